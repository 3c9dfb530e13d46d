"""Records the cases of a corpus, has each judged, and counts how right the answers are."""

from __future__ import annotations

import gc
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import otel_torch
from otel_torch.bisecting.bisection import Bisection
from otel_torch.parity.finding import Report
from tests.corpora.case import BISECT, GRAPH, MODULES, SIDE, Case, Run
from tests.corpora.judge import (
    GRADES,
    OURS,
    RULE,
    Named,
    Recordings,
    fastvideo_rule,
    grade,
    our_diff,
)
from tests.corpora.judge_lines import LINE_GRADES, describe, grade_line, grade_module
from tests.corpora.side import side
from tests.support import run_python, run_ranks

FILE = Path(__file__).parents[2] / "docs/parity-scores.json"
QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
# variants that are an argument of the program, and those that are settings of the recording
DTYPES = ("fp32", "bf16")


@dataclass(frozen=True)
class Score:
    """The grade of one judge's answer; `both`: it is exact by both programs' names; `line`: the grade
    by line of a comparison of operations.
    """

    corpus: str
    case: str
    variant: str
    judge: str
    grade: str
    both: bool
    clean: bool
    invisible: bool
    round: str
    kind: str
    said: str = ""
    engine: str = MODULES
    line: str = ""
    proof: str = ""
    healed: bool = False
    runs: int = 0


class Corpus:
    """Cases, and how they are recorded and compared.

    Attributes:
        engine: what is recorded of each program and compared.
        variants: in which each case is recorded: types of the weights, or what is kept.
        together: recorded in this process, because importing the frameworks takes ten times longer
            than running the tiny models.
        judges: who is asked.
        noise: the reference is also recorded with noise added.
        in_whole: a clean pair is silent only if all of it was compared.
        without_warnings: a clean pair is silent only if there is no warning either.
    """

    name: str
    engine = MODULES
    variants: tuple[str, ...] = ("",)
    together = False
    judges: tuple[str, ...] = (OURS,)
    noise = False
    without_warnings = False
    in_whole = True

    def load(self) -> Sequence[Case]:
        """Return all cases."""
        raise NotImplementedError

    def has_noise(self, variant: str) -> bool:
        """Return whether the reference is recorded with noise, too."""
        return self.noise

    @cached_property
    def cases(self) -> dict[str, Case]:
        return {case.name: case for case in self.load()}

    def compare(self, case: Case, variant: str, recorder: Recorder) -> tuple[Report, Recordings]:
        """Record and compare both sides of a case."""
        recordings = recorder.recordings(case, variant, self.has_noise(variant))
        report = otel_torch.diff(recordings.reference, recordings.port, noise=recordings.noise)
        return report, recordings

    def compared(
        self, cases: Sequence[Case], variant: str, recorder: Recorder
    ) -> Iterator[tuple[Case, Callable[[], tuple[Report, Recordings]]]]:
        """Yield each case and what compares it; a corpus may compare several at once."""
        for case in cases:
            yield case, lambda case=case: self.compare(case, variant, recorder)  # type: ignore[misc]


class Recorder:
    """Records programs, each once: many cases share a reference.

    Args:
        together: in this process, otherwise each in one of its own that environment variables
            switch on.
        fresh: start each program in a new interpreter (see `tests/interpreters.py`).
        alone: the process does nothing else, so objects that exist at its first recording may be
            frozen.
    """

    def __init__(
        self,
        corpus: Corpus,
        folder: Path,
        seed: int = 0,
        together: bool | None = None,
        fresh: bool = False,
        alone: bool = False,
    ) -> None:
        self._corpus, self.folder, self._seed = corpus, folder, seed
        self._together = corpus.together if together is None else together
        self._fresh, self._freeze = fresh, alone

    def recordings(self, case: Case, variant: str = "", noise: bool | None = None) -> Recordings:
        """Return the recordings of a case; run the programs that have not run yet."""
        assert case.reference is not None and case.port is not None
        noise = self._corpus.noise if noise is None else noise
        return Recordings(
            self.recording(case.reference, variant),
            self.recording(case.port, variant),
            self.recording(case.reference, variant, noise="1") if noise else None,
        )

    def recording(self, run: Run, variant: str = "", noise: str = "") -> Path:
        """Return the recording of a program; of several ranks the folder."""
        seed = f"seed{self._seed}" if self._seed else ""
        engine = GRAPH if run.capture == GRAPH else ""
        parts = f"parts{run.parts}" if run.parts else ""
        words = (
            *run.arguments, variant, f"ranks{run.ranks}", seed, noise and "noise", engine, parts
        )  # fmt: skip
        name = re.sub(r"[^\w.-]+", "_", "-".join(filter(None, (run.program.stem, *words))))
        folder = self.folder / name
        recording = folder / "recording" / "run.jsonl"
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            recording.parent.mkdir(parents=True)
            settings = {"capture": run.capture, "jsonl": str(recording)}
            settings |= {"noise": noise} if noise else {}
            settings |= {"steps": run.steps} if run.steps else {}
            settings |= {"graph_parts": str(run.parts)} if run.parts else {}
            settings |= {"tensors": str(folder / "tensors")} if variant == "tensors" else {}
            if self._together:
                self._run_here(run, variant, folder, settings)
            else:
                self.start(run, folder, settings, variant)
            (folder / "done").touch()
        return recording if run.ranks == 1 else recording.parent

    def start(self, run: Run, folder: Path, settings: Mapping[str, str], variant: str = "") -> None:
        """Run a program recorded with some settings, in processes of its own."""
        arguments = list(run.arguments)
        if run.program == SIDE:
            arguments += ["--variant", variant] if variant in DTYPES else []
            arguments += ["--seed", str(self._seed)]
        variables = {f"OTEL_TORCH_{name.upper()}": value for name, value in settings.items()}
        variables |= {**QUIET, **run.environment}
        if run.ranks == 1:
            run_python(folder, run.program, *arguments, fresh=self._fresh, **variables)
        else:
            run_ranks(folder, run.program, *arguments, ranks=run.ranks, **variables)

    def _run_here(self, run: Run, variant: str, folder: Path, settings: dict[str, str]) -> None:
        from otel_torch import bootstrap

        with side(
            *run.arguments, variant if variant in DTYPES else DTYPES[0], self._seed
        ) as program:
            if not bootstrap.start(run_id="run", **settings):
                raise RuntimeError("recording did not start")
            try:
                program()
            finally:
                bootstrap.stop()
        if self._freeze:
            # importing the frameworks makes half a million objects, which each recording would scan
            gc.collect()
            gc.freeze()
            self._freeze = False


# ---- scoring


def score(
    corpus: Corpus, recorder: Recorder, cases: Iterable[Case], variants: Sequence[str] = ()
) -> Iterator[list[Score]]:
    """Yield the scores of each case and variant, one for each judge.

    A program or a judge that fails is an outcome too.
    """
    cases = list(cases)
    for variant in variants or corpus.variants:
        for case, compare in corpus.compared(cases, variant, recorder):
            try:
                report, recordings = compare()
            except Exception as error:
                yield [_score(corpus, case, variant, judge, error) for judge in corpus.judges]
                continue
            answers: list[Score] = []
            for judge in corpus.judges:
                try:
                    result = _judge(corpus, case, judge, report, recordings)
                except Exception as error:
                    result = error  # type: ignore[assignment]
                answer = _score(corpus, case, variant, judge, result)
                if recordings.bisection is not None:
                    answer = _with_proof(answer, recordings.bisection)
                answers.append(answer)
            yield answers


# (grade, whether it is exact in both programs' names, what was said, grade by line)
Result = tuple[str, bool, str, str]


def _judge(
    corpus: Corpus, case: Case, judge: str, report: Report, recordings: Recordings
) -> Result:
    if judge == RULE:
        named = fastvideo_rule(recordings)
        return *grade(case.right, named, recordings), str(named or ""), ""
    named = our_diff(report, corpus.in_whole, corpus.engine)
    if case.clean and corpus.without_warnings and report.warnings:
        named = named or Named(None, None, report.warnings[0])
    if corpus.engine == MODULES:
        return *grade(case.right, named, recordings), str(named or ""), ""
    said = "" if report.first is None else describe(report)
    return grade_module(case.right, named), False, said, grade_line(case.right, report)


def _with_proof(answer: Score, bisection: Bisection) -> Score:
    first = next(iter(bisection.faults), None)
    return replace(
        answer,
        proof=(first and first.proof) or "",
        healed=bisection.is_healed,
        runs=len(bisection.runs),
    )


def _score(
    corpus: Corpus, case: Case, variant: str, judge: str, result: Result | Exception
) -> Score:
    if isinstance(result, Exception):
        said = f"{type(result).__name__}: {result}".splitlines()[-1]
        result = (
            "error",
            False,
            said,
            "other" if corpus.engine != MODULES and not case.clean else "",
        )
    graded, both, said, line = result
    return Score(
        corpus.name, case.name, variant, judge, graded, both, case.clean, variant in case.invisible,
        case.round, case.kind, said, corpus.engine, line,
    )  # fmt: skip


class Board:
    """Scores each case of a corpus when it is first asked for, and sums up what it has scored."""

    def __init__(self, corpus: Corpus, folder: Path) -> None:
        self.corpus, self.recorder = corpus, Recorder(corpus, folder)
        self.scores: dict[tuple[str, str, str], Score] = {}

    def ours(self, name: str, variant: str | None = None, judge: str = OURS) -> Score:
        variant = self.corpus.variants[0] if variant is None else variant
        if (name, variant, judge) not in self.scores:
            for scores in score(self.corpus, self.recorder, [self.corpus.cases[name]], [variant]):
                self.scores |= {(s.case, s.variant, s.judge): s for s in scores}
        return self.scores[name, variant, judge]

    def lines(self) -> list[str]:
        return [*map(line, self.scores.values()), *totals(self.scores.values())]


class Summary:
    """A pytest plugin that prints lines below pytest's summary."""

    def __init__(self, title: str, lines: Sequence[str]) -> None:
        self._title, self._lines = title, lines

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section(self._title)
        for text in self._lines:
            terminalreporter.write_line(text)


# ---- lines and files


def line(score: Score) -> str:
    """Return what was said of a case, in one line."""
    name = " ".join(filter(None, (score.case, score.variant)))
    judge = "" if score.judge == OURS else f" ({score.judge})"
    invisible = " (cannot be seen)" if score.invisible else ""
    grade = f"{score.grade:<7}" + (f" {score.line:<6}" if score.engine != MODULES else "")
    if score.engine == BISECT:
        healed = "healed" if score.healed else ""
        grade += f" {score.proof:<10} {healed:<6} {score.runs:>2} runs"
    return f"{score.corpus:<9} {name:<60} {grade} {score.said}{judge}{invisible}"


def totals(scores: Iterable[Score]) -> list[str]:
    """Return a line for each corpus, variant, judge and round."""
    groups: dict[tuple[str, ...], list[Score]] = {}
    for s in scores:
        engine = "" if s.engine == MODULES else s.engine
        groups.setdefault((s.corpus, engine, s.variant, s.judge, s.round), []).append(s)
    lines = []
    for words, group in groups.items():
        faults, clean = ([s for s in group if s.clean == is_clean] for is_clean in (False, True))
        visible = [s for s in faults if not s.invisible]
        counts, silent = Counter(s.grade for s in visible), sum(s.grade == "silent" for s in clean)
        counted = " · ".join(f"{counts[name]} {name}" for name in GRADES)
        if proven := sum(s.proof == "proven" for s in visible):
            wrongly = sum(s.proof == "proven" and s.line == "other" for s in visible)
            healed = sum(s.healed for s in visible)
            counted += f"; {proven} proven, {wrongly} of them elsewhere, {healed} healed in whole"
        if by_line := Counter(s.line for s in visible if s.line):
            counted += "; by line: " + " · ".join(f"{by_line[name]} {name}" for name in LINE_GRADES)
        left_out = (
            f", {len(faults) - len(visible)} that cannot be seen"
            if len(faults) > len(visible)
            else ""
        )
        lines.append(
            f"{', '.join(filter(None, words))}: {len(visible)} faults: {counted}{left_out}; "
            f"{len(clean)} clean: {silent} silent"
        )
    return lines


def read(file: Path = FILE) -> list[Score]:
    """Return the scores of a file."""
    return [Score(*row) for row in json.loads(file.read_text())] if file.exists() else []


def write(scores: Iterable[Score], file: Path = FILE) -> None:
    """Write scores to a file, a line each; those of the same corpora and engine that it held are
    dropped.
    """
    scores = list(scores)
    written = {(s.corpus, s.engine) for s in scores}
    kept = [s for s in read(file) if (s.corpus, s.engine) not in written]
    rows = [json.dumps(_row(s), ensure_ascii=False) for s in kept + scores]
    file.write_text("[\n" + ",\n".join(rows) + "\n]\n")


def _row(score: Score) -> list[Any]:
    """Return a row of the file, which ends with what is not as by default."""
    row = list(asdict(score).values())
    defaults = [field.default for field in fields(Score)]
    while row[-1] == defaults[len(row) - 1]:
        row.pop()
    return row
