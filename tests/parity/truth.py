"""Where a planted fault really begins: the clean and the faulty port in one process, every tensor
of every module compared.

    python -m tests.parity.truth [--only WORD] [--seed N]

prints for each case the first event in time order that is not bit for bit the same, and the figures
of the case table. A score is worth nothing if the place that it counts as right was guessed.
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
    """A tensor that enters or leaves a module: `call` counts the module's calls, `slot` the tensors
    of one.
    """

    side: str
    module: str
    call: int
    slot: str


Events = dict[Event, torch.Tensor]


@dataclass(frozen=True)
class Difference:
    """The first event, in the clean run's order, that the other run has not, or has with another
    value; and the parameters and buffers that are others.
    """

    place: Place
    event: Event
    error: float
    weights: tuple[str, ...]


def events(family: str, model: nn.Module, dtype: str, seed: int = 0) -> tuple[Events, torch.Tensor]:
    """Every tensor that enters or leaves a module in one run, in time order, and the final output."""
    seen: Events = {}
    calls: Counter[str] = Counter()
    handles = []
    for name, module in model.named_modules():

        def entering(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            for slot, tensor in _tensors((args, kwargs)):
                seen[Event("input", name, calls[name], slot)] = tensor.detach().clone()

        def leaving(_: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            for slot, tensor in _tensors(output):
                seen[Event("output", name, calls[name], slot)] = tensor.detach().clone()
            calls[name] += 1

        handles += [
            module.register_forward_pre_hook(entering, with_kwargs=True),
            module.register_forward_hook(leaving, with_kwargs=True),
        ]
    final = families.run(family, model, dtype, seed)
    for handle in handles:
        handle.remove()
    return seen, final


def port(
    case: str, dtype: str, *, bug: bool, seed: int = 0
) -> tuple[Events, torch.Tensor, dict[str, torch.Tensor]]:
    """The events, the final output, and the parameters and buffers of a case's port, with its fault
    or without.
    """
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
    """What the fault of a case changes first; LookupError if it changes nothing."""
    clean, _, weights = port(case, dtype, bug=False, seed=seed)
    faulty, _, faulty_weights = port(case, dtype, bug=True, seed=seed)
    changed = tuple(
        name for name, tensor in weights.items() if not torch.equal(tensor, faulty_weights[name])
    )
    for event, tensor in clean.items():
        other = faulty.get(event)
        if other is None or not _same(tensor, other):
            return Difference(
                Place(event.side, event.module), event, relative(other, tensor), changed
            )
    raise LookupError(f"{case} changes nothing")


def relative(value: torch.Tensor | None, truth: torch.Tensor) -> float:
    """|value - truth| / |truth|; inf where there is nothing to subtract."""
    if value is None or value.shape != truth.shape:
        return math.inf
    return float((value.double() - truth.double()).norm() / truth.double().norm())


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and bool(((one == other) | (one != one) & (other != other)).all())
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
    arguments.add_argument("--only", default="", help="cases whose name holds this")
    arguments.add_argument(
        "--seed", type=int, default=0, help="other weights and inputs; the table is of seed 0"
    )
    given = arguments.parse_args()
    only, seed = given.only, given.seed
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
        found = first_difference(name, seed=seed)
        exact, rounded = (
            port(name, dtype, bug=False, seed=seed)[0][found.event] for dtype in families.DTYPES
        )
        rounding = relative(rounded, exact)
        agrees = name in expected and found.place == expected[name].expected[0]
        print(
            f"{name}: {found.place}{found.event.slot} call {found.event.call}, error {found.error:.2g}, rounding in bf16"
            f" {rounding:.2g}, above it: {found.error > 3 * rounding}, final {finals},"
            f" weights {', '.join(found.weights[:3]) or 'none'}, as the table says: {agrees}",
            flush=True,
        )


if __name__ == "__main__":
    main()
