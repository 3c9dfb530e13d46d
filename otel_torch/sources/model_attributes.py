"""By which attribute a program holds a model: `transformer_2` tells two models of one class apart
better than `#2`.
"""

from __future__ import annotations

import gc
from types import ModuleType
from typing import Any

from torch import nn


def attributes_holding(root: nn.Module | None) -> list[str]:
    """The attribute names and dictionary keys by which other objects hold `root`, sorted. Walks the
    heap once.
    """
    if root is None:
        return []
    names = set()
    for referrer in gc.get_referrers(root):
        if isinstance(referrer, ModuleType):
            continue
        attributes: Any = (
            referrer if type(referrer) is dict else getattr(referrer, "__dict__", None)
        )
        if isinstance(attributes, dict):
            names |= {
                key
                for key, value in list(attributes.items())
                if value is root and isinstance(key, str)
            }
    return sorted(name for name in names if name.isidentifier() and not name.startswith("_"))
