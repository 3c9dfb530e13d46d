"""Set aside what enters and leaves a table whose rows are split, where each rank shifts the ids.

    ids      3   9   5          one process
    rank 0   3   0   5  rows 0 to 7, then zeros instead of the second row
    rank 1   0   1   0  rows 8 to 15, then zeros instead of the others

The code around such an embedding makes the ids its own and masks what it has no row for. Only the
sum of the ranks is what one process has, and the next module gets it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from otel_torch.parity.layouts.judged_places import JudgedPlace
from otel_torch.records import FORWARD_PHASES


@dataclass(slots=True)
class ShardedTables:
    """The modules whose weights are split along their rows, and whether each rank has its own."""

    _modules: dict[tuple[str, str], bool] = field(default_factory=dict)

    def set_aside(self, judged: Sequence[JudgedPlace]) -> None:
        """Mark the ids that are each rank's own, and the rows that they select."""
        shifted = set()
        given_others = {  # models whose own ids are wrong already
            entry.key.model for entry in judged if entry.key.is_input_of_model and entry.is_wrong
        }
        for entry in judged:
            key, module = entry.key, entry.key.module_path
            if key.tensor.startswith("param.") and _has_split_rows(entry):
                self._modules[module] = not entry.is_wrong
            if key.phase not in FORWARD_PHASES or module not in self._modules:
                continue
            is_shifted = key.is_input and entry.is_wrong and entry.rows[0].is_integer
            if is_shifted and key.model not in given_others:
                shifted.add(key.module_call)
            # what wrong rows select is wrong, too
            if key.module_call in shifted and (key.is_input or self._modules[module]):
                entry.is_own = True


def _has_split_rows(entry: JudgedPlace) -> bool:
    """Return whether the ranks compute with other rows of a weight than one another.

    A DTensor is whole where it is used (FSDP2), or knows its rows.
    """
    reference, part = entry.reference, entry.rows[0].shape
    if "shard" in entry.rows[0].row:
        return False
    whole = None if reference is None else reference.shape
    if not whole or not part or len(whole) != len(part):
        return False
    return part[0] < whole[0] and part[1:] == whole[1:]
