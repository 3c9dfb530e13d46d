"""Tables for a terminal: aligned columns, colors only where the stream supports them."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TextIO

from otel_torch.process.console import escape as escape

_STYLES = {"bold": "1", "dim": "2", "red": "31", "yellow": "33"}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a table: a text for each column, and the style of the line (a key of `_STYLES`)
    or None.
    """

    cells: Sequence[str]
    style: str | None = None


def supports_color(stream: TextIO) -> bool:
    """Return whether to print colors: `stream` is a terminal, not dumb, and NO_COLOR is not set."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()


def paint(text: str, style: str | None, color: bool) -> str:
    """Return the text with the escape codes of `style`, or unchanged without color.

    >>> paint("NaN", "red", True), paint("NaN", "red", False)
    ('\\x1b[31mNaN\\x1b[0m', 'NaN')
    """
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if color and style is not None else text


def format_table(
    header: Sequence[str], lines: Iterable[Line], *, left_columns: int = 1, color: bool = False
) -> str:
    """Return a table as text.

    The first `left_columns` columns are left-aligned, the rest right-aligned.

    >>> print(format_table(["module", "max"], [Line(["block", "1.5"]), Line(["", "20"])]))
    module  max
    block   1.5
             20
    """
    rows = [Line(header, "bold"), *lines]
    texts = [[escape(cell) for cell in row.cells] for row in rows]
    widths = [max(map(_width, column)) for column in zip(*texts, strict=True)]

    formatted = []
    for row, cells in zip(rows, texts, strict=True):
        padded = [
            _pad(cell, width, align_left=index < left_columns)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        formatted.append(paint("  ".join(padded).rstrip(), row.style, color))
    return "\n".join(formatted)


def write_line(stream: TextIO, text: str) -> None:
    """Write the text and a line end; characters that the stream cannot encode are escaped.

    Raises:
        BrokenPipeError: If the reader has closed the pipe.
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")


def _pad(text: str, width: int, *, align_left: bool) -> str:
    blanks = " " * (width - _width(text))
    return text + blanks if align_left else blanks + text


def _width(text: str) -> int:
    """Return how many terminal columns the text takes."""
    if text.isascii():
        return len(text)
    return sum(map(_char_width, text))


def _char_width(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
