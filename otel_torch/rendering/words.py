"""Words that messages and reports share."""

from __future__ import annotations

from collections.abc import Sequence


def plural(count: int, word: str) -> str:
    """Return the count with its noun.

    >>> plural(1, "pair"), plural(2000, "pair")
    ('1 pair', '2,000 pairs')
    """
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def enumerate_words(words: Sequence[str]) -> str:
    """Return words as one text.

    >>> enumerate_words(["a", "b", "c"]), enumerate_words(["a"])
    ('a, b and c', 'a')
    """
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
