"""Compare two tensors of merged forwards by the norms of their tokens, which no order changes."""

from __future__ import annotations

import numpy as np

from otel_torch.parity.call_graph import Role

# rounding in single tokens exceeds the limit of a whole tensor
_TOKEN_FACTOR = 4.0


def have_equal_token_norms(reference: Role, port: Role, limit: float) -> bool:
    """Return whether all tokens have equal sums of squares; False where none were recorded.

    Args:
        limit: The relative limit of the whole tensors.
    """
    squares, port_squares = (np.array(role.row.get("squares", ())) for role in (reference, port))
    if not len(squares) or squares.shape != port_squares.shape:
        return False
    return bool((np.abs(squares - port_squares) <= _TOKEN_FACTOR * limit * squares).all())
