"""Scores how often the comparison names a known fault, and how often FastVideo's own rule does on
the same recordings.

    python -m tests.parity.scoreboard [--dtype fp32] [--only WORD] [--keep FOLDER]
        [--corpus MODULE] [--seed N] [--together]
    python -m tests.parity.scoreboard --faults COUNT [--seed N]
        [--corpus tests.fastvideo.ports.cases]

Each side of a case is an unmodified program in a child process that environment variables switch
on. `--together` records all of them in this process instead, ten times faster. `--keep` keeps the
recordings for the next time; delete the folder when recording changes.

A module of a corpus has
- `CASES`, or under the name after a colon, a tuple of cases or a function that returns one;
- for `--together`, `program(arguments, dtype, seed)`: a context manager that yields the built
  program as a function without arguments;
- for `--faults`, `drawn(count, seed, only)`: `count` random faults for each pair.
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
from tests.contradictions import contradictions
from tests.interpreters import run_script
from tests.parity.case import Case, Place

# best first; a clean pair is `silent` or `false`
OUTCOMES = ("exact", "adjacent", "late", "missed", "false", "error")
TIMEOUT_S = 300
# the rule in FastVideo's documentation of its traces
RULE_STATISTICS = ("abs_mean", "max")
RULE_TOLERANCE = 0.005

Row = dict[str, Any]


@dataclass(frozen=True)
class Recordings:
    """The recordings of one case and dtype; `noise` is the reference with noise added, or None."""

    reference: Path
    port: Path
    noise: Path | None = None


@dataclass(frozen=True)
class Named:
    """The first fault that a judge named, by each program's names; None if a program lacks it."""

    reference: Place | None
    port: Place | None
    kind: str = ""

    def __str__(self) -> str:
        if self.reference == self.port:
            return f"{self.port} {self.kind}".rstrip()
        return f"{self.port or 'nothing'}, in the reference {self.reference or 'nothing'} {self.kind}".rstrip()


Judge = Callable[[Recordings], Named | None]
# builds a program with arguments, dtype and seed; undoes all patches on exit
Program = Callable[[Sequence[str], str, int], AbstractContextManager[Callable[[], object]]]


@dataclass(frozen=True)
class Score:
    """The outcome of one judge on one case; `both`: it is exact by both programs' names."""

    case: Case
    dtype: str
    judge: str
    outcome: str
    named: str
    seconds: float
    both: bool = False


# ---- recording


class Recorder:
    """Makes recordings, each once: many cases share a reference.

    Args:
        fresh: start each program in a new interpreter (see `tests/interpreters.py`).
    """

    def __init__(self, folder: Path, seed: int = 0, fresh: bool = True) -> None:
        self.folder, self._seed, self._fresh = folder, seed, fresh

    def record(self, case: Case, dtype: str, noise: bool = True) -> Recordings:
        """Return the recordings of a case; run the programs that have not run yet.

        Raises: RuntimeError, with the program's output, if one fails.
        """
        return Recordings(
            self._recording(case, case.reference, dtype),
            self._recording(case, case.port, dtype),
            self._recording(case, case.noise, dtype, noise="1") if noise else None,
        )

    def _recording(self, case: Case, arguments: Sequence[str], dtype: str, noise: str = "") -> Path:
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
        """Run a program in a child process that environment variables switch on."""
        inherited = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("OTEL_", "FASTVIDEO_", "RANK", "WORLD_SIZE", "TRACEPARENT"))
        }
        environment = {
            **inherited, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", **case.environment,
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
    """Makes the same recordings in this process: importing a framework takes ten times longer than
    running a tiny model.

    Args:
        alone: the process does nothing else, so objects that exist at its first recording may be
            frozen.
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
            # importing the frameworks makes half a million objects, which each recording would scan
            gc.collect()
            gc.freeze()
            self._freeze = False


# ---- judges


def our_diff(recordings: Recordings) -> Named | None:
    """Judge by `otel_torch.diff`, with the noise of the reference and without a map.

    Raises: RuntimeError, if the report contradicts itself.
    """
    import otel_torch

    report = otel_torch.diff(recordings.reference, recordings.port, noise=recordings.noise)
    lines = contradictions(report)
    if lines:
        raise RuntimeError(f"contradiction: {lines[0]}")
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
    """Judge by FastVideo's rule: the first output, in the reference's order, whose shape, abs_mean or
    max differs by more than 0.5 %.

    Rows pair by (module, step, tensor) and occurrence; unpaired rows are skipped.
    """
    port = dict(_outputs(recordings.port))
    for key, row in _outputs(recordings.reference):
        port_row = port.get(key)
        if port_row is not None and _is_outside(row, port_row):
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


def _is_outside(row: Row, port_row: Row) -> bool:
    if row["shape"] != port_row["shape"]:
        return True
    values = [
        (row[name], port_row[name])
        for name in RULE_STATISTICS
        if row.get(name) is not None and port_row.get(name) is not None
    ]
    # `not … <=`, so that a NaN on one side is outside
    return any(
        not abs(a - b) <= RULE_TOLERANCE * abs(a) for a, b in values if not (a != a and b != b)
    )


JUDGES: dict[str, Judge] = {"otel_torch": our_diff, "FastVideo 0.5 %": fastvideo_rule}


# ---- scoring


def score(case: Case, dtype: str, recordings: Recordings, judge: str) -> Score:
    """Ask a judge about a case, and score the answer."""
    begin = time.perf_counter()
    try:
        named = JUDGES[judge](recordings)
    except Exception as error:
        # a judge that fails is an outcome too
        seconds = time.perf_counter() - begin
        return Score(
            case, dtype, judge, "error", f"{type(error).__name__}: {error}".splitlines()[0], seconds
        )
    seconds = time.perf_counter() - begin
    results = outcomes(case, named, recordings)
    return Score(
        case, dtype, judge, best(results), str(named or ""), seconds, both=set(results) == {"exact"}
    )


def outcome(case: Case, named: Named | None, recordings: Recordings) -> str:
    """Return the better outcome of both programs' names.

    exact: an expected place. adjacent: its parent, its child, or the event before or after it.
    late: downstream of it. false: upstream of it, or any place in a clean pair. missed: no place.
    """
    return best(outcomes(case, named, recordings))


def best(results: Sequence[str]) -> str:
    """Return the best of several outcomes."""
    return min(results, key=(*OUTCOMES, "silent").index)


def outcomes(case: Case, named: Named | None, recordings: Recordings) -> list[str]:
    """Return the outcome by the port's names and, if its right places are known, by the reference's."""
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
    # a missing call is a kind of finding; its side is that of the tensor that is missing
    if place in expected or (kind == "missing" and Place("missing", place.module) in expected):
        return "exact"
    order = {event: position for position, event in enumerate(timeline(recording))}
    for right in expected:
        if _is_related(place.module, right.module):
            return "adjacent"
        if place in order and right in order and abs(order[place] - order[right]) == 1:
            return "adjacent"
    # a wrong weight shows when its module is called, or at the end if it never is
    position = order.get(place, order.get(Place("input", place.module), len(order)))
    due = min((order[right] for right in expected if right in order), default=0)
    return "late" if position > due else "false"


def _is_related(a: str, b: str) -> bool:
    """Return whether two modules are the same, or parent and child."""
    return a == b or a.rpartition(".")[0] == b or b.rpartition(".")[0] == a


def timeline(recording: Path) -> list[Place]:
    """Return the inputs and outputs of all modules in time order, each place once."""
    moments: dict[Place, int] = {}
    for row in load_recording(recording).rows:
        for side, moment in zip(("input", "output"), row.get("order") or (None, None), strict=True):
            place = Place(side, row["module"])
            if moment is not None and moment < moments.get(place, moment + 1):
                moments[place] = moment
    return sorted(moments, key=moments.__getitem__)


# ---- the table


def table(scores: Sequence[Score]) -> str:
    """Return a line for each case and dtype with the outcome of each judge, then the totals."""
    judges = list(dict.fromkeys(s.judge for s in scores))
    lines: dict[tuple[str, str], dict[str, Score]] = {}
    for s in scores:
        lines.setdefault((s.case.name, s.dtype), {})[s.judge] = s
    width = max((len(name) for name, _ in lines), default=0)
    rows = []
    for (name, dtype), by_judge in lines.items():
        verdicts = "  ".join(f"{by_judge[judge].outcome:<{len(judge)}}" for judge in judges)
        ours = next(iter(by_judge.values()))
        case = ours.case
        below = " (below rounding)" if dtype == "bf16" and not case.above_rounding else ""
        right = "" if case.clean or ours.outcome == "exact" else f" · expected {case.expected[0]}"
        named = f" · named {ours.named}" if ours.named else ""
        rows.append(
            f"{name:<{width}}  {dtype}  {verdicts}  {ours.seconds:5.1f} s{below}{right}{named}"
        )
    header = f"{'':<{width}}        " + "  ".join(judges)
    return "\n".join([header, *rows, "", *totals(scores)])


def totals(scores: Sequence[Score]) -> list[str]:
    """Return a line for each judge and dtype."""
    rows = []
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
        rows.append(
            f"{line}; {len(clean)} clean: {sum(s.outcome == 'silent' for s in clean)} silent"
        )
    return rows


def not_exact(scores: Sequence[Score]) -> list[str]:
    """Return a line for each case in which our comparison is wrong, with the place that it named."""
    return [
        f"{s.outcome}: {s.case.name} {s.dtype}: {s.named or 'nothing'}; expected {next(iter(s.case.expected), 'nothing')}"
        for s in scores
        if s.judge == "otel_torch" and s.outcome not in ("exact", "silent")
    ]


def as_json(scores: Sequence[Score]) -> list[dict[str, Any]]:
    """Return the scores for JSON."""
    return [
        {
            "case": s.case.name, "clean": s.case.clean, "above_rounding": s.case.above_rounding, "dtype": s.dtype,
            "judge": s.judge, "outcome": s.outcome, "both": s.both, "named": s.named,
        }
        for s in scores
    ]  # fmt: skip


class Summary:
    """A pytest plugin that prints lines below pytest's summary."""

    def __init__(self, title: str, lines: Sequence[str]) -> None:
        self._title, self._lines = title, lines

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section(self._title)
        for line in self._lines:
            terminalreporter.write_line(line)


def score_all(
    work: Sequence[tuple[Case, str]], recorder: Recorder, judges: Sequence[str] = tuple(JUDGES)
) -> list[Score]:
    """Record every case and ask every judge. A program that fails is an outcome too."""
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
            reason = f"{type(error).__name__}: {error}".splitlines()[-1]
            scores += [Score(case, dtype, judge, "error", reason, 0.0) for judge in judges]
            continue
        scores += [score(case, dtype, recordings, judge) for judge in judges]
    return scores


def main() -> None:
    arguments = argparse.ArgumentParser(
        description="Score the comparison on programs with known faults."
    )
    arguments.add_argument(
        "--dtype",
        choices=["fp32", "bf16"],
        action="append",
        help="default: both; with --faults, fp32",
    )
    arguments.add_argument("--only", default="", help="only cases with this in their name")
    arguments.add_argument("--keep", type=Path, help="folder that keeps the recordings")
    arguments.add_argument(
        "--corpus", action="append", help="module with CASES (default: tests.parity.cases)"
    )
    arguments.add_argument(
        "--together",
        action="store_true",
        help="record in this process",
    )
    arguments.add_argument(
        "--faults",
        type=int,
        metavar="COUNT",
        help="random faults for each pair, in place of CASES",
    )
    arguments.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of weights and inputs; with --faults, of the random choice",
    )
    arguments.add_argument("--json", type=Path, help="write the scores to this file")
    options = arguments.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for one order of summation
    scores = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        for corpus_name in options.corpus or [
            "tests.parity.cases" if options.faults is None else "tests.fastvideo.ports.cases"
        ]:
            module, _, name = corpus_name.partition(":")
            corpus = importlib.import_module(module)
            if options.faults is None:
                cases, dtypes, seed = (
                    getattr(corpus, name or "CASES"),
                    options.dtype or ["fp32", "bf16"],
                    options.seed,
                )
                cases = cases() if callable(cases) else cases
            else:
                cases, dtypes, seed = (
                    corpus.drawn(options.faults, options.seed, options.only),
                    options.dtype or ["fp32"],
                    0,
                )
            together = options.together or options.faults is not None
            recorder = (
                RecorderInProcess(folder, corpus.program, seed, alone=True)
                if together
                else Recorder(folder, seed)
            )
            work = [
                (case, dtype) for dtype in dtypes for case in cases if options.only in case.name
            ]
            scores += score_all(work, recorder)
    print(table(scores))
    print(*["", *not_exact(scores)], sep="\n")
    if options.json:
        options.json.write_text(json.dumps(as_json(scores), indent=1) + "\n")


if __name__ == "__main__":
    main()
