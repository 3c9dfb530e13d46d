"""Values rounded to integers, such as pixels: legal errors may shift a few of them by one."""

from __future__ import annotations

import numpy as np
import pytest

from otel_torch.graph.compare import compare_graphs
from otel_torch.graph.graph import Graph
from tests.graph.writer import Writer

# the next number of float32 is rounded up
BELOW_HALF = np.nextafter(np.float32(101.5), np.float32(0))
PIXELS = np.linspace(0, 255, 48 * 32, dtype=np.float32).reshape(48, 32)
PIXELS[20, 3] = BELOW_HALF


def image(*factors: float, brighter: int = 0) -> Graph:
    """Return the pixels of an image, and their sum, scaled by some factors before they are rounded.

    Args:
        brighter: How many rows of pixels get one more.
    """
    writer = Writer()
    made = writer.leaf("x", PIXELS, "input")
    for factor in factors:
        made = writer.op("mul.scalar", made, factor)
    rounded = writer.at("round").op("round", made)
    lighter = np.zeros_like(PIXELS)
    lighter[:brighter] = 1
    rounded = writer.at("brighter").op("add", rounded, writer.leaf("lighter", lighter))
    writer.end("pixels", rounded)
    writer.end("sum", writer.op("sum", rounded, None))
    return writer.finish()


# half and double, which change nothing, and a factor of one rounding
EXACT, ROUNDED = (0.5, 2.0), (0.5, 2.0 + 2.0**-22)


@pytest.mark.parametrize("noise", [None, image(*EXACT)])
def test_a_pixel_may_be_rounded_to_the_next(noise: Graph | None) -> None:
    reference, port = image(*EXACT), image(*ROUNDED)
    pixels = [graph.values.statistics[graph.ends[0], 1] for graph in (reference, port)]
    assert pixels[0] != pixels[1]
    assert compare_graphs(reference, port, noise).is_match


def test_more_pixels_are_a_fault() -> None:
    comparison = compare_graphs(image(*EXACT), image(*EXACT, brighter=4))
    assert not comparison.is_match


def test_numbers_that_are_whole_already_are_exact() -> None:
    def tokens(change: int) -> Graph:
        numbers = np.arange(48, dtype=np.float32).reshape(6, 8)
        numbers[2, 3] += change
        writer = Writer()
        made = writer.op("mul.scalar", writer.leaf("x", numbers, "input"), 3.0)
        writer.end("tokens", writer.op("round", made))
        return writer.finish()

    assert compare_graphs(tokens(0), tokens(0)).is_match
    assert not compare_graphs(tokens(0), tokens(1)).is_match


def test_whole_numbers_whose_sketch_is_zero_are_measured_by_none() -> None:
    def rounded() -> Graph:
        writer = Writer()
        small = np.linspace(-0.8, 0.8, 32, dtype=np.float32)
        made = writer.op("round", writer.leaf("x", small, "input"))
        writer.end("out", made)
        graph = writer.finish()
        graph.values.sketch[made.index] = 0
        return graph

    assert compare_graphs(rounded(), rounded()).is_match


def test_what_saturates_at_whole_numbers_is_not_rounded() -> None:
    """Its limit is the one that the run with noise has measured."""
    numbers = np.linspace(-1.2, 1.2, 512 * 48, dtype=np.float32).reshape(512, 48)
    numbers[[0, -1]] *= 8

    def saturated(factor: float, noise: int | None = None) -> Graph:
        writer = Writer("bfloat16", noise=noise)
        made = writer.leaf("x", numbers, "input")
        for scale in (1.1, 1 / 1.1) * 6:
            made = writer.op("mul.scalar", made, scale)
        writer.end("out", writer.at("scale").op("mul.scalar", writer.op("tanh", made), factor))
        return writer.finish()

    assert compare_graphs(saturated(1), saturated(1), saturated(1, noise=1)).is_match
    assert not compare_graphs(saturated(1), saturated(1.1), saturated(1, noise=1)).is_match
