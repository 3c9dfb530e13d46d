"""Where a comparison reads its rows: a file, or rows in memory that were made from other files.

    one file                            RecordingSource
    shards of ranks as one recording    MadeRecording, of `merge_shards`
    ranks as one process                MadeRecording, of `layouts`
    one model of a recording            MadeRecording, of `one_model`

Both kinds are read several times: the parameters first, then training steps, then forwards.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from otel_torch.recording.metadata import read_metadata
from otel_torch.recording.reader import (
    LineBatch,
    RecordingError,
    iterate_attach_rows,
    iterate_rows,
)
from otel_torch.recording.row_batches import RowBatch, RowKinds, iterate_batches
from otel_torch.recording.rows import Row

Warn = Callable[[str], None]

# of a made recording: rows of a batch, and bytes in memory, beyond which all are on disk
_BATCH_ROWS, _MOST_BYTES = 512, 1 << 28


def _ignore(message: object) -> None:
    """Drop a warning, or a number of bytes."""


@dataclass(unsafe_hash=True)
class RecordingSource:
    """A recording to compare; this one is a file.

    Attributes:
        path: What the user gave, for messages.
    """

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def size(self) -> int:
        """How many bytes its batches have in all."""
        return self.path.stat().st_size if self.path.exists() else 0

    def metadata(self, warn: Warn = _ignore) -> dict[str, Any]:
        """Return its metadata, {} if it has none."""
        return read_metadata(self.path, warn)

    def rows(self, warn: Warn = _ignore) -> Iterator[Row]:
        """Yield its rows, as `iterate_rows` does."""
        return iterate_rows(self.path, warn)

    def attach_rows(self, models: Iterable[str] = ()) -> Iterator[Row]:
        """Yield its rows of phase `attach`, as `iterate_attach_rows` does."""
        return iterate_attach_rows(self.path, models)

    def batches(
        self, kinds: RowKinds, problem: Warn = _ignore, read: Callable[[int], None] = _ignore
    ) -> Iterator[RowBatch]:
        """Yield its rows as arrays, as `iterate_batches` does."""
        return iterate_batches(self.path, kinds, problem, read)


@dataclass(eq=False)
class MadeRecording(RecordingSource):
    """A recording without a file, made of others that the user gave.

    Its rows are in memory, each batch of them as bytes; many of them are on disk.
    """

    meta: dict[str, Any] = field(default_factory=dict)
    _batches: Any = field(default_factory=lambda: tempfile.SpooledTemporaryFile(_MOST_BYTES))  # noqa: SIM115 - it is kept
    _ends: list[int] = field(default_factory=lambda: [0])

    def extend(self, rows: Iterable[Row]) -> None:
        """Add rows at the end."""
        rows = iter(rows)
        while batch := list(islice(rows, _BATCH_ROWS)):
            pickle.dump(batch, self._batches, pickle.HIGHEST_PROTOCOL)
            self._ends.append(self._batches.tell())

    @property
    def size(self) -> int:
        """How many bytes its batches have in all."""
        return self._ends[-1]

    def metadata(self, warn: Warn = _ignore) -> dict[str, Any]:
        """Return its metadata."""
        return self.meta

    def _read_batches(self) -> Iterator[tuple[list[Row], int]]:
        if not self.size:
            raise RecordingError(f"{self}: holds no record")
        for start, end in pairwise(self._ends):
            self._batches.seek(start)
            yield pickle.loads(self._batches.read(end - start)), end - start

    def rows(self, warn: Warn = _ignore) -> Iterator[Row]:
        """Yield its rows."""
        for rows, _ in self._read_batches():
            yield from rows

    def attach_rows(self, models: Iterable[str] = ()) -> Iterator[Row]:
        """Yield its rows of phase `attach`; those of `models`, if given, are all."""
        unseen = set(models)
        can_stop = bool(unseen)
        for row in self.rows():
            if row.get("phase") == "attach":
                unseen.discard(row.get("model", ""))
                yield row
            elif can_stop and not unseen:
                return

    def batches(
        self, kinds: RowKinds, problem: Warn = _ignore, read: Callable[[int], None] = _ignore
    ) -> Iterator[RowBatch]:
        """Yield its rows as arrays."""
        for rows, size in self._read_batches():
            read(size)
            yield RowBatch.of_rows(rows, kinds, LineBatch(self.path, size=size))
