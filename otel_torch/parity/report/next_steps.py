"""The next step after a finding: a sentence, and the commands that take it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from otel_torch.parity.finding import OTHER_INPUTS, ComparedPair, Finding, Kind, Report

_RECORD_AGAIN = "Next: record this neighborhood again with whole tensors, and compare:"
_LOOK_INSIDE = "Next: list the operations that both programs run here:"
_LOOK_INSIDE_ONE = "Next: list the operations that the {name} runs here:"
_FIX = "Next: mend this, record the port again, and compare:"
_SENTENCES: dict[Kind, str] = {
    "weights": "Next: mend how this weight is converted or loaded, record the port again:",
    "missing": (
        "Next: find out why only one side runs this. If it only has another name, pair the two in "
        "the map:"
    ),
    "dtype": "Next: run both sides in the same dtype here, record the port again, and compare:",
}
_GIVE_ALIKE = "Next: give both programs the same inputs, record both again, and compare:"
_RECORD_TRAINING = (
    "Next: record both programs with their losses, gradients and updates, and compare. If they are "
    "recorded, compare how the two programs use the optimizer up to this step:"
)
_ISOLATION = (
    "One bug can hide another: record all of the reference with OTEL_TORCH_TENSORS=WHOLE, compare "
    "with --save-isolation WHOLE, then run the port from its values with "
    "OTEL_TORCH_ISOLATE=WHOLE."
)
# how a recording is made again of a program that does not run under otel_torch
_IMPORT = "otel-torch import MANIFEST --output {recording}"
# causes that say how a tensor looks and not what made it so
_VAGUE_CAUSES = ("reordered", "part")
_SWITCH = "OTEL_TORCH_ENABLED=1 OTEL_TORCH_CAPTURE={capture}"
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


def next_step(report: Report) -> tuple[str, list[str]]:
    """Return what to do about the first finding, and commands for a POSIX shell, in order.

    What the recordings hold already is not recorded again. REFERENCE_COMMAND and PORT_COMMAND stand
    for how the two programs are started, which no recording holds, PROGRAM_COMMAND for how one with
    both models is.
    """
    finding = report.first
    if finding is None:
        return "", []
    if finding.phase in _TRAINING_PHASES:
        if finding.cause is not None or finding.phase != "update":
            return _FIX, _port_commands(report, "training")
        return _RECORD_TRAINING, _both_commands(report, "training")
    if finding.kind == "missing":
        return _SENTENCES["missing"], _map_commands(report)
    if finding.cause is not None and finding.cause.kind == OTHER_INPUTS:
        return _GIVE_ALIKE, _both_commands(report)
    sides = _sides(report, finding)
    if len(sides) == 2 and _wants_tensors(finding):
        # of programs with other batches, only the weights can be compared whole
        is_whole = finding.kind == "weights" or not report.by_tokens
        if is_whole and not any(report.imported) and any(side.tensors is None for side in sides):
            return _RECORD_AGAIN, _tensor_commands(report, sides)
        traced = [side for side in sides if not report.is_imported(side.name)]
        if traced and _is_vague(finding) and not _is_made_outside(finding):
            one = _LOOK_INSIDE_ONE.format(name=traced[0].name)
            return one if len(traced) == 1 else _LOOK_INSIDE, _operation_commands(report, traced)
    return _SENTENCES.get(finding.kind, _FIX), _port_commands(report)


def isolation_advice(report: Report) -> str:
    """Return how to separate several faults; empty if there is one, or if the port already ran
    in isolation.

    >>> isolation_advice(Report("match"))
    ''
    """
    if report.isolated or len(report.introduced) < 2 or any(report.imported):
        return ""
    return _ISOLATION if any(map(_is_computed, report.introduced)) else ""


def _is_made_outside(finding: Finding) -> bool:
    """Return whether the code that made an input runs in no recorded call."""
    return finding.side == "input" and finding.before == "unknown"


def _is_computed(finding: Finding) -> bool:
    return finding.kind not in _SENTENCES


def _wants_tensors(finding: Finding) -> bool:
    """Return whether whole tensors say more: of what is computed, and of weights in disorder."""
    return _is_computed(finding) or (finding.kind == "weights" and _is_vague(finding))


def _is_vague(finding: Finding) -> bool:
    return finding.cause is None or finding.cause.kind in _VAGUE_CAUSES


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


# -- commands


def _tensor_commands(report: Report, sides: Sequence[_Side]) -> list[str]:
    """Return how to record the tensors that were not kept, and how to compare with them."""
    commands, recordings, folders = [], [], []
    for run in _runs(sides):
        recording = run[0].recording
        folder = run[0].tensors if all(side.tensors for side in run) else None
        if folder is None:
            recording, folder = _beside(recording, "near"), _beside(recording, "tensors")
            commands.append(_recording_command(run, recording, folder, _capture(report)))
        recordings += [recording] * len(run)
        folders += [folder] * len(run)
    # the recordings of a neighborhood are related by the module before, if they have it
    is_enough = all(side.previous is not None for side in sides) and sides[0].side != "parameter"
    reference, port = recordings if is_enough else (report.reference, report.port)
    compare = _compare(reference, port, report.models)
    return [*commands, f"{compare} --tensors {' '.join(map(shlex.quote, folders))}"]


def _runs(sides: Sequence[_Side]) -> list[list[_Side]]:
    """Return the sides by run: two models of one recording are of one run."""
    runs: dict[str, list[_Side]] = {}
    for side in sides:
        runs.setdefault(side.recording, []).append(side)
    return list(runs.values())


def _recording_command(run: Sequence[_Side], recording: str, folder: str, capture: str) -> str:
    modules = dict.fromkeys(_neighborhood(side.module, side.previous) for side in run)
    settings = f"OTEL_TORCH_MODULES={shlex.quote('|'.join(modules))}"
    steps = dict.fromkeys(str(side.step) for side in run if side.step is not None)
    if steps:
        settings += f" OTEL_TORCH_STEPS={','.join(steps)}"
    settings += f" OTEL_TORCH_TENSORS={shlex.quote(folder)}"
    return _run(_name(run), recording, settings, capture)


def _name(run: Sequence[_Side]) -> str:
    return run[0].name if len(run) == 1 else _BOTH


def _operation_commands(report: Report, sides: Sequence[_Side]) -> list[str]:
    commands = []
    for run in _runs(sides):
        patterns = dict.fromkeys(map(_operations_pattern, run))
        recording = _beside(run[0].recording, "operations")
        settings = f"OTEL_TORCH_OPERATIONS={shlex.quote('|'.join(patterns))}"
        commands.append(_run(_name(run), recording, settings, _capture(report)))
        shows = dict.fromkeys((_operations_pattern(side), side.step) for side in run)
        for pattern, step in shows:
            show = f"otel-torch show {shlex.quote(recording)} --module {shlex.quote(pattern)}"
            commands.append(show if step is None else f"{show} --step {step}")
    return commands


def _operations_pattern(side: _Side) -> str:
    # what enters a module was made by the code around it
    module = _container(side.module) if side.side == "input" else side.module
    return f"^{re.escape(module)}$"


def _both_commands(report: Report, capture: str | None = None) -> list[str]:
    again = _port_commands(report, capture)
    if _is_one_run(report):
        return again
    return [_again(report, "reference", report.reference, capture), *again]


def _port_commands(report: Report, capture: str | None = None) -> list[str]:
    name = _BOTH if _is_one_run(report) else "port"
    compare = _compare(report.reference, report.port, report.models)
    return [_again(report, name, report.port, capture), compare]


def _again(report: Report, name: str, recording: str, capture: str | None) -> str:
    """Return the command that makes a recording again."""
    if report.is_imported(name):
        return _IMPORT.format(recording=shlex.quote(recording))
    return _run(name, recording, "", capture or _capture(report))


def _capture(report: Report) -> str:
    return "tokens" if report.by_tokens else "parity"


def _map_commands(report: Report) -> list[str]:
    command = _compare(report.reference, report.port, report.models)
    return [f"{command} --save-map pairs.toml", f"{command} --map pairs.toml"]


def _is_one_run(report: Report) -> bool:
    return report.models is not None and report.reference == report.port


def _compare(reference: str, port: str, models: tuple[str, str] | None) -> str:
    """Return the command that compares two recordings, or two models.

    >>> _compare("a.jsonl", "a.jsonl", ("N", "N#2"))
    "otel-torch diff a.jsonl --models N 'N#2'"
    """
    words = [reference, port]
    if models is not None:
        words = [*dict.fromkeys(words), "--models", *models]
    return f"otel-torch diff {' '.join(map(shlex.quote, words))}"


def _run(name: str, recording: str, settings: str, capture: str = "parity") -> str:
    """Return the command that records a program."""
    switch = _SWITCH.format(capture=capture)
    file = recording if Path(recording).suffix else f"{recording}/{name}.jsonl"
    parts = (switch, f"OTEL_TORCH_JSONL={shlex.quote(file)}", settings, f"{name.upper()}_COMMAND")
    return " ".join(filter(None, parts))


def _beside(recording: str, word: str) -> str:
    """Return a name beside a recording; that of tensors is a folder's.

    >>> _beside("runs/port.jsonl", "near"), _beside("runs/port.jsonl", "tensors")
    ('runs/port-near.jsonl', 'runs/port-tensors')
    """
    path = Path(recording)
    suffix = "" if word == "tensors" else path.suffix
    return str(path.parent / f"{path.stem}-{word}{suffix}")


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
