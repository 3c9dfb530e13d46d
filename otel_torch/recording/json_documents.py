"""Splits a file into JSON documents: one a line, as exporters write them, or printed over many
lines, or several after one another.

>>> lines = [b'{"a": 1}\\n', b'{\\n', b' "b": 2\\n', b'}\\n', b'{"c": ']
>>> for document in iterate_documents(lines):
...     print(document.line, document.start, document.end, document.is_whole)
1 0 9 True
2 9 21 True
5 21 28 False
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|["{}\[\]]')
_BEGINNING = re.compile(rb'\s*[{\[]\s*(?:["{}\[\]]|$)')
_raw_decode = json.JSONDecoder().raw_decode
_STEPS = {b"{": 1, b"[": 1, b"}": -1, b"]": -1}


@dataclass(frozen=True, slots=True)
class Document:
    """A document, or text that is none.

    Attributes:
        line: The number of its first line, from 1.
        start, end: Where it is in the file, in bytes; with the line feed that ends it, or will.
        is_whole: False if it opens more lists and objects than it closes.
    """

    line: int
    start: int
    end: int
    text: bytes
    is_whole: bool = True

    @property
    def is_cut_off(self) -> bool:
        """Whether it is a last line whose end was not written, or not yet."""
        return not self.is_whole and b"\n" not in self.text


def iterate_documents(lines: Iterable[bytes]) -> Iterator[Document]:
    """Yield the documents of a file's lines, and each line that is none.

    A document whose end is missing ends before a line that begins another one.
    """
    opened: _Opened | None = None
    offset = 0
    for number, line in enumerate(lines, 1):
        start, offset = offset, offset + len(line) + (not line.endswith(b"\n"))
        text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if opened is not None and opened.is_ended_by(text):
            yield opened.document(start, is_whole=False)
            opened = None
        while text.strip():
            if opened is None:
                parts = [text] if _is_document(text) else _split(text)
                if parts is not None:
                    yield from _documents(parts, number, start, offset)
                    break
                opened = _Opened(number, start)
            rest = opened.add(text)
            if rest is None:
                break
            start, text = start + len(text) - len(rest) if rest else offset, rest
            yield opened.document(start)
            opened = None
    if opened is not None:
        yield opened.document(offset, is_whole=False)


def _documents(parts: list[bytes], number: int, start: int, end: int) -> Iterator[Document]:
    """Yield the documents of a line from `start` to `end`."""
    for part in parts[:-1]:
        yield Document(number, start, start + len(part), part)
        start += len(part)
    yield Document(number, start, end, parts[-1])


class _Opened:
    """A document that goes on in the next line."""

    def __init__(self, number: int, start: int) -> None:
        self._number, self._start = number, start
        self._lines: list[bytes] = []
        self._depth = 0

    def add(self, line: bytes) -> bytes | None:
        """Add a line; return what follows the document in it, None if it goes on."""
        for token in _TOKEN.finditer(line):
            self._depth += _STEPS.get(token[0], 0)
            if self._depth <= 0:
                rest = line[token.end() :]
                if not rest.strip():
                    rest = b""  # a line feed belongs to the document that it ends
                self._lines.append(line[: len(line) - len(rest)])
                return rest
        self._lines.append(line)
        return None

    def is_ended_by(self, line: bytes) -> bool:
        """Return whether a line begins another document, so that the end of this is missing."""
        if not (line.startswith(b"{") and self._lines[0].startswith(b"{")):
            return False
        is_indented = len(self._lines) > 1 and self._lines[1][:1].isspace()
        return is_indented or (len(line) > 4 and _is_document(line))

    def document(self, end: int, *, is_whole: bool = True) -> Document:
        return Document(self._number, self._start, end, b"".join(self._lines), is_whole)


def _is_document(text: bytes) -> bool:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)  # checks it, and makes nothing of it
    except msgspec.DecodeError:
        return False
    return True


def _split(line: bytes) -> list[bytes] | None:
    """Return the documents of a line, or the line as it is; None if it begins a longer document."""
    if not _BEGINNING.match(line):
        return [line]
    if _depth_of(line) > 0:
        return None
    parts: list[bytes] = []
    position = 0
    try:
        text = line.decode()
        while text[position:].strip():
            begin = position + len(text[position:]) - len(text[position:].lstrip())
            _, end = _raw_decode(text, begin)
            parts.append(text[position:end].encode())
            position = end
    except (ValueError, RecursionError):
        return [line]
    parts[-1] += text[position:].encode()
    return parts


def _depth_of(text: bytes) -> int:
    """Return how many more lists and objects a text opens than it closes."""
    return sum(_STEPS.get(token, 0) for token in _TOKEN.findall(text))
