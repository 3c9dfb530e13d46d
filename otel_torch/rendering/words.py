"""Words that messages and reports share."""

from __future__ import annotations


def plural(count: int, word: str) -> str:
    """Return the count with its noun.

    >>> plural(1, "pair"), plural(2000, "pair")
    ('1 pair', '2,000 pairs')
    """
    return f"{count:,} {word}{'' if count == 1 else 's'}"
