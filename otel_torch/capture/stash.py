"""The events that `track` sees and what it keeps of them, under tensor_tracker's names."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from otel_torch.capture.describe_value import describe_briefly
from otel_torch.capture.tensor_structure import rmap_tensor


@dataclass
class Event:
    """A value or a gradient at a tracked module.

    Args:
        name: The module's canonical name.
        type: The module's class.
        grad: Whether this is a gradient.
        value: The module's output; with `grad`, the gradients of its outputs as a tuple, None for
            an output that the backward pass did not use.
        args: The positional arguments of the call; empty with `grad`.
        kwargs: The keyword arguments of the call; empty with `grad`.
        recompute: Whether this is the second forward of a checkpoint.
    """

    name: str
    type: type[nn.Module]
    grad: bool
    value: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    recompute: bool = False

    def __repr__(self) -> str:
        return f"Event({', '.join(_cells(self))})"


@dataclass
class Stash:
    """The part of an event that is kept, under the event's field names."""

    name: str
    type: type[nn.Module]
    grad: bool
    value: Any
    recompute: bool = False

    def cells(self) -> tuple[str, str, str, str]:
        """Return module, class, what it is, and dtypes and shapes, as words."""
        return _cells(self)

    def __repr__(self) -> str:
        return f"Stash({', '.join(self.cells())})"

    @property
    def first_value(self) -> Any:
        """The first leaf of `value`: while it is a non-empty tuple or list, take its first
        element.
        """
        value = self.value
        while isinstance(value, (tuple, list)) and value:
            value = value[0]
        return value


def _cells(item: Event | Stash) -> tuple[str, str, str, str]:
    what = "gradient" if item.grad else "recomputed output" if item.recompute else "output"
    return item.name or "(root)", item.type.__name__, what, describe_briefly(item.value)


StashFn = Callable[[Event], Stash]
StashValueFn = Callable[[Tensor], Any]
NamePattern = None | re.Pattern[str] | str


def default_stash_value(tensor: Tensor) -> Tensor:
    """Return a detached copy of the tensor on the CPU."""
    return tensor.detach().cpu().clone()


def default_stash(event: Event, stash_value: StashValueFn) -> Stash:
    """Return the event with every tensor of its value replaced by `stash_value(tensor)`."""
    value = rmap_tensor(event.value, stash_value)
    return Stash(event.name, event.type, event.grad, value, event.recompute)


def get_stash_fn(stash_value: StashValueFn | None = None, stash: StashFn | None = None) -> StashFn:
    """Return `stash`, or `default_stash` with `stash_value`. Raises ValueError for both."""
    if stash_value and stash:
        raise ValueError("give stash_value or stash, not both")
    return stash or partial(default_stash, stash_value=stash_value or default_stash_value)
