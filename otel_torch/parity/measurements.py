"""The numbers of a forward's tensors as arrays, and the errors between those of two forwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from otel_torch.parity.columns import Columns, Sketches, Structure
from otel_torch.parity.rules import (
    Flags,
    Floats,
    Indices,
    fused_errors,
    largest_errors,
    sketch_errors,
    statistics_errors,
    sum_errors,
)

# (whole is the reference's, number of parts) -> (pair, row of the whole, rows of the parts)
Groups = dict[tuple[bool, int], list[tuple[int, ...]]]


@dataclass(slots=True)
class Measurements:
    """The numbers of one side of a forward.

    Args:
        sketches: float64, shape (sketches, 64): those of `columns`, then those of earlier forwards.
        slots: For each row, the index of its value's sketch, -1 without one.
        finite: For each row, whether its tensor has no NaN and no Inf.
    """

    columns: Columns
    structure: Structure
    sketches: Floats
    slots: Indices
    finite: Flags

    @staticmethod
    def of(columns: Columns, structure: Structure, earlier: Sketches) -> Measurements:
        """Read the numbers of a forward.

        Args:
            structure: The forward's.
            earlier: Sketches of values that were recorded in earlier forwards.
        """
        sketches, slots = columns.sketches.astype(np.float64), structure.slots
        if len(structure.foreign):
            numbers = columns.value[structure.foreign].tolist()
            looked_up = [earlier.get(number) for number in numbers]
            foreign, is_missing = _stack_sketches(looked_up, sketches.shape[1])
            sketches = np.concatenate((sketches.reshape(len(sketches), foreign.shape[1]), foreign))
            if is_missing.any():
                missing = len(columns.sketched) + np.flatnonzero(is_missing)
                slots = np.where(np.isin(slots, missing), -1, slots)
        return Measurements(columns, structure, sketches, slots, columns.finite)

    def statistics_or_zero(self, rows: Indices) -> Floats:
        """Return the statistics of some rows, shape (8, rows), 0 where absent."""
        return np.nan_to_num(self.columns.statistics(rows))


def _stack_sketches(sketches: Sequence[bytes | None], width: int) -> tuple[Floats, Flags]:
    """Return sketches as rows of an array, zeros where missing, and which are missing.

    Args:
        width: Numbers in a sketch of this forward, 0 if it has none. Others are missing.
    """
    usable = [
        sketch if sketch is not None and (not width or len(sketch) == 4 * width) else None
        for sketch in sketches
    ]
    if not width:
        width = max((len(sketch) // 4 for sketch in usable if sketch is not None), default=0)
    zeros = bytes(4 * width)
    content = b"".join(zeros if sketch is None else sketch for sketch in usable)
    table = np.frombuffer(content, "<f4").reshape(len(usable), width)
    return table.astype(np.float64), np.array([sketch is None for sketch in usable])


def measure_floors(reference: Measurements, noise: Measurements, partners: Indices) -> Floats:
    """Return the errors of the reference's rows under noise, NaN where unknown.

    Args:
        partners: For each row of the reference, the same row under noise, -1 without one.
    """
    rows = np.flatnonzero(partners >= 0)
    first, noise_first = reference.structure.first[rows], noise.structure.first[partners[rows]]
    is_same_size = reference.columns.numel[first] == noise.columns.numel[noise_first]
    rows, first, noise_first = rows[is_same_size], first[is_same_size], noise_first[is_same_size]
    error, by_statistics = errors_by_sketch(reference, first, noise, noise_first)
    error[by_statistics] = statistics_errors(
        reference.columns.statistics(rows[by_statistics]),
        noise.columns.statistics(partners[rows[by_statistics]]),
        reference.columns.numel[first[by_statistics]],
    )
    return largest_errors(error, first, len(partners))[reference.structure.first]


def errors_by_sketch(
    reference: Measurements, rows: Indices, port: Measurements, port_rows: Indices
) -> tuple[Floats, Indices]:
    """Return the errors of pairs of rows by their sketches, and the pairs that need statistics."""
    slots, port_slots = reference.slots[rows], port.slots[port_rows]
    is_sketched = (slots >= 0) & (port_slots >= 0)
    error = np.full(len(rows), np.nan)
    sketches = reference.sketches[slots[is_sketched]]
    port_sketches = port.sketches[port_slots[is_sketched]]
    if sketches.shape[1:] == port_sketches.shape[1:]:
        norms = reference.columns.l2[rows[is_sketched]]
        error[is_sketched] = sketch_errors(sketches, port_sketches, norms)
    return error, np.flatnonzero(np.isnan(error))


@dataclass(slots=True)
class PartGroup:
    """Pairs of a whole on one side and several parts on the other.

    pairs: Indices in the plan. whole: Rows, shape (pairs,). parts: Rows, shape (parts, pairs).
    """

    pairs: Indices
    whole: Indices
    parts: NDArray[np.int64]
    whole_is_reference: bool

    def whole_and_part_side(
        self, reference: Measurements, port: Measurements
    ) -> tuple[Measurements, Measurements]:
        """Return the side of the whole, and that of the parts."""
        return (reference, port) if self.whole_is_reference else (port, reference)

    def sum_errors(self, reference: Measurements, port: Measurements) -> Floats:
        """Compare the whole with the sum of the parts; NaN without sketches."""
        side, part_side = self.whole_and_part_side(reference, port)
        slots, part_slots = side.slots[self.whole], part_side.slots[self.parts]
        error = sum_errors(side.sketches[slots], part_side.sketches[part_slots])
        return np.where((slots < 0) | (part_slots < 0).any(axis=0), np.nan, error)

    def fused_errors(self, reference: Measurements, port: Measurements) -> Floats:
        """Compare the whole with the concatenated parts; NaN if their sizes do not add up."""
        side, part_side = self.whole_and_part_side(reference, port)
        parts = part_side.statistics_or_zero(self.parts.ravel())
        return fused_errors(
            side.statistics_or_zero(self.whole),
            parts.reshape(-1, *self.parts.shape),
            side.columns.numel[self.whole],
            part_side.columns.numel[self.parts],
        )


def part_groups(groups: Groups) -> list[PartGroup]:
    """Return the collected groups as arrays."""
    arrays = []
    for (whole_is_reference, _), rows in groups.items():
        pairs, whole, *parts = np.array(rows, dtype=np.int64).T
        arrays.append(PartGroup(pairs, whole, np.array(parts), whole_is_reference))
    return arrays
