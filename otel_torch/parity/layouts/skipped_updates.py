"""Find the update that a rank skips, where the other ranks make as many as one process.

A rank counts its steps by its updates. After one that it skips, it is a step behind:

    one process   step 0: forward 0, update    step 1: forward 0, update
    rank 1        step 0: forward 0, forward 1, update
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from otel_torch.parity.layouts.rank_rows import (
    RankRow,
    TensorPlace,
    without_numbers,
)
from otel_torch.recording.metadata import read_metadata

_PARAMETER = "param."
# what a row keeps that has the numbers of an earlier one
_PLACE = ("module", "model", "loop", "step", "call", "phase", "order", "parent", "value", "storage")


def ranks_that_skip(reference: Path, ranks: dict[int, Path]) -> set[int]:
    """Return the ranks that update a model less often than the reference, if not all of them do."""
    expected = _updates_of(reference)
    updates = {rank: _updates_of(path) for rank, path in ranks.items()}
    skipping = {
        rank
        for rank, of_rank in updates.items()
        if any(0 < count < expected.get(model, 0) for model, count in of_rank.items())
    }
    is_one_behind = skipping and all(
        count == expected[model]
        for rank, of_rank in updates.items()
        if rank not in skipping
        for model, count in of_rank.items()
        if model in expected
    )
    return skipping if is_one_behind and len(skipping) < len(ranks) else set()


def _updates_of(path: Path) -> dict[str, int]:
    metadata = read_metadata(path)
    if not metadata.get("ended_cleanly"):
        return {}
    return {model: facts["steps"] for model, facts in metadata.get("training", {}).items()}


@dataclass(slots=True)
class SkippedUpdates:
    """The parameters of the ranks that skip an update, as they were before it.

    Attributes:
        ranks: Those that skip one.
        step: The first (loop, step) that a rank does not update, None if none was found so far.
    """

    ranks: set[int]
    step: tuple[int | None, int | None] | None = None
    _latest: dict[tuple[int, str, str, str], RankRow] = field(default_factory=dict)

    def undo(self, places: Sequence[TensorPlace]) -> Sequence[TensorPlace]:
        """Return the places of a step as a rank leaves them that does not update its parameters.

        What it has of later steps is left out, and its gradients are not known.
        """
        self._remember(place for place in places if place.key.phase == "attach")
        skipping = {rank for rank in self.ranks if _skips(places, rank)}
        if not skipping:
            self._remember(places)
            return places
        self.step = places[0].key.position
        kept = []
        for place in places:
            own = [row for row in place.ranks if row.rank in skipping]
            if place.key.phase == "update":
                place = self._not_updated(place, skipping)
            elif own and place.key.is_parameter_gradient:
                row = without_numbers(own[0].row)
                place = TensorPlace(place.key, None, [RankRow(own[0].rank, row)])
            elif own and place.reference is None and len(own) == len(place.ranks):
                continue
            kept.append(place)
        return kept

    def _remember(self, places: Iterable[TensorPlace]) -> None:
        for place in places:
            if place.key.tensor.startswith(_PARAMETER):
                for row in place.ranks:
                    if row.rank in self.ranks:
                        self._latest[row.rank, *place.key.tensor_name] = row

    def _not_updated(self, place: TensorPlace, skipping: set[int]) -> TensorPlace:
        rows = []
        for row in place.ranks:
            before = self._latest.get((row.rank, *place.key.tensor_name))
            if row.rank in skipping and before is not None:
                numbers = {**before.row, **{name: row.row.get(name) for name in _PLACE}}
                row = RankRow(row.rank, numbers, before.sketch, before.as_part, row.chunk)
            rows.append(row)
        return TensorPlace(place.key, place.reference, rows)


def _skips(places: Sequence[TensorPlace], rank: int) -> bool:
    """Return whether a rank runs more backward passes in a step than the reference."""
    return any(
        place.reference is None and {row.rank for row in place.ranks} == {rank}
        for place in places
        if place.key.is_gradient_inside
    )
