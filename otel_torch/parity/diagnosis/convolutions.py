"""Causes inside a convolution: it pads at other ends, or with other numbers.

The convolution is computed again from the tensor before it, with each padding that yields as many
positions. If one yields the reference's tensor and another one the port's, these are the cause.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from otel_torch.parity.diagnosis.clues import Clues, parameters_of
from otel_torch.parity.finding import Cause

Array = NDArray[Any]

# a padding that fits is this close (relative L2)
_EXACT = 1e-5
_LARGEST_STRIDE = 4
_MOST_PRODUCTS = 2**26
_MODES = {"constant": "zeros", "reflect": "a reflection", "edge": "its edge", "wrap": "its far end"}


class _Padding(NamedTuple):
    """What is added to each axis, before and after it."""

    stride: int
    widths: tuple[tuple[int, int], ...]
    mode: str

    @property
    def text(self) -> str:
        before, after = zip(*self.widths, strict=True)
        ends = [
            str(sizes[0]) if len(set(sizes)) == 1 else str(list(sizes)) for sizes in (before, after)
        ]
        return f"{ends[0]} before and {ends[1]} after each axis, filled with {_MODES[self.mode]}"


def padding(clues: Clues) -> Cause | None:
    """The two programs pad what they convolve in other ways."""
    role, tensors = clues.role, clues.tensors
    if role is None or clues.elements is None or tensors is None or not role.call.inputs:
        return None
    weight = parameters_of(clues.parameters.reference, role.call.module_path).get("weight")
    given = tensors.reference.of_role(role.call.inputs[0])
    kernel = None if weight is None else tensors.reference.of_parameter(weight)
    if given is None or kernel is None or not 3 <= kernel.ndim == given.ndim:
        return None
    bias = parameters_of(clues.parameters.reference, role.call.module_path).get("bias")
    added = None if bias is None else tensors.reference.of_parameter(bias)
    given, kernel = given[:1].astype(np.float64), kernel.astype(np.float64)
    reference, port = (
        _padding_of(given, kernel, added, elements[:1]) for elements in clues.elements
    )
    if reference is None or port is None or reference == port:
        return None
    text = f"the port's kernel reaches {port.text}; the reference's {reference.text}"
    return Cause("padding", True, text)


def _padding_of(given: Array, kernel: Array, bias: Array | None, made: Array) -> _Padding | None:
    """Return the padding with which a convolution yields a tensor, None if there is none."""
    if made.ndim != given.ndim or made.shape[1] != len(kernel):
        return None
    if made[0].size * kernel[0].size > _MOST_PRODUCTS or given.shape[1] % kernel.shape[1]:
        return None
    if bias is not None:
        made = made - bias.astype(np.float64).reshape(-1, *[1] * (made.ndim - 2))
    size = float(np.linalg.norm(made))
    for variant in _paddings(given.shape[2:], kernel.shape[2:], made.shape[2:]):
        error = np.linalg.norm(_convolve(given, kernel, variant, made.shape[2:]) - made)
        if error <= _EXACT * size:
            return variant
    return None


def _paddings(
    given: tuple[int, ...], kernel: tuple[int, ...], made: tuple[int, ...]
) -> Iterator[_Padding]:
    """Yield the paddings of which a kernel makes so many positions, the same before each axis."""
    for stride in range(1, _LARGEST_STRIDE + 1):
        for before in range(max(kernel)):
            widths = tuple(
                (min(before, width - 1), (count - 1) * stride + width - size - before)
                for size, width, count in zip(given, kernel, made, strict=True)
            )
            # positions that a kernel reaches without them need none
            if any(after >= width for (_, after), width in zip(widths, kernel, strict=True)):
                continue
            if any(after <= -stride for _, after in widths):
                continue
            widths = tuple((first, max(after, 0)) for first, after in widths)
            for mode in _MODES:
                yield _Padding(stride, widths, mode)
                if not any(map(any, widths)):
                    break


def _convolve(given: Array, kernel: Array, variant: _Padding, made: tuple[int, ...]) -> Array:
    padded = np.pad(given, ((0, 0), (0, 0), *variant.widths), mode=variant.mode)  # type: ignore[call-overload]
    axes = tuple(range(2, given.ndim))
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel.shape[2:], axes)
    steps = tuple(slice(0, (count - 1) * variant.stride + 1, variant.stride) for count in made)
    windows = windows[(slice(None), slice(None), *steps)]
    groups = given.shape[1] // kernel.shape[1]
    summed_axes = (1, *range(-len(axes), 0)), tuple(range(1, kernel.ndim))
    parts = zip(np.split(windows, groups, axis=1), np.split(kernel, groups), strict=True)
    summed = [np.tensordot(part, weight, summed_axes) for part, weight in parts]
    return np.moveaxis(np.concatenate(summed, axis=-1), -1, 1)
