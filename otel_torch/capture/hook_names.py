"""Unique names for hooks.

A module's hooks are registered by name, and one module may belong to several caches, trackers and
interleavers.
"""

from __future__ import annotations

import itertools

_numbers = itertools.count()


def unique_hook_name(kind: str) -> str:
    """Return a hook name that no other hook of the process has, such as `otel_torch.cache.7`."""
    return f"otel_torch.{kind}.{next(_numbers)}"
