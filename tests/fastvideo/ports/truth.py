"""Where a broken port first differs from the clean one, found with hooks on every module: what a
diff must find without the clean port to compare with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tests.fastvideo.ports.corpus import Program
from tests.fastvideo.ports.places import Place


@dataclass(frozen=True)
class Event:
    """One tensor going in or out of one call of a module, in the order in which that happened."""

    side: Literal["input", "output"]
    module: str
    call: int
    tensors: tuple[Tensor, ...]

    @property
    def place(self) -> Place:
        return Place(self.side, self.module)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor of a call's arguments or result, dataclasses and their like included."""
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


def trace(program: Program) -> tuple[Tensor, list[Event]]:
    """Run the program once: its output and every event on the way."""
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

    for name, module in program.model.named_modules():
        watch(name, module)
    try:
        return program.run(), events
    finally:
        for hook in hooks:
            hook.remove()


def _same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return len(a) == len(b) and all(
        x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True)
    )


def first_difference(clean: list[Event], broken: list[Event]) -> Event | None:
    """The first event of the broken port that is not, bit for bit, the clean one's; None where
    there is none.

    Where calls are missing or too many, events are paired by module, call and side.
    """
    before = {(event.side, event.module, event.call): event.tensors for event in clean}
    for event in broken:
        expected = before.get((event.side, event.module, event.call))
        if expected is None or not _same(expected, event.tensors):
            return event
    return None


def never_called(clean: list[Event], broken: list[Event]) -> list[str]:
    """Modules that the clean port calls and the broken one does not, in the order of the clean
    port.
    """
    called = {event.module for event in broken}
    return list(dict.fromkeys(event.module for event in clean if event.module not in called))


def first_lost(
    reference: list[Event], clean: list[Event], broken: list[Event], tolerance: float
) -> int | None:
    """The first event of the reference, by its index, whose value the clean port computes somewhere
    and the broken one nowhere. Values are the same when they agree, laid out flat, within
    `tolerance` (relative L2), whatever their names.
    """
    for index, event in enumerate(reference):
        if any(
            _among(tensor, clean, tolerance) and not _among(tensor, broken, tolerance)
            for tensor in event.tensors
        ):
            return index
    return None


def confirms(
    claimed: tuple[Place, ...],
    port: tuple[Place, ...],
    reference: list[Event],
    clean: list[Event],
    broken: list[Event],
    tolerance: float,
) -> bool:
    """Whether the values say that the port goes wrong at one of the `claimed` places of the
    reference.

    So they do where the first lost value belongs to one of them, or where, ahead of that, a value
    of such a place is one
    that the clean port has at its own claimed place and the broken port has no longer there."""  # fmt: skip
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


def _among(wanted: Tensor, events: list[Event], tolerance: float) -> bool:
    return any(_near(tensor, wanted, tolerance) for event in events for tensor in event.tensors)


def _where(
    wanted: Tensor, events: list[Event], tolerance: float
) -> set[tuple[Place, int, int, int]]:
    """The calls and slots that hold the value, whole or, where a fused projection holds three, by
    which third.
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
