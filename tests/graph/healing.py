"""Whether a program becomes right once a fault's values are those of the reference."""

from __future__ import annotations

from itertools import permutations

import numpy as np

from otel_torch.graph.compare import GraphComparison, GraphFault, compare_graphs
from otel_torch.graph.cut import FAR, counterparts_of, find_cut
from otel_torch.graph.shapes import have_same_order
from tests.graph.programs import Case, compute_program

# what can become of a trial
OUTCOMES = ("proven", "far", "still wrong", "no cut")


def heal(case: Case, comparison: GraphComparison, fault: GraphFault) -> str:
    """Return what becomes of the port with the reference's values behind a fault."""
    cut = find_cut(comparison, fault, counterparts_of(comparison))
    if cut is None:
        return "no cut"
    reference, arrays = compute_program(case.reference)
    _, own = compute_program(case.port)
    put = {
        exchange.port: conform(arrays[exchange.reference], own[exchange.port])
        for exchange in cut.exchanges
    }
    port, _ = compute_program(case.port, put)
    if not compare_graphs(reference, port).is_match:
        return "still wrong"
    return "far" if cut.closeness == FAR else "proven"


def conform(reference: np.ndarray, port: np.ndarray) -> np.ndarray:
    """Return a value in the shape of another: of all orders of the axes the one nearest to it."""
    if reference.shape == port.shape:
        return reference
    if have_same_order(reference.shape, port.shape):
        return reference.reshape(port.shape)
    turned = [
        np.transpose(reference, order)
        for order in permutations(range(reference.ndim))
        if tuple(reference.shape[axis] for axis in order) == port.shape
    ]
    return min(turned, key=lambda array: np.linalg.norm(array - port), default=port)
