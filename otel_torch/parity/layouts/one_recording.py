"""Make the recordings of ranks the recording that one process would have made.

The places of a step go through three passes: what do the ranks hold of each tensor, which sums are
used before they are reduced, and what would one process have written. `diff` then compares the
result as it compares any other recording, and `explain` adds the ranks to what it finds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from otel_torch.parity.layouts.call_numbers import CallNumbers
from otel_torch.parity.layouts.dealt_calls import find_dealt_calls
from otel_torch.parity.layouts.equal_rows import EqualRows, TiedWeights
from otel_torch.parity.layouts.fused_parts import FusedParts
from otel_torch.parity.layouts.gradient_scales import describe_all_gradients, find_unscaled
from otel_torch.parity.layouts.judged_places import (
    JudgedPlace,
    TensorName,
    expect_no_reduction,
    judge_places,
)
from otel_torch.parity.layouts.merged_metadata import (
    merge_metadata,
    use_others_than_parameters,
)
from otel_torch.parity.layouts.numbering import number_ranks
from otel_torch.parity.layouts.padded_tables import PaddedTables
from otel_torch.parity.layouts.rank_rows import (
    PlaceKey,
    iterate_places,
    without_numbers,
)
from otel_torch.parity.layouts.same_batches import have_same_batches
from otel_torch.parity.layouts.sharded_tables import ShardedTables
from otel_torch.parity.layouts.skipped_updates import SkippedUpdates, ranks_that_skip
from otel_torch.parity.layouts.whole_row import CHANGED_BY_PADDING, row_of_all, row_of_rank
from otel_torch.parity.layouts.whole_statistics import SCALING, STATISTICS
from otel_torch.parity.layouts.wrong_part import find_wrong_parts
from otel_torch.parity.layouts.wrong_places import (
    Biases,
    EqualParts,
    WrongPlace,
    describe_wrong,
)
from otel_torch.parity.recording_source import MadeRecording, Warn
from otel_torch.recording.rows import Row
from otel_torch.records import FORWARD_PHASES

# wrong places that are kept; the first ones matter
_MOST_WRONG = 5000
# wrong places whose rank is searched for in those that follow
_MOST_SEARCHED = 50
# places of single ranks that are kept
_MOST_SINGLE = 200_000


@dataclass(slots=True)
class OneRecording:
    """The recording of all ranks, and what is wrong on which rank.

    Attributes:
        rank_of_settings: The first rank whose optimizers have other settings than the reference's,
            None if all of them have, or none.
        only_rank: The rank of each place that a single one has.
    """

    recording: MadeRecording
    wrong: dict[PlaceKey, WrongPlace] = field(default_factory=dict)
    rank_of_settings: int | None = None
    only_rank: dict[PlaceKey, int] = field(default_factory=dict)


def make_one_recording(
    reference: Path, folder: Path, ranks: dict[int, Path], warn: Warn, leave_out: Warn
) -> OneRecording:
    """Make one recording of the recordings of several ranks.

    Args:
        reference: The recording of the same model in one process.
        folder: The folder of the ranks, for messages.
        ranks: Rank -> recording.
        warn: Called with a line for each problem.
        leave_out: Called with a line for what the ranks computed and is left out.

    Raises:
        RecordingError: A file is not a recording.
    """
    cuts: list[str] = []
    numberings = number_ranks(reference, ranks)
    one = OneRecording(MadeRecording(folder))
    incomplete: list[Row] = []
    in_parts: list[Row] = []
    padded_ends: list[Row] = []
    has_gradients = False
    biases, equal_rows, tied = Biases(), EqualRows(), TiedWeights()
    equal_parts = EqualParts()
    in_order: set[TensorName] = set()
    tables, fused, padded = ShardedTables(), FusedParts(len(ranks)), PaddedTables()
    passes = fused.accept, padded.forget_others, tables.set_aside
    are_used_elsewhere = use_others_than_parameters(reference, ranks)
    skipped = SkippedUpdates(ranks_that_skip(reference, ranks))
    same_batches = have_same_batches(reference, next(iter(ranks.values())))
    dealt, groups = find_dealt_calls(reference, ranks, numberings)
    steps = iterate_places(
        reference if same_batches else None, ranks, numberings, dealt, cuts.append
    )
    for recorded in steps:
        if skipped.step is not None:
            leave_out(
                f"nothing was compared after step {skipped.step[1]}: rank {min(skipped.ranks)} "
                "does not update its parameters there, and counts its steps from another one"
            )
            break
        places = skipped.undo(recorded)
        judged = judge_places(places, len(ranks), passes, groups, in_order)
        find_unscaled(judged, are_used_elsewhere)
        if are_used_elsewhere:
            expect_no_reduction(judged)
        tied.learn(judged)
        causes = equal_rows.find_causes(judged)
        one.wrong |= describe_all_gradients(judged, causes)
        rows_of_ranks = (row for place in places for row in place.ranks)
        numbers = CallNumbers(rows_of_ranks, are_in_time=bool(dealt))
        rows = []
        for index, place in enumerate(judged):
            if place.is_in_unknown_parts:
                # the reference has the norms of a tied weight, and its numbers, elsewhere
                if place.key.phase != "train" and not tied.has(place):
                    in_parts.append(place.rows[0].row)
                continue
            biases.learn(place)
            equal_parts.learn(place)
            has_gradients |= place.key.phase == "backward"
            if place.is_padded_end:
                padded_ends.append(place.rows[0].row)
            if len(place.place.ranks) == 1 and len(one.only_rank) < _MOST_SINGLE:
                one.only_rank[place.key] = place.place.ranks[0].rank
            row = _row_of(place, numbers)
            if row is None:
                incomplete.append(place.place.ranks[0].row)
                continue
            rows.append(row)
            if place.is_notable and len(one.wrong) < _MOST_WRONG:
                wrong = _describe(judged, index, biases, len(one.wrong))
                if equal_parts.has(place) and wrong.says_equal_parts:
                    wrong = WrongPlace(None, None, "")
                cause = causes.get(place.key)
                if cause is not None:
                    wrong = WrongPlace(place.rows[0].rank, cause, "")
                one.wrong[place.key] = wrong
        one.recording.extend(_in_time(rows))
    for cut in cuts:
        leave_out(cut)
    if padded_ends and not has_gradients:
        leave_out(
            f"the ranks pad the output {padded_ends[0]['tensor']} of "
            f"{padded_ends[0].get('model')}, and what is in the padding is not known, so that it "
            "was not compared: `otel-torch bisect` compares the ranks part by part"
        )
    if incomplete:
        leave_out(
            f"{len(incomplete)} rows were left out because some shards of their tensors are "
            "missing (is a rank's recording missing?); the first is "
            f"{_name_of(incomplete[0])}"
        )
    if in_parts:
        why = (
            "the reference has no such tensors to tell how the parts belong together"
            if same_batches
            else "the programs batch their tokens differently: compare the port on one device with "
            "the reference, and then with its ranks"
        )
        warn(
            f"{len(in_parts)} rows of which each rank has its own part were left out, such as "
            f"{_name_of(in_parts[0])}: {why}"
        )
    one.recording.meta, one.rank_of_settings = merge_metadata(
        reference, ranks, numberings, warn, groups, is_cut=bool(cuts)
    )
    return one


def _describe(judged: list[JudgedPlace], index: int, biases: Biases, described: int) -> WrongPlace:
    """Return what is wrong at a place.

    Args:
        described: The number of places before it that are wrong.
    """
    place = judged[index]
    wrong = describe_wrong(place, biases)
    if wrong.rank is not None or described >= _MOST_SEARCHED:
        return wrong
    parts = find_wrong_parts(place, judged[index + 1 :])
    if not parts:
        return wrong
    rank = place.rows[parts[0]].rank
    sentence = f"Only rank {rank} is wrong." if len(parts) == 1 else "All ranks are wrong."
    return WrongPlace(rank, wrong.cause, sentence)


def _name_of(row: Row) -> str:
    return f"{row['module'] or row.get('model')} {row['tensor']}"


def _row_of(judged: JudgedPlace, numbers: CallNumbers) -> Row | None:
    """Return the row of a place in one process; None if parts of the tensor are missing."""
    owner = numbers.renumber(judged.rows[0])
    layout = judged.layout
    if not judged.is_complete:
        return None
    if layout is None:
        return owner
    reference = judged.reference
    if judged.is_own and reference is not None and reference.numel == 1:
        # a right scalar of the whole lies between those of its parts: the other outputs decide
        return owner | {name: reference.row[name] for name in STATISTICS if name in reference.row}
    if judged.is_own or (judged.is_padded and math.isnan(layout.error)):
        shape = judged.whole_shape
        return without_numbers(owner) | {"shape": shape, "numel": math.prod(shape)}
    if judged.unreduced:
        return _row_of_terms(judged, owner)
    if layout.kind == "whole" and layout.scale == 1:
        return row_of_rank(owner, judged.rows[judged.worst])
    whole = row_of_all(owner, layout, judged.rows, judged.whole_shape)
    if reference is not None and not layout.is_wrong and judged.rows[0].is_integer:
        # integers are compared exactly, and what follows from their parts is rounded
        whole |= {
            name: reference.row[name] for name in SCALING if name in {*whole} & {*reference.row}
        }
    if judged.is_padded:
        return {name: value for name, value in whole.items() if name not in CHANGED_BY_PADDING}
    return whole


def _row_of_terms(judged: JudgedPlace, owner: Row) -> Row:
    """Return the row of a sum that was not reduced: the first rank's term.

    A rank of a mesh has a part of it; then the terms of some ranks are put together as if they
    were all of it.
    """
    layout, reference, rows = judged.layout, judged.reference, judged.rows
    if layout is None or layout.has_sketches or reference is None or not rows[0].numel:
        return owner
    parts = rows[:: max(1, len(rows) * rows[0].numel // (reference.numel or 1))]
    return row_of_all(owner, replace(layout, kind="parts"), parts, judged.whole_shape)


def _in_time(rows: list[Row]) -> list[Row]:
    """Sort the rows of forwards by the time of their calls; those of the ranks come one by one."""
    indices = [
        index
        for index, row in enumerate(rows)
        if row.get("phase") in FORWARD_PHASES and None not in (row.get("order") or [None])
    ]
    in_time = sorted((rows[index] for index in indices), key=_time)
    ordered = list(rows)
    for index, row in zip(indices, in_time, strict=True):
        ordered[index] = row
    return ordered


def _time(row: Row) -> Any:
    return row["order"][0 if row["tensor"].startswith("in") else 1]
