"""Causes that sketches show: a factor, a missing term, a sum. Sketches are linear.

The sketch of `a x + b y` is `a sketch(x) + b sketch(y)`. So if the port's tensor is the reference's
times two, or lacks one term of a sum, 64 numbers say so, and which term it is. A coincidence is
out of the question: the fit of one factor leaves 63 of the numbers to agree.

>>> import numpy as np
>>> fit(np.array([2.0, 4.0, 6.0]), [np.array([1.0, 2.0, 3.0])])
(array([2.]), 0.0)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from otel_torch.parity.diagnosis.clues import Clues, Measured
from otel_torch.parity.finding import Cause

Vector = NDArray[np.float64]

# what a fit may leave of the difference (relative L2), at best and at worst
_EXACT, _WORST = 1e-3, 0.1
# errors of sums of several tensors, as a multiple of the limit of one
_SUM_ERROR = 3.0
# fewer elements leave too few numbers to agree, with one factor and with two
_FEWEST, _FEWEST_FOR_TWO = 8, 32
# all pairs of so many tensors are tried
_MOST_IN_PAIRS = 64
# how close to a whole number a factor is read as one
_WHOLE = 2e-3
# decades by which numbers in two units, such as s and ms, may be off a power of ten:
# rounding in fp32
_SAME_UNIT = 1e-6
# a factor this close to 1 is written with more digits
_NEAR_ONE = 1e-3


def fit(target: Vector, columns: Sequence[Vector]) -> tuple[Vector, float]:
    """Return the factors of the columns closest to `target`, and the norm of what remains."""
    matrix = np.stack(columns, axis=1)
    factors = np.linalg.lstsq(matrix, target, rcond=None)[0]
    remainder = float(np.linalg.norm(target - matrix @ factors))
    negligible = 1e-12 * float(np.linalg.norm(target))
    return factors.astype(np.float64), remainder if remainder > negligible else 0.0


def equal_to_another(clues: Clues) -> Cause | None:
    """The port has another tensor of the reference here."""
    sketches = _sketches(clues)
    if sketches is None:
        return None
    reference, port = sketches
    for candidate in reversed(clues.right):
        if candidate.numel != clues.reference.numel:
            continue
        if candidate.sketch is not None and _explains(
            clues, port - candidate.sketch, candidate.sketch
        ):
            if _explains(clues, candidate.sketch - reference, reference):
                continue
            text = f"the port has {candidate.name} where the reference has {clues.reference.name}"
            return Cause("other_tensor", True, text)
    return None


def scaled(clues: Clues) -> Cause | None:
    """The port's tensor is the reference's, times a number."""
    vectors = _sketches(clues) or _elements(clues)
    if vectors is None or _is_one_number(clues):
        return None
    reference, port = vectors
    if not port.any():
        return Cause("zero", True, f"{clues.subject} is all zeros")
    factors, remainder = fit(port, [reference])
    if not _is_explained(clues, port - reference, remainder, reference):
        return None
    factor = float(factors[0])
    if abs(factor + 1) < _WHOLE:
        return Cause("negated", True, f"{clues.subject} is the reference's with the other sign")
    return Cause("scaled", True, f"{clues.subject} is the reference's times {_digits(factor)}")


def _digits(factor: float) -> str:
    """Return a factor with the digits that tell it from 1.

    >>> _digits(0.0883883), _digits(1.0001), _digits(0.99952)
    ('0.08839', '1.0001', '0.99952')
    """
    return f"{factor:.6g}" if abs(factor - 1) < _NEAR_ONE else f"{factor:.4g}"


def constant(clues: Clues) -> Cause | None:
    """Both tensors are one number each."""
    numbers = [side.extremes for side in (clues.reference, clues.port)]
    if any(low != high or not low for low, high in numbers):
        return None
    before, after = (low for low, _ in numbers)
    decades = np.log10(abs(after / before))
    is_other_unit = round(decades) != 0 and abs(decades - round(decades)) < _SAME_UNIT
    if clues.weight is None and not is_other_unit:
        text = f"{clues.subject} is {after:.6g}, and the reference's {before:.6g}"
        return Cause("number", True, text)
    text = f"{clues.subject} is the reference's times {after / before:.4g}"
    return Cause("scaled", False, f"{text}: {after:.4g}, not {before:.4g}")


def shifted(clues: Clues) -> Cause | None:
    """The port's tensor is the reference's plus a number: every statistic moves with it."""
    reference, port = clues.reference, clues.port
    moves = [port.statistic(name) - reference.statistic(name) for name in ("min", "max", "mean")]
    shift = moves[2]
    size = max(reference.statistic("std"), abs(shift))
    if not np.isfinite([*moves, size]).all() or clues.reference.numel < _FEWEST:
        return None
    slack = max(clues.limit, 1e-6) * max(*map(abs, reference.extremes), *map(abs, port.extremes))
    spread = abs(port.statistic("std") - reference.statistic("std"))
    if abs(shift) < 100 * slack or max(abs(move - shift) for move in moves) > 4 * slack:
        return None
    if not spread <= 4 * slack or reference.statistic("std") < 100 * slack:
        return None
    return Cause("shifted", True, f"{clues.subject} is the reference's plus {shift:.4g}")


def scaled_and_shifted(clues: Clues) -> Cause | None:
    """The port's tensor is the reference's times a number, plus another one.

    The extremes give both numbers, mean and standard deviation confirm them.
    """
    reference, port = clues.reference, clues.port
    low, high = reference.extremes
    port_low, port_high = port.extremes
    if clues.reference.numel < _FEWEST or not high > low:
        return None
    slack = max(clues.limit, 1e-6) * max(*map(abs, reference.extremes), *map(abs, port.extremes))
    for first, last in ((port_low, port_high), (port_high, port_low)):
        factor = (last - first) / (high - low)
        shift = first - factor * low
        mean, deviation = reference.statistic("mean"), reference.statistic("std")
        errors = (
            port.statistic("mean") - factor * mean - shift,
            port.statistic("std") - abs(factor) * deviation,
        )
        if abs(factor) * deviation < 100 * slack or abs(shift) < 100 * slack:
            continue
        if max(map(abs, errors)) <= 4 * slack and _fits_elements(clues, factor, shift, slack):
            numbers = (
                f"times {_digits(factor)}, {'plus' if shift > 0 else 'minus'} {abs(shift):.4g}"
            )
            return Cause("scaled", True, f"{clues.subject} is the reference's {numbers}")
    return None


def _fits_elements(clues: Clues, factor: float, shift: float, slack: float) -> bool:
    """Return whether all elements that were kept agree; True if none were."""
    if clues.elements is None:
        return True
    reference, port = clues.elements
    return bool((np.abs(factor * reference + shift - port) <= 4 * slack).all())


def _is_one_number(clues: Clues) -> bool:
    """Return whether all elements of both activations are one number.

    Any number is another one times a factor, so that a factor says nothing of it.
    """
    extremes = (clues.reference.extremes, clues.port.extremes)
    return clues.weight is None and all(low == high for low, high in extremes)


def one_term(clues: Clues) -> Cause | None:
    """The port lacks a term, has one too many, or weighs one otherwise."""
    sketches = _sketches(clues)
    if sketches is None:
        return None
    reference, port = sketches
    difference = port - reference
    for candidate, sketch in _with_sketches(clues):
        factors, remainder = fit(difference, [sketch])
        if not _is_explained(clues, difference, remainder):
            continue
        factor = float(factors[0])
        return Cause(_term_kind(factor), True, _term_text(clues.subject, candidate.name, factor))
    return None


def one_part_scaled(clues: Clues) -> Cause | None:
    """One part of a fused weight is the reference's times a number."""
    sketches = _sketches(clues)
    if sketches is None or clues.weight is None or not clues.weight.is_fused:
        return None
    difference = sketches[1] - sketches[0]
    for candidate, sketch in _with_sketches(clues):
        factors, remainder = fit(difference, [sketch])
        if _is_explained(clues, difference, remainder):
            text = f"the part {candidate.name} of {clues.subject} is the reference's times"
            return Cause("scaled", True, f"{text} {1 + float(factors[0]):.4g}")
    return None


def sum_of_two(clues: Clues) -> Cause | None:
    """The port's tensor is the sum of two recorded ones."""
    sketches = _sketches(clues)
    if sketches is None or clues.reference.numel < _FEWEST_FOR_TWO:
        return None
    reference, port = sketches
    recent = list(_with_sketches(clues))[:_MOST_IN_PAIRS]
    for (first, first_sketch), (second, second_sketch) in itertools.combinations(recent, 2):
        for target, is_port in ((port, True), (port - reference, False)):
            factors, remainder = fit(target, [first_sketch, second_sketch])
            rounded = np.round(factors)
            if np.abs(factors - rounded).max() > _WHOLE or not rounded.all():
                continue
            if _is_explained(clues, target, remainder):
                terms = _signed_sum(rounded, (first.name, second.name))
                if is_port:
                    text = f"{clues.subject} is {terms}, and the reference's is not"
                else:
                    text = f"{clues.subject} is the reference's plus ({terms})"
                return Cause("sum", True, text)
    return None


def _sketches(clues: Clues) -> tuple[Vector, Vector] | None:
    reference, port = clues.reference, clues.port
    if reference.sketch is None or port.sketch is None or reference.numel != port.numel:
        return None
    if len(reference.sketch) != len(port.sketch):
        return None  # sketches of rows in other shapes
    if reference.numel < _FEWEST or not np.isfinite([reference.sketch, port.sketch]).all():
        return None
    if _is_one_number(clues) and port.sketch.any():
        return None
    return reference.sketch, port.sketch


def _elements(clues: Clues) -> tuple[Vector, Vector] | None:
    """Return all elements, which are known of fused tensors without a sketch."""
    if clues.elements is None or np.iscomplexobj(clues.elements[0]):
        return None
    reference, port = clues.elements
    return reference.ravel(), port.ravel()


def _with_sketches(clues: Clues) -> Iterator[tuple[Measured, Vector]]:
    """Yield the earlier tensors of this size, the latest first, each content once."""
    seen: list[Vector] = []
    for candidate in reversed(clues.same_size):
        sketch = candidate.sketch
        if sketch is None or not np.isfinite(sketch).all() or not sketch.any():
            continue
        if any(np.array_equal(sketch, other) for other in seen):
            continue
        seen.append(sketch)
        yield candidate, sketch


def _is_explained(
    clues: Clues, difference: Vector, remainder: float, reference: Vector | None = None
) -> bool:
    """Return whether a fit leaves no more of a difference than rounding would."""
    size = float(np.linalg.norm(difference))
    reference = clues.reference.sketch if reference is None else reference
    assert reference is not None
    rounding = _SUM_ERROR * clues.limit * float(np.linalg.norm(reference))
    allowed = max(rounding, _EXACT * size)
    return remainder <= allowed <= _WORST * size


def _explains(clues: Clues, difference: Vector, expected: Vector) -> bool:
    """Return whether two sketches are equal but for rounding."""
    size = float(np.linalg.norm(expected))
    return float(np.linalg.norm(difference)) <= max(_SUM_ERROR * clues.limit, 1e-6) * size


def _term_kind(factor: float) -> str:
    if abs(factor + 1) < _WHOLE:
        return "term_missing"
    return "term_added" if abs(factor - 1) < _WHOLE else "term_scaled"


def _term_text(subject: str, name: str, factor: float) -> str:
    if abs(factor + 1) < _WHOLE:
        return f"{subject} is the reference's without {name}"
    if abs(factor - 1) < _WHOLE:
        return f"{subject} is the reference's plus {name}"
    return f"{subject} is the reference's plus {factor:.4g} times {name}"


def _signed_sum(factors: Vector, names: Sequence[str]) -> str:
    """Return a sum as in a sentence.

    >>> _signed_sum(np.array([1.0, -2.0]), ["a", "b"])
    'a minus 2 times b'
    """
    words: list[str] = []
    for factor, name in zip(factors, names, strict=True):
        word = "minus " if factor < 0 else "plus " if words else ""
        times = "" if abs(factor) == 1 else f"{abs(factor):g} times "
        words.append(f"{word}{times}{name}")
    return " ".join(words)
