"""Tables for a terminal: aligned columns that fit its width, colors only where it supports them.

A file or a pipe gets everything, in full.
"""

from __future__ import annotations

import os
import shutil
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TextIO

from otel_torch.process.console import as_given as as_given
from otel_torch.process.console import escape as escape

_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}
# terminal columns of a left-aligned column: columns are left out before it gets narrower than the
# first, and it never gets narrower than the second
_READABLE_NAME, _MIN_NAME = 32, 16


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


def terminal_size(stream: TextIO) -> os.terminal_size | None:
    """Return columns and lines of the terminal that `stream` writes to; None for a file or pipe."""
    return shutil.get_terminal_size() if stream.isatty() else None


def paint(text: str, style: str | None, color: bool) -> str:
    """Return the text with the escape codes of `style`, or unchanged without color.

    >>> paint("NaN", "red", True), paint("NaN", "red", False)
    ('\\x1b[31mNaN\\x1b[0m', 'NaN')
    """
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if color and style is not None else text


def shorten(text: str, width: int) -> str:
    """Return the text with its middle left out, if it takes more than `width` terminal columns.

    Most names of modules differ at their end, so more of that is kept.

    >>> shorten("model.layers.10.self_attn.q_proj", 20)
    'model.…f_attn.q_proj'
    """
    if _width(text) <= width:
        return text
    head, tail = 0, len(text)
    available = width - 1
    while head < tail and _width(text[: head + 1]) <= available // 3:
        head += 1
    while tail > head and _width(text[tail - 1 :]) <= available - _width(text[:head]):
        tail -= 1
    return f"{text[:head]}…{text[tail:]}"


def format_table(
    header: Sequence[str],
    lines: Iterable[Line],
    *,
    left_columns: int = 1,
    color: bool = False,
    width: int | None = None,
) -> str:
    """Return a table as text.

    The first `left_columns` columns are left-aligned, the rest right-aligned.

    Args:
        width: Of the terminal: left-aligned cells are shortened to fit, but no column to less
            than `_MIN_NAME`. None for as wide as the cells are.

    >>> print(format_table(["module", "max"], [Line(["block", "1.5"]), Line(["", "20"])]))
    module  max
    block   1.5
             20
    """
    rows = [Line(header, "bold"), *lines]
    texts = [[escape(cell) for cell in row.cells] for row in rows]
    widths = _column_widths(texts)
    if width is not None:
        _narrow(widths, left_columns, width, _MIN_NAME)

    formatted = []
    for row, cells in zip(rows, texts, strict=True):
        padded = [
            _pad(shorten(cell, width), width, align_left=index < left_columns)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        formatted.append(paint("  ".join(padded).rstrip(), row.style, color))
    return "\n".join(formatted)


def without_wide_columns(
    header: Sequence[str],
    lines: Sequence[Line],
    optional: Iterable[str],
    *,
    width: int,
    left_columns: int = 1,
) -> tuple[list[str], list[Line], list[str]]:
    """Leave out columns of a table until `format_table` can make it fit into `width`.

    Args:
        optional: The right-aligned columns that may be left out, the first one first.

    Returns:
        The header and the lines that remain, and the names of the columns that were left out.

    >>> line = Line(["block", "1.5", "float32"])
    >>> without_wide_columns(["module", "max", "dtype"], [line], ["dtype", "max"], width=12)
    (['module', 'max'], [Line(cells=['block', '1.5'], style=None)], ['dtype'])
    """
    rows = [header, *(line.cells for line in lines)]
    widths = _column_widths([[escape(cell) for cell in cells] for cells in rows])
    _narrow(widths, left_columns, 0, _READABLE_NAME)
    left_out: list[str] = []
    kept = list(range(len(header)))
    for name in filter(header.__contains__, optional):
        if _total([widths[index] for index in kept]) <= width:
            break
        left_out.append(name)
        kept = [index for index in kept if header[index] not in left_out]

    def keep(cells: Sequence[str]) -> list[str]:
        return [cells[index] for index in kept]

    return keep(header), [Line(keep(line.cells), line.style) for line in lines], left_out


def _column_widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(_width, column)) for column in zip(*rows, strict=True)]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _narrow(widths: list[int], left_columns: int, available: int, minimum: int) -> None:
    """Narrow the widest left-aligned columns until the table fits, or all are at `minimum`."""
    excess = _total(widths) - available
    while excess > 0 and (widest := max(widths[:left_columns], default=0)) > minimum:
        widths[widths.index(widest)] -= 1
        excess -= 1


def write_line(stream: TextIO, text: str) -> None:
    """Write the text and a line end; characters that the stream cannot encode are escaped.

    Raises:
        BrokenPipeError: If the reader has closed the pipe.
    """
    stream.write(encodable(as_given(text), stream) + "\n")


def encodable(text: str, stream: TextIO) -> str:
    """Return the text with the characters escaped that the stream cannot encode."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


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
