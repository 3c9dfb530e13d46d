"""The order in which a port keeps a tensor's elements, where it legally is another than the
reference's.

A sketch goes by flat position and sees a transposed tensor as another one. A person who knows
better says so in the map, in torch's own words: `permute(0, 2, 1, 3)` is what turns the reference's
tensor into the port's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """What turns the reference's tensor into the port's: steps, one after the other; none for an
    order that is not known.

    >>> parse_layout("reshape(2, 16, 4, 8).permute(0, 2, 1, 3)").shape((2, 16, 32))
    (2, 4, 16, 8)
    """

    text: str
    steps: tuple[tuple[str, Shape], ...] = ()

    def __str__(self) -> str:
        return self.text

    @property
    def keeps_order(self) -> bool:
        """Whether the flat order of the elements stays what it was, so that sketches can still be
        compared.
        """
        return bool(self.steps) and all(name == "reshape" for name, _ in self.steps)

    def shape(self, reference: Shape) -> Shape:
        """The port's shape, of the reference's. Raises ValueError, of one line, where a step does
        not fit.
        """
        for name, numbers in self.steps:
            reference = _STEPS[name][1](reference, numbers)
        return reference

    def apply(self, array: Any) -> Any:
        """The port's array, of the reference's NumPy array. Raises ValueError where a step does not
        fit.
        """
        for name, numbers in self.steps:
            array = (
                array.reshape(numbers)
                if name == "reshape"
                else array.transpose(_axes(name, numbers, array.ndim))
            )
        return array


def parse_layout(text: Any) -> Layout:
    """Read a layout: `permute(…)`, `transpose(…, …)` and `reshape(…)`, joined by dots, or `any` for
    an order unknown.

    Raises ValueError, of one line, for anything else.
    """
    if text == "any":
        return Layout("any")
    known = f'write {", ".join(f"{name}(…)" for name in _STEPS)}, joined by dots, or "any"'
    if not isinstance(text, str) or not re.fullmatch(
        r"\s*\w+\([^()]*\)(\s*\.\s*\w+\([^()]*\))*\s*", text
    ):
        raise ValueError(f"{text!r} is no layout; {known}")
    steps = []
    for name, inside in re.findall(r"(\w+)\(([^()]*)\)", text):
        if name not in _STEPS:
            raise ValueError(f"{name} is not known in a layout; {known}")
        try:
            numbers = tuple(int(number) for number in inside.split(",") if number.strip())
        except ValueError:
            raise ValueError(f"{name}({inside}) needs whole numbers") from None
        if not _STEPS[name][0](numbers):
            raise ValueError(f"{name}({inside}) is none that a tensor could take")
        steps.append((name, numbers))
    return Layout(text, tuple(steps))


def _axes(name: str, numbers: Shape, dimensions: int) -> Shape:
    """The order of axes that a permute or transpose makes of a tensor."""
    if name == "transpose":
        first, second = (
            number % dimensions if -dimensions <= number < dimensions else -1 for number in numbers
        )
        axes = list(range(dimensions))
        if -1 in (first, second):
            raise ValueError(
                f"transpose({numbers[0]}, {numbers[1]}) needs more than {dimensions} dimensions"
            )
        axes[first], axes[second] = second, first
        return tuple(axes)
    if len(numbers) != dimensions:
        raise ValueError(f"permute of {len(numbers)} axes, of a tensor of {dimensions} dimensions")
    return tuple(number % dimensions for number in numbers)


def _permuted(name: str, shape: Shape, numbers: Shape) -> Shape:
    return tuple(shape[axis] for axis in _axes(name, numbers, len(shape)))


def _reshaped(shape: Shape, numbers: Shape) -> Shape:
    numel, known = math.prod(shape), math.prod(number for number in numbers if number != -1)
    filled = tuple(
        (numel // known if known else 0) if number == -1 else number for number in numbers
    )
    if math.prod(filled) != numel:
        raise ValueError(f"reshape{numbers} of {numel} elements")
    return filled


def _is_order(numbers: Shape) -> bool:
    return bool(numbers) and sorted(number % len(numbers) for number in numbers) == list(
        range(len(numbers))
    )


# name -> (whether numbers can be its own, the shape that it makes of a shape)
_STEPS: dict[str, tuple[Callable[[Shape], bool], Callable[[Shape, Shape], Shape]]] = {
    "permute": (_is_order, lambda shape, numbers: _permuted("permute", shape, numbers)),
    "transpose": (
        lambda numbers: len(numbers) == 2,
        lambda shape, numbers: _permuted("transpose", shape, numbers),
    ),
    "reshape": (
        lambda numbers: bool(numbers) and numbers.count(-1) <= 1 and min(numbers) >= -1,
        _reshaped,
    ),
}
