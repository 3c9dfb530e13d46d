"""The value and the gradient of a parameter, wherever its framework keeps them.

A sharded optimizer may empty a parameter between its uses, and move its gradient into a buffer.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from otel_torch import torch_private

# the `id` of a gradient, and its version; None without a gradient
GradientState = tuple[int, int | None] | None
# Asked in order for a parameter; the first that returns a tensor wins.
Source = Callable[[Tensor], Tensor | None]
value_sources: list[Source] = []
gradient_sources: list[Source] = []
# Each tells whether this process has only a part of a parameter's gradient.
part_tests: list[Callable[[Tensor], bool]] = []


def value_of(parameter: Tensor) -> Tensor | None:
    """Return the value of a parameter; None if this process does not have all of it."""
    for source in value_sources:
        if (value := source(parameter)) is not None:
            return value
    return None if _is_emptied(parameter) else parameter


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Return the gradient with which a parameter is updated, if there is one."""
    if parameter.grad is not None:
        return parameter.grad
    for source in gradient_sources:
        if (gradient := source(parameter)) is not None:
            return gradient
    return None


def gradient_state(parameter: Tensor | None) -> GradientState:
    """Return which gradient a parameter has itself, and how often that was written to.

    A gradient that another thread's backward pass is writing must not be read: torch would crash.
    """
    if parameter is None or (gradient := parameter.grad) is None:
        return None
    return id(gradient), torch_private.version_of(gradient)


def is_gradient_spread(parameter: Tensor) -> bool:
    """Return whether this process and others have a part of a parameter's gradient each."""
    return any(test(parameter) for test in part_tests)


def _is_emptied(parameter: Tensor) -> bool:
    """Return whether ZeRO-3 has taken the values of a parameter away."""
    return getattr(parameter, "ds_numel", 0) > 0 and parameter.numel() == 0
