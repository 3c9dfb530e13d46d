"""Loads and calls the compiled scanner, which reads a recording's lines into arrays.

`scanner.c` is compiled when the package is installed. It makes no object of a row and needs no lock
of the interpreter. Without the library, and for lines that it does not accept, `row_batches`
decodes in Python; both give the same arrays.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otel_torch.process.compiled_library import SUFFIX, source_version

FOLDER = Path(__file__).parent
SOURCES = ("scanner.c",)
LIBRARY = FOLDER / f"libscanner{SUFFIX}"

# bytes read at a time: another thread may wait 5 ms for the interpreter after each block
BLOCK_BYTES = 1 << 21
# of the shortest row, {"module":"","tensor":"","step":0}, with its line feed
_SHORTEST_LINE = 35
_OTHER_FORM, _TOO_LONG, _UNREADABLE = -1, -2, -3


@dataclass(slots=True)
class ScannedLines:
    """The arrays that were read from a block of lines.

    Attributes:
        size: Bytes.
        is_last: Whether the file ends after them.
        text: The lines, if they are of another form; then nothing else is set.
        kinds: Of each row, in the order in which a scanner met them.
        numbers, order, places, statistics: As in `RowBatch`. statistics: None unless asked for.
        starts: Where each line begins, from the first one; and where the last one ends.
        sketched: Rows with a sketch.
        sketches, sketch_ends: Their bytes, one after the other, and where each ends.
    """

    size: int
    is_last: bool
    text: bytes | None = None
    kinds: Any = None
    numbers: Any = None
    order: Any = None
    places: Any = None
    statistics: Any = None
    starts: Any = None
    sketched: Any = None
    sketches: Any = None
    sketch_ends: Any = None


# array -> its type, and its shape for numbers of rows and of bytes; in the order of the library's
# structure
_ARRAYS: dict[str, tuple[Any, Callable[[int, int], tuple[int, ...]]]] = {
    "kinds": (np.int64, lambda rows, size: (rows,)),
    "numbers": (np.float64, lambda rows, size: (5, rows)),
    "order": (np.int64, lambda rows, size: (rows, 2)),
    "places": (np.int64, lambda rows, size: (rows, 3)),
    "statistics": (np.float64, lambda rows, size: (8, rows)),
    "starts": (np.int64, lambda rows, size: (rows + 1,)),
    "sketched": (np.int64, lambda rows, size: (rows,)),
    "sketch_ends": (np.int64, lambda rows, size: (rows,)),
    "sketches": (np.uint8, lambda rows, size: (size,)),
}


class _Arrays(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("capacity", "sketch_room")),
        *((name, ctypes.c_int64) for name in ("is_full", "size", "is_last", "sketch_count")),
        *((name, ctypes.c_void_p) for name in _ARRAYS),
    )


class Scanner:
    """Reads the lines of one file, block by block, into memory that it uses again and again.

    Args:
        library: From `load`.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._scanner = library.scanner_new()
        if not self._scanner:
            raise MemoryError
        self._make_room(BLOCK_BYTES)

    def close(self) -> None:
        """Free what the library holds."""
        self._library.scanner_free(self._scanner)
        self._scanner = None

    def _make_room(self, size: int) -> None:
        rows, sketch_bytes = size // _SHORTEST_LINE + 1, size // 4 * 3
        self._room, self._text = size, np.empty(size + 1, np.uint8)
        self._memory: dict[str, NDArray[Any]] = {
            name: np.empty(shape(rows, sketch_bytes), dtype)
            for name, (dtype, shape) in _ARRAYS.items()
        }
        self._arrays = _Arrays(capacity=rows, sketch_room=sketch_bytes)
        for name, array in self._memory.items():
            setattr(self._arrays, name, array.ctypes.data)

    def read(self, file: int, offset: int, *, is_full: bool) -> ScannedLines:
        """Return the lines of a file from an offset on: about a block.

        Args:
            file: Its descriptor.
            is_full: Read the statistics, too, and check every known field.

        Raises:
            OSError: The file cannot be read.
        """
        arrays, text = self._arrays, self._text
        arrays.is_full = is_full
        rows = self._library.scanner_read(
            self._scanner, file, offset, text.ctypes.data, self._room, ctypes.addressof(arrays)
        )
        if rows == _TOO_LONG:
            self._make_room(2 * self._room)
            return self.read(file, offset, is_full=is_full)
        if rows == _UNREADABLE:
            raise OSError(arrays.size, os.strerror(arrays.size))
        is_last = bool(arrays.is_last)
        if rows == _OTHER_FORM:
            return ScannedLines(arrays.size, is_last, text=text[: arrays.size].tobytes())
        memory, sketches = self._memory, arrays.sketch_count
        ends = memory["sketch_ends"][:sketches].copy()
        return ScannedLines(
            arrays.size,
            is_last,
            kinds=memory["kinds"][:rows].copy(),
            numbers=memory["numbers"][:, :rows].copy(),
            order=memory["order"][:rows].copy(),
            places=memory["places"][:rows].copy(),
            statistics=memory["statistics"][:, :rows].copy() if is_full else None,
            starts=memory["starts"][: rows + 1].copy(),
            sketched=memory["sketched"][:sketches].copy(),
            sketches=memory["sketches"][: ends[-1] if sketches else 0].copy(),
            sketch_ends=ends,
        )


def iterate_blocks(path: str | Path, library: Any) -> Generator[ScannedLines]:
    """Yield the lines of a file, about a block at a time.

    The fields beyond the header are read as long as there are no sketches.

    Raises:
        OSError: The file cannot be read.
    """
    is_full, is_last, offset = True, False, 0
    with open(path, "rb", buffering=0) as file, closing(Scanner(library)) as scanner:
        while not is_last:
            lines = scanner.read(file.fileno(), offset, is_full=is_full)
            yield lines
            is_last = lines.is_last
            offset += lines.size
            if lines.text is None:
                is_full = not len(lines.sketched)


@functools.cache
def load() -> Any:
    """Return the library, or None if it is missing, stale or cannot be loaded."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        library.scanner_source.restype = ctypes.c_char_p
        if library.scanner_source() != source_version(FOLDER, SOURCES):
            return None
    except (OSError, AttributeError):
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.scanner_new.restype = pointer
    library.scanner_free.argtypes = [pointer]
    library.scanner_free.restype = None
    library.scanner_read.argtypes = [pointer, ctypes.c_int, number, pointer, number, pointer]
    library.scanner_read.restype = number
    return library
