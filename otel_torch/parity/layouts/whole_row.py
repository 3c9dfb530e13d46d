"""Make the row that a single process would have written of the rows of all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from otel_torch.parity.layouts.rank_layout import RankLayout, add_up, terms_of
from otel_torch.parity.layouts.rank_rows import RankRow
from otel_torch.parity.layouts.whole_statistics import (
    SCALING,
    STATISTICS,
    encode_sketch,
    merge_statistics,
)
from otel_torch.recording.rows import Row

# the other fields that describe the numbers, and not the place
_DESCRIPTION = ("histogram", "shape", "dtype", "shard")
# what zeros beside the numbers of a tensor change
CHANGED_BY_PADDING = ("min", "max", "std", "zeros")


def row_of_rank(owner: Row, row: RankRow) -> Row:
    """Return the row of the owner with the numbers of another rank."""
    if row.row is owner:
        return owner
    names = (*STATISTICS, *_DESCRIPTION)
    whole = {name: value for name, value in owner.items() if name not in names}
    whole |= {name: row.row[name] for name in names if name in row.row}
    if "sketch" in owner and "sketch" not in whole and row.sketch is not None:
        whole["sketch"] = encode_sketch(row.sketch)
    if "sketch" not in owner:
        whole.pop("sketch", None)
    return whole


def row_of_all(owner: Row, layout: RankLayout, rows: Sequence[RankRow], shape: list[int]) -> Row:
    """Return the row of the owner with the numbers of the whole.

    Args:
        shape: Of the whole.
    """
    columns = {name: [row.row.get(name) for row in rows] for name in STATISTICS}
    del columns["sketch"], columns["row_sketch"]
    sizes = [row.numel for row in rows]
    numel = math.prod(shape)
    merged: dict[str, Any] = merge_statistics(columns, sizes, numel, layout.kind == "sum")
    merged |= {
        name: merged[name] * layout.scale
        for name in SCALING
        if isinstance(merged.get(name), float) and layout.scale != 1
    }
    terms = terms_of(layout, rows)
    if terms is not None:
        merged["sketch"] = encode_sketch(add_up(terms))
    # the sketches of rows are those of one part
    dropped = {name for name in (*STATISTICS, "histogram", "shard", "rows") if name not in merged}
    whole = {name: value for name, value in owner.items() if name not in dropped}
    return whole | {name: merged[name] for name in owner if name in merged} | {"shape": shape}
