"""Finds the attributes under which a program holds a model.

`transformer_2` distinguishes two models of one class better than the `#2` in their names.
"""

from __future__ import annotations

import gc
from types import ModuleType
from typing import Any

from torch import nn


def attributes_holding(root: nn.Module | None) -> list[str]:
    """Return the attribute names and dictionary keys under which other objects hold `root`, sorted.

    Walks the heap once.
    """
    if root is None:
        return []
    names = set()
    for referrer in gc.get_referrers(root):
        if isinstance(referrer, ModuleType):
            continue
        is_dict = type(referrer) is dict
        attributes: Any = referrer if is_dict else getattr(referrer, "__dict__", None)
        if not isinstance(attributes, dict):
            continue
        # not `list(items())`: its tuples may start a collection, which may change the dictionary
        for key, value in zip(list(attributes), list(attributes.values()), strict=False):
            if value is root and isinstance(key, str):
                names.add(key)
    return sorted(name for name in names if name.isidentifier() and not name.startswith("_"))
