"""Code whose text was changed to plant a fault, with lines that can be read as those of a file can."""

from __future__ import annotations

import linecache
from types import CodeType


def compile_text(text: str, name: str) -> CodeType:
    """Compile source text, and let tracebacks and recordings read its lines under this name."""
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    return compile(text, name, "exec")
