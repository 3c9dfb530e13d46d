"""Who produced a NaN or Inf of a training step that no forward shows: loss, backward or update.

The rows of phase `train` of a step come in order of execution: the loss, the gradients, the update.
A backward pass runs the modules in reverse, so a NaN came in between the last one (in order of the
forward) whose gradient has it and the one behind, whose gradient has not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from otel_torch.records import Record
from otel_torch.sources.models.model import Model
from otel_torch.sources.nonfinite.evidence import Examined, Kind, examine, examine_weights
from otel_torch.sources.nonfinite.judge import Verdict
from otel_torch.sources.nonfinite.report import named, number
from otel_torch.sources.nonfinite.suspects import FORWARD_PHASES, Row, is_nonfinite
from otel_torch.sources.tensors.parameter_data import gradient_of
from otel_torch.statistics.row_layout import largest_magnitude
from otel_torch.torch_private import unobserved
from otel_torch.training_quantities import PHASE

_LOSS, _GRADIENT, _CLIPPED, _CHANGE = "loss", "grad_norm", "grad_norm_clipped", "update_ratio"


def training_faults(records: Sequence[Record], bad: Sequence[int]) -> Iterator[int]:
    """Yield the indices of a bad loss, gradient norm or change of parameters, in order."""
    for index in bad:
        record = records[index]
        if record.phase == PHASE and record.tensor in (_LOSS, _GRADIENT, _CHANGE):
            yield index


def judge_training(
    step: Sequence[tuple[Record, Row]],
    record: Record,
    model: Model | None,
    optimizer: str,
    first: Mapping[str, Examined],
) -> Verdict | None:
    """Return who produced the NaN or Inf of a row of phase `train`; None if it is no fault.

    Args:
        step: the records of its step with their rows, in order of execution.
        record: of the row.
        model: whose row it is, while it has the gradients and weights of that step.
        optimizer: its class and settings.
        first: its weights before its first update.
    """
    if record.tensor == _LOSS:
        return _loss(step, record)
    if record.tensor == _GRADIENT:
        gradients = _norms_by_module(step)
        if not gradients and model is not None:
            gradients = examine_gradients(model)
        details: tuple[str, ...] = ()
        if (
            any(other.tensor == _CLIPPED for other, _ in step)
            and "finite" not in gradients.values()
        ):
            gradients, details = {}, ("clipping has spread it to all gradients",)
        order = modules_in_order(other for other, _ in step)
        return Verdict("backward", *judge_backward(record.model, order, gradients), details)
    return None if model is None else _update(model, optimizer, first)


def judge_backward(
    model: str, order: Sequence[str], gradients: Mapping[str, Kind]
) -> tuple[str, str]:
    """Return the module in whose backward a NaN or Inf appeared, and that in words.

    Args:
        order: the modules that ran, in order of completion.
        gradients: those of the parameters, by module.

    >>> judge_backward("Net", ["a", "act", "b"], {"a": "NaN", "b": "finite"})[0]
    'act'
    """
    owners = [module for module in order if module in gradients]
    bad = [module for module in owners if gradients[module] != "finite"]
    if not bad:
        return (
            "",
            f"the backward pass of {model} produced it: the loss is finite, a gradient is not",
        )
    last = bad[-1]
    place = owners.index(last)
    if gradients[owners[0]] == "finite":
        text = (
            "produced it in its backward: the gradients of the modules before it are finite, "
            "those of its weights are not"
        )
        return last, f"{named(model, last)} {text}"
    behind = owners[place + 1] if place + 1 < len(owners) else None
    end = len(order) if behind is None else order.index(behind)
    between = [
        module
        for module in order[order.index(last) + 1 : end]
        if module not in gradients and not _contains(module, last, behind)
    ]
    between = [module for module in between if not _contains(module, *between)]
    edge = "the loss" if behind is None else repr(behind)
    names = ", ".join(map(repr, between))
    where = f"of {names}, or of the code" if between else "of the code"
    text = (
        f"the backward {where} between {last!r} and {edge} of {model} produced it: the gradient of "
        f"{edge} is finite, that of {last!r} is not"
    )
    return (between[-1] if between else last), text


@unobserved
def examine_gradients(model: Model) -> dict[str, Kind]:
    """Return what the gradients of a model's parameters on a CPU are, by module.

    A parameter that modules share, such as that of tied embeddings, belongs to the first of them: a
    backward pass reaches that one last, with whatever came in before.
    """
    kinds: dict[str, Kind] = {}
    seen: set[int] = set()
    for site in list(model.sites.values()):
        module = site.module()
        if module is None or not site.names:
            continue
        for parameter in module._parameters.values():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            gradient = gradient_of(parameter)
            if isinstance(gradient, Tensor) and gradient.is_cpu:
                kind = examine("", gradient).kind
                name = site.names[0][0]
                kinds[name] = kind if kinds.get(name, "finite") == "finite" else kinds[name]
    return kinds


def _loss(step: Sequence[tuple[Record, Row]], record: Record) -> Verdict:
    outputs = [
        (other, row) for other, row in step if other.phase in FORWARD_PHASES and row is not None
    ]
    details: tuple[str, ...] = ()
    if outputs:
        last, row = outputs[-1]
        name = named(last.model, last.module)
        details = (f"largest |{last.tensor}| of {name} {number(largest_magnitude(row))}",)
    text = f"the code that computes the loss produced it: {record.model} returned finite values"
    return Verdict("loss", "", text, details)


def _update(model: Model, optimizer: str, first: Mapping[str, Examined]) -> Verdict | None:
    root = model.root()
    for weight in () if root is None else examine_weights(root, recurse=True):
        before = first.get(weight.name)
        if weight.kind in ("NaN", "Inf") and (before is None or before.kind == "finite"):
            owner, _, name = weight.name.rpartition(".")
            text = (
                f"{optimizer} put it into {name!r} of {named(model.name, owner)}, "
                "whose gradient is finite"
            )
            size = (
                () if before is None else (f"largest |{name}| at first {number(before.largest)}",)
            )
            return Verdict("update", owner, text, size)
    return None


def _norms_by_module(step: Sequence[tuple[Record, Row]]) -> dict[str, Kind]:
    return {
        record.module: "NaN" if is_nonfinite(row) else "finite"
        for record, row in step
        if record.tensor == _GRADIENT and record.module
    }


def modules_in_order(records: Iterable[Record]) -> list[str]:
    """Return the modules that have run in a forward, in order of completion."""
    names = (
        record.module
        for record in records
        if record.phase == "forward" and record.tensor.startswith("out")
    )
    return list(dict.fromkeys(names))


def _contains(module: str, *others: str | None) -> bool:
    return not module or any(other and other.startswith(f"{module}.") for other in others)
