"""The distance of two values, estimated from their linear sketches: the one place that does."""

from __future__ import annotations

import numpy as np

from otel_torch.graph.graph import Floats


def sketch_norms(sketches: Floats) -> Floats:
    """Return the L2 norms of sketches, shape (values, width) -> (values,)."""
    squares: Floats = np.einsum("ij,ij->i", sketches, sketches)
    return np.sqrt(squares)


def relative_distances(reference: Floats, port: Floats) -> Floats:
    """Return the L2 distances of pairs of sketches, relative to the larger norm of the two.

    NaN where a sketch is unknown.

    >>> relative_distances(np.array([[3.0, 4.0], [0, 0]]), np.array([[3.0, 4.5], [0, 0]])).round(3)
    array([0.092, 0.   ])
    """
    with np.errstate(all="ignore"):
        distance = sketch_norms(reference - port)
        norm = np.maximum(sketch_norms(reference), sketch_norms(port))
        return np.where(distance == 0, 0.0, distance / np.where(norm > 0, norm, 1.0))
