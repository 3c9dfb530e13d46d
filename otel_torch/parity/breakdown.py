"""Finds where inside a wrong tensor the error is, and whether the difference has a simple form.

One number says how wrong a tensor is. That only one head is wrong, only the second half of the
channels, or that two halves are swapped, says why:

>>> reference = np.random.default_rng(0).standard_normal((2, 6, 16))
>>> port = reference.copy()
>>> port[:, :, 4:8] = 0  # one of four heads
>>> print(break_down(reference, port).sentence())
98% of the error or more is in channels 4 to 7 of 16, part 2 of 4
>>> print(break_down(reference, -reference).sentence())
the port's tensor is the reference's with the other sign
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# The share of the squared error that must be at some indices for the error to be "in" them.
_MAIN_SHARE = 0.98
# Indices are worth naming if they are at most this part of their axis: a range, scattered ones.
_MAX_RANGE, _MAX_SCATTERED = 0.5, 0.125
# A simple form explains the difference if at most this much of it remains (relative L2).
_MAX_UNEXPLAINED = 0.02
# Sorted, the same numbers agree to this (relative L2).
_SAME_NUMBERS = 1e-5
# An index next to a range belongs to it from this part of the range's median error on.
_SIMILAR_ERROR = 0.25
_WORST_INDICES = 3
_LISTED_INDICES = 8
_AXIS_NAMES = ("batch entry", "token", "channel")
_WEIGHT_AXES = ("row", "column")


@dataclass(frozen=True, slots=True)
class Axis:
    """The error along one axis of a tensor.

    Attributes:
        name: `channel`, `token` or `batch entry`; with more than three axes `axis-1 index`, ….
        relative: Relative L2 error at each index, float64 of shape (size,); infinite where the
            reference is zero and the port is not.
        share: Part of the squared error at each index, float64 of shape (size,).
    """

    name: str
    relative: Array
    share: Array

    @property
    def size(self) -> int:
        """Number of indices."""
        return len(self.share)

    def worst(self, count: int = _WORST_INDICES) -> list[tuple[int, float]]:
        """Return (index, relative error) of the indices with the largest share, largest first."""
        order = np.argsort(-self.share, kind="stable")[:count]
        return [(int(index), float(self.relative[index])) for index in order]

    def concentration(self) -> str | None:
        """Return the few indices that hold nearly all of the error, or None if it is spread.

        >>> share = np.array([0, 0, 0, 0, .25, .25, .25, .25])
        >>> Axis("channel", np.zeros(8), share).concentration()
        'channels 4 to 7 of 8, the second half'
        """
        return self._range() or self._scattered() or self._every_other()

    def _range(self) -> str | None:
        first, last = self._widen(*_shortest_range(self.share, _MAIN_SHARE))
        length = last - first + 1
        if length > max(1, self.size * _MAX_RANGE):
            return None
        if length == 1:
            return f"{self.name} {first} of {self.size}"
        indices = f"{plural(self.name)} {first} to {last} of {self.size}"
        if self.size % length or first % length:
            return indices
        part, parts = first // length + 1, self.size // length
        if parts == 2:
            return f"{indices}, the {'first' if part == 1 else 'second'} half"
        return f"{indices}, part {part} of {parts}"

    def _widen(self, first: int, last: int) -> tuple[int, int]:
        """Extend a range to neighbors that are as wrong.

        The first and last channels of a head can hold small numbers: they add little to the error
        and still belong to the head.
        """
        median = np.median(self.relative[first : last + 1])
        belongs = (self.relative >= _SIMILAR_ERROR * median) & (self.share > 0)
        while first > 0 and belongs[first - 1]:
            first -= 1
        while last < self.size - 1 and belongs[last + 1]:
            last += 1
        return first, last

    def _scattered(self) -> str | None:
        order = np.argsort(-self.share, kind="stable")
        count = int(np.searchsorted(np.cumsum(self.share[order]), _MAIN_SHARE)) + 1
        if count > self.size * _MAX_SCATTERED:
            return None
        listed = sorted(map(int, order[:count]))[:_LISTED_INDICES]
        more = ", ..." if count > _LISTED_INDICES else ""
        return f"{count} of {self.size} {plural(self.name)} ({', '.join(map(str, listed))}{more})"

    def _every_other(self) -> str | None:
        if self.size < 4:
            return None
        for start, name in ((0, "even"), (1, "odd")):
            if float(self.share[start::2].sum()) >= _MAIN_SHARE:
                return f"the {name} {plural(self.name)} of {self.size}"
        return None


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The difference of two tensors.

    Attributes:
        error: Relative L2 of the whole tensor.
        form: The simple form of the difference, in words, or None.
        nonfinite: How many elements are NaN or Inf in only one of the tensors.
        first_nonfinite: The index of the first of those, if any.
        axes: The axes longer than 1; empty if there is no error or it is infinite.
    """

    shape: tuple[int, ...]
    error: float
    form: str | None = None
    nonfinite: int = 0
    first_nonfinite: tuple[int, ...] | None = None
    axes: list[Axis] = field(default_factory=list)

    def sentence(self) -> str:
        """Return the most important fact about the difference."""
        if self.nonfinite:
            return (
                f"{self.nonfinite} of {math.prod(self.shape)} elements are NaN or Inf on one side "
                f"only, the first at {list(self.first_nonfinite or ())}"
            )
        if self.error == 0:
            return "the two tensors are equal"
        if self.form is not None:
            return f"the port's tensor is the reference's {self.form}"
        concentrations = [axis.concentration() for axis in self.axes]
        places = [place for place in concentrations if place is not None]
        if places:
            return f"{_MAIN_SHARE:.0%} of the error or more is in {'; and in '.join(places)}"
        spread = " and ".join(f"all {plural(axis.name)}" for axis in self.axes)
        return f"the error is spread over {spread or 'its one element'}"

    def lines(self) -> list[str]:
        """Return the lines of a report: the sentence, then the worst indices of each axis."""
        lines = [self.sentence()]
        for axis in self.axes:
            worst = [
                f"{index} ({relative:.2g})"
                for index, relative in axis.worst()
                if axis.share[index] > 0
            ]
            lines.append(f"worst {plural(axis.name)}: {', '.join(worst)}")
        return lines


def break_down(reference: Array, port: Array, names: Sequence[str] = ()) -> Breakdown:
    """Return where two tensors differ; the port's is viewed in the reference's shape.

    Args:
        names: Of the axes; by default those of an activation.

    Raises:
        ValueError: If the tensors have different numbers of elements.
    """
    if reference.size != port.size:
        raise ValueError(
            f"the reference's tensor has shape {reference.shape} and the port's {port.shape}"
        )
    is_complex = np.iscomplexobj(reference) or np.iscomplexobj(port)
    dtype = np.complex128 if is_complex else np.float64
    shape = tuple(reference.shape)
    names = names or axis_names(len(shape))
    reference, port = reference.astype(dtype), port.reshape(shape).astype(dtype)
    mismatches = np.isfinite(reference) != np.isfinite(port)
    if mismatches.any():
        first = tuple(int(index) for index in np.argwhere(mismatches)[0])
        count = int(mismatches.sum())
        return Breakdown(shape, math.inf, nonfinite=count, first_nonfinite=first)

    reference = np.nan_to_num(reference, posinf=0, neginf=0)
    port = np.nan_to_num(port, posinf=0, neginf=0)
    squared_error, squared_size = np.abs(port - reference) ** 2, np.abs(reference) ** 2
    total_error, total_size = float(squared_error.sum()), float(squared_size.sum())
    if total_error == 0:
        return Breakdown(shape, 0.0)
    error = math.sqrt(total_error / total_size) if total_size else math.inf
    axes = [
        _error_along(axis, name, squared_error, squared_size)
        for axis, (name, size) in enumerate(zip(names, shape, strict=True))
        if size > 1
    ]
    return Breakdown(shape, error, _simple_form(reference, port, names), axes=axes)


def _error_along(axis: int, name: str, squared_error: Array, squared_size: Array) -> Axis:
    remaining_axes = tuple(index for index in range(squared_error.ndim) if index != axis)
    errors, sizes = squared_error.sum(axis=remaining_axes), squared_size.sum(axis=remaining_axes)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(errors == 0, 0.0, np.sqrt(errors / sizes))
    return Axis(name, relative, errors / float(squared_error.sum()))


def axis_names(dimensions: int, is_weight: bool = False) -> list[str]:
    """Return what the axes of an activation or a weight conventionally hold, in the singular.

    >>> axis_names(3), axis_names(2, is_weight=True)
    (['batch entry', 'token', 'channel'], ['row', 'column'])
    >>> axis_names(4)[1], axis_names(1)
    ('axis-1 index', ['element'])
    """
    if dimensions < 2:
        return ["element"] * dimensions
    numbered = [f"axis-{axis} index" for axis in range(dimensions)]
    if is_weight:
        return [*_WEIGHT_AXES, *numbered[len(_WEIGHT_AXES) :]][:dimensions]
    return numbered if dimensions > len(_AXIS_NAMES) else list(_AXIS_NAMES[-dimensions:])


def plural(name: str) -> str:
    """Return the plural of the name of an axis."""
    if name.endswith("y"):
        return f"{name[:-1]}ies"
    if name.endswith("x"):
        return f"{name[:-2]}ices"
    return f"{name}s"


def _shortest_range(share: Array, enough: float) -> tuple[int, int]:
    """Return the first and last index of the shortest range that holds `enough` of the total.

    >>> _shortest_range(np.array([0.01, 0.5, 0.49, 0.0]), 0.98)
    (1, 2)
    """
    sums = np.concatenate([[0.0], np.cumsum(share)])
    # Past the end for a start with less than `enough` after it.
    ends = np.searchsorted(sums, sums[:-1] + enough * sums[-1] - 1e-12)
    lengths = np.where(ends <= len(share), ends - np.arange(len(share)), len(share) + 1)
    first = int(np.argmin(lengths))
    return first, max(int(ends[first]) - 1, first)


def _simple_form(reference: Array, port: Array, names: Sequence[str]) -> str | None:
    """Return the first simple change of the reference's tensor that yields the port's."""
    limit = _MAX_UNEXPLAINED * float(np.linalg.norm(port - reference))
    for description, make in _candidate_forms(reference, port, names):
        if float(np.linalg.norm(port - make())) <= limit:
            return description
    if _is_permutation(reference, port):
        return "with its elements in another order"
    return None


def _candidate_forms(
    reference: Array, port: Array, axes: Sequence[str]
) -> Iterator[tuple[str, Callable[[], Array]]]:
    """Yield (description, function that applies the change to the reference's tensor)."""
    is_one_number = len(np.unique(reference)) == 1
    square = float(np.vdot(reference, reference).real)
    factor = float(np.vdot(reference, port).real) / square if square else 0.0
    is_negated = abs(factor + 1) < 1e-3
    if is_one_number and not is_negated:
        return  # any number is another one times a factor, or plus a number
    yield (
        "with the other sign" if is_negated else f"times {factor:.4g}",
        partial(np.multiply, reference, factor),
    )
    shift = float((port - reference).real.mean())
    yield f"plus {shift:.4g}", partial(np.add, reference, shift)
    if not port.any():
        return
    long_axes = [axis for axis, size in enumerate(reference.shape) if size > 1]
    names = [plural(name) for name in axes]
    for axis in long_axes:
        half, remainder = divmod(reference.shape[axis], 2)
        if remainder == 0:
            yield (
                f"with the two halves of its {names[axis]} swapped",
                partial(np.roll, reference, half, axis),
            )
        yield f"with its {names[axis]} reversed", partial(np.flip, reference, axis)
        for offset in (1, -1):
            yield (
                f"with its {names[axis]} shifted by {offset}",
                partial(np.roll, reference, offset, axis),
            )
    for first in long_axes:
        for second in long_axes:
            if first < second:
                yield (
                    f"with {names[first]} and {names[second]} laid out in swapped order",
                    partial(_swap_memory_order, reference, first, second),
                )


def _swap_memory_order(array: Array, first: int, second: int) -> Array:
    return np.swapaxes(array, first, second).reshape(array.shape)


def _is_permutation(reference: Array, port: Array) -> bool:
    if np.iscomplexobj(reference) or not port.any():
        return False
    difference = np.sort(port, axis=None) - np.sort(reference, axis=None)
    # two samples of one distribution are close to each other when sorted, but not as close
    return float(np.linalg.norm(difference)) <= _SAME_NUMBERS * float(np.linalg.norm(reference))
