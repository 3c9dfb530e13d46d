"""Keep functions out of compiled graphs.

Some functions cannot be traced: they move a graph's own inputs to another device, or they block on
another thread. The compiler ends the graph where such a function is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])


def disable_compile(function: _F) -> _F:
    """Mark `function` so that no compiler traces it (a typed `torch.compiler.disable`)."""
    disabled: _F = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled
