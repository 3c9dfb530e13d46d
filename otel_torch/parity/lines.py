"""Lines of a recording as typed records: what a comparison looks at in every row, read faster than dicts are made.

A long recording is read a block at a time. A block is kept as the bytes that it is for as long as rows of it are at work, so
that the few which are analysed in full can still be had as dicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from otel_torch.parity.recording import Row, iterate_texts, parse_line

Number = float | str | None  # as text where it is not finite


class Line(msgspec.Struct, gc=False, rename={"cls": "class"}):
    """One record. The fields mean what they mean in a row; `sketch` is decoded: little-endian float32.

    odd: a field was not of its type, and is left out here; the row as a dict has it.
    """

    module: str
    tensor: str
    step: int | None
    call: int | None = None
    loop: int | None = None
    model: str = ""
    phase: str = "forward"
    cls: str = ""
    argument: str | None = None
    value: int | None = None
    order: tuple[int | None, int | None] | None = None
    parent: int | None = None
    abs_mean: Number = None
    sum: Number = None
    min: Number = None
    max: Number = None
    mean: Number = None
    std: Number = None
    rms: Number = None
    l2: Number = None
    nonfinite: int | None = None
    numel: int | None = None
    shape: list[int] | None = None
    dtype: str = ""
    sketch: bytes | None = None
    odd: bool = False


_decode = msgspec.json.Decoder(Line).decode
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)


class Block:
    """Some neighbouring lines of a recording, and on demand the same rows as dicts."""

    __slots__ = ("_rows", "lines")

    def __init__(self, lines: list[Line], rows: list[Row] | list[bytes]) -> None:
        self._rows = rows  # as they were read, where that is enough
        self.lines = lines

    def rows(self, start: int, stop: int) -> list[Row]:
        """The rows of some of the lines."""
        found = [parse_line(row) if isinstance(row, bytes) else row for row in self._rows[start:stop]]
        return [row for row in found if isinstance(row, dict)]


def iterate_lines(
    path: str | Path, problem: Callable[[str], None] = lambda message: None, read: Callable[[int], None] = lambda count: None
) -> Iterator[Block]:
    """The lines of a recording, block by block. read: is told how many bytes each block has. Raises RecordingError."""
    for texts, tolerant in iterate_texts(path, problem):
        read(sum(map(len, texts)))
        try:
            yield Block(list(map(_decode, texts)), texts)
        except _UNREADABLE:
            rows = tolerant()
            yield Block([line_of(row) for row in rows], rows)


def line_of(row: Row) -> Line:
    """A row as a line.

    >>> line_of({"module": "a", "tensor": "out", "step": 0, "sum": "<error>", "order": "?"}).odd
    True
    """
    try:
        return msgspec.convert(row, Line)
    except _UNREADABLE:
        kept: dict[str, Any] = {name: row[name] for name in ("module", "tensor", "step")}
        for name, value in row.items():
            try:
                msgspec.convert({**kept, name: value}, Line)
            except _UNREADABLE:
                continue
            kept[name] = value
        return msgspec.convert({**kept, "odd": True}, Line)
