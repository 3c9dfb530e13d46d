"""A tensor over all matched tokens, from the forwards that computed them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otel_torch.recording.rows import Row

# shape (tokens, rows per token, ROW_NUMBERS)
Sketches = NDArray[np.float32]
Flags = NDArray[np.bool_]
Indices = NDArray[np.int64]
# model, module, tensor, and which of several such rows of a forward
TensorKey = tuple[str, str, str, int]


@dataclass(slots=True, eq=False)
class MergedTensor:
    """A tensor over all matched tokens.

    row: its first record. sketches: of the rows of each token. sources: which forward they are
    from, -1 for none. values: the numbers of its values in the forwards. lengths: of its rows, with
    the tokens of a request in the same forward.
    """

    row: Row
    order: tuple[int | None, ...]
    parent: int | None
    sketches: Sketches
    sources: NDArray[np.int64]
    values: list[tuple[int, Any]] = field(default_factory=list)
    lengths: set[tuple[int, int]] = field(default_factory=set)

    @property
    def present(self) -> Flags:
        """Which tokens have rows."""
        return self.sources >= 0

    @property
    def width(self) -> int:
        """The elements of a token."""
        return int(self.row["shape"][-1]) * int(self.sketches.shape[1])

    @property
    def row_lengths(self) -> set[int]:
        """The lengths of its rows: several if it has a number for each key, or each window."""
        return {length for length, _ in self.lengths}

    @property
    def is_of_keys(self) -> bool:
        """Whether each row has one value per token, as in a mask."""
        return all(length == tokens for length, tokens in self.lengths)

    @property
    def squares(self) -> NDArray[np.float32]:
        """The sum of squares of each token, NaN where it has no rows."""
        squares: NDArray[np.float32] = self.sketches[:, :, -1].sum(1)
        return squares

    def fill(self, forward: int, tokens: Indices, rows: Sketches) -> None:
        """Add the rows of some tokens; of several forwards, the last one counts."""
        is_later = self.sources[tokens] < forward
        self.sketches[tokens[is_later]] = rows[is_later]
        self.sources[tokens[is_later]] = forward
