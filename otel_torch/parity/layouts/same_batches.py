"""Tell whether a process that ran alone and the ranks compute the same batches of tokens."""

from __future__ import annotations

from pathlib import Path

from otel_torch.parity.loaded_recording import captures_of
from otel_torch.recording.metadata import read_metadata
from otel_torch.recording.reader import iterate_rows
from otel_torch.recording.rows import Row
from otel_torch.records import TOKENS

_BATCH = ("shape", "hashes", "ids", "positions")
# rows that are searched for the first forward's tokens
_MOST_ROWS = 20_000


def have_same_batches(reference: Path, rank: Path) -> bool:
    """Return whether the first forwards have the same tokens, or those of one are not recorded.

    Where they differ, the shapes of tensors do not show which part of them a rank holds.
    """
    if any("tokens" not in captures_of(read_metadata(path)) for path in (reference, rank)):
        return True  # nothing to search for
    tokens = [_first_tokens(path) for path in (reference, rank)]
    if any(row is None for row in tokens):
        return True
    batches = [[row.get(name) for name in _BATCH] for row in tokens if row is not None]
    return batches[0] == batches[1]


def _first_tokens(path: Path) -> Row | None:
    for _, row in zip(range(_MOST_ROWS), iterate_rows(path), strict=False):
        if row.get("phase") == TOKENS:
            return row
    return None
