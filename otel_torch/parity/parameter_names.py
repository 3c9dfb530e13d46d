"""Take the names of parameters apart: their pattern, their indices, and how alike two names are."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence


def pattern(name: str) -> str:
    """Replace the indices of a name by `*`; the 1 of `attn1` is not an index.

    >>> pattern("blocks.12.attn1.to_q.weight")
    'blocks.*.attn1.to_q.weight'
    """
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def fill(name: str, numbers: Sequence[int]) -> str:
    """Put indices into a pattern; return "" if the counts differ.

    >>> fill("blocks.*.to_q", [3])
    'blocks.3.to_q'
    """
    parts = name.split(".")
    if parts.count("*") != len(numbers):
        return ""
    remaining = iter(numbers)
    return ".".join(str(next(remaining)) if part == "*" else part for part in parts)


def indices(name: str) -> tuple[int, ...]:
    """Return the indices in a name.

    >>> indices("blocks.12.net.0")
    (12, 0)
    """
    return tuple(int(part) for part in name.split(".") if part.isdigit())


def similarity(reference: str, port: str) -> float:
    """Return the similarity of two names, from 0 to 1.

    It depends on common words, equal last components and the first index.

    >>> name = "a.0.to_q.weight"
    >>> similarity(name, "b.0.to_q.weight") > similarity(name, "b.1.to_k.weight")
    True
    """
    if reference == port:
        return 1.0
    reference_words, port_words = _words(reference), _words(port)
    common = sum((Counter(reference_words) & Counter(port_words)).values())
    word_count = len(reference_words) + len(port_words)
    tail = 0
    for first, second in zip(
        reversed(reference.split(".")), reversed(port.split(".")), strict=False
    ):
        if first != second:
            break
        tail += 1
    same_index = indices(reference)[:1] == indices(port)[:1]
    return 0.6 * 2 * common / word_count + 0.15 * min(tail, 2) / 2 + 0.24 * same_index


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[._]|(?<=[a-z])(?=[0-9A-Z])", name) if word]
