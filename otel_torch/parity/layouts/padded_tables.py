"""Distinguish a padded vocabulary from a fused tensor with rows that every rank keeps whole.

    one process   22 words        16 rows that are cut, 4 that are not
    two ranks     12 | 12 rows    8 + 4 | 8 + 4 rows

Both have more rows together than the whole. Rows of padding have no gradients. Those that every
rank has do, and they count on each rank, so that gradients cannot be compared. Only vocabularies
are padded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from otel_torch.parity.layouts.judged_places import JudgedPlace
from otel_torch.parity.layouts.rank_layout import RankLayout, limit_of
from otel_torch.parity.parameter_names import pattern


@dataclass(slots=True)
class PaddedTables:
    """The sizes of the reference's vocabularies: the rows of tables that are given integers."""

    _tables: dict[tuple[str, str], int] = field(default_factory=dict)
    _sizes: set[int] = field(default_factory=set)

    def forget_others(self, judged: Sequence[JudgedPlace]) -> None:
        """Do not compare gradients of padded parts that are of no vocabulary."""
        for entry in judged:
            module, reference = entry.key.module_path, entry.reference
            shape = reference.shape if reference is not None else None
            if entry.key.tensor.startswith("param.") and shape and len(shape) > 1:
                self._tables[module] = shape[0]
            if entry.key.is_input and module in self._tables and entry.rows[0].is_integer:
                self._sizes.add(self._tables[module])
        for entry in judged:
            reference = entry.reference
            if reference is None or not reference.shape or not entry.is_padded:
                continue
            rows = 0 if entry.key.is_parameter_gradient else -1
            name = entry.key.module  # a head is in no block
            is_vocabulary = name == pattern(name) and reference.shape[rows] in self._sizes
            if entry.key.phase == "backward" and not is_vocabulary:
                limit = limit_of(reference)
                entry.layout = RankLayout("parts", math.nan, limit, has_sketches=False)
