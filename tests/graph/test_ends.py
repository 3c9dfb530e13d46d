"""Which ends of two programs are compared, and with which."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from otel_torch.graph.compare import GraphComparison, compare_graphs
from otel_torch.graph.graph import Graph
from otel_torch.graph.states import is_in_order, use_values_equally
from tests.graph.writer import Writer

RANDOM = np.random.default_rng(0)
X, Y, W = (RANDOM.standard_normal(shape).astype(np.float32) for shape in ((4, 6), (4, 6), (6, 6)))


def sampler(factor: float, *, at_once: bool = False, is_cut: bool = False) -> Graph:
    """Return a model that is called for two inputs, once or twice, and a sum that is no model's."""
    writer = Writer()
    writer.builder.is_cut = is_cut
    x, y, w = writer.leaf("x", X, "input"), writer.leaf("y", Y, "input"), writer.leaf("w", W)
    if at_once:
        both = writer.op("mm", writer.op("cat", x, y, 0), w)
        writer.end("out", both)
        first, second = (writer.op("slice", both, 0, start, start + 4) for start in (0, 4))
    else:
        first, second = writer.op("mm", x, w), writer.op("mm", y, w)
        writer.end("out", first)
        writer.end("out#2", second)
    scaled = writer.at("scale").op("mul.scalar", second, factor)
    writer.end("", writer.at("sum").op("add", first, scaled))
    return writer.finish()


def lines(comparison: GraphComparison) -> list[str]:
    graph = comparison.graphs[1]
    return [
        graph.lines[graph.nodes.line[fault.port.nodes[0]]][1]
        for fault in comparison.faults
        if fault.port
    ]


def test_what_is_made_last_is_compared_where_models_return_other_sizes() -> None:
    assert compare_graphs(sampler(0.5), sampler(0.5, at_once=True)).is_match
    assert lines(compare_graphs(sampler(0.5), sampler(0.7, at_once=True)))[0] == "scale"


def test_models_that_are_called_in_another_order_match() -> None:
    def two(order: tuple[str, str]) -> Graph:
        writer = Writer()
        w, arrays = writer.leaf("w", W), {"x": X, "y": Y}
        made = {
            name: writer.op("mm", writer.leaf(name, arrays[name], "input"), w) for name in order
        }
        for count, name in enumerate(order):
            writer.end(f"out#{count}", made[name])
        writer.end("", writer.op("sub", made["x"], made["y"]))
        return writer.finish()

    assert compare_graphs(two(("x", "y")), two(("y", "x"))).is_match


def test_a_number_of_an_end_says_nothing_where_models_are_called_unequally_often() -> None:
    def three(factor: float, *, at_once: bool) -> Graph:
        writer = Writer()
        arrays = {"x": X, "y": Y, "z": X - Y}
        w, inputs = writer.leaf("w", W), [writer.leaf(*own, "input") for own in arrays.items()]
        if at_once:
            both = writer.op("mm", writer.op("cat", *inputs[:2], 0), w)
            made = [writer.op("slice", both, 0, start, start + 4) for start in (0, 4)]
            made.append(writer.op("mm", inputs[2], w))
            returned = both, made[2]
        else:
            made = [writer.op("mm", own, w) for own in inputs]
            returned = made
        # of a training: gradients come from the first result
        writer.builder.add_end("out", inputs[0].index, is_passed=True)
        for count, value in enumerate(returned, 2):
            writer.end(f"out#{count}", value)
        scaled = writer.at("scale").op("mul.scalar", made[2], factor)
        writer.end("", writer.op("addcmul", scaled, *made[:2]))
        return writer.finish()

    reference = three(0.5, at_once=False)
    assert compare_graphs(reference, three(0.5, at_once=True)).is_match
    assert lines(compare_graphs(reference, three(0.7, at_once=True)))[0] == "scale"


def test_models_that_are_called_unequally_often_are_paired_by_no_number() -> None:
    def scaled(factor: float, *, has_helper: bool) -> Graph:
        writer = Writer()
        x, w = writer.leaf("x", X, "input"), writer.leaf("w", W)
        if has_helper:
            half = writer.op("exp", x)
            writer.end("out", half)
            writer.op("square", half)  # which is looked at, and goes nowhere
        made = writer.op("mm", x, w)
        writer.end("out#2" if has_helper else "out", made)
        writer.end("", writer.at("scale").op("mul.scalar", made, factor))
        return writer.finish()

    reference = scaled(0.5, has_helper=False)
    assert compare_graphs(reference, scaled(0.5, has_helper=True)).is_match
    assert lines(compare_graphs(reference, scaled(0.7, has_helper=True))) == ["scale"]


def test_of_ends_with_merged_axes_the_first_fault_is_named() -> None:
    def scaled(factor: float, *shape: int) -> Graph:
        writer = Writer()
        made = writer.op("mm", writer.leaf("x", X, "input"), writer.leaf("w", W))
        made = writer.at("scale").op("mul.scalar", made, factor)
        writer.end("out" if len(shape) > 2 else "", writer.op("reshape", made, shape))
        return writer.finish()

    assert compare_graphs(scaled(0.5, 2, 2, 6), scaled(0.5, 4, 6)).is_match
    assert lines(compare_graphs(scaled(0.5, 2, 2, 6), scaled(0.7, 4, 6))) == ["scale"]


def test_what_is_left_of_a_program_that_goes_on_is_not_compared_with_an_end() -> None:
    comparison = compare_graphs(sampler(0.5), sampler(0.7, is_cut=True))
    assert comparison.is_match and [pair.name for pair in comparison.ends] == ["out", "out#2"]
    assert not compare_graphs(sampler(0.5, is_cut=True), sampler(0.7, is_cut=True)).is_match


def test_of_one_program_what_goes_on_from_the_other_end_is_compared_with_it() -> None:
    def scaled(*factors: float) -> Graph:
        writer = Writer()
        value = writer.op("mm", writer.leaf("x", X, "input"), writer.leaf("w", W))
        writer.end("out", value)
        for factor in factors:
            value = writer.op("mul.scalar", value, factor)
        writer.end("", value)
        return writer.finish()

    programs = scaled(0.5), scaled(0.5, 3.0)
    assert compare_graphs(*programs).is_match
    assert not compare_graphs(*programs, is_one_program=True).is_match
    assert compare_graphs(programs[1], programs[1], is_one_program=True).is_match
    endless = scaled(float("inf"))
    assert not compare_graphs(programs[0], endless, is_one_program=True).is_match
    assert compare_graphs(endless, endless, is_one_program=True).is_match


def returning(name: str, factor: float, *, goes_on: bool = True) -> Graph:
    """Return a model that returns the logarithms of something, or the logits, and what is made of it."""
    writer = Writer()
    logits = writer.op("mm", writer.leaf("x", X, "input"), writer.leaf("w", W))
    powers = writer.op("exp", logits)
    writer.end("out", {"logits": logits, "powers": powers}[name])
    if goes_on:
        made = writer.at("scale").op("mul.scalar", writer.op("add", logits, powers), factor)
        writer.end("", writer.op("mm", made, writer.leaf("v", Y.T @ Y)))
    return writer.finish()


def test_a_model_may_return_something_else_if_all_that_is_made_of_it_is_right() -> None:
    assert compare_graphs(returning("logits", 0.5), returning("powers", 0.5)).is_match
    assert lines(compare_graphs(returning("logits", 0.5), returning("powers", 0.7))) == ["scale"]
    last = [returning(name, 0.5, goes_on=False) for name in ("logits", "powers")]
    assert not compare_graphs(*last).is_match


def with_raw_image(slope: float, *, is_returned: bool) -> Graph:
    """Return an image, and the raw one before it if that is what a model returns; else the image is
    computed by another formula.
    """
    writer = Writer()
    raw = writer.op("mm", writer.leaf("x", X, "input"), writer.leaf("w", W))
    raw = writer.at("slope").op("mul.scalar", raw, slope)
    if is_returned:
        writer.end("", raw)
        image = writer.op("sigmoid", raw)
    else:
        image = writer.op("tanh", writer.op("mul.scalar", raw, 0.5))
        image = writer.op("add.scalar", writer.op("mul.scalar", image, 0.5), 0.5)
    writer.end("", image)
    return writer.finish()


def test_a_wrong_result_is_compared_with_the_nearest_of_its_shape() -> None:
    right = with_raw_image(0.5, is_returned=True)
    comparison = compare_graphs(right, with_raw_image(0.55, is_returned=False))
    assert [(end.reference, end.port, end.is_right) for end in comparison.ends] == [(1, 0, False)]
    assert lines(comparison)[0] == "slope"


def printing(operation: str, factor: float) -> Graph:
    """Return a mean of squares, and what it is the mean of as an end; squares may be negative."""
    writer = Writer()
    scaled = writer.at("scale").op("mul.scalar", writer.leaf("x", X, "input"), factor)
    if operation == "square":
        squares = writer.op("square", scaled)
        mean = writer.op("mean", writer.op("mean", squares, 0), 1)
    else:
        squares = writer.op("mul", scaled, writer.op("neg", scaled))
        mean = writer.op("neg", writer.op("mean", writer.op("mean", squares, 0), 1))
    writer.end("", squares)
    writer.end("", mean)
    return writer.finish()


def test_programs_need_not_meet_on_the_way_to_the_numbers_that_they_show() -> None:
    assert compare_graphs(printing("square", 0.5), printing("mul", 0.5)).is_match
    assert lines(compare_graphs(printing("square", 0.5), printing("mul", 0.7))) == ["scale"]


def losing(factor: float, *, is_named: bool = False, norm: float = 1.0) -> Graph:
    """Return a loss: what a model returns, beside a gradient, or a number that is printed, beside a norm."""
    writer = Writer()
    scaled = writer.at("scale").op("mul.scalar", writer.leaf("x", X, "input"), factor)
    gradient = writer.op("mm", scaled, writer.leaf("w", W))
    loss = writer.op("mean", writer.op("mean", writer.op("square", gradient), 0), 1)
    if is_named:
        writer.end("grad.w", gradient)
        writer.end("out", loss)
    else:
        squares = writer.op("mul", gradient, gradient)
        means = writer.op("mean", writer.op("mean", squares, 1), 0)
        writer.end("", writer.op("mul.scalar", means, norm))
        writer.end("", loss)
    return writer.finish()


def test_losses_are_compared_where_a_program_shows_nothing_else() -> None:
    reference = losing(0.5, is_named=True)
    assert compare_graphs(reference, losing(0.5)).is_match
    assert len(compare_graphs(reference, losing(0.5)).ends) == 1
    assert lines(compare_graphs(reference, losing(0.7))) == ["scale"]
    # a number that is wrong, and with which nothing of the reference can be compared
    assert not compare_graphs(reference, losing(0.5, norm=2.0)).ends


def imaging(columns: tuple[int, int], factor: float, *, is_last: bool) -> tuple[Graph, int]:
    """Return a program that ends with some columns and an image, and what it prints of the first or of
    the last image.
    """
    writer = Writer()
    x = writer.leaf("x", X, "input")
    for count in columns:
        writer.end("", writer.op("slice", x, 1, 0, count))
    first = writer.at("scale").op("mul.scalar", x, factor)
    last = writer.op(
        "tanh", writer.op("mm", writer.op("mul.scalar", first, 2.0), writer.leaf("w", W))
    )
    image = last if is_last else first
    printed = writer.op("mean", writer.op("mean", writer.op("square", image), 0), 1)
    writer.op("add.scalar", printed, 1.0)
    writer.end("", last)
    return writer.finish(), printed.index


@pytest.mark.parametrize("is_last", [False, True])
def test_of_what_has_one_shape_stays_what_both_print_a_number_of(*, is_last: bool) -> None:
    reference, own = imaging((2, 3), 0.5, is_last=True)
    port, other = imaging((4, 5), 0.7, is_last=is_last)
    comparison = compare_graphs(reference, port, shown=[(own, other)])
    images = [(pair.reference, pair.port) for pair in comparison.ends if pair.reference == 2]
    assert images == ([(2, 2)] if is_last else [])
    assert lines(comparison)[0] == "scale"


def in_rows(*, is_reversed: bool) -> Graph:
    """Return the products of some rows, in the given or in reverse order."""
    writer = Writer()
    rows = X[::-1].copy() if is_reversed else X
    made = writer.op("mm", writer.leaf("x", rows, "input"), writer.leaf("w", W))
    for _ in range(3):
        made = writer.op("tanh", made)
    writer.end("out", made)
    return writer.finish()


def test_what_is_computed_in_another_order_is_known_for_it() -> None:
    for is_reversed in (False, True):
        graphs = in_rows(is_reversed=False), in_rows(is_reversed=is_reversed)
        assert is_in_order(compare_graphs(*graphs).programs[1]) != is_reversed


def through_weights(parts: int) -> Graph:
    """Return two products, of all rows at once or of one part after the other."""
    writer = Writer()
    x, v, w = writer.leaf("x", X, "input"), writer.leaf("v", W + 1), writer.leaf("w", W)
    size = len(X) // parts
    pieces = [writer.op("slice", x, 0, n * size, (n + 1) * size) for n in range(parts)]
    made = [writer.op("mm", writer.op("mm", piece, v), w) for piece in pieces]
    writer.end("out", made[0] if parts == 1 else writer.op("cat", *made, 0))
    return writer.finish()


def test_weights_tell_whether_programs_go_through_rows_in_other_parts() -> None:
    for parts, is_equal in ((1, True), (2, False)):
        comparison = compare_graphs(through_weights(1), through_weights(parts))
        assert comparison.is_match and use_values_equally(comparison.programs) == is_equal


def through_paddings(rows: int) -> Graph:
    """Return the products of the first two of some rows; the others are paddings."""
    writer = Writer()
    x = writer.leaf("x", X[:rows], "input")
    made = writer.op("mm", writer.op("mm", x, writer.leaf("v", W + 1)), writer.leaf("w", W))
    writer.end("out", writer.op("slice", made, 0, 0, 2) if rows > 2 else made)
    return writer.finish()


def test_weights_tell_whether_one_program_goes_through_paddings() -> None:
    comparison = compare_graphs(through_paddings(len(X)), through_paddings(2))
    assert comparison.is_match and not use_values_equally(comparison.programs)


def refined(factor: float, *, is_model: bool) -> Graph:
    """Return what a sampler makes of two guesses of a model; it may be a model itself."""
    writer = Writer()
    x, w = writer.leaf("x", X @ W, "input"), writer.leaf("w", W)
    for _ in range(2):
        guess = writer.op("mm", x, w)
        if not is_model:
            writer.end("out", guess)
        x = writer.at("step").op("mul.scalar", writer.op("add", x, guess), factor)
    writer.end("out" if is_model else "", x)
    return writer.finish()


def test_a_sampler_may_be_a_model_itself() -> None:
    assert compare_graphs(refined(0.5, is_model=False), refined(0.5, is_model=True)).is_match
    comparison = compare_graphs(refined(0.5, is_model=False), refined(0.7, is_model=True))
    assert lines(comparison) == ["step"]


def end_of(shape: tuple[int, ...], count: int, factor: float = 1.0) -> Graph:
    """Return a program with an end of the given shape, and `count` small ends."""
    writer = Writer()
    x = writer.leaf("x", X.reshape(shape), "input")
    writer.end("out", writer.op("mul.scalar", x, factor))
    for number in range(count):
        row = writer.op("slice", x, 0, 0, 1)
        writer.end(f"out#{number + 2}", writer.op("slice", row, 1, 0, shape[0] + number))
    return writer.finish()


def test_a_wrong_end_of_another_shape_beside_many_without_counterparts_is_one_by_chance() -> None:
    def is_by_chance(port: Graph) -> bool:
        return compare_graphs(end_of((4, 6), 0), port).is_by_chance

    assert not is_by_chance(end_of((4, 6), 0))
    alone = compare_graphs(end_of((4, 6), 3), end_of((2, 12), 3, 2.0))
    ends = [pair for pair in alone.ends if not pair.is_right]
    only = replace(alone, ends=ends)
    assert only.is_by_chance
    right = replace(alone, ends=[replace(pair, is_right=True) for pair in ends])
    assert not right.is_by_chance
    same = compare_graphs(end_of((4, 6), 3), end_of((4, 6), 3, 2.0))
    assert not replace(same, ends=[pair for pair in same.ends if not pair.is_right]).is_by_chance


def test_a_result_that_is_right_only_because_much_is_legal_is_suspicious() -> None:
    comparison = compare_graphs(sampler(1.0), sampler(1.0))
    (pair, *_) = comparison.ends

    def is_suspicious(error: float, *, is_right: bool) -> bool:
        ends = [replace(pair, error=error, limit=0.02, is_right=is_right)]
        return replace(comparison, ends=ends).is_suspicious

    assert is_suspicious(5e-3, is_right=True)
    assert not is_suspicious(1e-6, is_right=True) and not is_suspicious(5e-3, is_right=False)


def test_ends_are_paired_in_order_only_where_both_programs_have_equally_many() -> None:
    """Behind other ends a number says nothing."""

    def generated(factor: float, *, is_port: bool) -> Graph:
        writer = Writer()
        w = writer.leaf("w", W)
        for step, array in enumerate((X, Y)):
            hidden = writer.op("tanh", writer.op("mm", writer.leaf(f"x{step}", array, "input"), w))
            if is_port:
                writer.end(f"hidden#{step}", hidden)
                writer.end(f"norm#{step}", writer.op("mean", hidden, -1))
            logits = writer.at("head").op("mul.scalar", writer.op("mm", hidden, w), factor)
            writer.end(f"{'out' if is_port else 'logits'}#{step}", logits)
        return writer.finish()

    comparison = compare_graphs(generated(0.5, is_port=False), generated(0.6, is_port=True))
    assert [(pair.reference, pair.port) for pair in comparison.ends] == [(0, 2), (1, 5)]


def scoring(factor: float, *, returns_loss: bool) -> Graph:
    """Return a mean over logits: the model's result, or computed behind a model that returns a view
    of what it is computed from, and of more rows.
    """
    writer = Writer()
    made = writer.op("mm", writer.leaf("x", X, "input"), writer.leaf("w", W))
    if returns_loss:
        kept = writer.op("slice", made, 0, 0, 3)
    else:
        writer.end("out", writer.op("reshape", made, (2, 2, 6)))
        kept = writer.op("reshape", writer.op("slice", made, 0, 0, 3), (3, 6))
    scaled = writer.at("scale").op("mul.scalar", writer.op("tanh", kept), factor)
    writer.end("out" if returns_loss else "", writer.at("mean").op("mean", scaled, 0))
    return writer.finish()


def test_a_program_goes_on_with_what_its_result_is_a_view_of() -> None:
    comparison = compare_graphs(scoring(0.5, returns_loss=True), scoring(0.5, returns_loss=False))
    assert comparison.is_match
    assert comparison.ends
    comparison = compare_graphs(scoring(0.5, returns_loss=True), scoring(0.6, returns_loss=False))
    assert lines(comparison)[0] == "scale"


def stepping(factors: tuple[float, ...]) -> Graph:
    """Return what each step of a loop makes of one input."""
    writer = Writer()
    x = writer.leaf("x", X, "input")
    for factor in factors:
        writer.end("", writer.at("step").op("mul.scalar", writer.op("tanh", x), factor))
    return writer.finish()


def pairs_of(reference: Graph, port: Graph) -> list[tuple[int, int]]:
    return sorted((end.reference, end.port) for end in compare_graphs(reference, port).ends)


def test_wrong_results_of_a_loop_are_compared_in_their_order() -> None:
    """The nearest of the reference's second result is the first of the port's."""
    assert pairs_of(stepping((1.2, 2, 3)), stepping((1.6, 2.6, 3.6))) == [(0, 0), (1, 1), (2, 2)]
    assert pairs_of(stepping((1.2, 2, 3)), stepping((1.6, 3.6))) == [(1, 0), (2, 1)]


def test_wrong_results_that_are_far_nearer_in_another_order_are_compared_in_that() -> None:
    assert pairs_of(stepping((1.2, 9)), stepping((9.01, 1.201))) == [(0, 1), (1, 0)]
