"""Sines of large angles: an angle that rounds otherwise moves them by more than one rounding."""

from __future__ import annotations

import numpy as np
import pytest

from otel_torch.graph.compare import compare_graphs
from otel_torch.graph.graph import Graph
from tests.graph.writer import Writer

RANDOM = np.random.default_rng(0)
TIMES = np.linspace(900, 1000, 64, dtype=np.float32).reshape(8, 8)
WEIGHT = RANDOM.standard_normal((8, 8)).astype(np.float32)


def embedded_times(*factors: float, weight_scale: float = 1.0) -> Graph:
    """Return what a model makes of the sines of some times, which are scaled by some factors."""
    writer = Writer()
    angles = writer.leaf("t", TIMES, "input")
    for factor in factors:
        angles = writer.at("scale").op("mul.scalar", angles, factor)
    sines = writer.at("sine").op("sin", angles)
    weight = writer.at("weight").op("mul.scalar", writer.leaf("w", WEIGHT), weight_scale)
    made = writer.at("embed").op("mm", sines, weight)
    writer.end("out", writer.at("bounded").op("tanh", made))
    return writer.finish()


# 1/3 and 3 round: some angles are off by their last bit
EXACT, ROUNDED = (0.5, 2.0), (1 / 3, 3.0)


def test_sines_of_angles_that_round_otherwise_are_right():
    comparison = compare_graphs(embedded_times(*EXACT), embedded_times(*ROUNDED))
    assert comparison.ends[0].error > 1e-5
    assert comparison.is_match and not comparison.faults


@pytest.mark.parametrize(
    "factors, scale", [(EXACT, 1 + 1e-5), (ROUNDED, 1.001), ((0.5, 2.001), 1.0)]
)
def test_a_fault_beside_such_angles_is_found_at_its_line(factors: tuple[float, ...], scale: float):
    comparison = compare_graphs(
        embedded_times(*EXACT), embedded_times(*factors, weight_scale=scale)
    )
    lines = [comparison.graphs[1].lines[own][1] for own in lines_of(comparison)]
    assert lines[0] == ("scale" if scale == 1.0 else "weight")


def lines_of(comparison) -> list[int]:
    nodes = comparison.graphs[1].nodes
    return [int(nodes.line[fault.port.nodes[0]]) for fault in comparison.faults]
