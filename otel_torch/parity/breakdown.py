"""Where inside a wrong tensor the error is: in which tokens, in which channels, and whether it has
a simple form.

One number says how wrong a tensor is. That only one head is wrong, or the second half of the
channels, or that two halves are exchanged, says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otel_torch.parity.finding import Finding
from otel_torch.recording.tensor_files import TensorFolder, tensor_key

Array = NDArray[Any]

# error counts as being somewhere if this much of it (of its square) is there
_MOST = 0.98
# a place is worth naming if it is at most this part of its axis, scattered places at most that part
_RANGE_PART, _SCATTERED_PART = 0.5, 0.125
# a simple form explains the error if so much of it is left (relative L2)
_LEFT_OVER = 0.02
# relative error, compared with its neighbours', from which on an index is wrong like them
_AS_WRONG = 0.25
_WORST = 3


@dataclass(frozen=True, slots=True)
class Axis:
    """The error along one axis of a tensor.

    name: `channel`, `token`, `batch entry`, or, of a tensor with more than three axes, `axis-1
    index` and so on. relative: relative L2 error at each index, float64, shape (size,), infinite
    where the reference is zero and the port is not. share: which part of the squared error is at
    each index, likewise.
    """

    name: str
    relative: Array
    share: Array

    @property
    def size(self) -> int:
        """How many indices it has."""
        return len(self.share)

    def worst(self, count: int = _WORST) -> list[tuple[int, float]]:
        """(index, relative error) of the indices with most of the error, most first."""
        order = np.argsort(-self.share, kind="stable")[:count]
        return [(int(index), float(self.relative[index])) for index in order]

    def concentration(self) -> str | None:
        """Where on this axis nearly all of the error is, None where it is everywhere.

        >>> Axis("channel", np.zeros(8), np.array([0, 0, 0, 0, .25, .25, .25, .25])).concentration()
        'channels 4 to 7 of 8, the second half'
        """
        for find in (self._range, self._scattered, self._every_other):
            found = find()
            if found is not None:
                return found
        return None

    def _range(self) -> str | None:
        first, last = _shortest_range(self.share, _MOST)
        # at its ends a head may hold small numbers: what is as wrong belongs to it, however little
        # it adds
        as_wrong = self.relative >= _AS_WRONG * np.median(self.relative[first : last + 1])
        while first > 0 and as_wrong[first - 1] and self.share[first - 1] > 0:
            first -= 1
        while last < self.size - 1 and as_wrong[last + 1] and self.share[last + 1] > 0:
            last += 1
        length = last - first + 1
        if length > max(1, self.size * _RANGE_PART):
            return None
        if length == 1:
            return f"{self.name} {first} of {self.size}"
        where = f"{_plural(self.name)} {first} to {last} of {self.size}"
        if self.size % length or first % length:
            return where
        part, parts = first // length + 1, self.size // length
        return (
            f"{where}, the {('first', 'second')[part - 1]} half"
            if parts == 2
            else f"{where}, part {part} of {parts}"
        )

    def _every_other(self) -> str | None:
        if self.size < 4:
            return None
        for start, name in ((0, "even"), (1, "odd")):
            if float(self.share[start::2].sum()) >= _MOST:
                return f"the {name} {_plural(self.name)} of {self.size}"
        return None

    def _scattered(self) -> str | None:
        order = np.argsort(-self.share, kind="stable")
        count = int(np.searchsorted(np.cumsum(self.share[order]), _MOST)) + 1
        if count > self.size * _SCATTERED_PART:
            return None
        shown = ", ".join(str(index) for index in sorted(map(int, order[:count]))[:8])
        return (
            f"{count} of {self.size} {_plural(self.name)} ({shown}{', ...' if count > 8 else ''})"
        )


@dataclass(frozen=True, slots=True)
class Breakdown:
    """error: relative L2 of the whole tensor. form: a simple form of the difference in words, None
    where there is none. nonfinite: how many numbers are finite in one tensor only; first_nonfinite:
    the index of the first of them. axes: those longer than 1; empty where the error is none or not
    finite.
    """

    shape: tuple[int, ...]
    error: float
    form: str | None = None
    nonfinite: int = 0
    first_nonfinite: tuple[int, ...] | None = None
    axes: list[Axis] = field(default_factory=list)

    def sentence(self) -> str:
        """What a person should know first."""
        if self.nonfinite:
            of_all = f"{self.nonfinite} of {math.prod(self.shape)} numbers"
            return f"{of_all} are finite on one side only, the first at {list(self.first_nonfinite or ())}"
        if self.error == 0:
            return "the two tensors are equal"
        if self.form is not None:
            return f"the port's tensor is the reference's {self.form}"
        where = [found for axis in self.axes if (found := axis.concentration()) is not None]
        if not where:
            return "the error is spread over " + (
                " and ".join(f"all {_plural(axis.name)}" for axis in self.axes) or "its one number"
            )
        return f"{_MOST:.0%} of the error or more is in {'; and in '.join(where)}"

    def lines(self) -> list[str]:
        """A few lines for a report: the sentence, then the worst indices of each axis."""
        shown = [self.sentence()]
        for axis in self.axes:
            worst = ", ".join(
                f"{index} ({relative:.2g})"
                for index, relative in axis.worst()
                if axis.share[index] > 0
            )
            shown.append(f"worst {_plural(axis.name)}: {worst}")
        return shown


def break_down(reference: Array, port: Array) -> Breakdown:
    """Break the difference of two tensors down by axes; the port's is viewed in the reference's
    shape.

    Up to three axes are taken for batch, tokens and channels. Raises ValueError where the two hold
    different amounts.
    """
    if reference.size != port.size:
        raise ValueError(
            f"the reference's tensor has shape {reference.shape} and the port's {port.shape}"
        )
    kind = np.complex128 if np.iscomplexobj(reference) or np.iscomplexobj(port) else np.float64
    one, other = reference.astype(kind), port.reshape(reference.shape).astype(kind)
    shape = tuple(reference.shape)
    apart = np.isfinite(one) != np.isfinite(other)
    if apart.any():
        first = tuple(int(index) for index in np.argwhere(apart)[0])
        return Breakdown(shape, math.inf, nonfinite=int(apart.sum()), first_nonfinite=first)
    one, other = np.nan_to_num(one, posinf=0, neginf=0), np.nan_to_num(other, posinf=0, neginf=0)
    wrong, size = np.abs(other - one) ** 2, np.abs(one) ** 2
    total, whole = float(wrong.sum()), float(size.sum())
    error = math.sqrt(total / whole) if whole else math.inf if total else 0.0
    if total == 0:
        return Breakdown(shape, error)
    axes = [
        _axis(index, shape, wrong, size, total) for index in range(len(shape)) if shape[index] > 1
    ]
    return Breakdown(shape, error, _form(one, other, math.sqrt(total)), axes=axes)


def break_down_finding(
    finding: Finding, reference: str | Path, port: str | Path, rank: int | None = None
) -> Breakdown:
    """Break down the tensor that a finding is about. reference, port: the folders of whole tensors
    of the two runs.

    Raises ValueError, of one line, where the tensor is not there on both sides or cannot be broken
    down.
    """
    places = (
        ("reference", reference, finding.model, finding.module, finding.tensor, finding.loop, finding.step, finding.call),
        ("port", port, finding.port_model, finding.port_module, finding.port_tensor, finding.port_loop, finding.port_step,
         finding.port_call),
    )  # fmt: skip
    found = []
    for side, folder, model, module, tensor, loop, step, call in places:
        if model is None or module is None or tensor is None:
            raise ValueError(
                f"the finding names no tensor of the {side}, so there is nothing to break down"
            )
        key = tensor_key(model, module, tensor, call, finding.phase)
        stored = TensorFolder(folder, rank).find(loop, step, key)
        numbers = None if stored is None else stored.read()
        if numbers is None:
            raise ValueError(
                f"{folder}: holds no tensor {key} of loop {loop or 0}, step {step or 0}; record the {side} with "
                f"OTEL_TORCH_TENSORS and a selection that takes {module or model} in"
            )
        found.append(numbers)
    return break_down(*found)


def _axis(index: int, shape: tuple[int, ...], wrong: Array, size: Array, total: float) -> Axis:
    others = tuple(axis for axis in range(len(shape)) if axis != index)
    errors, sizes = wrong.sum(axis=others), size.sum(axis=others)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(errors == 0, 0.0, np.sqrt(errors / sizes))
    return Axis(_name(index, len(shape)), relative, errors / total)


def _name(index: int, count: int) -> str:
    """What an axis holds, as far as that is custom.

    >>> [_name(index, 3) for index in range(3)], _name(1, 4)
    (['batch entry', 'token', 'channel'], 'axis-1 index')
    """
    return (
        ("batch entry", "token", "channel")[index - count] if count <= 3 else f"axis-{index} index"
    )


def _plural(name: str) -> str:
    return {"y": f"{name[:-1]}ies", "x": f"{name[:-2]}ices"}.get(name[-1], f"{name}s")


def _shortest_range(share: Array, enough: float) -> tuple[int, int]:
    """The first and last index of the shortest range that holds `enough` of the whole."""
    sums = np.concatenate([[0.0], np.cumsum(share)])
    ends = np.searchsorted(
        sums, sums[:-1] + enough * sums[-1] - 1e-12
    )  # beyond the last one where not enough is left
    lengths = np.where(ends <= len(share), ends - np.arange(len(share)), len(share) + 1)
    first = int(np.argmin(lengths))
    return first, max(int(ends[first]) - 1, first)


def _form(one: Array, other: Array, error: float) -> str | None:
    """A simple form of the difference: what one would have to do to the reference's tensor to get
    the port's.
    """
    for name, make in _forms(one, other):
        if float(np.linalg.norm(other - make())) <= _LEFT_OVER * error:
            return name
    return None


def _forms(one: Array, other: Array) -> Iterator[tuple[str, Callable[[], Array]]]:
    square = float(np.vdot(one, one).real)
    factor = float(np.vdot(one, other).real) / square if square else 0.0
    yield (
        ("with the other sign" if abs(factor + 1) < 1e-3 else f"times {factor:.4g}"),
        lambda: one * factor,
    )
    shift = float((other - one).real.mean())
    yield f"plus {shift:.4g}", lambda: one + shift
    if not other.any():
        return
    for axis, size in enumerate(one.shape):
        if size == 1:
            continue
        name = _plural(_name(axis, one.ndim))
        if size % 2 == 0:
            yield (
                f"with the two halves of its {name} exchanged",
                lambda axis=axis, size=size: np.roll(one, size // 2, axis),  # type: ignore[misc]
            )
        yield f"with its {name} in reverse", lambda axis=axis: np.flip(one, axis)  # type: ignore[misc]
        for by in (1, -1):
            yield f"with its {name} moved by {by}", lambda axis=axis, by=by: np.roll(one, by, axis)  # type: ignore[misc]
    for first in range(one.ndim):
        for second in range(first + 1, one.ndim):
            if one.shape[first] > 1 and one.shape[second] > 1:
                names = _plural(_name(first, one.ndim)), _plural(_name(second, one.ndim))
                yield (
                    f"with {names[0]} and {names[1]} laid out in exchanged order",
                    lambda first=first, second=second: np.swapaxes(one, first, second).reshape(
                        one.shape
                    ),  # type: ignore[misc]
                )
    if not np.iscomplexobj(one):
        ordered = np.sort(one, axis=None)
        if float(np.linalg.norm(np.sort(other, axis=None) - ordered)) <= _LEFT_OVER * float(
            np.linalg.norm(other - one)
        ):
            yield "with its numbers in another order", lambda: other
