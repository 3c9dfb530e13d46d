"""Compare two tensors that should be equal, or a fused one and its parts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from otel_torch.parity.call_graph import Sketch
from otel_torch.parity.rules import ORDER_BLIND, Floats, fused_errors, statistics_errors
from otel_torch.parity.training.steps import RecordedTensor

# what a fit of one factor may leave (relative L2), beside the limit of the tensors
_EXACT = 1e-4


def norm_of(parts: Sequence[RecordedTensor]) -> float:
    """Return the norm of tensors joined, NaN where one is not recorded."""
    return math.sqrt(sum(part.l2**2 for part in parts))


def distance(
    reference: Sequence[RecordedTensor], port: Sequence[RecordedTensor], in_order: bool
) -> float | None:
    """Return the L2 distance, infinite with NaN or Inf on one side, None where it is unknown.

    Args:
        in_order: Whether the elements are in the same order on both sides.
    """
    are_finite = [all(part.is_finite for part in side) for side in (reference, port)]
    if not all(are_finite):
        return 0.0 if are_finite[0] == are_finite[1] else math.inf
    if sum(part.numel for part in reference) != sum(part.numel for part in port):
        return None
    if len(reference) == len(port) == 1 and in_order:
        sketches = reference[0].sketch, port[0].sketch
        if sketches[0] is not None and sketches[1] is not None:
            return float(np.linalg.norm(sketches[0] - sketches[1]))
    error = _order_blind_error(reference, port)
    return None if math.isnan(error) else error * norm_of(reference)


def _order_blind_error(
    reference: Sequence[RecordedTensor], port: Sequence[RecordedTensor]
) -> float:
    if len(reference) == len(port) == 1:
        numel = np.array([float(reference[0].numel)])
        return float(statistics_errors(_statistics(reference), _statistics(port), numel)[0])
    whole, parts = sorted((reference, port), key=len)
    sizes = np.array([[float(part.numel)] for part in parts])
    error = fused_errors(
        np.nan_to_num(_statistics(whole)),
        np.nan_to_num(_statistics(parts))[:, :, None],
        np.array([float(whole[0].numel)]),
        sizes,
    )
    return float(error[0])


def _statistics(tensors: Sequence[RecordedTensor]) -> Floats:
    """Return the order-blind statistics, shape (6, tensors), NaN where absent."""
    rows = [[getattr(tensor.record, name) for tensor in tensors] for name in ORDER_BLIND]
    return np.array(
        [[x if isinstance(x, int | float) else math.nan for x in row] for row in rows], dtype=float
    )


def factor_of(reference: Sketch | None, port: Sketch | None, limit: float) -> float | None:
    """Return by which number the port's tensor is the reference's, None if by none.

    Args:
        limit: The relative error that the two may have otherwise.

    >>> factor_of(np.array([1.0, 2.0, 3.0]), np.array([2.0, 4.0, 6.0]), limit=0.0)
    2.0
    """
    if reference is None or port is None:
        return None
    square = float(reference @ reference)
    if not square or not np.isfinite(port).all():
        return None
    factor = float(reference @ port) / square
    remainder = float(np.linalg.norm(port - factor * reference))
    return factor if remainder <= max(limit, _EXACT) * float(np.linalg.norm(port)) else None
