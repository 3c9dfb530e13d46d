"""The parts of the comparison of graphs, each on a graph of a few rows."""

import json
from dataclasses import replace

import numpy as np
import pytest

from otel_torch.graph.blame import Rules
from otel_torch.graph.builder import GraphBuilder
from otel_torch.graph.compare import compare_graphs
from otel_torch.graph.equality import (
    CUT,
    EQUAL,
    MOVED,
    NEAR,
    NONE,
    PART,
    REORDERED,
    TERM,
    find_equal,
    has_information,
)
from otel_torch.graph.error_model import (
    COARSE_ROUNDINGS,
    ROUNDINGS,
    _columns,
    base_limits,
    legal_errors,
    noise_floors,
)
from otel_torch.graph.explanation import Explanation
from otel_torch.graph.graph import AXIS_LAST, Graph, Rows
from otel_torch.graph.unfold import unfold
from tests.graph.writer import Writer

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((4, 6)).astype(np.float32)
W = RANDOM.standard_normal((6, 6)).astype(np.float32)


def relations(reference: Graph, port: Graph):
    limits = tuple(base_limits(graph, legal_errors(graph)) for graph in (reference, port))
    return find_equal(reference, port, limits)


def one_value(array: np.ndarray, dtype: str = "float32") -> Graph:
    writer = Writer(dtype)
    writer.end("out", writer.op("tanh", writer.leaf("x", array, "input")))
    return writer.finish()


def leaves(*arrays: np.ndarray, has_rows: bool = False) -> Graph:
    writer = Writer(has_rows=has_rows)
    made = [writer.leaf(f"{index}", array) for index, array in enumerate(arrays)]
    writer.end("out", made[0])
    return writer.finish()


def test_rows_know_their_owners_and_turn_around():
    rows = Rows.of([[1, 0], [], [1]])
    assert rows.lists() == [[1, 0], [], [1]]
    assert rows.owners().tolist() == [0, 0, 2]
    assert rows.transpose(2).lists() == [[0], [0, 2]]


def test_values_of_two_numbers_or_of_one_say_nothing():
    mask = np.array([[0.0, -1e9], [-1e9, 0.0], [0.0, 0.0]], np.float32)
    graph = leaves(mask, np.ones(8, np.float32), X, X[0, :3], np.zeros(8, np.float32))
    assert has_information(graph.values).tolist() == [False, False, True, False, False]


def test_a_value_equals_one_of_the_same_content_wherever_it_is():
    reference, port = relations(leaves(X, W), leaves(W, X))
    assert port.partner.tolist() == [1, 0]
    assert port.relation.tolist() == [EQUAL, EQUAL]
    assert reference.group.tolist() == port.group.tolist()[::-1]


def test_a_difference_of_ten_limits_is_no_equality():
    near, far = X * np.float32(1 + 1e-7), X * np.float32(1 + 1e-4)
    assert relations(leaves(X), leaves(near))[1].relation[0] == EQUAL
    assert relations(leaves(X), leaves(far))[1].relation[0] != EQUAL


def test_a_permutation_is_found_by_sums():
    _, port = relations(leaves(X), leaves(np.ascontiguousarray(X.T)))
    assert port.relation[0] == REORDERED


def test_what_is_off_by_less_than_its_sums_show_is_near_and_in_no_other_order():
    turned = np.ascontiguousarray(X.T)
    limit = base_limits(leaves(X), legal_errors(leaves(X)))[0]
    noise = np.random.default_rng(1).standard_normal(X.shape)
    near = X + (2 * limit * noise).astype(np.float32)
    reference, port = relations(leaves(X, turned), leaves(near))
    assert (port.relation[0], port.partner[0]) == (NEAR, 0)
    assert reference.relation.tolist() == [NEAR, NONE]


def test_parts_of_a_whole_are_found_by_sums():
    parts = [np.ascontiguousarray(W[:, index : index + 2]) for index in (0, 2, 4)]
    reference, port = relations(leaves(W), leaves(*parts))
    assert reference.relation.tolist() == [PART]
    assert port.relation.tolist() == [PART] * 3


@pytest.mark.parametrize("has_rows", [False, True])
def test_parts_with_other_rows_than_the_whole_are_none_whatever_their_sums(has_rows: bool):
    shuffled = np.random.default_rng(1).permutation(W.reshape(-1)).reshape(W.shape)
    _, port = relations(
        leaves(W, has_rows=has_rows), leaves(*np.split(shuffled, 3), has_rows=has_rows)
    )
    assert (PART in port.relation.tolist()) is not has_rows


def test_legal_error_grows_with_depth_and_with_the_dtype():
    writer = Writer()
    x = y = writer.leaf("x", X, "input")
    for _ in range(3):
        y = writer.op("tanh", y)
    rounded = writer.cast(x)
    writer.end("out", y)
    errors = legal_errors(writer.finish())
    assert errors[y.index] == pytest.approx(2 * ROUNDINGS * 2.0**-24)
    assert errors[rounded.index] == pytest.approx(COARSE_ROUNDINGS * 2.0**-8, rel=1e-3)


def test_a_cast_that_one_program_makes_alone_is_named_where_its_result_differs():
    def rounded(is_rounded: bool) -> Graph:
        writer = Writer()
        x = writer.op("tanh", writer.leaf("x", X, "input"))
        if is_rounded:
            x = writer.at("cast").cast(x)
        moved = writer.at("move").op("transpose", x, (1, 0))
        writer.end("out", writer.at("product").op("mm", writer.leaf("w", W), moved))
        return writer.finish()

    reference, port = rounded(True), rounded(False)
    assert compare_graphs(reference, rounded(True), reference).is_match
    (fault,) = compare_graphs(reference, port, reference).faults
    node = fault.reference.nodes[0]
    assert reference.lines[reference.nodes.line[node]][1] == "cast"


def test_infinite_values_are_no_parts_of_a_whole():
    """A recording has no sums of masked logits, and the sketch of what is finite."""

    def masked(*shapes: tuple[int, ...]) -> Graph:
        builder, random = GraphBuilder(), np.random.default_rng(len(shapes))
        for shape in shapes:
            sketch = random.standard_normal(builder.width)
            builder.add_value(
                shape=shape, nonfinite=5, sketch=sketch, statistics={"max": 1.0}, leaf="input"
            )
        builder.add_end("out", 0)
        return builder.finish()

    _, port = relations(masked((2, 4, 6)), masked((4, 6), (4, 6)))
    assert PART not in port.relation.tolist()


def test_a_small_term_brings_a_small_error_into_a_sum():
    writer = Writer()
    x = writer.leaf("x", X, "input")
    y = x
    for _ in range(15):
        y = writer.op("mul.scalar", y, 0.5)
    total = writer.op("add", x, y)
    writer.end("out", total)
    errors = legal_errors(writer.finish())
    assert errors[y.index] == pytest.approx(4 * ROUNDINGS * 2.0**-24)
    assert errors[total.index] == pytest.approx(2**0.5 * ROUNDINGS * 2.0**-24, rel=1e-3)


def test_a_fused_operation_reads_what_its_parts_made():
    writer = Writer()
    x, weight = writer.leaf("x", X, "input"), writer.leaf("w", W[0])
    whole = writer.op("rms_norm", x, weight, 0.1)
    writer.inside = writer.builder.node_count - 1
    mean = writer.op("add.scalar", writer.op("mean", writer.op("square", x), -1), 0.1)
    last = writer.op("mul", writer.op("mul", x, writer.op("rsqrt", mean)), weight)
    writer.inside = -1
    end = writer.op("tanh", whole)
    graph = writer.finish()
    opened = unfold(graph, base_limits(graph, legal_errors(graph)))
    node = int(opened.values.maker[whole.index])
    assert opened.nodes.reads[node].tolist() == [last.index]
    assert opened.nodes.moves[node]
    assert opened.values.maker[last.index] < node < opened.values.maker[end.index]


def two_steps(scale: float, *, swap: bool = False, end: str = "last") -> Graph:
    """Return mm, scale, tanh, mm: six rows."""
    writer = Writer()
    x = writer.at("x").leaf("x", X, "input")
    weight = writer.at("weight").leaf("w", W)
    first = writer.at("first").op("mm", x, weight)
    scaled = writer.at("scale").op("mul.scalar", first, scale)
    bent = writer.at("bend").op("tanh", scaled)
    operands = (x, bent) if swap else (bent, x)
    last = writer.at("last").op("sub", *operands)
    writer.end("out", {"last": last, "bent": bent}[end])
    return writer.finish()


def test_another_number_is_named_with_both_numbers():
    comparison = compare_graphs(two_steps(0.5), two_steps(0.25))
    (fault,) = comparison.faults
    assert [place.nodes for place in fault.places] == [(1,), (1,)]
    assert fault.explanation.kind == "arguments"
    assert fault.explanation.reference == (0.5,) and fault.explanation.port == (0.25,)
    assert fault.error == pytest.approx(0.5, rel=0.3)


def test_exchanged_operands_are_named():
    (fault,) = compare_graphs(two_steps(0.5), two_steps(0.5, swap=True)).faults
    assert [place.nodes for place in fault.places] == [(3,), (3,)]
    assert fault.explanation.kind == "exchanged"


def gradients(*, is_detached: bool) -> Graph:
    """Return the gradients of a product behind a block with a residual, which may be detached."""
    writer = Writer()
    x, weight = writer.leaf("x", X, "input"), writer.leaf("w", W)
    slope = writer.at("block").op("rms_norm", x, writer.leaf("gain", W[:1]), 1e-5)
    if not is_detached:
        slope = writer.op("add", slope, x)
    turned = writer.at("product").op("transpose", slope, (1, 0))
    writer.end("of_weight", writer.op("mm", turned, writer.op("tanh", x)))
    writer.end("of_input", writer.op("mm", slope, weight))
    return writer.finish()


def test_what_is_left_out_is_what_reads_a_value_that_the_port_reads_nowhere_else():
    comparison = compare_graphs(gradients(is_detached=False), gradients(is_detached=True))
    assert comparison.faults[0].explanation == Explanation("missing", ("add",))


def test_equal_programs_have_no_fault_and_no_wrong_value():
    comparison = compare_graphs(two_steps(0.5), two_steps(0.5))
    assert comparison.is_match and comparison.faults == []
    assert comparison.counts[0] == {"right": 6, "doubtful": 0, "wrong": 0}


def test_an_end_that_is_right_elsewhere_is_a_fault_of_the_end():
    comparison = compare_graphs(two_steps(0.5), two_steps(0.5, end="bent"))
    (fault,) = comparison.faults
    assert fault.explanation.kind == "end" or fault.reference.nodes == (3,)


def test_a_wrong_weight_is_a_leaf_on_both_sides():
    graphs = []
    for factor in (1.0, 1.5):
        writer = Writer()
        x, weight = writer.leaf("x", X, "input"), writer.leaf("w", W * np.float32(factor))
        writer.end("out", writer.op("mm", x, weight))
        graphs.append(writer.finish())
    (fault,) = compare_graphs(*graphs).faults
    assert fault.explanation.kind == "leaf"
    assert [place.leaf for place in fault.places] == [1, 1]


def test_two_independent_faults_are_both_listed():
    graphs = []
    for first, second in ((0.5, 0.3), (0.7, 0.9)):
        writer = Writer()
        x, weight = writer.leaf("x", X, "input"), writer.leaf("w", W)
        left = writer.at("left").op("tanh", writer.op("mul.scalar", x, first))
        y = writer.at("mm").op("mm", x, weight)
        right = writer.at("right").op("exp", writer.op("mul.scalar", y, second))
        writer.end("out", writer.at("sum").op("add", left, right))
        graphs.append(writer.finish())
    faults = compare_graphs(*graphs).faults
    lines = {graphs[1].lines[graphs[1].nodes.line[fault.port.nodes[0]]][1] for fault in faults}
    assert lines == {"left", "right"}


def test_a_scale_that_a_norm_hides_is_no_other_way_to_write_the_same():
    """The norm of a scaled stream is right, and the residual is wrong: the scale is the fault."""
    graphs = []
    for scale in (2.0, 3.0):
        writer = Writer()
        x = writer.leaf("x", X, "input")
        stream = writer.at("scale").op("mul.scalar", x, scale)
        root = writer.at("norm").op("sqrt", writer.op("mean", writer.op("square", stream), -1))
        normed = writer.at("norm").op("div", stream, root)
        writer.end("out", writer.at("residual").op("add", stream, normed))
        graphs.append(writer.finish())
    (fault,) = compare_graphs(*graphs).faults
    assert [place.nodes for place in fault.places] == [(0,), (0,)]
    (fault,) = compare_graphs(*graphs, rules=replace(Rules(), sees_insensitive=False)).faults
    assert [place.nodes for place in fault.places] != [(0,), (0,)]


def test_graphs_without_values_and_ends_compare():
    empty = GraphBuilder().finish()
    comparison = compare_graphs(empty, empty)
    assert comparison.is_match and comparison.faults == []


def test_noise_of_another_program_is_refused():
    with pytest.raises(ValueError, match="other operations"):
        compare_graphs(two_steps(0.5), two_steps(0.5), one_value(X))


def test_arguments_are_compared_as_json():
    writer = Writer()
    x = writer.leaf("x", X, "input")
    writer.end("out", writer.op("mul.scalar", x, 0.5))
    graph = writer.finish()
    assert json.loads(graph.arguments[graph.nodes.argument[0]]) == [None, 0.5]


def test_a_weight_that_is_wrong_in_one_part_is_not_acquitted_by_the_others():
    """Heads that the wrong columns do not reach are right; both programs take them alike."""
    graphs = []
    for factor in (1.0, 1.5):
        weight = W.copy()
        weight[:, 0] *= np.float32(factor)
        writer = Writer()
        y = writer.op("mm", writer.leaf("x", X, "input"), writer.leaf("w", weight))
        halves = [writer.op("slice", y, 1, start, start + 3) for start in (0, 3)]
        writer.end("out", writer.op("sub", writer.op("tanh", halves[0]), halves[1]))
        graphs.append(writer.finish())
    (fault,) = compare_graphs(*graphs).faults
    assert [place.leaf for place in fault.places] == [1, 1]


def test_other_rows_are_not_the_same_numbers_in_another_order():
    graphs = []
    for start in (0, 2):
        writer = Writer()
        y = writer.op("tanh", writer.leaf("x", X, "input"))
        writer.end("out", writer.op("square", writer.op("slice", y, 0, start, start + 2)))
        graphs.append(writer.finish())
    (fault,) = compare_graphs(*graphs).faults
    assert fault.explanation.kind == "arguments"
    assert fault.explanation.operation == "slice"
    assert (fault.explanation.reference, fault.explanation.port) == ((0, 2), (2, 4))


def ends(shape: tuple[int, ...], order: tuple[int, ...]) -> Graph:
    """Return a program that ends with a reordered tensor of a shape."""
    writer = Writer()
    y = writer.op("tanh", writer.leaf("x", X, "input"))
    writer.end("out", writer.op("reshape", writer.op("transpose", y, order), shape))
    return writer.finish()


def test_an_end_of_another_layout_is_right_and_one_in_another_order_is_wrong():
    reference = ends((4, 6), (0, 1))
    assert compare_graphs(reference, ends((6, 4), (1, 0))).is_match
    comparison = compare_graphs(reference, ends((4, 6), (1, 0)))
    assert not comparison.is_match
    (fault,) = comparison.faults
    assert fault.port.nodes == (1,)
    assert fault.explanation.kind == "order"


def test_an_end_that_nobody_measured_accuses_nobody():
    graphs = []
    for seed in (0, 1):
        builder = GraphBuilder()
        builder.add_end("out", builder.add_value(numel=-1, leaf="unseen", name=str(seed)))
        graphs.append(builder.finish())
    assert compare_graphs(*graphs).is_match


def test_parts_that_one_line_makes_in_turn_are_found():
    reference, port = Writer(), Writer()
    for name in "qk":
        weight = RANDOM.standard_normal((6, 6)).astype(np.float32)
        reference.op("mm", reference.leaf("x", X, "input"), reference.leaf(name, weight))
        port.leaf(name, weight)
    for head in range(3):
        for name in "qk":
            rows = port.at("heads").op("slice", port.leaf(name, X), 1, 2 * head, 2 * head + 2)
            port.at("heads").op("mm", port.leaf("x", X, "input"), rows)
    sides = relations(reference.finish(), port.finish())
    assert [sides[0].relation[value] for value in (2, 4)] == [PART, PART]
    partners = [int(sides[1].partner[value]) for value in (4, 6, 8, 10, 12, 14)]
    assert partners == [2, 4, 2, 4, 2, 4]


def test_numbers_that_one_program_holds_several_times_are_known():
    once, thrice = relations(leaves(X), leaves(np.concatenate([X] * 3)))
    assert once.relation.tolist() == thrice.relation.tolist() == [PART]


def test_what_a_difference_leaves_has_the_errors_of_both_terms():
    writer = Writer()
    x, y = writer.leaf("x", X, "input"), writer.leaf("y", RANDOM.standard_normal((4, 6)), "input")
    near = writer.op("add", x, writer.op("mul.scalar", y, 0.01))
    left = writer.op("sub", near, x)
    writer.end("out", left)
    errors = legal_errors(writer.finish())
    size = np.linalg.norm(X) / np.linalg.norm(left.array)
    assert errors[left.index] == pytest.approx(size * 3**0.5 * ROUNDINGS * 2.0**-24, rel=0.3)


def test_a_quotient_that_is_nearly_1_is_no_difference_of_its_operands():
    """Divided by itself plus a little: 100,000 times what the two differ by fits it as well."""
    writer = Writer()
    x = writer.op("square", writer.leaf("x", X, "input"))
    ones = writer.op("div", x, writer.op("add.scalar", x, 1e-5))
    writer.end("out", ones)
    errors = legal_errors(writer.finish())
    assert errors[ones.index] < 10 * ROUNDINGS * 2.0**-24


def test_what_was_measured_on_the_way_bounds_what_is_legal_behind_it():
    writer = Writer()
    x = y = writer.leaf("x", X, "input")
    for _ in range(6):  # each step leaves a hundredth of what it takes apart
        y = writer.op("sub", writer.op("mul.scalar", y, 1.01), y)
    writer.end("out", y)
    graph = writer.finish()
    modelled = legal_errors(graph)
    measured = legal_errors(graph, np.full(len(graph.values), 1e-7))
    assert modelled[y.index] > 1e3 and measured[y.index] < 1e-3
    assert measured[x.index] == modelled[x.index]


def test_what_comes_in_another_order_is_named_before_what_sees_it():
    """The sum and the product of a joined value are written otherwise, so they are no twins."""

    def joined(swap: bool, fused: bool) -> Graph:
        writer = Writer()
        x = writer.leaf("x", X, "input")
        parts = [writer.op("tanh", x), writer.op("exp", x)]
        both = writer.at("join").op("cat", *(parts[::-1] if swap else parts), 1)
        w, bias = writer.leaf("w", np.concatenate([W, W[::-1]])), writer.leaf("b", X)
        writer.at("use")
        out = writer.op("addmm", bias, both, w) if fused else writer.op("mm", both, w)
        writer.end("out", out if fused else writer.op("add", out, bias))
        return writer.finish()

    assert compare_graphs(joined(False, False), joined(False, True)).is_match
    for rules, line in ((Rules(), "join"), (replace(Rules(), finds_other_orders=False), "use")):
        comparison = compare_graphs(joined(False, False), joined(True, True), rules=rules)
        graph, node = comparison.graphs[1], comparison.faults[0].port.nodes[0]
        assert graph.lines[graph.nodes.line[node]][1] == line


def stepped_by_rounding(*, as_sum: bool = False, rate: float = 0.01) -> Graph:
    """Return the gradient of a bias before a softmax, zero but for rounding, and what a step of one
    size in its direction makes of a parameter.
    """
    writer = Writer()
    x = writer.leaf("x", np.random.default_rng(7).standard_normal((60, 6), np.float32), "input")
    mean = writer.op("mul.scalar", writer.op("sum", x, 0), 1 / 60) if as_sum else None
    terms = writer.op("sub", x, mean or writer.op("mean", x, 0))
    gradient = writer.op("sum", terms, 0)
    sign = writer.op("div", gradient, writer.op("sqrt", writer.op("square", gradient)))
    step = writer.at("step").op("mul.scalar", sign, rate)
    writer.end("grad", gradient)
    writer.end("param", writer.op("add", writer.leaf("p", X[:1]), step))
    writer.end("terms", writer.op("mul.scalar", terms, 100 * rate))
    return writer.finish()


def test_what_may_be_all_rounding_accuses_nobody():
    plain = stepped_by_rounding()
    comparison = compare_graphs(plain, stepped_by_rounding(as_sum=True))
    assert comparison.is_match
    errors = {pair.name: pair.error for pair in comparison.ends}
    assert errors["grad"] > 0.1 and errors["param"] > 1e-4  # but it is not small
    wrong = compare_graphs(plain, stepped_by_rounding(as_sum=True, rate=0.02)).ends
    assert [pair.is_right for pair in wrong] == [True, True, False]


def test_an_operation_on_lists_mixes_no_errors_of_its_places():
    assert _columns("[[null, null], [null, null], 0.1]", [1, 2, 3, 4], [5, 6]) == [[1, 3], [2, 4]]
    assert _columns("[null, null]", [1, 2], [3]) is None


def with_readings(
    values: list[np.ndarray],
    reads: list[list[int]],
    made: list[list[np.ndarray]],
    operation: str = "read",
) -> Graph:
    """Return leaves with readings: `made[i]` of `reads[i]`, the parts of one value together."""
    writer = Writer()
    leaf = [writer.leaf(f"{index}", array) for index, array in enumerate(values)]
    for own, arrays in zip(reads, made, strict=True):
        node = writer.builder.add_node(
            operation, [leaf[value].index for value in own], moves=True, is_reading=True
        )
        for array in arrays:
            writer._value(array, None, maker=node)
    writer.end("out", leaf[0])
    return writer.finish()


def test_a_whole_of_which_all_parts_are_right_is_right_in_parts():
    upper, lower = X[:2], X[2:]
    reference = with_readings([X], [[0]], [[upper, lower]])
    sides = relations(reference, leaves(upper, lower))
    assert sides[0].relation.tolist() == [CUT, EQUAL, EQUAL]
    assert sides[1].relation.tolist() == [EQUAL, EQUAL]
    assert len({*sides[0].group.tolist(), *sides[1].group.tolist()}) == 1
    one_wrong = relations(reference, leaves(upper, lower + 1))
    assert one_wrong[0].relation[0] != CUT and one_wrong[1].relation[0] == EQUAL


def test_terms_of_a_sum_are_right_and_not_the_same_as_the_sum():
    other = RANDOM.standard_normal(X.shape).astype(np.float32)
    port = with_readings([X, other], [[0, 1]], [[X + other]])
    sides = relations(leaves(X + other), port)
    assert sides[1].relation.tolist() == [TERM, TERM, EQUAL]
    assert sides[1].group[0] == sides[1].group[1] != sides[0].group[0]


def with_axes_last(array: np.ndarray) -> Graph:
    """Return a leaf with the readings that OTEL_TORCH_GRAPH_AXES adds."""
    moved = [np.moveaxis(array, axis, -1) for axis in range(array.ndim - 1)]
    return with_readings([array], [[0]] * len(moved), [[own] for own in moved], AXIS_LAST)


@pytest.mark.parametrize("order", [(0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1)])
def test_a_value_with_one_axis_elsewhere_is_equal_with_it_moved(order):
    array = RANDOM.standard_normal((3, 4, 6)).astype(np.float32)
    near = np.transpose(array, order) * np.float32(1 + 1e-7)
    reference, port = relations(with_axes_last(array), with_axes_last(near))
    assert (reference.relation[0], port.relation[0]) == (MOVED, MOVED)
    assert (reference.partner[0], port.partner[0]) == (0, 0)
    assert reference.group[0] == port.group[0]
    assert port.error[0] == pytest.approx(1e-7, rel=0.3)


def test_the_same_numbers_in_another_order_than_any_of_the_axes_are_not_equal():
    array = RANDOM.standard_normal((3, 4, 6)).astype(np.float32)
    port = relations(with_axes_last(array), with_axes_last(array[:, :, ::-1].copy()))[1]
    assert port.relation[0] == REORDERED


def test_merged_axes_are_equal_with_the_other_one_moved():
    array = RANDOM.standard_normal((2, 6, 4, 3)).astype(np.float32)
    flat = array[1].reshape(6, 12).T.copy()  # channels last, of one picture
    port = relations(with_axes_last(array[1]), with_axes_last(flat))[1]
    assert port.relation[0] == MOVED


def test_a_value_of_which_a_program_takes_all_parts_is_right_in_them():
    both = np.stack([X, X + 1])
    port = Writer()
    whole = port.op("tanh", port.leaf("both", np.arctanh(both / 10), "input"))
    for place in (0, 1):
        port.end(f"out{place}", port.op("slice", whole, 0, place, place + 1))
    reference = leaves(both[0] / 10, both[1] / 10)
    assert relations(reference, port.finish())[1].relation.tolist()[1:] == [CUT, EQUAL, EQUAL]
    one = Writer()
    whole = one.op("tanh", one.leaf("both", np.arctanh(both / 10), "input"))
    one.end("out", one.op("slice", whole, 0, 0, 1))
    assert relations(reference, one.finish())[1].relation[1] != CUT


def test_noise_that_cancels_in_one_sum_says_nothing_of_the_next():
    def summed(noise: int | None) -> Graph:
        writer = Writer(noise=noise)
        terms = writer.op("tanh", writer.leaf("x", W - W.mean(), "input"))
        total = writer.op("sum", writer.op("reshape", terms, (36,)), 0)
        writer.end("out", total)
        return writer.finish()

    reference = summed(None)
    floors = [noise_floors(reference, summed(seed)) for seed in range(0, 100, 5)]
    values = reference.values
    cancels = np.linalg.norm(values.sketch[1]) / np.linalg.norm(values.sketch[-1])
    assert min(own[-1] for own in floors) > 0.5 * cancels * min(own[1] for own in floors)


@pytest.mark.parametrize(("scale", "is_bent"), [(0.9, False), (0.8, True)])
def test_operations_on_other_values_explain_nothing(scale: float, is_bent: bool):
    def scaled(first: float | None, second: float | None) -> Graph:
        writer = Writer()
        for name, array, own in (("x", X, first), ("w", W, second)):
            value = writer.leaf(name, array, "input")
            if own is not None:
                value = writer.op("mul.scalar", value, own)
            if own is not None and is_bent and name == "w":
                value = writer.op("tanh", value)
            writer.end(name, value)
        return writer.finish()

    faults = compare_graphs(scaled(0.8, None), scaled(None, scale)).faults
    kinds = {fault.explanation.kind for fault in faults}
    assert kinds and kinds.isdisjoint(("arguments", "operand") if is_bent else ("arguments",))
