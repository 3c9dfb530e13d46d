"""Add to a finding which rank it is on, and what the ranks hold there."""

from __future__ import annotations

from dataclasses import replace

from otel_torch.parity.finding import Finding, Report
from otel_torch.parity.layouts.one_recording import OneRecording
from otel_torch.parity.layouts.rank_rows import PlaceKey
from otel_torch.parity.layouts.wrong_places import WrongPlace

_FORWARD_PHASES = ("forward", "eval", "attach")


def explain_ranks(report: Report, one: OneRecording) -> None:
    """Add the ranks to the findings of a report about all ranks."""
    explained = {id(finding): _explain(finding, one) for finding in report.introduced}
    if report.first is not None:
        report.first = explained.get(id(report.first), report.first)
    report.introduced = [explained[id(finding)] for finding in report.introduced]


def _explain(finding: Finding, one: OneRecording) -> Finding:
    wrong = _wrong_place(finding, one)
    if wrong is None:
        rank = one.only_rank.get(_place_key(finding))
        return finding if rank is None else replace(finding, rank=rank)
    cause = wrong.cause if wrong.cause is not None and _is_better(wrong.cause, finding) else None
    explanation = finding.explanation
    if cause is not None and finding.cause is not None:
        explanation = explanation.removeprefix(finding.cause.sentence).lstrip()
    sentences = [cause.sentence if cause else "", explanation, wrong.sentence]
    return replace(
        finding,
        rank=wrong.rank,
        cause=cause or finding.cause,
        explanation=" ".join(filter(None, sentences)),
    )


def _wrong_place(finding: Finding, one: OneRecording) -> WrongPlace | None:
    """Return what is wrong at the place of a finding.

    The gradient of an input is no place: no row has it. It is seen in the next gradient, which is
    the first that is wrong in its step.
    """
    module = finding.port_model, finding.port_module, finding.port_tensor
    step = finding.port_loop, finding.port_step
    if finding.phase == "backward" and str(finding.port_tensor).startswith("grad_in"):
        return next(
            (
                wrong
                for key, wrong in one.wrong.items()
                if key[3:5] == step and key[6] == "backward"
            ),
            None,
        )
    if finding.phase == "loss":
        losses = (
            wrong
            for key, wrong in one.wrong.items()
            if (key[:3], key[3:5], key[6]) == (module, step, "train")
        )
        return next(losses, None)
    if finding.phase == "update" and finding.cause is not None and not finding.port_module:
        return _wrong_settings(step, one)
    if finding.port_side == "parameter" and finding.phase in _FORWARD_PHASES:
        return one.wrong.get((*module, 0, 0, 0, "attach", None))
    return one.wrong.get(_place_key(finding))


def _place_key(finding: Finding) -> PlaceKey:
    return (
        finding.port_model,
        finding.port_module,
        finding.port_tensor,
        finding.port_loop,
        finding.port_step,
        finding.port_call,
        finding.phase,
        None,
    )


def _wrong_settings(step: tuple[int | None, int | None], one: OneRecording) -> WrongPlace | None:
    """Return what is wrong with the settings of optimizers, which differ between the ranks."""
    for key, wrong in one.wrong.items():
        if key[6] == "train" and key[2].endswith("]") and key[3:5] == step:
            return replace(wrong, cause=None)
    if one.rank_of_settings is None:
        return None
    return WrongPlace(one.rank_of_settings, None, f"Only rank {one.rank_of_settings} is wrong.")


def _is_better(cause: object, finding: Finding) -> bool:
    """Return whether what the ranks show says more than what the tensors show."""
    return getattr(cause, "certain", False) or finding.cause is None
