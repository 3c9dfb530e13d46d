"""Right values acquit the wrong ones that they are made of, unless they do not depend on them."""

from __future__ import annotations

import numpy as np

from otel_torch.graph.blame import ROUNDS
from otel_torch.graph.compare import GraphComparison, compare_graphs
from otel_torch.graph.graph import Graph
from tests.graph.writer import Tensor, Writer

RANDOM = np.random.default_rng(0)
X, W = (RANDOM.standard_normal(shape).astype(np.float32) for shape in ((6, 6), (6, 6)))
EPSILON = 1e-5


def normed(writer: Writer, x: Tensor, w: Tensor, *, is_fused: bool) -> tuple[Tensor, Tensor]:
    """Return a norm, in one operation or written out, and the factor of each row, or twice its
    inverse.
    """
    mean = writer.op("mean", writer.op("square", x), -1)
    if is_fused:
        factor = writer.op("rsqrt", writer.op("add.scalar", mean, EPSILON))
        return writer.op("rms_norm", x, w, EPSILON), factor
    root = writer.op("sqrt", writer.op("add.scalar", writer.op("mul.scalar", mean, 4), 4 * EPSILON))
    return writer.op("mul", writer.op("div", writer.op("mul.scalar", x, 2), root), w), root


def first_step(scale: float, *, is_fused: bool) -> Graph:
    """Return what is made of a gradient behind many layers, and a weight that goes by its sign."""
    writer = Writer()
    x, w = writer.leaf("x", X, "input"), writer.leaf("w", W)
    hidden, factor = normed(writer.at("norm"), x, w, is_fused=is_fused)
    slope = writer.at("scale").op("mul.scalar", hidden, scale)
    for _ in range(ROUNDS + 8):  # a longer way than may be acquitted
        slope = writer.at("layer").op("mul.scalar", writer.op("neg", slope), 0.9)
    made = writer.op("tanh", slope)
    if is_fused:
        writer.end("out", writer.op("mul", made, factor))
    else:
        writer.end("out", writer.op("div", writer.op("mul.scalar", made, 2), factor))
    size = writer.at("step").op("sqrt", writer.op("square", slope))
    if is_fused:
        rate = writer.op("div", writer.leaf("rate", np.full((6, 6), 0.01, np.float32)), size)
        stepped = writer.op("addcmul", w, slope, rate)
    else:
        sign = writer.op("mul.scalar", writer.op("div", slope, size), 0.01)
        stepped = writer.op("add", w, sign)
    writer.end("param", stepped)
    return writer.finish()


def lines_of(comparison: GraphComparison) -> list[str]:
    """Return at which line of the port each fault begins."""
    graph = comparison.graphs[1]
    places = [fault.port for fault in comparison.faults if fault.port is not None]
    return [graph.lines[graph.nodes.line[place.nodes[0]]][1] for place in places]


def test_a_step_that_sees_only_signs_acquits_nothing_before_it() -> None:
    graphs = first_step(0.5, is_fused=True), first_step(0.7, is_fused=False)
    assert lines_of(compare_graphs(*graphs)) == ["scale"]


def moments(scale: float) -> Graph:
    """Return a gradient, and a weight that goes by its mean over the root of its square's mean."""
    writer = Writer()
    x, w = writer.leaf("x", X, "input"), writer.leaf("w", W)
    slope = writer.at("scale").op("mul.scalar", x, scale)
    writer.end("out", writer.at("layer").op("tanh", slope))
    mean = writer.at("step").op("mul.scalar", slope, 0.1)
    root = writer.op("sqrt", writer.op("mul.scalar", writer.op("square", slope), 0.001))
    rate = writer.op("div", writer.leaf("rate", np.full((6, 6), 0.01, np.float32)), root)
    writer.end("param", writer.op("addcmul", w, mean, rate))
    return writer.finish()


def test_what_is_made_of_one_wrong_value_in_two_ways_does_not_acquit_it() -> None:
    """The factor cancels: the weight is right whatever the scale."""
    comparison = compare_graphs(moments(0.5), moments(0.7))
    assert lines_of(comparison) == ["scale"]


def energies(sign: float) -> Graph:
    """Return what does not see a sign, which another operation makes, too, and what sees it."""
    writer = Writer()
    x = writer.leaf("x", X, "input")
    writer.end("energy", writer.op("rsqrt", writer.at("energy").op("mul", x, x)))
    signed = writer.at("sign").op("mul.scalar", x, sign)
    writer.end("norm", writer.at("norm").op("mean", writer.op("square", signed), -1))
    writer.end("out", writer.at("layer").op("tanh", signed))
    return writer.finish()


def test_an_operation_is_insensitive_though_another_one_makes_the_same_value() -> None:
    assert lines_of(compare_graphs(energies(1.0), energies(-1.0))) == ["sign"]


KEYS, QUERIES = (RANDOM.standard_normal((6, 6)).astype(np.float32) for _ in range(2))


def decoder(turn: np.ndarray, scale: float = 1.0) -> Graph:
    """Return two rows of scores over the same keys, with the columns of their heads turned."""
    writer = Writer()
    query, key = (writer.leaf(name, w @ turn) for name, w in (("q", QUERIES), ("k", KEYS)))
    x, later = writer.leaf("x", X, "input"), writer.leaf("later", X[::-1].copy() ** 3, "input")
    keys = writer.op("transpose", writer.at("keys").op("mm", x, key), (1, 0))
    writer.end(
        "out", writer.op("tanh", writer.at("scores").op("mm", writer.op("mm", x, query), keys))
    )
    scaled = writer.at("scale").op("mul.scalar", writer.at("queries").op("mm", later, query), scale)
    writer.end("out#2", writer.op("tanh", writer.at("scores").op("mm", scaled, keys)))
    return writer.finish()


def test_queries_and_keys_that_are_turned_alike_are_acquitted_by_right_scores() -> None:
    """One operation makes the scores of both, but would not if one of them were wrong."""
    turn = np.linalg.qr(RANDOM.standard_normal((6, 6)))[0].astype(np.float32)
    reference = decoder(np.eye(6, dtype=np.float32))
    assert compare_graphs(reference, decoder(turn)).is_match
    assert lines_of(compare_graphs(reference, decoder(turn, 1.5))) == ["queries"]


def attention(order: list[int], scale: float = 1.0, *, is_fused: bool) -> Graph:
    """Return two rows of scores over the same keys, with the columns of each head in an order."""
    writer = Writer()
    x, later = writer.leaf("x", X, "input"), writer.leaf("later", X[::-1].copy() ** 3, "input")
    projections = QUERIES[:, order], KEYS[:, order]
    if is_fused:
        whole = writer.leaf("qk", np.concatenate(projections, 1))

        def project(tokens: Tensor) -> list[Tensor]:
            made = writer.at("whole").op("mm", tokens, whole)
            return [writer.at("split").op("slice", made, 1, i, i + 6) for i in (0, 6)]
    else:
        weights = [writer.leaf(name, w) for name, w in zip("qk", projections, strict=True)]

        def project(tokens: Tensor) -> list[Tensor]:
            return [writer.at("projection").op("mm", tokens, weight) for weight in weights]

    queries, keys = project(x)
    turned = writer.op("transpose", keys, (1, 0))
    writer.end("out", writer.op("tanh", writer.at("scores").op("mm", queries, turned)))
    later_queries, _ = project(later)
    scaled = writer.at("scale").op("mul.scalar", later_queries, scale)
    writer.end("out#2", writer.op("tanh", writer.at("scores").op("mm", scaled, turned)))
    return writer.finish()


def test_parts_of_one_projection_are_acquitted_by_right_scores() -> None:
    order = [3, 1, 5, 0, 2, 4]
    reference = attention(list(range(6)), is_fused=False)
    assert compare_graphs(reference, attention(order, is_fused=True)).is_match
    comparison = compare_graphs(reference, attention(order, 1.5, is_fused=True))
    assert lines_of(comparison) == ["scale"]


def positioned(step: float) -> Graph:
    """Return scores of queries that a table of positions has changed."""
    writer = Writer()
    x, q, k = (writer.leaf(name, w) for name, w in (("x", X), ("q", QUERIES), ("k", KEYS)))
    positions = writer.leaf("positions", np.abs(W))
    table = writer.op("add.scalar", writer.at("table").op("mul.scalar", positions, step), 1.0)
    query = writer.at("turn").op("mul", writer.at("query").op("mm", x, q), table)
    writer.end("out", writer.op("tanh", writer.at("scores").op("mm", query, k)))
    return writer.finish()


def test_what_leaves_a_value_as_it_was_is_not_right_because_of_it() -> None:
    """A product with ones is the reference's value before its product: it acquits no table."""
    assert lines_of(compare_graphs(positioned(0.5), positioned(0.0)))[0] == "table"


def weighed(factor: float, put: np.ndarray | None = None) -> Graph:
    """Return a weighed input beside what is made of it, which a trial may have put there."""
    writer = Writer()
    weight = writer.leaf("weight", W[0] * np.float32(factor))
    x = writer.at("weigh").op("mul", writer.leaf("x", X, "input"), weight)
    made = writer.at("layer").op("tanh", writer.op("mm", x, writer.leaf("w", W)))
    if put is not None:
        made = writer.put_there(put)
    writer.end("made", made)
    writer.end("out", writer.at("add").op("add", x, made))
    return writer.finish()


def test_a_value_that_was_put_there_acquits_nothing_before_it() -> None:
    right = np.tanh((X * W[0]) @ W)
    comparison = compare_graphs(weighed(1.0), weighed(1.5, right))
    assert [fault.explanation.kind for fault in comparison.faults] == ["leaf"]


def weighted(factor: float, share: float) -> Graph:
    """Return what two steps make of a value: each weighs it by a share of weights of its own."""
    writer = Writer()
    random = np.random.default_rng(0)
    x, n, *weights = (random.uniform(1, 2, (4, 6)).astype(np.float32) for _ in range(4))
    made, size = writer.leaf("x", x, "input"), writer.leaf("n", n)
    leaves = [writer.leaf(f"m.{step}", own) for step, own in enumerate(weights)]
    shares = [
        writer.at("share").op("neg", writer.op("div", writer.op("mul.scalar", own, share), size))
        for own in leaves
    ]
    for own in shares:
        made = writer.at("weigh").op("mul.scalar", writer.op("mul", made, own), 1 / share)
        made = writer.op("neg", writer.at("update").op("mul.scalar", made, factor))
    writer.end("out", made)
    return writer.finish()


def test_code_that_is_legal_in_one_step_comes_after_other_faults_of_a_later_one() -> None:
    comparison = compare_graphs(weighted(0.5, share=0.7), weighted(0.6, share=0.3))
    graph = comparison.graphs[1]
    nodes = [fault.port.nodes[0] for fault in comparison.faults if fault.port is not None]
    assert graph.lines[graph.nodes.line[nodes[0]]][1] == "update"


def turned(place: float, *, is_port: bool) -> Graph:
    """Return what is turned in two steps, each by a place of its own and by an axis that is the
    same; the reference has both with the other sign, and computes the first step otherwise.
    """
    writer = Writer()
    sign = 1.0 if is_port else -1.0
    freq = writer.leaf("freq", X, "input")
    for step, own in enumerate((0.5, place)):
        # a constant that each step creates again
        axis = writer.leaf(f"axis{step}", np.full(3, 2 * sign, np.float32), "constant")
        zero = writer.leaf(f"zero{step}", np.zeros(1, np.float32), "input")
        at = writer.at("place").op("add.scalar", zero, own * sign)
        wide = writer.at("axis").op("reshape", writer.op("expand", axis, (12, 3)), (6, 6))
        at = writer.at("turn").op("expand", at, (6, 6))
        if step or is_port:
            turn = writer.op("addcmul", freq, at, wide)
        else:
            turn = writer.op("add", freq, writer.op("mul", at, wide))
        writer.at("out").end(f"out#{step}", writer.op("tanh", turn))
    return writer.finish()


def test_a_constant_that_each_step_makes_anew_is_as_legal_as_in_the_first() -> None:
    comparison = compare_graphs(turned(0.7, is_port=False), turned(0.9, is_port=True))
    assert lines_of(comparison)[0] == "place"


KERNEL = RANDOM.standard_normal((4, 6)).astype(np.float32)


def convolved(first: int, *, is_port: bool) -> Graph:
    """Return what is mixed of rows in two steps; the port keeps rows in a cache that begins empty,
    and in which the second step reads the rows from `first` on.
    """
    writer = Writer()
    kernel = writer.leaf("kernel", KERNEL)
    rows = [writer.leaf(f"x{step}", own, "input") for step, own in enumerate((X[:4], W[:4]))]
    if is_port:
        cache = writer.leaf("empty", np.zeros((2, 6), np.float32), "constant")
        for step, own in enumerate(rows):
            joined = writer.at("join").op("cat", cache, own, 0)
            cache = writer.at("keep").op("slice", joined, 0, first, first + 2)
            writer.end(f"out#{step}", writer.at("mix").op("mm", kernel, joined))
    else:
        turned = writer.op("transpose", kernel, (1, 0))
        part = writer.op("slice", turned, 0, 2, 6)
        made = writer.op("mm", writer.op("transpose", rows[0], (1, 0)), part)
        writer.end("out#0", writer.op("transpose", made, (1, 0)))
        kept = writer.at("keep").op("slice", rows[0], 0, first - 2, first)
        wide = writer.op("transpose", writer.op("cat", kept, rows[1], 0), (1, 0))
        made = writer.at("mix").op("mm", wide, turned)
        writer.end("out#1", writer.op("transpose", made, (1, 0)))
    return writer.finish()


def test_what_legal_code_reads_for_the_first_time_is_blamed() -> None:
    """The cache is empty when the code runs first, and that is right."""
    assert compare_graphs(convolved(4, is_port=False), convolved(4, is_port=True)).is_match
    comparison = compare_graphs(convolved(4, is_port=False), convolved(3, is_port=True))
    assert lines_of(comparison)[0] == "keep"


def updated(*, is_turned: bool) -> Graph:
    """Return two weights, each updated by its gradient; the port turns the gradient of the second."""
    writer = Writer()
    x = writer.leaf("x", QUERIES, "input")
    for name, own in (("first", W), ("second", KEYS)):
        weight = writer.leaf(name, own)
        gradient = writer.at("gradient").op("mm", x, weight)
        if is_turned and name == "second":
            gradient = writer.at("turn").op("transpose", gradient, (1, 0))
        mean = writer.at("step").op("mul.scalar", gradient, 0.1)
        size = writer.op("rsqrt", writer.op("mul", gradient, gradient))
        writer.end("updated", writer.op("addcmul", weight, mean, size))
    return writer.finish()


def test_what_right_code_read_a_step_before_is_nothing_new_to_it() -> None:
    comparison = compare_graphs(updated(is_turned=False), updated(is_turned=True))
    assert lines_of(comparison)[0] == "turn"


def attended(count: int) -> Graph:
    """Return what attends to some rows of keys, in a line that scales the queries and then them."""
    writer = Writer()
    q, k = writer.leaf("q", QUERIES, "input"), writer.leaf("k", KEYS)
    halves = [writer.op("slice", k, 0, start, 3 + start) for start in (0, 3)]
    joined = writer.at("join").op("cat", *halves, *halves, 0)
    joined = writer.op("slice", joined, 0, 0, count)
    scaled = [writer.at("scores").op("mul.scalar", operand, 0.5) for operand in (q, joined)]
    scores = writer.op("mm", scaled[0], writer.op("transpose", scaled[1], (1, 0)))
    writer.end("out", writer.op("mm", writer.op("softmax", scores), joined))
    return writer.finish()


def test_what_a_line_reads_in_one_place_is_not_new_to_another_place_of_it() -> None:
    comparison = compare_graphs(attended(6), attended(8))
    assert lines_of(comparison)[0] == "scores"
