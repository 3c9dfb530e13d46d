"""The next step after a finding: a sentence, and settings that record its neighborhood again."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from otel_torch.parity.finding import ComparedPair, Finding, Kind, Report

_RECORD_AGAIN = "Next: record this neighborhood again in both programs, with whole tensors:"
_NEXT_STEPS: dict[Kind, str] = {
    "value": _RECORD_AGAIN,
    "layout": _RECORD_AGAIN,
    "nonfinite": _RECORD_AGAIN,
    "shape": _RECORD_AGAIN,
    "dtype": "Next: run both sides in the same dtype here, then compare again.",
    "weights": "Next: check how this weight is converted and loaded; that needs no forward pass.",
    "missing": (
        "Next: find out why only one side runs this. If it only has another name, pair the two "
        "with --map."
    ),
}
_ISOLATION = (
    "One bug can hide another: record all of the reference with OTEL_TORCH_TENSORS=WHOLE, compare "
    "with --save-isolation WHOLE, then run the port from its values with "
    "OTEL_TORCH_ISOLATE=WHOLE."
)


def next_step(
    finding: Finding, path: Sequence[ComparedPair] = ()
) -> tuple[str, list[tuple[str, str]]]:
    """Return what to do next, and the environment that records the neighborhood in each program.

    Args:
        finding: The first finding.
        path: The pairs from the inputs to the finding.

    Returns:
        A sentence, and (program, environment variables quoted for a POSIX shell) for each program
        that has the module. The list is empty if recording again does not help.
    """
    sentence = _NEXT_STEPS[finding.kind]
    if not _needs_tensors(finding):
        return sentence, []
    upstream = _last_matching_pair(path)
    programs = [
        ("reference", finding.module, finding.step, upstream.module if upstream else None),
        (
            "port",
            finding.port_module,
            finding.port_step,
            upstream.port_module if upstream else None,
        ),
    ]
    return sentence, [
        (program, _environment(module, step, previous))
        for program, module, step, previous in programs
        if module is not None
    ]


def isolation_advice(report: Report) -> str:
    """Return how to separate several faults; empty if there is one, or if the port already ran
    in isolation.

    >>> isolation_advice(Report("match"))
    ''
    """
    if report.isolated or len(report.introduced) < 2:
        return ""
    return _ISOLATION if any(map(_needs_tensors, report.introduced)) else ""


def _needs_tensors(finding: Finding) -> bool:
    return _NEXT_STEPS[finding.kind] is _RECORD_AGAIN


def _last_matching_pair(path: Sequence[ComparedPair]) -> ComparedPair | None:
    for pair in reversed(path):
        if pair.state != "introduced" and pair.module and pair.port_module:
            return pair
    return None


def _environment(module: str, step: int | None, previous: str | None) -> str:
    """Return the variables that record the container of a module and the module that ran before.

    >>> for variable in shlex.split(_environment("blocks.0.attn.out", 2, "blocks.0.norm")):
    ...     print(variable)
    OTEL_TORCH_MODULES=^(blocks\\.0\\.attn|blocks\\.0\\.norm)(\\.|$)
    OTEL_TORCH_STEPS=2
    OTEL_TORCH_TENSORS=FOLDER
    """
    container = _container(module) or module
    names = [container]
    if previous is not None and not _is_inside(previous, container):
        names.append(previous)
    alternatives = "|".join(map(re.escape, names))
    pattern = f"^{alternatives}(\\.|$)" if len(names) == 1 else f"^({alternatives})(\\.|$)"
    steps = "" if step is None else f"OTEL_TORCH_STEPS={step} "
    return f"OTEL_TORCH_MODULES={shlex.quote(pattern)} {steps}OTEL_TORCH_TENSORS=FOLDER"


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
