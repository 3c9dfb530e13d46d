"""Where a faulty port first differs from the clean one, found with hooks on every module: what a
comparison must find without the clean port. Without this, a score would only compare with a guess.

    python -m tests.corpora.truth [--only WORD] [--seed N]

prints for each small case the first event in time order that is not bit-identical, and the figures of
the table of cases.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tests.corpora.case import Place

DTYPES = ("fp32", "bf16")


@dataclass(frozen=True)
class Event:
    """The tensors that go in or out of one call of a module, in the order in which that happened."""

    side: Literal["input", "output"]
    module: str
    call: int
    tensors: tuple[Tensor, ...]

    @property
    def place(self) -> Place:
        return Place(self.side, self.module)

    @property
    def key(self) -> tuple[str, str, int]:
        return self.side, self.module, self.call


Events = Sequence[Event]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor of a call's arguments or result, those in dataclasses and their like included."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)
    elif hasattr(value, "__dict__") and not isinstance(value, nn.Module | type):
        yield from tensors_in(vars(value))


def trace(model: nn.Module, run: Callable[[], Tensor]) -> tuple[Tensor, list[Event]]:
    """Run a program once; return its output and every event on the way."""
    events: list[Event] = []
    calls: dict[str, int] = {}
    hooks = []

    def copies(*values: Any) -> tuple[Tensor, ...]:
        return tuple(tensor.detach().clone() for tensor in tensors_in(values))

    def watch(name: str, module: nn.Module) -> None:
        def entering(_: nn.Module, args: Any, kwargs: Any) -> None:
            calls[name] = calls.get(name, -1) + 1
            events.append(Event("input", name, calls[name], copies(args, kwargs)))

        def leaving(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            events.append(Event("output", name, calls[name], copies(output)))

        hooks.append(module.register_forward_pre_hook(entering, with_kwargs=True))
        hooks.append(module.register_forward_hook(leaving, with_kwargs=True))

    for name, module in model.named_modules():
        watch(name, module)
    try:
        return run(), events
    finally:
        for hook in hooks:
            hook.remove()


# ---- where a port first differs


def first_difference(clean: Events, broken: Events) -> Event | None:
    """Return the first event of the clean port that the broken one lacks or has with other bits, if
    any. Events are paired by module, call and side.
    """
    after = {event.key: event.tensors for event in broken}
    return next((e for e in clean if not _same(e.tensors, after.get(e.key))), None)


def never_called(clean: Events, broken: Events) -> list[str]:
    """Return the modules that only the clean port calls, in its order."""
    called = {event.module for event in broken}
    return list(dict.fromkeys(event.module for event in clean if event.module not in called))


def relative_error(value: Tensor | None, truth: Tensor) -> float:
    """Return |value - truth| / |truth|, in double precision; inf if the value is missing or has
    another shape.
    """
    if value is None or value.shape != truth.shape:
        return math.inf
    return float((value.double() - truth.double()).norm() / truth.double().norm())


def error_at(event: Event, broken: Events) -> float:
    """Return the relative error of the first tensor of an event that differs in the broken port."""
    after = {other.key: other.tensors for other in broken}.get(event.key, ())
    pairs = zip(event.tensors, (*after, *[None] * len(event.tensors)), strict=False)
    return next(relative_error(b, a) for a, b in pairs if b is None or not _same((a,), (b,)))


def _same(a: tuple[Tensor, ...], b: tuple[Tensor, ...] | None) -> bool:
    return (
        b is not None
        and len(a) == len(b)
        and all(
            x.dtype == y.dtype
            and x.shape == y.shape
            and bool(((x == y) | (x != x) & (y != y)).all())
            for x, y in zip(a, b, strict=True)
        )
    )


# ---- where the reference would show it


def confirms(
    claimed: tuple[Place, ...],
    port: tuple[Place, ...],
    reference: Events,
    clean: Events,
    broken: Events,
    tolerance: float,
) -> bool:
    """Return whether the values say that the port goes wrong at one of the `claimed` places of the
    reference.

    So they do where the first lost value belongs to one of them, or where, before that, a value of
    such a place is one that the clean port has at its own claimed place and the broken port has no
    longer there.
    """
    lost = first_lost(reference, clean, broken, tolerance)
    ahead = reference if lost is None else reference[: lost + 1]
    if lost is not None and reference[lost].place in claimed:
        return True
    then, now = ([event for event in events if event.place in port] for events in (clean, broken))
    return any(
        _where(tensor, then, tolerance) - _where(tensor, now, tolerance)
        for event in ahead
        if event.place in claimed
        for tensor in event.tensors
    )


def first_lost(reference: Events, clean: Events, broken: Events, tolerance: float) -> int | None:
    """Return the index of the first event of the reference whose value the clean port computes
    somewhere and the broken one nowhere. Values are the same when they agree, laid out flat, within
    `tolerance` (relative L2), whatever their names.
    """
    for index, event in enumerate(reference):
        if any(
            _among(tensor, clean, tolerance) and not _among(tensor, broken, tolerance)
            for tensor in event.tensors
        ):
            return index
    return None


def _among(wanted: Tensor, events: Events, tolerance: float) -> bool:
    return any(_near(tensor, wanted, tolerance) for event in events for tensor in event.tensors)


def _where(wanted: Tensor, events: Events, tolerance: float) -> set[tuple[Place, int, int, int]]:
    """Return the calls and slots that hold the value, whole or, where a fused projection holds three,
    by which third.
    """
    return {
        (event.place, event.call, slot, part)
        for event in events
        for slot, tensor in enumerate(event.tensors)
        for part, value in enumerate((tensor, *_thirds(tensor)))
        if _near(value, wanted, tolerance)
    }


def _thirds(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.chunk(3, -1) if tensor.dim() and tensor.shape[-1] % 3 == 0 else ()


def _near(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if a.numel() != b.numel() or a.is_floating_point() != b.is_floating_point():
        return False
    a, b = a.flatten().double(), b.flatten().double()
    return bool((a - b).norm() <= tolerance * b.norm())


# ---- the small cases


@dataclass(frozen=True)
class Difference:
    """Where a small case's fault begins, and the parameters and buffers that it changes."""

    event: Event
    error: float
    weights: tuple[str, ...]

    @property
    def place(self) -> Place:
        return self.event.place


def port_of(
    name: str, dtype: str, seed: int, faulty: bool
) -> tuple[Tensor, list[Event], dict[str, Tensor]]:
    """Run the port of a small case; return its output, its events, its parameters and buffers."""
    from tests.corpora.small import families
    from tests.corpora.small.bugs import BUGS, Patches

    family, patches = name.partition("_")[0], Patches()
    model = families.load(family, "port", dtype, seed)
    try:
        if faulty:
            BUGS[name](model, patches)
        weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return *trace(model, lambda: families.run(family, model, dtype, seed)), weights
    finally:
        patches.undo()


def measure(name: str, seed: int = 0) -> Difference:
    """Return the first difference that the fault of a small case makes in fp32.

    Raises: LookupError, if it makes none.
    """
    _, clean, weights = port_of(name, "fp32", seed, faulty=False)
    _, broken, others = port_of(name, "fp32", seed, faulty=True)
    first = first_difference(clean, broken)
    if first is None:
        raise LookupError(f"{name} changes nothing")
    changed = tuple(n for n, tensor in weights.items() if not torch.equal(tensor, others[n]))
    return Difference(first, error_at(first, broken), changed)


def main() -> None:
    from tests.corpora.small import families
    from tests.corpora.small.cases import CASES

    arguments = argparse.ArgumentParser(description="Measure where the planted faults begin.")
    arguments.add_argument("--only", default="", help="only cases with this in their name")
    arguments.add_argument("--seed", type=int, default=0, help="the table has seed 0")
    options = arguments.parse_args()
    seed = options.seed
    for case in (case for case in CASES if options.only in case.name):
        finals = " ".join(
            f"{dtype} {relative_error(port_of(case.name, dtype, seed, not case.clean)[0], reference):.2g}"
            for dtype in DTYPES
            for model in [families.load(case.family, "reference", dtype, seed)]
            for reference in [families.run(case.family, model, dtype, seed)]
        )
        if case.right is None:
            print(f"{case.name}: clean, final {finals}", flush=True)
            continue
        first = measure(case.name, seed)
        rounded = port_of(case.name, "bf16", seed, faulty=False)[1]
        rounding = error_at(first.event, rounded)
        print(
            f"{case.name}: {first.place} call {first.event.call}, error {first.error:.2g}, rounding in bf16"
            f" {rounding:.2g}, above it: {first.error > 3 * rounding}, final {finals},"
            f" weights {', '.join(first.weights[:3]) or 'none'},"
            f" as the table says: {first.place == case.right.places[0]}",
            flush=True,
        )


if __name__ == "__main__":
    main()
