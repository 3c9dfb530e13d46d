"""What to do about a comparison: the table of its outcomes and of the steps after each.

What the recordings hold already is not recorded again. REFERENCE_COMMAND and PORT_COMMAND stand for
how the two programs are started, which no recording holds, PROGRAM_COMMAND for how one with both
models is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from otel_torch.parity.finding import OTHER_INPUTS, ComparedPair, Finding, Report
from otel_torch.rendering.next_step import NextStep, beside, record

_FIND_LINE = "find the line and prove it, in one command"
_RECORD_GRAPHS = (
    "or record every operation of both programs, and compare, which names the line of each"
)
_MEND = "mend this, record the port again, and compare"
_MEND_WEIGHT = "mend how this weight is converted or loaded, record the port again, and compare"
_ALIGN_DTYPE = "run both sides in the same dtype here, record the port again, and compare"
_RECORD_TENSORS = "record whole tensors around it, and compare"
_LOOK_INSIDE = "list the operations that both programs run here"
_LOOK_INSIDE_ONE = "list the operations that the {name} runs here"
_MAP = "find out why only one side runs this. If it only has another name, pair the two in the map"
_GIVE_ALIKE = "give both programs the same inputs, record both again, and compare"
_RECORD_TRAINING = (
    "record both programs with their losses, gradients and updates, and compare. If they are "
    "recorded, compare how the two programs use the optimizer up to this step"
)
_ISOLATE = "or tell the faults apart by an isolated run"

_IS_EXPLAINED = "status 1: where in its tensor the finding is, and often what it is"
_NAMES_LINES = "status 1 and a line of each program"
_MATCHES = "status 0: verdict match, or the next finding"
# causes that say how a tensor looks and not what made it so
_VAGUE_CAUSES = ("reordered", "part")
# the program that holds both models
_BOTH = "program"
_TRAINING_PHASES = ("loss", "backward", "recompute", "update")


class _Side(NamedTuple):
    """What the commands for one program need.

    Attributes:
        name: `reference` or `port`.
        recording: A file, or a folder with the recordings of all ranks.
        tensors: The folder in which this run kept the tensor of the finding, or None.
        module, side, step: The place of the finding.
        previous: The last module before it that is right, or None.
    """

    name: str
    recording: str
    tensors: str | None
    module: str
    side: str | None
    step: int | None
    previous: str | None


class _Outcome:
    """A diverged comparison, and what its steps depend on."""

    def __init__(self, report: Report, finding: Finding) -> None:
        self.report, self.finding = report, finding

    @cached_property
    def sides(self) -> list[_Side]:
        """The programs that have the place of the finding."""
        return _sides(self.report, self.finding)

    @property
    def is_graph(self) -> bool:
        """Whether operations were compared."""
        return self.report.by_operations or self.finding.has_line

    @property
    def is_training(self) -> bool:
        return self.finding.phase in _TRAINING_PHASES

    @property
    def is_unexplained_training(self) -> bool:
        return self.is_training and self.finding.cause is None

    @property
    def is_unexplained_update(self) -> bool:
        return self.is_unexplained_training and self.finding.phase == "update"

    @property
    def is_missing(self) -> bool:
        return self.finding.kind == "missing"

    @property
    def is_given_other_inputs(self) -> bool:
        return self.finding.cause is not None and self.finding.cause.kind == OTHER_INPUTS

    @property
    def is_computed(self) -> bool:
        return _is_computed(self.finding)

    @property
    def is_vague(self) -> bool:
        cause = self.finding.cause
        return cause is None or cause.kind in _VAGUE_CAUSES

    @property
    def can_be_graphs(self) -> bool:
        """Whether the operations of both programs can be recorded and compared.

        `diff` compares ranks and programs with other batches by modules.
        """
        report = self.report
        return not (_has_ranks(report) or report.by_tokens) and self.can_be_bisected

    @property
    def can_be_bisected(self) -> bool:
        """Whether `bisect` can run both programs: a dump has none, and it selects no models."""
        return self.report.models is None and not any(self.report.imported)

    @property
    def lacks_tensors(self) -> bool:
        """Whether whole tensors, which were not kept, would say more."""
        report = self.report
        # of programs with other batches, only the weights can be compared whole
        is_whole = self.finding.kind == "weights" or not report.by_tokens
        is_recorded = not any(report.imported) and len(self.sides) == 2
        is_open = self.is_computed or (self.finding.kind == "weights" and self.is_vague)
        return is_whole and is_recorded and is_open and not all(s.tensors for s in self.sides)

    @property
    def lacks_operations(self) -> bool:
        """Whether the operations of one module would say more."""
        is_made_outside = self.finding.side == "input" and self.finding.before == "unknown"
        is_open = self.is_vague and not is_made_outside
        is_open = is_open and (self.is_computed or self.finding.kind == "weights")
        return is_open and len(self.sides) == 2 and bool(self.traced_sides)

    @property
    def traced_sides(self) -> list[_Side]:
        """The programs whose operations can be listed."""
        return [side for side in self.sides if not self.report.is_imported(side.name)]


def next_steps(report: Report) -> list[NextStep]:
    """Return what to do about the first finding, or what was left out, in order."""
    if report.following is not None:
        return list(report.following)
    if report.first is None:
        # what only ranks have is left out here, and bisect compares its operations
        return [_bisect()] if report.verdict == "partial" and _has_ranks(report) else []
    outcome = _Outcome(report, report.first)
    steps = next(plan(outcome) for applies, plan in _PLANS if applies(outcome))
    return [*steps, *_isolation_steps(outcome)]


# -- plans


def _mend(why: str, capture: str | None = None) -> Callable[[_Outcome], list[NextStep]]:
    """Return the plan that records the port again once it is mended."""
    return lambda outcome: [
        _again(outcome, _port_name(outcome.report), why, capture),
        _compare(outcome.report, why, _MATCHES),
    ]


def _bisect_or(plan: Callable[[_Outcome], list[NextStep]]) -> Callable[[_Outcome], list[NextStep]]:
    """Return the plan that finds the line first, where both programs can be run."""
    return lambda outcome: [_bisect()] * outcome.can_be_bisected + plan(outcome)


def _record_both(why: str, capture: str | None = None) -> Callable[[_Outcome], list[NextStep]]:
    """Return the plan that records both programs again under the names that they have."""
    return lambda outcome: [
        *(_again(outcome, name, why, capture) for name in _program_names(outcome.report)),
        _compare(outcome.report, why, _MATCHES),
    ]


def _bisect() -> NextStep:
    # it looks for the first step that differs itself
    words = ["otel-torch", "bisect", "--", "REFERENCE_COMMAND", "--", "PORT_COMMAND"]
    return NextStep(words, _FIND_LINE, _NAMES_LINES)


def _find_line(outcome: _Outcome) -> list[NextStep]:
    finding, report = outcome.finding, outcome.report
    reference, port = beside(report.reference, "graph"), beside(report.port, "graph")
    # a program that lacks the place is recorded at the other one's step
    step = finding.port_step if finding.step is None else finding.step
    port_step = step if finding.port_step is None else finding.port_step
    return [
        _bisect(),
        record("reference", reference, _RECORD_GRAPHS, _steps_setting(step), capture="graph"),
        record("port", port, _RECORD_GRAPHS, _steps_setting(port_step), capture="graph"),
        _diff([reference, port], _RECORD_GRAPHS, _NAMES_LINES),
    ]


def _record_tensors(outcome: _Outcome) -> list[NextStep]:
    """Record the tensors that were not kept, and compare with them."""
    report, sides = outcome.report, outcome.sides
    steps, recordings, folders = [], [], []
    for run in _runs(sides):
        recording = run[0].recording
        folder = run[0].tensors if all(side.tensors for side in run) else None
        if folder is None:
            recording = beside(recording, "near")
            folder = beside(run[0].recording, "tensors", is_folder=True)
            steps.append(_record_neighborhood(run, recording, folder, _capture(report)))
        recordings += [recording] * len(run)
        folders += [folder] * len(run)
    # the recordings of a neighborhood are related by the module before, if they have it
    is_enough = all(side.previous is not None for side in sides) and sides[0].side != "parameter"
    compared = recordings if is_enough else [report.reference, report.port]
    words = [*_recordings(compared, report.models), "--tensors", *folders]
    return [*steps, _diff(words, _RECORD_TENSORS, _IS_EXPLAINED)]


def _record_neighborhood(
    run: Sequence[_Side], recording: str, folder: str, capture: str
) -> NextStep:
    modules = dict.fromkeys(_neighborhood(side.module, side.previous) for side in run)
    settings = {"OTEL_TORCH_MODULES": "|".join(modules)}
    steps = dict.fromkeys(str(side.step) for side in run if side.step is not None)
    if steps:
        settings["OTEL_TORCH_STEPS"] = ",".join(steps)
    settings["OTEL_TORCH_TENSORS"] = folder
    expects = "the recording and the folder of its tensors are written"
    return record(
        _run_name(run), recording, _RECORD_TENSORS, settings, capture=capture, expects=expects
    )


def _list_operations(outcome: _Outcome) -> list[NextStep]:
    sides = outcome.traced_sides
    why = _LOOK_INSIDE if len(sides) == 2 else _LOOK_INSIDE_ONE.format(name=sides[0].name)
    steps = []
    for run in _runs(sides):
        patterns = dict.fromkeys(map(_operations_pattern, run))
        recording = beside(run[0].recording, "operations")
        settings = {"OTEL_TORCH_OPERATIONS": "|".join(patterns)}
        capture = _capture(outcome.report)
        steps.append(record(_run_name(run), recording, why, settings, capture=capture))
        for pattern, step in dict.fromkeys((_operations_pattern(side), side.step) for side in run):
            words = ["otel-torch", "show", recording, "--module", pattern]
            words += [] if step is None else ["--step", str(step)]
            steps.append(NextStep(words, why, "a line for each operation, in order"))
    return steps


def _pair_names(outcome: _Outcome) -> list[NextStep]:
    words = _recordings([outcome.report.reference, outcome.report.port], outcome.report.models)
    return [
        _diff([*words, "--save-map", "pairs.toml"], _MAP, "pairs.toml is written, to be edited"),
        _diff([*words, "--map", "pairs.toml"], _MAP, _MATCHES),
    ]


def _isolation_steps(outcome: _Outcome) -> list[NextStep]:
    """Return how to separate several faults of programs that `bisect` cannot run."""
    report = outcome.report
    is_done = outcome.is_graph or report.isolated
    is_impossible = report.by_tokens or any(report.imported)
    is_several = len(report.introduced) > 1 and any(map(_is_computed, report.introduced))
    if outcome.can_be_bisected or is_done or is_impossible or not is_several:
        return []
    name = _port_name(report)
    folder = beside(report.reference, "whole-tensors", is_folder=True)
    reference, port = beside(report.reference, "whole"), beside(report.port, "isolated")
    first, last = "reference" if name == "port" else name, [reference, port]
    return [
        record(first, reference, _ISOLATE, {"OTEL_TORCH_TENSORS": folder}, capture="parity"),
        _diff(
            [*_recordings([reference, report.port], report.models), "--save-isolation", folder],
            _ISOLATE,
            f"{folder}/isolation.json is written",
        ),
        record(name, port, _ISOLATE, {"OTEL_TORCH_ISOLATE": folder}, capture="parity"),
        _diff(_recordings(last, report.models), _ISOLATE, "each finding has a cause of its own"),
    ]


# The first line that applies to a diverged comparison decides.
_PLANS: tuple[tuple[Callable[[_Outcome], bool], Callable[[_Outcome], list[NextStep]]], ...] = (
    (lambda outcome: outcome.is_graph, _mend(_MEND, "graph")),
    (lambda outcome: outcome.is_unexplained_training and outcome.can_be_graphs, _find_line),
    (lambda outcome: outcome.is_unexplained_update, _record_both(_RECORD_TRAINING, "training")),
    (lambda outcome: outcome.is_training, _mend(_MEND, "training")),
    (
        lambda outcome: outcome.is_missing and outcome.can_be_graphs,
        lambda outcome: [*_find_line(outcome), *_pair_names(outcome)],
    ),
    (lambda outcome: outcome.is_missing, _pair_names),
    (lambda outcome: outcome.is_given_other_inputs, _record_both(_GIVE_ALIKE)),
    (lambda outcome: outcome.is_computed and outcome.can_be_graphs, _find_line),
    (lambda outcome: outcome.lacks_tensors, _bisect_or(_record_tensors)),
    (lambda outcome: outcome.lacks_operations, _bisect_or(_list_operations)),
    (lambda outcome: outcome.finding.kind == "weights", _mend(_MEND_WEIGHT)),
    (lambda outcome: outcome.finding.kind == "dtype", _mend(_ALIGN_DTYPE)),
    (lambda outcome: True, _mend(_MEND)),
)


# -- the parts of a plan


def _has_ranks(report: Report) -> bool:
    """Return whether any recording is a folder with those of several ranks."""
    return not all(Path(path).suffix for path in (report.reference, report.port))


def _is_computed(finding: Finding) -> bool:
    return finding.kind not in ("weights", "missing", "dtype")


def _sides(report: Report, finding: Finding) -> list[_Side]:
    """Return the programs that have the place of a finding."""
    before = _last_matching_pair(report.chain)
    folder, port_folder = report.tensors
    sides = []
    if finding.module is not None:
        previous = None if before is None else before.module
        place = finding.module, finding.side, finding.step, previous
        sides.append(_Side("reference", report.reference, folder, *place))
    if finding.port_module is not None:
        previous = None if before is None else before.port_module
        place = finding.port_module, finding.port_side, finding.port_step, previous
        sides.append(_Side("port", report.port, port_folder, *place))
    return sides


def _last_matching_pair(path: Sequence[ComparedPair]) -> ComparedPair | None:
    for pair in reversed(path):
        if pair.state != "introduced" and pair.module and pair.port_module:
            return pair
    return None


def _runs(sides: Sequence[_Side]) -> list[list[_Side]]:
    """Return the sides by run: two models of one recording are of one run."""
    runs: dict[str, list[_Side]] = {}
    for side in sides:
        runs.setdefault(side.recording, []).append(side)
    return list(runs.values())


def _run_name(run: Sequence[_Side]) -> str:
    return run[0].name if len(run) == 1 else _BOTH


def _port_name(report: Report) -> str:
    return _BOTH if _is_one_run(report) else "port"


def _program_names(report: Report) -> list[str]:
    return [_BOTH] if _is_one_run(report) else ["reference", "port"]


def _is_one_run(report: Report) -> bool:
    return report.models is not None and report.reference == report.port


def _again(outcome: _Outcome, name: str, why: str, capture: str | None) -> NextStep:
    """Return the step that makes a recording again."""
    report = outcome.report
    recording = report.reference if name == "reference" else report.port
    if report.is_imported(name):  # of a program that does not run under otel_torch
        words = ["otel-torch", "import", "MANIFEST", "--output", recording]
        return NextStep(words, why, "the recording is written")
    selection = report.selections[0 if name == "reference" else 1]
    return record(name, recording, why, selection, capture=capture or _capture(report))


def _capture(report: Report) -> str:
    return "tokens" if report.by_tokens else "parity"


def _steps_setting(step: int | None) -> dict[str, str]:
    """Return the setting that selects a step and, for what runs between the two, the one before.

    Without it, the first step of each model is recorded.
    """
    return {"OTEL_TORCH_STEPS": f"{step - 1},{step}"} if step else {}


def _operations_pattern(side: _Side) -> str:
    # what enters a module was made by the code around it
    module = _container(side.module) if side.side == "input" else side.module
    return f"^{re.escape(module)}$"


def _compare(report: Report, why: str, expects: str) -> NextStep:
    return _diff(_recordings([report.reference, report.port], report.models), why, expects)


def _diff(words: Sequence[str], why: str, expects: str) -> NextStep:
    return NextStep(["otel-torch", "diff", *words], why, expects)


def _recordings(recordings: Sequence[str], models: tuple[str, str] | None) -> list[str]:
    """Return what `diff` takes to compare two recordings, or two models.

    >>> _recordings(["a.jsonl", "a.jsonl"], ("N", "N#2"))
    ['a.jsonl', '--models', 'N', 'N#2']
    """
    if models is None:
        return list(recordings)
    return [*dict.fromkeys(recordings), "--models", *models]


# -- neighborhoods


def _neighborhood(module: str, previous: str | None) -> str:
    """Return a pattern of the container of a module and the module that ran before.

    >>> print(_neighborhood("blocks.0.attn.out", "blocks.0.norm"))
    ^(blocks\\.0\\.attn|blocks\\.0\\.norm)(\\.|$)
    """
    container = _container(module) or module
    names = [container]
    if previous is not None and not _is_inside(previous, container):
        names.append(previous)
    alternatives = "|".join(map(re.escape, names))
    return f"^{alternatives}(\\.|$)" if len(names) == 1 else f"^({alternatives})(\\.|$)"


def _container(module: str) -> str:
    """Return the module that contains another one; a ModuleList or Sequential does not count.

    >>> _container("blocks.0.attn.to_out.0"), _container("blocks.0.norm"), _container("blocks.0")
    ('blocks.0.attn', 'blocks.0', '')
    """
    parts = module.split(".")
    while parts and parts.pop().isdigit():
        pass
    return ".".join(parts)


def _is_inside(module: str, container: str) -> bool:
    return module == container or module.startswith(f"{container}.")
