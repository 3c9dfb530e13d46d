"""How often the comparison names a known fault, beside what FastVideo's own rule says of the same
recordings.

    python -m tests.parity.scoreboard [--dtype fp32] [--only WORD] [--keep FOLDER] [--corpus MODULE]
    [--seed N] [--together] python -m tests.parity.scoreboard --faults COUNT [--seed N] [--corpus
    tests.fastvideo.ports.cases]

Each side of a case is a process of its own that knows nothing of us: environment variables alone
make it record. `--together` records them one after the other in this process instead, ten times
faster. `--keep` keeps the recordings for the next time; throw the folder away when recording
changes.

A module of a corpus holds `CASES`, or under the name after a colon, a tuple of cases or a function
that returns one; for `--together`, `program(arguments, dtype, seed)`, a context in which the built
program is a function of nothing; for `--faults`, `drawn(count, seed, only)`, faults planted by a
machine, `count` for each pair.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from otel_torch.recording.reader import load_recording
from tests.interpreters import run_script
from tests.parity.case import Case, Place

# from the best to the worst; a clean pair is `silent` or `false`
OUTCOMES = ("exact", "adjacent", "late", "missed", "false", "error")
TIMEOUT_S = 300
# the rule that FastVideo's documents give for its own traces
RULE_STATISTICS = ("abs_mean", "max")
RULE_TOLERANCE = 0.005

Row = dict[str, Any]


@dataclass(frozen=True)
class Recordings:
    """The files of one case and dtype; noise is the reference, recorded under jitter, None where
    that was not asked for.
    """

    reference: Path
    port: Path
    noise: Path | None = None


@dataclass(frozen=True)
class Named:
    """The first fault that a judge named, in each program's names; None where that program has no
    such place.
    """

    reference: Place | None
    port: Place | None
    kind: str = ""

    def __str__(self) -> str:
        if self.reference == self.port:
            return f"{self.port} {self.kind}".rstrip()
        return f"{self.port or 'nothing'}, in the reference {self.reference or 'nothing'} {self.kind}".rstrip()


Judge = Callable[[Recordings], Named | None]
# a program built with these arguments, dtype and seed, ready to be run, and everything as it was
# when it is left
Program = Callable[[Sequence[str], str, int], AbstractContextManager[Callable[[], object]]]


@dataclass(frozen=True)
class Score:
    """What one judge made of one case. both: exact, and so in either program's names."""

    case: Case
    dtype: str
    judge: str
    outcome: str
    named: str
    seconds: float
    both: bool = False


# ---- recording


class Recorder:
    """Makes recordings, each once: the reference of many cases is one program.

    fresh: whether each program gets a new interpreter (see `tests/interpreters.py`).
    """

    def __init__(self, folder: Path, seed: int = 0, fresh: bool = True) -> None:
        self.folder, self._seed, self._fresh = folder, seed, fresh

    def record(self, case: Case, dtype: str, noise: bool = True) -> Recordings:
        """Run what has not been run yet; RuntimeError with the program's output where one fails."""
        return Recordings(
            self._made(case, case.reference, dtype),
            self._made(case, case.port, dtype),
            self._made(case, case.noise, dtype, noise="1") if noise else None,
        )

    def _made(self, case: Case, arguments: Sequence[str], dtype: str, noise: str = "") -> Path:
        seed = ("--seed", str(self._seed)) if self._seed else ()
        name = "-".join(
            [case.program.parent.name, *arguments, dtype, *seed, *(["noise"] if noise else [])]
        )
        folder = self.folder / re.sub(r"[^\w.-]+", "_", name)
        recording, done = folder / "run.jsonl", folder / "done"
        if done.exists():
            return recording
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._run(case, arguments, dtype, recording, noise)
        done.touch()
        return recording

    def _run(
        self, case: Case, arguments: Sequence[str], dtype: str, recording: Path, noise: str
    ) -> None:
        """As a process of its own, switched on by environment variables alone."""
        kept = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("OTEL_", "FASTVIDEO_", "RANK", "WORLD_SIZE", "TRACEPARENT"))
        }
        environment = {
            **kept, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", **case.environment,
            "OTEL_TORCH_ENABLED": "1", "OTEL_TORCH_CAPTURE": "parity", "OTEL_TORCH_JSONL": str(recording),
            **({"OTEL_TORCH_NOISE": noise} if noise else {}),
        }  # fmt: skip
        argv = [str(case.program), *arguments, "--dtype", dtype, "--seed", str(self._seed)]
        done = run_script(argv, environment, recording.parent, TIMEOUT_S, fresh=self._fresh)
        output = done.stdout + done.stderr
        recording.with_name("output.txt").write_text(output)
        if done.returncode or not recording.exists():
            raise RuntimeError(
                f"{' '.join(arguments)} {dtype}: exit status {done.returncode}\n{output[-2000:]}"
            )


class RecorderInProcess(Recorder):
    """Makes the same recordings in this process, for importing a framework takes ten times longer
    than a tiny model.

    alone: whether the process is there for nothing else, so that garbage from before its first
    recording may stay.
    """

    def __init__(self, folder: Path, program: Program, seed: int = 0, alone: bool = False) -> None:
        super().__init__(folder, seed)
        self._program, self._freeze = program, alone

    def _run(
        self, case: Case, arguments: Sequence[str], dtype: str, recording: Path, noise: str
    ) -> None:
        from otel_torch import bootstrap

        with self._program(arguments, dtype, self._seed) as run:
            if not bootstrap.start(
                jsonl=str(recording), capture="parity", **({"noise": noise} if noise else {})
            ):
                raise RuntimeError("recording did not start")
            try:
                run()
            finally:
                bootstrap.stop()
        if not recording.exists():
            raise RuntimeError(f"{' '.join(arguments)} {dtype}: nothing was recorded")
        if self._freeze:
            # what the frameworks' imports made, half a million objects, is looked through at the
            # start of each recording
            gc.collect()
            gc.freeze()
            self._freeze = False


# ---- judges


def our_diff(recordings: Recordings) -> Named | None:
    """`otel_torch.diff` with the noise of the reference and no map."""
    import otel_torch

    report = otel_torch.diff(recordings.reference, recordings.port, noise=recordings.noise)
    if report.verdict == "match":
        return None
    if report.verdict == "incomparable":
        raise RuntimeError(f"incomparable: {report.reason}")
    first = report.first
    assert first is not None
    return Named(
        _place(first.side, first.module), _place(first.port_side, first.port_module), first.kind
    )


def fastvideo_rule(recordings: Recordings) -> Named | None:
    """The first output, in the reference's order, whose shape, abs_mean or max is 0.5 % off; rows
    by (module, step, tensor) in order of occurrence; rows of one side only are passed over.
    """
    port = dict(_outputs(recordings.port))
    for key, row in _outputs(recordings.reference):
        other = port.get(key)
        if other is not None and _outside(row, other):
            place = Place("output", row["module"])
            return Named(place, place)
    return None


def _place(side: str | None, module: str | None) -> Place | None:
    return None if side is None or module is None else Place(side, module)


def _outputs(recording: Path) -> Iterable[tuple[tuple[Any, ...], Row]]:
    seen: Counter[tuple[Any, ...]] = Counter()
    for row in load_recording(recording).rows:
        if row["tensor"].startswith("out") and row.get("phase", "forward") == "forward":
            key = (row["module"], row["step"], row["tensor"])
            yield (*key, seen[key]), row
            seen[key] += 1


def _outside(row: Row, other: Row) -> bool:
    if row["shape"] != other["shape"]:
        return True
    values = [
        (row[name], other[name])
        for name in RULE_STATISTICS
        if row.get(name) is not None and other.get(name) is not None
    ]
    # written so that a NaN of one side alone is outside
    return any(
        not abs(a - b) <= RULE_TOLERANCE * abs(a) for a, b in values if not (a != a and b != b)
    )


JUDGES: dict[str, Judge] = {"otel_torch": our_diff, "FastVideo 0.5 %": fastvideo_rule}


# ---- scoring


def score(case: Case, dtype: str, recordings: Recordings, judge: str) -> Score:
    """What a judge says of a case, and what that is worth."""
    begin = time.perf_counter()
    try:
        named = JUDGES[judge](recordings)
    except Exception as error:
        # a judge that breaks is a result, and must not end the others
        seconds = time.perf_counter() - begin
        return Score(
            case, dtype, judge, "error", f"{type(error).__name__}: {error}".splitlines()[0], seconds
        )
    seconds = time.perf_counter() - begin
    worth = outcomes(case, named, recordings)
    return Score(
        case, dtype, judge, best(worth), str(named or ""), seconds, both=set(worth) == {"exact"}
    )


def outcome(case: Case, named: Named | None, recordings: Recordings) -> str:
    """exact: an expected place, in either program's names. adjacent: one step off, its parent or
    child or the event before or after. late: behind it. false: in front of it, or anything at all
    in a clean pair. missed: nothing.
    """
    return best(outcomes(case, named, recordings))


def best(worth: Sequence[str]) -> str:
    """The best of several outcomes."""
    return min(worth, key=(*OUTCOMES, "silent").index)


def outcomes(case: Case, named: Named | None, recordings: Recordings) -> list[str]:
    """The outcome in the port's names and in the reference's, as far as it is known there what is
    right.
    """
    if case.clean:
        return ["false" if named else "silent"]
    if named is None:
        return ["missed"]
    sides = (
        (named.port, case.expected, recordings.port),
        (named.reference, case.places_in_reference, recordings.reference),
    )
    return [
        _rank(place, named.kind, expected, recording)
        for place, expected, recording in sides
        if expected
    ]


def _rank(place: Place | None, kind: str, expected: Sequence[Place], recording: Path) -> str:
    if place is None:
        return "false"
    # that a call is missing is the finding's kind; its side says only what would have come of it
    if place in expected or (kind == "missing" and Place("missing", place.module) in expected):
        return "exact"
    order = {event: position for position, event in enumerate(timeline(recording))}
    for right in expected:
        related = _related(place.module, right.module)
        if related or (place in order and right in order and abs(order[place] - order[right]) == 1):
            return "adjacent"
    # a wrong weight shows where its module is entered; one that is never called, at the very end
    position = order.get(place, order.get(Place("input", place.module), len(order)))
    due = min((order[right] for right in expected if right in order), default=0)
    return "late" if position > due else "false"


def _related(one: str, other: str) -> bool:
    """Whether they are one module, or parent and child."""
    return one == other or one.rpartition(".")[0] == other or other.rpartition(".")[0] == one


def timeline(recording: Path) -> list[Place]:
    """The modules' enterings and leavings in order of time, each place once, when it is first
    passed.
    """
    moments: dict[Place, int] = {}
    for row in load_recording(recording).rows:
        for side, moment in zip(("input", "output"), row.get("order") or (None, None), strict=True):
            place = Place(side, row["module"])
            if moment is not None and moment < moments.get(place, moment + 1):
                moments[place] = moment
    return sorted(moments, key=moments.__getitem__)


# ---- the table


def table(scores: Sequence[Score]) -> str:
    """A line a case and dtype, what each judge made of it; then the totals."""
    judges = list(dict.fromkeys(s.judge for s in scores))
    lines: dict[tuple[str, str], dict[str, Score]] = {}
    for s in scores:
        lines.setdefault((s.case.name, s.dtype), {})[s.judge] = s
    width = max((len(name) for name, _ in lines), default=0)
    said = []
    for (name, dtype), by_judge in lines.items():
        verdicts = "  ".join(f"{by_judge[judge].outcome:<{len(judge)}}" for judge in judges)
        ours = next(iter(by_judge.values()))
        case = ours.case
        below = " (below rounding)" if dtype == "bf16" and not case.above_rounding else ""
        right = "" if case.clean or ours.outcome == "exact" else f" · expected {case.expected[0]}"
        named = f" · named {ours.named}" if ours.named else ""
        said.append(
            f"{name:<{width}}  {dtype}  {verdicts}  {ours.seconds:5.1f} s{below}{right}{named}"
        )
    header = f"{'':<{width}}        " + "  ".join(judges)
    return "\n".join([header, *said, "", *totals(scores)])


def totals(scores: Sequence[Score]) -> list[str]:
    """A line a judge and dtype."""
    said = []
    for judge, dtype in dict.fromkeys((s.judge, s.dtype) for s in scores):
        chosen = [s for s in scores if (s.judge, s.dtype) == (judge, dtype)]
        bugs, clean = [s for s in chosen if not s.case.clean], [s for s in chosen if s.case.clean]
        counts = Counter(s.outcome for s in bugs)
        line = f"{judge}, {dtype}: {len(bugs)} bugs: " + " · ".join(
            f"{counts[name]} {name}" for name in OUTCOMES
        )
        if any(s.case.places_in_reference for s in bugs):
            line += f"; {sum(s.both for s in bugs)} exact in both programs' names"
        if dtype == "bf16":
            above = [s for s in bugs if s.case.above_rounding]
            line += f" ({sum(s.outcome == 'exact' for s in above)} exact of {len(above)} above rounding)"
        said.append(
            f"{line}; {len(clean)} clean: {sum(s.outcome == 'silent' for s in clean)} silent"
        )
    return said


def not_exact(scores: Sequence[Score]) -> list[str]:
    """A line for each case that our comparison did not get right: what was said instead."""
    return [
        f"{s.outcome}: {s.case.name} {s.dtype}: {s.named or 'nothing'}; expected {next(iter(s.case.expected), 'nothing')}"
        for s in scores
        if s.judge == "otel_torch" and s.outcome not in ("exact", "silent")
    ]


def plain(scores: Sequence[Score]) -> list[dict[str, Any]]:
    """The scores as JSON has them."""
    return [
        {
            "case": s.case.name, "clean": s.case.clean, "above_rounding": s.case.above_rounding, "dtype": s.dtype,
            "judge": s.judge, "outcome": s.outcome, "both": s.both, "named": s.named,
        }
        for s in scores
    ]  # fmt: skip


class Summary:
    """A plugin of pytest that prints what was scored below pytest's own summary."""

    def __init__(self, title: str, lines: Sequence[str]) -> None:
        self._title, self._lines = title, lines

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section(self._title)
        for line in self._lines:
            terminalreporter.write_line(line)


def score_all(
    work: Sequence[tuple[Case, str]], recorder: Recorder, judges: Sequence[str] = tuple(JUDGES)
) -> list[Score]:
    """Record what is not recorded yet, and let every judge say what it says. A program that fails
    is a result, too.
    """
    scores = []
    for number, (case, dtype) in enumerate(work, 1):
        if sys.stderr.isatty():
            print(
                f"\r\033[K{number}/{len(work)} {case.name} {dtype} ",
                end="\r",
                file=sys.stderr,
                flush=True,
            )
        try:
            recordings = recorder.record(case, dtype)
        except Exception as error:
            said = f"{type(error).__name__}: {error}".splitlines()[-1]
            scores += [Score(case, dtype, judge, "error", said, 0.0) for judge in judges]
            continue
        scores += [score(case, dtype, recordings, judge) for judge in judges]
    return scores


def main() -> None:
    arguments = argparse.ArgumentParser(
        description="Score the comparison on programs whose faults are known."
    )
    arguments.add_argument(
        "--dtype",
        choices=["fp32", "bf16"],
        action="append",
        help="both, unless given; faults: fp32",
    )
    arguments.add_argument("--only", default="", help="cases whose name holds this")
    arguments.add_argument("--keep", type=Path, help="folder of recordings, made once")
    arguments.add_argument(
        "--corpus", action="append", help="module that holds CASES; tests.parity.cases unless given"
    )
    arguments.add_argument(
        "--together",
        action="store_true",
        help="record in this process, not each program in its own",
    )
    arguments.add_argument(
        "--faults",
        type=int,
        metavar="COUNT",
        help="instead of CASES, so many faults drawn for each pair",
    )
    arguments.add_argument(
        "--seed", type=int, default=0, help="of weights and inputs; with --faults, of the drawing"
    )
    arguments.add_argument("--json", type=Path, help="write the scores there")
    given = arguments.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # sums are then always taken in the same order
    scores = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.keep or Path(temporary)).resolve()
        for corpus_name in given.corpus or [
            "tests.parity.cases" if given.faults is None else "tests.fastvideo.ports.cases"
        ]:
            module, _, name = corpus_name.partition(":")
            corpus = importlib.import_module(module)
            if given.faults is None:
                cases, dtypes, seed = (
                    getattr(corpus, name or "CASES"),
                    given.dtype or ["fp32", "bf16"],
                    given.seed,
                )
                cases = cases() if callable(cases) else cases
            else:
                cases, dtypes, seed = (
                    corpus.drawn(given.faults, given.seed, given.only),
                    given.dtype or ["fp32"],
                    0,
                )
            together = given.together or given.faults is not None
            recorder = (
                RecorderInProcess(folder, corpus.program, seed, alone=True)
                if together
                else Recorder(folder, seed)
            )
            work = [(case, dtype) for dtype in dtypes for case in cases if given.only in case.name]
            scores += score_all(work, recorder)
    print(table(scores))
    print(*["", *not_exact(scores)], sep="\n")
    if given.json:
        given.json.write_text(json.dumps(plain(scores), indent=1) + "\n")


if __name__ == "__main__":
    main()
