"""Decide what the ranks hold at each place of a step, and which sums nobody reduced."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from otel_torch.parity.diagnosis.linear import fit
from otel_torch.parity.layouts.mesh_layout import is_on_mesh, is_reordered, recognize_on_mesh
from otel_torch.parity.layouts.padded_parts import is_padded, recognize_padded
from otel_torch.parity.layouts.rank_layout import (
    RankLayout,
    add_up,
    cuts,
    holders,
    recognize,
    terms_of,
)
from otel_torch.parity.layouts.rank_rows import (
    PlaceKey,
    RankRow,
    TensorPlace,
)
from otel_torch.records import FORWARD_PHASES

TensorName = tuple[str, str, str]  # model, module, tensor
_ACTIVATION_PHASES = (*FORWARD_PHASES, "backward")
# how closely the ranks differ by their terms, relative
_ADDED = 0.02
# parts in another order are at least this many limits off
_FAR = 20.0
# relative distance from which on two ranks hold different tensors, and not other roundings
_DIFFERENT = 1e-2
# relative difference from which on the ranks' shares of the tokens are unequal
_OTHER_SHARE = 1e-2
# how much more of the error one part explains than any other, at least, if it alone is wrong
_ONE_ALONE = 0.5


@dataclass(slots=True, eq=False)
class JudgedPlace:
    """A place and its layout.

    Attributes:
        rows: The rows of the ranks that hold the tensor.
        layout: None where the reference does not have the place.
        unreduced: The value is used as if it were whole, but each rank has only its term.
        same_inputs: It is a loss, and each rank computed it of the whole batch.
        has_own_mean: It is a loss, and the gradients that enter the model are the reference's times
            a number on each rank; None where they do not show it.
        is_padded: The parts have elements that the whole lacks.
        is_own: Each rank has numbers of its own by design.
        rank_scales: Rank -> what it has multiplied this and its other gradients by, where the
            ranks differ.
    """

    place: TensorPlace
    rows: Sequence[RankRow]
    layout: RankLayout | None
    unreduced: bool = False
    same_inputs: bool = False
    has_own_mean: bool | None = None
    is_padded: bool = False
    is_own: bool = False
    rank_scales: dict[int, float] = field(default_factory=dict)

    @property
    def key(self) -> PlaceKey:
        """What identifies the place."""
        return self.place.key

    @property
    def reference(self) -> RankRow | None:
        """The row of the process that ran alone, if it has the place."""
        return self.place.reference

    @property
    def is_notable(self) -> bool:
        """Whether ranks do not hold what the reference has, a single one even if only slightly."""
        if self.is_own:
            return False
        return self.is_wrong or (self.layout is not None and self.layout.wrong is not None)

    @property
    def is_padded_end(self) -> bool:
        """Whether the model returns it with a padding that keeps it from being compared."""
        key, layout = self.key, self.layout
        is_end = not key.module and key.tensor.startswith("out")
        return is_end and self.is_padded and layout is not None and math.isnan(layout.error)

    @property
    def is_wrong(self) -> bool:
        """Whether the ranks do not hold what the reference has."""
        return self.unreduced or (self.layout is not None and self.layout.is_wrong)

    @property
    def has_parts_in_other_order(self) -> bool:
        """Whether the parts together hold the reference's numbers, in a different order."""
        layout, reference = self.layout, self.reference
        if layout is None or reference is None or layout.kind != "parts":
            return False
        return layout.error >= _FAR * layout.limit and is_reordered(reference, self.rows)

    @property
    def reordered_row(self) -> int | None:
        """The index of the row whose numbers alone are in another order, None if several are.

        Where only part p is another order of p', the error e = p - p' has e·p = |e|²/2, as the two
        have one norm, and no product with the other parts. Parts that changed places share it.
        """
        layout, reference = self.layout, self.reference
        if layout is None or reference is None or not self.has_parts_in_other_order:
            return None
        terms = terms_of(layout, self.rows)
        if terms is None or len(terms) < 2 or reference.sketch is None:
            return None
        error = add_up(terms) - reference.sketch
        square = float(error @ error) / 2
        shares = [float(error @ term) / square for term in terms]
        longest = max(float(np.linalg.norm(term)) for term in terms)
        noise = longest * float(np.linalg.norm(error)) / error.size**0.5 / square
        *_, second, first = sorted(shares)
        is_alone = first - second > _ONE_ALONE + noise / 2
        return shares.index(first) if is_alone else None

    @property
    def is_in_unknown_parts(self) -> bool:
        """Whether the ranks hold different numbers, and no reference says how to join them."""
        first = self.rows[0]
        return self.layout is None and any(
            row.sketch is not None
            and first.sketch is not None
            and np.linalg.norm(row.sketch - first.sketch)
            > _DIFFERENT * np.linalg.norm(first.sketch)
            for row in self.rows[1:]
        )

    @property
    def whole_shape(self) -> list[int]:
        """The shape of the whole tensor."""
        row = self.rows[0].row
        if "shard" in row:
            return list(row["shard"]["shape"])
        part = list(row.get("shape") or [])
        if self.is_padded and self.reference is not None:
            return list(self.reference.shape or part)
        if self.layout is None or (self.layout.has_sketches and self.layout.kind != "parts"):
            return part
        if self.layout.dim is None:
            reference = self.reference
            return list((reference.shape if reference else None) or part)
        part[self.layout.dim] *= len(self.rows)
        return part

    @property
    def is_complete(self) -> bool:
        """Whether all parts of a distributed tensor are there."""
        row = self.rows[0].row
        if "shard" not in row or row["shard"]["partial"]:
            return True
        whole: list[int] = row["shard"]["shape"]
        return sum(row.numel for row in self.rows) == math.prod(whole)

    @property
    def worst(self) -> int:
        """The index of the row that is farthest from the reference."""
        return 0 if self.layout is None else self.layout.wrong or 0


def judge_places(
    places: Sequence[TensorPlace],
    count: int,
    passes: Sequence[Callable[[Sequence[JudgedPlace]], None]] = (),
    groups: int = 1,
    in_order: set[TensorName] | None = None,
) -> list[JudgedPlace]:
    """Return the places of a step with their layouts.

    Args:
        count: The number of all ranks.
        passes: What corrects layouts by what was seen in earlier steps, too.
        groups: Among how many groups of ranks the calls of one process are divided.
        in_order: The inputs of models that earlier steps cut in the order of the ranks. Those of
            this step are added.
    """
    judged = [_judge(place, count) for place in places]
    cut = set() if in_order is None else in_order
    # a program cuts its batches alike in all steps
    if any(_is_reordered_input(entry) and entry.key.tensor_name not in cut for entry in judged):
        _forget_order(judged, count)
    cut |= {entry.key.tensor_name for entry in judged if _is_input_in_order(entry)}
    if _have_same_inputs(judged):
        _expect_one_loss(judged)
    _compare_loss_with_gradients(judged)
    _accept_larger_gradients(judged, count, groups)
    _set_aside_own_scalars(judged)
    for correct in passes:
        correct(judged)
    for phase in dict.fromkeys(place.key.phase for place in places):
        if phase != "train":
            _mark_unreduced([entry for entry in judged if entry.key.phase == phase])
    if _have_same_inputs(judged):
        _mark_first_gradient(judged)
    return judged


def _judge(place: TensorPlace, count: int) -> JudgedPlace:
    if place.reference is None:
        return JudgedPlace(place, holders(place.ranks[0], place.ranks), None)
    rows = holders(place.reference, place.ranks)
    if is_padded(place.reference, rows):
        return JudgedPlace(place, *recognize_padded(place.reference, rows, count), is_padded=True)
    if is_on_mesh(place.reference, rows, count):
        return JudgedPlace(place, *recognize_on_mesh(place.reference, rows, count))
    # all ranks have the settings of one optimizer
    is_setting = place.key.phase == "train" and place.key.tensor.endswith("]")
    can_add_up = not is_setting and not _is_given_zeros(place, rows)
    return JudgedPlace(place, rows, recognize(place.reference, rows, can_add_up))


def _is_given_zeros(place: TensorPlace, rows: Sequence[RankRow]) -> bool:
    """Return whether some ranks give the model zeros instead of an input, which are no terms."""
    return place.key.is_input_of_model and any(row.l2 == 0 for row in rows)


def _is_reordered_input(entry: JudgedPlace) -> bool:
    reference, layout = entry.reference, entry.layout
    if not entry.key.is_input_of_model or reference is None or layout is None:
        return False
    if layout.kind != "parts" or not layout.is_wrong or not is_reordered(reference, entry.rows):
        return False
    # what one rank alone has in another order did not come from another rank
    return entry.reordered_row is None


def _is_input_in_order(entry: JudgedPlace) -> bool:
    layout = entry.layout
    if not entry.key.is_input_of_model or layout is None or layout.is_wrong:
        return False
    return layout.kind == "parts" and layout.has_sketches


def _forget_order(judged: Sequence[JudgedPlace], count: int) -> None:
    """Compare parts of activations without their order, as the batch has been cut in another."""
    for entry in judged:
        reference, layout = entry.reference, entry.layout
        is_part = layout is not None and layout.kind == "parts" and layout.is_wrong
        if reference is not None and is_part and entry.key.phase in _ACTIVATION_PHASES:
            entry.rows, entry.layout = recognize_on_mesh(reference, entry.rows, count)


def _accept_larger_gradients(judged: Sequence[JudgedPlace], count: int, groups: int) -> None:
    """Accept gradients inside modules of some ranks, such as experts, of a mean over own tokens.

    Each rank averages the loss over its part of the batch: that of two ranks is twice as large. An
    expert has the tokens of both, and the gradients of its parameters are divided afterwards. If
    ranks divide microbatches among them, each averages over fewer, and so is its loss larger.
    """
    replicas = {groups}
    if groups == 1:
        replicas = {number for entry in judged for number in (_cuts_of_input(entry), _means(entry))}
    larger = sorted(replicas - {1})
    if not larger:
        return
    for entry in judged:
        reference, layout = entry.reference, entry.layout
        is_loss = groups > 1 and entry.key.tensor == "loss"
        if not entry.key.is_gradient_inside and not is_loss:
            continue
        if reference is None or layout is None or not layout.is_wrong or count == 1:
            continue
        if groups == 1 and (len(entry.rows) == count or layout.kind != "whole"):
            continue
        for number in larger:
            rows = [row.times(1 / number) for row in entry.rows]
            layout = recognize(reference, rows, can_add_up=groups > 1)
            if not layout.is_wrong:
                entry.rows, entry.layout = rows, layout
                break


def _cuts_of_input(entry: JudgedPlace) -> int:
    """Return into how many parts the ranks cut an input of the whole model, 1 for other tensors."""
    reference, layout = entry.reference, entry.layout
    if not entry.key.is_input_of_model or reference is None or layout is None:
        return 1
    return reference.numel // (entry.rows[0].numel or 1) if layout.kind == "parts" else 1


def _means(entry: JudgedPlace) -> int:
    """Return how many losses of ranks the reference's is the mean of, 1 for other tensors."""
    layout = entry.layout
    if entry.key.tensor != "loss" or layout is None or layout.is_wrong or layout.agree:
        return 1
    return round(1 / layout.scale) if layout.kind == "sum" else 1


def _set_aside_own_scalars(judged: Sequence[JudgedPlace]) -> None:
    """Set aside the scalars that a model makes of each rank's part of the batch, such as its loss.

    They say nothing of the whole, as the parts may not count alike, unless it is beyond them all.
    """
    in_parts = {entry.key.model for entry in judged if _cuts_of_input(entry) > 1}
    for entry in judged:
        reference = entry.reference
        is_inside = entry.key.model in in_parts and entry.key.phase in FORWARD_PHASES
        if not is_inside or reference is None:
            continue
        values = [row.number("mean") for row in entry.place.ranks]
        is_between = min(values) < reference.number("mean") < max(values)
        entry.is_own = reference.numel == 1 and is_between


def _have_same_inputs(judged: Sequence[JudgedPlace]) -> bool:
    """Return whether each rank has the whole batch, at all models."""
    inputs = [entry.layout for entry in judged if entry.key.is_input_of_model]
    return bool(inputs) and all(layout and layout.kind == "whole" for layout in inputs)


def _expect_one_loss(judged: Sequence[JudgedPlace]) -> None:
    """Expect the reference's loss on each rank, unless their losses add up to it."""
    for entry in judged:
        reference = entry.reference
        if entry.key.tensor == "loss" and reference is not None and entry.is_wrong:
            entry.layout = recognize(reference, entry.rows, can_add_up=False)
            entry.same_inputs = True


def _compare_loss_with_gradients(judged: Sequence[JudgedPlace]) -> None:
    """Find out whether the ranks average a loss each over their own part of the batch.

    Then the gradients of the model's output on a rank are the reference's times one number: that
    of all tokens over that of its own. Padding that counts has gradients of its own.
    """
    for loss in judged:
        if loss.key.tensor != "loss" or not loss.is_wrong:
            continue
        factors = [
            of_entry for entry in judged if (of_entry := _factors_on_ranks(entry, loss)) is not None
        ]
        if factors:
            known = [factor for of_entry in factors for factor in of_entry]
            differ = known and max(known) - min(known) > _OTHER_SHARE * max(known)
            loss.has_own_mean = all(factors) and bool(differ)


def _factors_on_ranks(entry: JudgedPlace, loss: JudgedPlace) -> list[float] | None:
    """Return by which numbers the ranks' gradients of the model's output make up the reference's.

    Empty if they do not; None if it is another tensor, or the layout does not show it.
    """
    key, reference, layout = entry.key, entry.reference, entry.layout
    is_output = not key.module and key.tensor.startswith("grad") and key.phase == "backward"
    is_of_loss = (key.model, key.position) == (loss.key.model, loss.key.position)
    if not is_output or not is_of_loss:
        return None
    if reference is None or reference.sketch is None or layout is None or layout.kind != "parts":
        return None
    limit = 3 * layout.limit * float(np.linalg.norm(reference.sketch))
    dims = cuts(reference, entry.rows) if len(entry.rows) > 1 else []
    if not dims:
        return None
    fits = [fit(reference.sketch, [row.as_part[dim] for row in entry.rows]) for dim in dims]
    factors, remainder = min(fits, key=lambda fitted: fitted[1])
    return [float(factor) for factor in factors] if remainder <= limit else []


def _mark_unreduced(places: Sequence[JudgedPlace]) -> None:
    """Mark the sums that are used before a reduction, up to the first wrong place.

    A sum is in order if it is reduced before it is used. Otherwise what follows is wrong, and
    differs between the ranks: as the sum does where both are added to the same tensor. The output
    of a model, and the gradients that an optimizer uses, have to be reduced.
    """
    sums: list[JudgedPlace] = []
    before: list[JudgedPlace] = []  # those directly before the place
    reduced = _modules_with_right_gradients(places)
    is_over = False
    for entry in places:
        layout = entry.layout
        if layout is None or "shard" in entry.rows[0].row or math.isnan(layout.error):
            continue
        if entry.is_own:
            continue
        if entry.key.is_parameter_gradient:
            entry.unreduced = layout.kind == "sum" and not layout.is_wrong
        elif is_over:
            continue
        elif layout.kind == "sum" and entry.key.module_path in reduced:
            continue  # of rows that each rank has its own of, as the gradients of parameters show
        elif layout.kind == "sum" and layout.has_sketches and not layout.is_wrong:
            sums.append(entry)
            before.append(entry)
        elif layout.is_wrong:
            # parts that together have the reference's numbers were reduced
            if not layout.agree and not entry.has_parts_in_other_order:
                _mark([term for term in sums if _is_added(term, entry)] or before)
            is_over = True
        elif not _is_other_input(entry, before):
            before = []
    if not is_over and places and places[0].key.phase in FORWARD_PHASES:
        _mark(before)


def _mark_first_gradient(judged: Sequence[JudgedPlace]) -> None:
    """Mark the first gradient that is a sum over the ranks, if all later ones are sums, too.

    Ranks that compute the same batch have the same gradients; those of own rows are another case.
    """
    inside = [entry for entry in judged if entry.key.is_gradient_inside]
    kinds = [_is_right_sum(entry) for entry in inside]
    if True not in kinds:
        return
    first = kinds.index(True)
    modules = {entry.key.module_path for entry in inside[first:]}
    gradients = [
        entry
        for entry in judged
        if entry.key.phase == "backward" and entry.key.is_parameter_gradient
        if entry.key.module_path in modules
    ]
    # a part of a parameter gets only the rank's own term, too, which is wrong
    if gradients and all(kinds[first:]) and all(entry.is_wrong for entry in gradients):
        _mark(inside[first:])


def _is_right_sum(entry: JudgedPlace) -> bool:
    layout = entry.layout
    return layout is not None and layout.kind == "sum" and not layout.is_wrong


def _modules_with_right_gradients(places: Sequence[JudgedPlace]) -> set[tuple[str, str]]:
    """Return (model, module) whose parameters have right gradients, reduced over the ranks."""
    are_right: dict[tuple[str, str], bool] = {}
    for entry in places:
        module, layout = entry.key.module_path, entry.layout
        if entry.key.is_parameter_gradient and layout is not None:
            is_right = layout.kind == "whole" and not layout.is_wrong
            are_right[module] = are_right.get(module, True) and is_right
    return {name for name, is_right in are_right.items() if is_right}


def expect_no_reduction(judged: Sequence[JudgedPlace]) -> None:
    """Accept gradients of which each rank has a term, where no optimizer uses them as they are."""
    for entry in judged:
        if entry.key.is_parameter_gradient:
            entry.unreduced = False


def _is_other_input(entry: JudgedPlace, before: Sequence[JudgedPlace]) -> bool:
    """Return whether a place is an input of the call that receives a sum: a residual to add to."""
    return entry.key.is_input and any(
        sum_.key.is_input and sum_.key.module_call == entry.key.module_call for sum_ in before
    )


def _is_added(term: JudgedPlace, wrong: JudgedPlace) -> bool:
    """Return whether the ranks differ at a wrong place by their terms of a sum."""
    terms, values = ([row.sketch for row in judged.rows] for judged in (term, wrong))
    if len(terms) != len(values) or term.rows[0].numel != wrong.rows[0].numel:
        return False
    gaps = [
        (first - other, value - other_value)
        for first, other, value, other_value in zip(
            terms[:1] * len(terms), terms, values[:1] * len(values), values, strict=True
        )
        if first is not None and other is not None and value is not None and other_value is not None
    ]
    apart = sum(float(np.linalg.norm(gap)) for gap, _ in gaps)
    unexplained = sum(float(np.linalg.norm(gap - other)) for gap, other in gaps)
    return unexplained <= _ADDED * apart


def _mark(sums: Sequence[JudgedPlace]) -> None:
    for entry in sums:
        entry.unreduced = True
