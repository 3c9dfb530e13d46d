"""Measures where a planted fault begins: runs the clean and the faulty port in one process and
compares every tensor of every module.

    python -m tests.parity.truth [--only WORD] [--seed N]

prints for each case the first event in time order that is not bit-identical, and the figures of the
case table. Without this, a score would only compare with a guess.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.parity.case import Place
from tests.parity.cases import CASES, families
from tests.parity.cases.bugs import BUGS, Patches


class Event(NamedTuple):
    """A tensor that enters or leaves a module; `slot` names it within the module's call `call`."""

    side: str
    module: str
    call: int
    slot: str


Events = dict[Event, torch.Tensor]


@dataclass(frozen=True)
class Difference:
    """The first event of the clean run that the faulty run lacks or has with another value, and the
    names of the parameters and buffers that differ.
    """

    place: Place
    event: Event
    error: float
    weights: tuple[str, ...]


def events(family: str, model: nn.Module, dtype: str, seed: int = 0) -> tuple[Events, torch.Tensor]:
    """Run a model; return all tensors that enter or leave a module, in time order, and the output."""
    tensors: Events = {}
    calls: Counter[str] = Counter()
    handles = []
    for name, module in model.named_modules():

        def entering(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            for slot, tensor in _tensors((args, kwargs)):
                tensors[Event("input", name, calls[name], slot)] = tensor.detach().clone()

        def leaving(_: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            for slot, tensor in _tensors(output):
                tensors[Event("output", name, calls[name], slot)] = tensor.detach().clone()
            calls[name] += 1

        handles += [
            module.register_forward_pre_hook(entering, with_kwargs=True),
            module.register_forward_hook(leaving, with_kwargs=True),
        ]
    final = families.run(family, model, dtype, seed)
    for handle in handles:
        handle.remove()
    return tensors, final


def port(
    case: str, dtype: str, *, bug: bool, seed: int = 0
) -> tuple[Events, torch.Tensor, dict[str, torch.Tensor]]:
    """Run a case's port; return its events, its final output, and its parameters and buffers."""
    family, patches = case.partition("_")[0], Patches()
    model = families.load(family, "port", dtype, seed)
    try:
        if bug:
            BUGS[case](model, patches)
        weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return *events(family, model, dtype, seed), weights
    finally:
        patches.undo()


def first_difference(case: str, dtype: str = "fp32", seed: int = 0) -> Difference:
    """Return the first difference that a case's fault makes.

    Raises: LookupError, if it makes none.
    """
    clean, _, weights = port(case, dtype, bug=False, seed=seed)
    faulty, _, faulty_weights = port(case, dtype, bug=True, seed=seed)
    changed = tuple(
        name for name, tensor in weights.items() if not torch.equal(tensor, faulty_weights[name])
    )
    for event, tensor in clean.items():
        faulty_tensor = faulty.get(event)
        if faulty_tensor is None or not _is_identical(tensor, faulty_tensor):
            error = relative(faulty_tensor, tensor)
            return Difference(Place(event.side, event.module), event, error, changed)
    raise LookupError(f"{case} changes nothing")


def relative(value: torch.Tensor | None, truth: torch.Tensor) -> float:
    """Return |value - truth| / |truth|, or inf if the value is missing or has another shape."""
    if value is None or value.shape != truth.shape:
        return math.inf
    return float((value.double() - truth.double()).norm() / truth.double().norm())


def _is_identical(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | (a != a) & (b != b)).all())
    )


def _tensors(value: Any, slot: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield slot, value
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{slot}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, f"{slot}.{key}")
    elif hasattr(value, "__dataclass_fields__"):
        for key in value.__dataclass_fields__:
            yield from _tensors(getattr(value, key), f"{slot}.{key}")


def main() -> None:
    arguments = argparse.ArgumentParser(description="Measure where the planted faults begin.")
    arguments.add_argument("--only", default="", help="only cases with this in their name")
    arguments.add_argument(
        "--seed", type=int, default=0, help="of weights and inputs; the table has seed 0"
    )
    options = arguments.parse_args()
    only, seed = options.only, options.seed
    expected = {case.name: case for case in CASES}
    references = {}
    for name in [*families.FAMILIES, *BUGS]:
        if only not in name:
            continue
        family = name.partition("_")[0]
        final = {}
        for dtype in families.DTYPES:
            if (family, dtype) not in references:
                reference = families.load(family, "reference", dtype, seed)
                references[family, dtype] = families.run(family, reference, dtype, seed)
            final[dtype] = relative(
                port(name, dtype, bug=name in BUGS, seed=seed)[1], references[family, dtype]
            )
        finals = " ".join(f"{dtype} {error:.2g}" for dtype, error in final.items())
        if name not in BUGS:
            print(f"{name}: clean, final {finals}", flush=True)
            continue
        first = first_difference(name, seed=seed)
        exact, rounded = (
            port(name, dtype, bug=False, seed=seed)[0][first.event] for dtype in families.DTYPES
        )
        rounding = relative(rounded, exact)
        agrees = name in expected and first.place == expected[name].expected[0]
        print(
            f"{name}: {first.place}{first.event.slot} call {first.event.call}, error {first.error:.2g}, rounding in bf16"
            f" {rounding:.2g}, above it: {first.error > 3 * rounding}, final {finals},"
            f" weights {', '.join(first.weights[:3]) or 'none'}, as the table says: {agrees}",
            flush=True,
        )


if __name__ == "__main__":
    main()
