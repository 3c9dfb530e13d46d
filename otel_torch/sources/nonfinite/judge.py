"""Says who produced a NaN or Inf: the rules, from what is known of the call where it appeared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from otel_torch.records import Record
from otel_torch.sources.nonfinite.evidence import EnclosingCall, Examined, examine_weights
from otel_torch.sources.nonfinite.report import named, number

# weights that updates made so many times larger are to blame, and not the module that they are in
_EXPLODED = 1e4
_LOOK_AT_DATA = "look at the data, or at the code that prepares it"


class Verdict(NamedTuple):
    """Who produced it: a `producer` of `Origin`, the module, what is said, and what led there.

    kind: of what was produced, if that is not the tensor that was recorded.
    """

    producer: str
    module: str
    text: str
    details: tuple[str, ...] = ()
    kind: str | None = None


class LastUpdate(NamedTuple):
    """What is known of the updates of a model. `first`: its weights before the first of them."""

    text: str
    first: dict[str, Examined]


@dataclass(frozen=True, slots=True)
class Scene:
    """What is known of the call where a NaN or Inf appeared.

    Args:
        record: the first one that has it.
        calls: the calls that were running, innermost first; empty if they were not examined.
        has_inner: whether modules inside the call's module are recorded, and were finite.
        has_inputs: whether the call's inputs are recorded, and were finite.
        all_recorded: whether every module is recorded.
        update: of the model's weights; None if no optimizer has updated them.
    """

    record: Record
    calls: Sequence[EnclosingCall]
    has_inner: bool
    has_inputs: bool
    all_recorded: bool
    update: LastUpdate | None

    @property
    def name(self) -> str:
        return named(self.record.model, self.record.module)


def judge(scene: Scene) -> Verdict:
    """Return who produced it."""
    if not scene.calls:
        return _without_inputs(scene)
    level = next((i for i, call in enumerate(scene.calls) if call.bad_input is None), None)
    if level is None:
        return _input(scene)
    for rule in (_weights, _module if level == 0 else _glue_in_front):
        verdict = rule(scene, level)
        if verdict is not None:
            return verdict
    raise AssertionError("the last rule always holds")


def _input(scene: Scene) -> Verdict:
    call = scene.calls[-1]
    assert call.bad_input is not None
    name = named(call.model, call.module)
    text = f"the input {call.bad_input.name} of {name} has it: {_LOOK_AT_DATA}"
    return Verdict("input", call.module, text)


def _weights(scene: Scene, level: int) -> Verdict | None:
    """Blame weights of the producing module that are not finite, or that have exploded."""
    call = scene.calls[level]
    module = call.site.module()
    if module is None:
        return None
    prefix = f"{call.module}." if call.module else ""
    weights = examine_weights(module, recurse=level == 0 and not scene.has_inner)
    largest = max((weight.largest for weight in weights), default=0.0)
    for weight in weights:
        before = scene.update.first.get(prefix + weight.name) if scene.update else None
        owner, _, name = (prefix + weight.name).rpartition(".")
        where = f"{name!r} of {named(call.model, owner)}"
        if weight.kind in ("NaN", "Inf"):
            if scene.update is None:
                text = (
                    f"{where} has it, and no optimizer has changed it: "
                    "look at the checkpoint or the initialization"
                )
            elif before is not None and before.kind != "finite":
                text = (
                    f"{where} had it before the first update: "
                    "look at the checkpoint or the initialization"
                )
            else:
                return Verdict("update", owner, f"{scene.update.text} put it into {where}")
            return Verdict("weights", owner, text)
        if (
            scene.update is not None
            and before is not None
            and weight.largest == largest > _EXPLODED * max(before.largest, 1.0)
        ):
            text = f"{scene.update.text} made {where} so large that {_produced(scene)}"
            grown = f"largest |{name}| {number(weight.largest)}, at first {number(before.largest)}"
            return Verdict("update", owner, text, (grown, *_extremes(call)))
    return None


def _produced(scene: Scene) -> str:
    return f"{scene.name} produced it from finite inputs"


def _module(scene: Scene, level: int) -> Verdict:
    call, name = scene.calls[0], scene.name
    module = call.site.module()
    details = (*_extremes(call), *_limit(scene, module))
    if scene.has_inner:
        text = f"the forward of {name} produced it, after its modules had returned finite values"
        return Verdict("glue", call.module, text, details)
    if not call.is_known:
        text = (
            f"{name} or the code before it produced it: which one is not known, "
            "because it changes its input in place"
        )
    else:
        text = f"{_produced(scene)}"
        if module is not None and next(module.children(), None) is not None:
            text = f"something inside {name} produced it from finite inputs"
    return Verdict("module", call.module, text, details)


def _glue_in_front(scene: Scene, level: int) -> Verdict:
    call, inner = scene.calls[level], scene.calls[level - 1]
    assert inner.bad_input is not None
    what = "the forward of" if scene.all_recorded else "something inside"
    text = (
        f"{what} {named(call.model, call.module)} produced it before it called {inner.module!r}, "
        f"whose {inner.bad_input.name} has it"
    )
    return Verdict("glue", call.module, text, _extremes(call), inner.bad_input.kind)


def _without_inputs(scene: Scene) -> Verdict:
    record, name = scene.record, scene.name
    if record.tensor.startswith("in"):
        if not record.module:
            text = f"the input {record.tensor} of {name} has it: {_LOOK_AT_DATA}"
            return Verdict("input", record.module, text)
        container = record.module.rpartition(".")[0]
        text = f"the code before {name} produced it: its {record.tensor} has it"
        return Verdict("glue", container, text)
    if scene.has_inner:
        text = f"the forward of {name} produced it, after its modules had returned finite values"
        return Verdict("glue", record.module, text)
    if scene.has_inputs:
        return Verdict("module", record.module, _produced(scene))
    text = f"{name} or the code before it produced it: whether its inputs were finite is not known"
    return Verdict("module", record.module, text)


def _extremes(call: EnclosingCall) -> tuple[str, ...]:
    """Return how large the inputs of a call were, and which have -Inf."""
    sizes = [f"{number(t.largest)} ({t.name})" for t in call.inputs if t.kind == "finite"]
    masks = [tensor.name for tensor in call.inputs if tensor.kind == "-Inf"]
    details = []
    if sizes:
        details.append(f"largest |x| of its inputs {', '.join(sizes)}")
    if masks:
        details.append(f"{', '.join(masks)} has -Inf, as masks do")
    return tuple(details)


def _limit(scene: Scene, module: nn.Module | None) -> tuple[str, ...]:
    details = []
    if module is not None and (weights := examine_weights(module, recurse=False)):
        details.append(f"of its weights {number(max(weight.largest for weight in weights))}")
    dtype = getattr(torch, str(scene.record.stats.get("dtype", "")).removeprefix("torch."), None)
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        details.append(f"the largest {dtype} is {number(torch.finfo(dtype).max)}")
    return tuple(details)
