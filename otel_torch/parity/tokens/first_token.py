"""Say at which token a fault begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from otel_torch.parity.call_graph import summed_sketch
from otel_torch.parity.faults import Fault
from otel_torch.parity.tensor_pair import TensorPair
from otel_torch.parity.tokens.requests import MatchedToken

# the limit is that of a whole tensor: rounding in single rows, whose sketches are short, exceeds it
_ROW_FACTOR = 4.0


def describe_first_token(fault: Fault, tokens: Sequence[MatchedToken]) -> str:
    """Return a sentence that names the first wrong token of a fault, "" if it is not known."""
    pair, relation = fault.pair, fault.relation
    if pair is None or relation is None:
        return ""
    errors = errors_by_token(pair)
    wrong = _wrong_tokens(errors, relation.limit)
    if not any(wrong.values()):
        return ""
    return _describe([tokens[number] for number in wrong], np.array(list(wrong.values())))


def _wrong_tokens(errors: Mapping[int, float], limit: float) -> dict[int, bool]:
    """Return which tokens are wrong, by number.

    >>> _wrong_tokens({0: 1.2e-6, 1: 0.1}, 1e-6)
    {0: False, 1: True}
    >>> _wrong_tokens({0: 1.2e-7, 1: 2e-6}, 1e-6)
    {0: False, 1: True}
    """
    wrong = {number: not error <= _ROW_FACTOR * limit for number, error in errors.items()}
    if any(wrong.values()):
        return wrong
    return {number: not error <= limit for number, error in errors.items()}


def errors_by_token(pair: TensorPair) -> dict[int, float]:
    """Return the relative L2 error of each token of a pair, by number; empty if not known.

    Of a fused tensor and its parts, it is the error of the squares, which add up in any order.
    """
    if pair.basis == "fused" and not pair.is_single:
        return _errors_of_squares(pair)
    reference, port = summed_sketch(pair.reference), summed_sketch(pair.port)
    numbers = pair.reference[0].row.get("tokens")
    if numbers is None or reference is None or port is None or reference.shape != port.shape:
        return {}
    rows, port_rows = (side.reshape(len(numbers), -1) for side in (reference, port))
    with np.errstate(all="ignore"):  # rows may be infinite
        distance = np.linalg.norm(rows - port_rows, axis=1)
        errors = np.where(distance == 0, 0.0, distance / np.linalg.norm(rows, axis=1))
    return dict(zip(numbers, errors.tolist(), strict=True))


def _errors_of_squares(pair: TensorPair) -> dict[int, float]:
    sides = [
        [role.row.get("squares", ()) for role in roles] for roles in (pair.reference, pair.port)
    ]
    numbers = pair.reference[0].row.get("tokens", ())
    if {len(squares) for side in sides for squares in side} != {len(numbers)}:
        return {}
    reference, port = (np.sum(side, axis=0) for side in sides)
    with np.errstate(all="ignore"):  # rows may be infinite
        distance = np.abs(reference - port)
        errors = np.where(distance == 0, 0.0, distance / reference)
    return dict(zip(numbers, errors.tolist(), strict=True))


def _describe(tokens: Sequence[MatchedToken], wrong: NDArray[np.bool_]) -> str:
    """Say which tokens are wrong.

    >>> from otel_torch.parity.sides import Sides
    >>> tokens = [MatchedToken(2, position, Sides(None, None)) for position in range(3)]
    >>> _describe(tokens, np.array([False, True, True]))
    'It begins with token 1 of request 2.'
    >>> _describe(tokens, np.array([False, True, False]))
    'Only token 1 of request 2 is wrong.'
    >>> _describe(tokens, np.array([True, True, True]))
    'Every token is wrong.'
    >>> tokens = [MatchedToken(2, position, Sides(None, None)) for position in range(4)]
    >>> _describe(tokens, np.array([False, True, False, True]))
    'It begins with token 1 of request 2; some later ones are right.'
    """
    first = tokens[int(np.argmax(wrong))]
    name = f"token {first.position} of request {first.request}"
    if wrong.all() and len(wrong) > 1:
        return "Every token is wrong."
    if wrong.sum() == 1:
        return f"Only {name} is wrong."
    later = [
        bool(flag)
        for token, flag in zip(tokens, wrong, strict=True)
        if token.request == first.request and token.position > first.position
    ]
    if all(later):
        return f"It begins with {name}."
    return f"It begins with {name}; {'some ' if any(later) else ''}later ones are right."
