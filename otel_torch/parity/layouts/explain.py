"""Add to a finding which rank it is on, and what the ranks hold there."""

from __future__ import annotations

from dataclasses import replace

from otel_torch.parity.finding import Finding, Report
from otel_torch.parity.layouts.one_recording import OneRecording
from otel_torch.parity.layouts.rank_rows import PlaceKey
from otel_torch.parity.layouts.wrong_places import WrongPlace
from otel_torch.records import FORWARD_PHASES

_WITH_PARAMETERS = (*FORWARD_PHASES, "attach")


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
    finding = _before_another_rank(finding, wrong, one)
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


def _before_another_rank(finding: Finding, wrong: WrongPlace, one: OneRecording) -> Finding:
    """Return the finding at the output whose wrong gradient comes from another rank.

    No module made it: what follows the output in one process is on a rank that is right.
    """
    module = finding.port_model, finding.port_module
    ranks = {rank for key, rank in one.only_rank.items() if key.module_path == module}
    is_made = finding.phase != "backward" or not str(finding.port_tensor).startswith("grad_in")
    if is_made or wrong.rank is None or len(ranks) != 1 or wrong.rank in ranks:
        return finding
    key = next(key for key, place in one.wrong.items() if place is wrong)
    text = (
        f"The gradient that reaches the output of {key.module} is the first that is wrong: it "
        f"comes from rank {ranks.pop()}, where the gradients are right."
    )
    sentence = "" if finding.cause is None else finding.cause.sentence
    return replace(
        finding,
        module=key.module,
        port_module=key.module,
        tensor=key.tensor,
        port_tensor=key.tensor,
        side="output",
        port_side="output",
        explanation=" ".join(filter(None, (sentence, text))),
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
                if key.position == step and key.phase == "backward"
            ),
            None,
        )
    if finding.phase == "loss":
        losses = (
            wrong
            for key, wrong in one.wrong.items()
            if (key.tensor_name, key.position, key.phase) == (module, step, "train")
        )
        return next(losses, None)
    if finding.phase == "update" and finding.cause is not None and not finding.port_module:
        return _wrong_updates(step, one)
    if finding.port_side == "parameter" and finding.phase in _WITH_PARAMETERS:
        return one.wrong.get(_place_key(finding)._replace(loop=0, step=0, call=0, phase="attach"))
    return one.wrong.get(_place_key(finding))


def _place_key(finding: Finding) -> PlaceKey:
    return PlaceKey._make(
        (
            finding.port_model,
            finding.port_module,
            finding.port_tensor,
            finding.port_loop,
            finding.port_step,
            finding.port_call,
            finding.phase,
            None,
        )
    )


def _wrong_updates(step: tuple[int | None, int | None], one: OneRecording) -> WrongPlace | None:
    """Return what is wrong with all updates: settings that differ between the ranks, or the first.

    A schedule may set them in a row of each step, and not all of them have one.
    """
    in_step = [(key, wrong) for key, wrong in one.wrong.items() if key.position == step]
    for key, wrong in in_step:
        if key.phase == "train" and key.tensor.endswith("]"):
            return replace(wrong, cause=None)
    rank = one.rank_of_settings
    if rank is not None:
        return WrongPlace(rank, None, f"Only rank {rank} is wrong.")
    updates = (wrong for key, wrong in in_step if key.phase == "update")
    first = next(updates, None)
    return None if first is None else replace(first, cause=None)


def _is_better(cause: object, finding: Finding) -> bool:
    """Return whether what the ranks show says more than what the tensors show."""
    return getattr(cause, "certain", False) or finding.cause is None
