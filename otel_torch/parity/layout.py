"""Memory layouts that a map can give the tensors of a port, such as `permute(0, 2, 1, 3)`.

A sketch depends on the flat position of each element, so a transposed tensor looks like a different
one. If a port stores a tensor in another order on purpose, its map says so: the layout turns the
reference's tensor into the port's.

>>> layout = parse_layout("reshape(2, 16, 4, 8).permute(0, 2, 1, 3)")  # split heads, then move them
>>> layout.steps
(('reshape', (2, 16, 4, 8)), ('permute', (0, 2, 1, 3)))
>>> layout.shape((2, 16, 32)), layout.keeps_order
((2, 4, 16, 8), False)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Shape = tuple[int, ...]

_STEP = r"\w+\([^()]*\)"
_LAYOUT = re.compile(rf"\s*{_STEP}(\s*\.\s*{_STEP})*\s*")


@dataclass(frozen=True, slots=True)
class Layout:
    """Steps that turn the reference's tensor into the port's; no steps if the order is unknown."""

    text: str
    steps: tuple[tuple[str, Shape], ...] = ()

    def __str__(self) -> str:
        return self.text

    @property
    def keeps_order(self) -> bool:
        """Whether the flat order of the elements is unchanged, so that sketches still apply."""
        return bool(self.steps) and all(name == "reshape" for name, _ in self.steps)

    def shape(self, reference: Shape) -> Shape:
        """Return the port's shape for a shape of the reference.

        Raises:
            ValueError: If a step does not fit the shape; the message is one line.
        """
        for name, arguments in self.steps:
            reference = _STEPS[name].shape(reference, arguments)
        return reference

    def apply(self, array: Any) -> Any:
        """Return the port's array for a NumPy array of the reference.

        Raises:
            ValueError: If a step does not fit the array.
        """
        for name, arguments in self.steps:
            if name == "reshape":
                array = array.reshape(arguments)
            else:
                array = array.transpose(_axis_order(name, arguments, array.ndim))
        return array


def parse_layout(text: Any) -> Layout:
    """Read a layout: `permute(…)`, `transpose(…, …)` and `reshape(…)` joined by dots, or `any` for
    an unknown order.

    Raises:
        ValueError: For anything else; the message is one line.
    """
    if text == "any":
        return Layout("any")
    usage = f'write {", ".join(f"{name}(…)" for name in _STEPS)}, joined by dots, or "any"'
    if not isinstance(text, str) or not _LAYOUT.fullmatch(text):
        raise ValueError(f"{text!r} is not a layout; {usage}")
    steps = []
    for name, inside in re.findall(r"(\w+)\(([^()]*)\)", text):
        if name not in _STEPS:
            raise ValueError(f"{name} is not a layout step; {usage}")
        try:
            arguments = tuple(int(part) for part in inside.split(",") if part.strip())
        except ValueError:
            raise ValueError(f"{name}({inside}) needs integers") from None
        if not _STEPS[name].accepts(arguments):
            raise ValueError(f"{name}({inside}) fits no tensor")
        steps.append((name, arguments))
    return Layout(text, tuple(steps))


def _axis_order(name: str, arguments: Shape, dimensions: int) -> Shape:
    """Return the axis order of a permute or transpose.

    >>> _axis_order("transpose", (1, -1), 4)
    (0, 3, 2, 1)
    """
    if name == "permute":
        if len(arguments) != dimensions:
            raise ValueError(
                f"permute of {len(arguments)} axes applied to a tensor of {dimensions} dimensions"
            )
        return tuple(axis % dimensions for axis in arguments)
    if not all(-dimensions <= axis < dimensions for axis in arguments):
        raise ValueError(
            f"transpose({arguments[0]}, {arguments[1]}) needs more than {dimensions} dimensions"
        )
    first, second = (axis % dimensions for axis in arguments)
    axes = list(range(dimensions))
    axes[first], axes[second] = second, first
    return tuple(axes)


def _is_axis_order(arguments: Shape) -> bool:
    axes = sorted(axis % len(arguments) for axis in arguments) if arguments else []
    return bool(arguments) and axes == list(range(len(arguments)))


def _is_axis_pair(arguments: Shape) -> bool:
    return len(arguments) == 2


def _is_shape(arguments: Shape) -> bool:
    return bool(arguments) and arguments.count(-1) <= 1 and min(arguments) >= -1


def _permuted(shape: Shape, arguments: Shape) -> Shape:
    return tuple(shape[axis] for axis in _axis_order("permute", arguments, len(shape)))


def _transposed(shape: Shape, arguments: Shape) -> Shape:
    return tuple(shape[axis] for axis in _axis_order("transpose", arguments, len(shape)))


def _reshaped(shape: Shape, arguments: Shape) -> Shape:
    """Return the arguments with -1 filled in."""
    numel = math.prod(shape)
    given = math.prod(size for size in arguments if size != -1)
    inferred = numel // given if given else 0
    filled = tuple(inferred if size == -1 else size for size in arguments)
    if math.prod(filled) != numel:
        raise ValueError(f"reshape{arguments} applied to {numel} elements")
    return filled


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of a layout: which arguments any tensor could take, and the shape it returns."""

    accepts: Callable[[Shape], bool]
    shape: Callable[[Shape, Shape], Shape]


_STEPS = {
    "permute": _Step(_is_axis_order, _permuted),
    "transpose": _Step(_is_axis_pair, _transposed),
    "reshape": _Step(_is_shape, _reshaped),
}
