"""What a compiler leaves alone: a graph ends where it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])


def eager(function: _F) -> _F:
    """`function`, which no compiler traces: what it moves are a graph's own inputs, or it waits for
    another thread.
    """
    disabled: _F = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled
