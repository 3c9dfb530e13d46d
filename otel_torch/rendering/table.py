"""Prints a table for a person: columns that line up, colours in a terminal, plain text in a pipe.
Without a dependency.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TextIO

_STYLES = {"bold": "1", "dim": "2", "red": "31", "yellow": "33"}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a table: a text for each column, and a style for all of it (a key of `_STYLES`),
    None for plain.
    """

    cells: Sequence[str]
    style: str | None = None


def colourful(stream: TextIO) -> bool:
    """Whether colours make sense there: a terminal that is not dumb, and NO_COLOR not set."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()


def paint(text: str, style: str | None, colour: bool) -> str:
    """The text in a style, or as it is.

    >>> paint("NaN", "red", True), paint("NaN", "red", False)
    ('\\x1b[31mNaN\\x1b[0m', 'NaN')
    """
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if colour and style is not None else text


def escape(text: str) -> str:
    r"""The text with nothing in it that a terminal would obey.

    >>> escape("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return (
        text
        if text.isprintable()
        else "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)
    )


def render(
    header: Sequence[str], lines: Iterable[Line], *, left: int = 1, colour: bool = False
) -> str:
    """A table as text: a header, then the lines; the first `left` columns begin at the left, all
    others end at the right.

    >>> print(render(["module", "max"], [Line(["block", "1.5"]), Line(["", "20"])]))
    module  max
    block   1.5
             20
    """
    rows = [Line(header, "bold"), *lines]
    texts = [[escape(cell) for cell in row.cells] for row in rows]
    widths = [max(map(_width, column)) for column in zip(*texts, strict=True)]
    return "\n".join(
        paint(
            "  ".join(
                _pad(*cell, position < left)
                for position, cell in enumerate(zip(text, widths, strict=True))
            ).rstrip(),
            row.style,
            colour,
        )
        for row, text in zip(rows, texts, strict=True)
    )


def write(stream: TextIO, text: str) -> None:
    """Write a line; what the stream's encoding lacks is written as its escape. A closed pipe raises
    BrokenPipeError.
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")


def _pad(text: str, width: int, left: bool) -> str:
    blanks = " " * (width - _width(text))
    return text + blanks if left else blanks + text


def _width(text: str) -> int:
    """Columns that a terminal gives the text."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(one) else 2 if unicodedata.east_asian_width(one) in "WF" else 1
        for one in text
    )
