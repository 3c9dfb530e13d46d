"""Names for hooks of which one module may carry several.

A module's hooks are registered by name, and a module may belong to several caches, trackers and
interleavers at once.
"""

from __future__ import annotations

import itertools

_numbers = itertools.count()


def unique_hook_name(kind: str) -> str:
    """Return a hook name that no other hook of the process has, such as `otel_torch.cache.7`."""
    return f"otel_torch.{kind}.{next(_numbers)}"
