"""Find by which factors the ranks scaled all their gradients of a step, before these are judged.

Clipping multiplies every gradient of a rank by one number. If a gradient was not reduced, the norm
is another one and so is this number: sums are recognized only without it. If ranks clip by norms of
their own parts, their numbers differ:

    one process    g0            g1
    two ranks      1.6 * g0      1.9 * g1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from otel_torch.parity.call_graph import Sketch
from otel_torch.parity.diagnosis.linear import fit
from otel_torch.parity.finding import Cause
from otel_torch.parity.layouts.judged_places import JudgedPlace
from otel_torch.parity.layouts.rank_layout import recognize, terms_of
from otel_torch.parity.layouts.rank_rows import PlaceKey, RankRow
from otel_torch.parity.layouts.wrong_places import WrongPlace

# how close the factors of a rank's gradients are, and how many of the gradients share them
_ONE_FACTOR, _MOST = 1e-2, 0.7
# factors that differ by less are equal
_SAME = 2e-3
# gradients below this part of the largest are rounding
_NEGLIGIBLE = 1e-4
Terms = list[tuple[RankRow, Sketch]]
# fewer gradients than this have no common factor
_FEW = 4


def find_unscaled(judged: Sequence[JudgedPlace], are_used_elsewhere: bool = False) -> None:
    """Judge the wrong gradients of a step without the factors that the ranks multiplied by.

    Args:
        are_used_elsewhere: Whether optimizers use others that are made of these, and scaled.
    """
    for entries in _gradients_by_model(judged).values():
        scales = _scales_of_ranks(entries)
        if scales and not _scale_activations(judged, scales, entries[0].key):
            _divide(entries, scales, are_used_elsewhere)


def describe_all_gradients(
    judged: Sequence[JudgedPlace], causes: dict[PlaceKey, Cause]
) -> dict[PlaceKey, WrongPlace]:
    """Return what is wrong with the gradients of a model alike, by the place of all of them.

    Args:
        causes: Those of single places that are known.
    """
    described = {}
    for model, entries in _gradients_by_model(judged).items():
        position = entries[0].key.position
        known = [causes[entry.key] for entry in entries if entry.key in causes]
        cause = _common_cause(entries) or next(iter(known[_FEW - 1 :]), None)
        if cause is not None:
            key = PlaceKey(model, "", "param_grad", *position, 0, "backward", None)
            rank = min(row.rank for entry in entries for row in entry.rows)
            described[key] = WrongPlace(rank, cause, "")
    return described


def _common_cause(entries: Sequence[JudgedPlace]) -> Cause | None:
    unreduced = [entry for entry in entries if entry.unreduced]
    if len(unreduced) >= max(_FEW, _MOST * len(entries)):
        text = (
            "each rank has the gradients of its own part of the batch: the reference's are made "
            f"of those of {len(unreduced[0].rows)} ranks, so a reduction over the ranks "
            "(all-reduce, reduce-scatter) is missing"
        )
        return Cause("partial_sum", True, text)
    scales = next((entry.rank_scales for entry in entries if entry.rank_scales), None)
    if scales is None:
        return None
    factors = ", ".join(f"{scale:.4g} on rank {rank}" for rank, scale in sorted(scales.items()))
    text = (
        f"each rank has multiplied its gradients by a number of its own ({factors}), as clipping "
        "by the norm of its own part does"
    )
    return Cause("clipped_by_own_norm", True, text)


def _gradients_by_model(judged: Sequence[JudgedPlace]) -> dict[str, list[JudgedPlace]]:
    by_model: dict[str, list[JudgedPlace]] = {}
    for entry in judged:
        if entry.key.is_parameter_gradient and entry.layout is not None:
            by_model.setdefault(entry.key.model, []).append(entry)
    return by_model


def _scales_of_ranks(entries: Sequence[JudgedPlace]) -> dict[int, float]:
    """Return rank -> what its gradients have to be multiplied by; empty if nothing explains them.

    Nor is anything to do where all are right as they are.
    """
    largest = max(
        (entry.reference.l2 for entry in entries if entry.reference is not None),
        default=0.0,
    )
    votes: dict[int, list[float]] = {}
    for entry in entries:
        reference = entry.reference
        if reference is None or reference.sketch is None or reference.l2 < _NEGLIGIBLE * largest:
            continue
        for rank, factor in _factors(entry, reference.sketch):
            votes.setdefault(rank, []).append(factor)
    scales = {}
    for rank, factors in votes.items():
        scale = float(np.median(factors))
        agreeing = sum(abs(factor - scale) <= _ONE_FACTOR * abs(scale) for factor in factors)
        if len(factors) < _FEW or agreeing < _MOST * len(factors) or scale <= 0:
            return {}
        scales[rank] = scale
    return {} if all(abs(scale - 1) <= _SAME for scale in scales.values()) else scales


def _scale_activations(
    judged: Sequence[JudgedPlace], scales: dict[int, float], key: PlaceKey
) -> bool:
    """Return whether gradients inside of a model have a factor, too: clipping does not reach them.

    Args:
        key: Of a gradient of the same model and step.
    """
    for entry in judged:
        reference = entry.reference
        is_of_model = (entry.key.model, entry.key.position) == (key.model, key.position)
        if not entry.key.is_gradient_inside or not is_of_model or not entry.is_wrong:
            continue
        if reference is None or reference.sketch is None or entry.layout is None:
            continue
        for rank, factor in _factors(entry, reference.sketch):
            scale = scales.get(rank, 1.0)
            if abs(scale - 1) > _ONE_FACTOR and abs(factor - scale) <= _ONE_FACTOR * abs(scale):
                return True
    return False


def _factors(entry: JudgedPlace, whole: Sketch) -> Iterator[tuple[int, float]]:
    """Yield (rank, factor) by which the gradients on the ranks make up the whole."""
    assert entry.layout is not None
    limit = 3 * entry.layout.limit * float(np.linalg.norm(whole))
    copies = [
        (row.rank, float(factors[0]))
        for row in entry.rows
        if row.sketch is not None and row.sketch.any()
        for factors, remainder in [fit(whole, [row.sketch])]
        if remainder <= limit
    ]
    if len(copies) == len(entry.rows):
        yield from copies
        return
    for terms in _ways_to_add_up(entry):
        known = [(row, term) for row, term in terms if term.any()]
        if not known:
            continue
        factors, remainder = fit(whole, [term for _, term in known])
        if remainder <= limit:
            yield from (
                (row.rank, float(factor)) for (row, _), factor in zip(known, factors, strict=True)
            )
            return


def _ways_to_add_up(entry: JudgedPlace) -> Iterator[Terms]:
    rows, layout, reference = entry.rows, entry.layout, entry.reference
    if len(rows) < 2 or layout is None or reference is None:
        return
    if any("shard" in row.row for row in rows) or rows[0].numel == reference.numel:
        yield [(row, row.sketch) for row in rows if row.sketch is not None]
        return
    terms = terms_of(layout, rows)
    if terms is not None:
        yield [(row, term / layout.scale) for row, term in zip(rows, terms, strict=True)]


def _divide(
    entries: Sequence[JudgedPlace], scales: dict[int, float], are_used_elsewhere: bool
) -> None:
    """Recognize wrong gradients by their rows times the scales.

    A sum that is right then was not reduced. What is off by different factors on the ranks gets
    that of one rank, which is off by most, so that it is off by one number everywhere.
    """
    common = max((1 / scale for scale in scales.values()), key=lambda factor: abs(factor - 1))
    wrong = [rank for rank, scale in scales.items() if abs(scale - 1) > _SAME]
    differ = max(scales.values()) - min(scales.values()) > _SAME * max(scales.values())
    for entry in entries:
        reference, layout = entry.reference, entry.layout
        is_right = layout is None or layout.error <= layout.limit
        if reference is None or layout is None or is_right:
            continue
        if any(row.rank not in scales for row in entry.rows):
            continue
        unscaled = [row.times(scales[row.rank]) for row in entry.rows]
        if not layout.has_sketches:
            if differ:
                entry.rows = [row.times(common) for row in unscaled]
            continue
        unscaled_layout = recognize(reference, unscaled)
        if unscaled_layout.is_wrong:
            continue
        if are_used_elsewhere:
            entry.rows, entry.layout = unscaled, unscaled_layout
            continue
        if len(wrong) == 1 and len(scales) > 1 and unscaled_layout.kind != "sum":
            # the other ranks are right as they are
            index = next((i for i, row in enumerate(entry.rows) if row.rank == wrong[0]), None)
            entry.layout = replace(unscaled_layout, error=abs(common - 1), wrong=index)
            continue
        if unscaled_layout.kind == "sum":
            entry.layout, entry.unreduced = unscaled_layout, True
        elif differ:
            entry.rows = [row.times(common) for row in unscaled]
            entry.layout = replace(unscaled_layout, error=abs(common - 1), wrong=None)
            entry.rank_scales = {rank: 1 / scale for rank, scale in scales.items()}
