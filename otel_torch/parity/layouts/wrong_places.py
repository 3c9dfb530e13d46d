"""Say what is wrong on the ranks: a missing or doubled collective, or another rank's value."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from otel_torch.parity.finding import Cause
from otel_torch.parity.layouts.judged_places import JudgedPlace
from otel_torch.parity.layouts.rank_rows import RankRow

# fields that are equal where two ranks hold the same numbers
_NUMBERS = ("sum", "abs_mean", "min", "max")
UNKNOWN_RANK = "The numbers do not show which rank is wrong."
# how exactly sums have to agree: of what is expected, and of rounding
_EXACT, _ROUNDING = 1e-3, 1e-5


@dataclass(slots=True)
class Biases:
    """The vectors that a module of the reference may add to its outputs, by their modules."""

    _rows: dict[tuple[str, str], list[RankRow]] = field(default_factory=dict)

    def learn(self, judged: JudgedPlace) -> None:
        """Remember the row of a parameter when it is attached, if it may be a bias: a vector."""
        key, reference = judged.key, judged.reference
        if reference is None or len(reference.shape or ()) != 1:
            return
        if key.tensor.startswith("param.") and key.phase == "attach":
            self._rows.setdefault(key.module_path, []).append(reference)

    def total(self, judged: JudgedPlace) -> float:
        """Return the sum that the module's bias adds to its output, NaN without a single one."""
        key, reference = judged.key, judged.reference
        vectors = self._rows.get(key.module_path, ())
        if len(vectors) != 1 or reference is None or not key.tensor.startswith("out"):
            return math.nan
        bias = vectors[0]
        if not bias.numel or reference.numel % bias.numel:
            return math.nan
        return reference.numel / bias.numel * bias.number("sum")


@dataclass(slots=True)
class EqualParts:
    """The tensors of which ranks have equal parts by design, as of a batch that is doubled."""

    _names: set[tuple[str, str, str]] = field(default_factory=set)

    def learn(self, judged: JudgedPlace) -> None:
        """Remember a right tensor, if ranks have equal parts of it."""
        layout = judged.layout
        if layout is None or judged.is_wrong or layout.kind != "parts":
            return
        if _twins(judged) is not None:
            self._names.add(judged.key.tensor_name)

    def has(self, judged: JudgedPlace) -> bool:
        """Return whether a tensor had equal parts in a call that was right."""
        return judged.key.tensor_name in self._names


@dataclass(frozen=True, slots=True)
class WrongPlace:
    """What is wrong at a place.

    Attributes:
        rank: The rank that is wrong, the first one if several are; None if it is not known.
        cause: What is wrong, None where the numbers do not show it.
        sentence: What the ranks hold.
    """

    rank: int | None
    cause: Cause | None
    sentence: str

    @property
    def says_equal_parts(self) -> bool:
        """Whether the cause is that ranks have the part of another rank."""
        return self.cause is not None and self.cause.kind == "another_ranks_part"


def describe_wrong(judged: JudgedPlace, biases: Biases) -> WrongPlace:
    """Return what is wrong at a place."""
    cause = next((cause for find in _CAUSES if (cause := find(judged, biases))), None)
    rows, layout = judged.rows, judged.layout
    reordered = judged.reordered_row
    if cause is not None and judged.has_parts_in_other_order and _twins(judged) is None:
        return WrongPlace(rows[reordered or 0].rank, cause, "")
    if layout is None or judged.unreduced:
        return WrongPlace(rows[0].rank, cause, "")
    if layout.wrong is not None:
        rank = rows[layout.wrong].rank
        return WrongPlace(rank, cause, f"Only rank {rank} is wrong.")
    if layout.kind == "whole":
        sentence = "All ranks have the same value." if layout.agree else "All ranks are wrong."
        return WrongPlace(rows[0].rank, cause, sentence)
    twins = _twins(judged) if layout.kind == "parts" else None
    if twins is not None:
        # on a mesh, some of those with equal numbers are right
        is_known = len(rows) == len(judged.place.ranks)
        return WrongPlace(rows[twins[1]].rank if is_known else None, cause, "")
    if cause is not None and cause.kind != "random_stream":
        return WrongPlace(rows[0].rank, cause, "")
    return WrongPlace(None, cause, UNKNOWN_RANK)


def _mean_of_means(judged: JudgedPlace, biases: Biases) -> Cause | None:
    """Each rank averages the loss over its own tokens, and they have unequal numbers."""
    reference = judged.reference
    if judged.key.tensor != "loss" or reference is None or judged.same_inputs:
        return None
    losses = [row.number("mean") for row in judged.rows]
    is_between = min(losses) < reference.number("mean") < max(losses)
    if not (is_between if judged.has_own_mean is None else judged.has_own_mean):
        return None
    text = (
        "each rank averages the loss over its own part of the batch, and the parts do not count "
        "alike (as with unequal numbers of tokens): the mean of the ranks is another than that of "
        "all"
    )
    return Cause("mean_of_means", judged.has_own_mean is True, text)


def _whole_logits_as_parts(judged: JudgedPlace, biases: Biases) -> Cause | None:
    """A cross-entropy adds up the exponentials of logits that each rank has as a whole."""
    reference, count = judged.reference, len(judged.place.ranks)
    if judged.key.tensor != "loss" or reference is None:
        return None
    whole = reference.number("mean")
    more = [row.number("mean") - whole for row in judged.rows]
    if not all(abs(excess - math.log(count)) < _EXACT * (1 + abs(whole)) for excess in more):
        return None
    text = (
        f"the loss is larger by log({count}), {count} being the number of ranks: each rank has the "
        "logits of the whole vocabulary, and a cross-entropy over the ranks takes them for parts"
    )
    return Cause("whole_as_part", True, text)


def _partial_sum(judged: JudgedPlace, biases: Biases) -> Cause | None:
    """Each rank has its term of the sum, to which it may have added a bias."""
    layout, count = judged.layout, len(judged.rows)
    bias = ""
    if not judged.unreduced:
        if layout is None or layout.agree or layout.kind == "parts":
            return None
        added = (count - 1) * biases.total(judged)
        if not _sums_to(judged, sum(row.number("sum") for row in judged.rows), added):
            return None
        bias = f", to which each one adds the bias of {judged.key.module}"
    what = "mean" if layout is not None and layout.scale != 1 else "sum"
    text = (
        f"each rank has a partial sum{bias}: the reference has the {what} of those of the {count} "
        "ranks, so a reduction over the ranks (all-reduce, reduce-scatter) is missing"
    )
    return Cause("partial_sum", True, text)


def _reduced_twice(judged: JudgedPlace, biases: Biases) -> Cause | None:
    """All ranks have the value times the number of ranks, before a bias is added."""
    layout, reference = judged.layout, judged.reference
    if layout is None or reference is None or layout.kind == "parts" or not layout.agree:
        return None
    count, total = len(judged.place.ranks), biases.total(judged)
    own, whole = judged.rows[0].number("sum"), reference.number("sum")
    factor = _factor(judged)
    if abs(factor * count - 1) < _EXACT:
        text = (
            f"the value is {count} times too small, the number of ranks: it is averaged over the "
            "ranks once too often, or not added up"
        )
        return Cause("averaged_twice", True, text)
    if abs(factor - count) < _EXACT * count:
        text = f"the value is {count} times too large"
    elif _sums_to(judged, own, (count - 1) * (whole - total)):
        text = f"without its bias, the value is {count} times too large"
    elif _sums_to(judged, own, (1 / count - 1) * (whole - total)):
        text = (
            f"without its bias, the value is {count} times too small, the number of ranks: it is "
            "averaged over the ranks once too often, or not added up"
        )
        return Cause("averaged_twice", True, text)
    else:
        return None
    text += ", the number of ranks: it is added up over the ranks once too often"
    return Cause("reduced_twice", True, text)


def _bias_on_each_rank(judged: JudgedPlace, biases: Biases) -> Cause | None:
    """All ranks have the value with the bias times the number of ranks."""
    layout, count = judged.layout, len(judged.place.ranks)
    if layout is None or not layout.agree or layout.kind == "parts":
        return None
    if not _sums_to(judged, judged.rows[0].number("sum"), (count - 1) * biases.total(judged)):
        return None
    text = (
        f"the bias of {judged.key.module} is added on each of the {count} ranks before the "
        f"reduction, so that it counts {count} times"
    )
    return Cause("bias_on_each_rank", True, text)


def _another_ranks_part(judged: JudgedPlace, biases: Biases) -> Cause | None:
    """Ranks hold each other's parts."""
    layout, reference = judged.layout, judged.reference
    if layout is None or reference is None or layout.kind != "parts":
        return None
    twins = _twins(judged)
    if twins is not None and (layout.agree or _agree(judged.place.ranks)):
        text = "all ranks hold the same numbers, where each should have a part of its own"
        return Cause("another_ranks_part", True, text)
    if twins is not None:
        first, second = (judged.rows[index].rank for index in twins)
        text = f"rank {second} holds the part of another rank: the same numbers as rank {first}"
        return Cause("another_ranks_part", True, text)
    if not judged.has_parts_in_other_order:
        return None
    reordered = judged.reordered_row
    if reordered is not None:
        text = f"rank {judged.rows[reordered].rank} has the numbers of its part in another order"
        return Cause("another_ranks_part", False, text)
    text = (
        "the ranks hold each other's parts, or their own in another order: together they have the "
        "numbers of the reference, but in another order"
    )
    return Cause("another_ranks_part", True, text)


def _another_value(judged: JudgedPlace, biases: Biases) -> Cause | None:
    """Ranks differ where each should have the whole."""
    layout, row = judged.layout, judged.rows[0].row
    if layout is None or layout.kind != "whole" or len(judged.rows) < 2:
        return None
    if row["tensor"] == "loss" and not judged.same_inputs:
        return None  # each rank has that of its own part of the batch
    if layout.agree and layout.wrong is None:
        return None
    if layout.wrong is None:
        text = "the ranks have different values, where each should have the reference's"
    else:
        rank = judged.rows[layout.wrong].rank
        text = f"rank {rank} has another value than the other ranks, which have the reference's"
    if "Dropout" in str(row.get("class")) and row["tensor"].startswith("out"):
        return Cause("random_stream", True, f"{text}: the ranks draw other random numbers")
    if row.get("phase") == "backward":
        text += ": a term of it is not reduced over the ranks"
        return Cause("partial_sum", False, text)
    return Cause("ranks_differ", False, text)


def _other_random_numbers(judged: JudgedPlace, biases: Biases) -> Cause | None:
    """The ranks drop other elements of their parts than one process does, and as many."""
    layout, reference = judged.layout, judged.reference
    row = judged.rows[0].row
    if layout is None or reference is None or layout.kind != "parts" or judged.unreduced:
        return None
    if "Dropout" not in str(row.get("class")) or not row["tensor"].startswith("out"):
        return None
    text = "the ranks draw other random numbers for their parts than one process for the whole"
    return Cause("random_stream", False, text)


_CAUSES: tuple[Callable[[JudgedPlace, Biases], Cause | None], ...] = (
    _mean_of_means,
    _whole_logits_as_parts,
    _partial_sum,
    _reduced_twice,
    _bias_on_each_rank,
    _another_ranks_part,
    _another_value,
    _other_random_numbers,
)


def _sums_to(judged: JudgedPlace, total: float, moved: float) -> bool:
    """Return whether a sum is that of the reference, moved by a number other than zero."""
    reference = judged.reference
    if reference is None:
        return False
    rounding = _ROUNDING * reference.l2 * reference.numel**0.5
    slack = max(_EXACT * abs(moved), rounding)
    actual = total - reference.number("sum")
    return bool(abs(moved) > 10 * rounding and abs(actual - moved) <= slack)


def _factor(judged: JudgedPlace) -> float:
    """Return the number by which the value is a multiple of the reference's, NaN if it is not."""
    reference = judged.reference
    value = judged.rows[0].sketch
    if reference is None or reference.sketch is None or value is None or judged.layout is None:
        return math.nan
    whole = reference.sketch
    factor = float(value @ whole) / (float(whole @ whole) or math.nan)
    rest = float(np.linalg.norm(value - factor * whole))
    return factor if rest <= judged.layout.limit * float(np.linalg.norm(value)) else math.nan


def _agree(rows: Sequence[RankRow]) -> bool:
    """Return whether all rows have the same numbers."""
    return len({repr([row.row.get(name) for name in _NUMBERS]) for row in rows}) == 1


def _twins(judged: JudgedPlace) -> tuple[int, int] | None:
    """Return the indices of two rows with the same numbers."""
    seen: dict[tuple[object, ...], int] = {}
    for index, row in enumerate(judged.rows):
        numbers = tuple(row.row.get(name) for name in _NUMBERS)
        if None not in numbers and numbers in seen:
            return seen[numbers], index
        seen[numbers] = index
    return None
