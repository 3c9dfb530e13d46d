"""A graph read from the rows of a recording of operations."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest

from otel_torch.graph.builder import GraphBuilder
from otel_torch.graph.compare import compare_graphs
from otel_torch.parity.operations.compare_operations import compare_operations
from otel_torch.parity.operations.read_graph import RecordedGraph, graph_of_rows, read_graph
from otel_torch.parity.recording_source import RecordingSource
from otel_torch.parity.sides import Sides

PLACE = {"module": "mlp", "step": 0, "call": 0, "loop": 0, "model": "Net", "phase": "forward"}
LINES = [["model.py", 7, "forward", "y = x * 2"], ["model.py", 9, "forward", "return y.t()"]]


def content(seed: int, shape: list[int], **fields) -> dict:
    array = np.random.default_rng(seed).standard_normal(64).astype("<f4")
    return {
        "shape": shape,
        "dtype": "torch.float32",
        "sketch": base64.b64encode(array.tobytes()).decode(),
        "abs_mean": 0.8,
        "mean": 0.1,
        "std": 1.0,
        "min": -2.0,
        "max": 2.5,
        "nonfinite": 0,
    } | fields


def rows(factor: float = 2.0, seed: int = 1) -> list[dict]:
    """Return the rows of x -> x * factor -> transposed, in the order of a recording."""
    return [
        PLACE
        | {"tensor": "leaf[0]", "leaf": "input", "name": "x", "value": 0, "line": 0}
        | content(0, [2, 8]),
        PLACE
        | {"tensor": "op[0]", "op": "aten.mul.Tensor", "args": [{"value": 0}, factor, {"alpha": 1}]}
        | {"reads": [0], "value": 1, "makes": 0, "line": 0}
        | content(seed, [2, 8]),
        PLACE | {"tensor": "out", "mean": 0.1},
        PLACE
        | {"tensor": "op[1]", "op": "aten.t.default", "args": [{"value": 1}], "reads": [1]}
        | {"value": 2, "makes": 0, "line": 1, "moves": True}
        | content(seed + 10, [8, 2]),
        PLACE | {"tensor": "end[0]", "end": "out", "value": 2},
    ]


def test_rows_become_values_nodes_and_ends():
    graph = graph_of_rows(rows(), {"lines": LINES}).graph
    assert graph.operations == ["aten.mul.Tensor", "aten.t.default"]
    assert [json.loads(text) for text in graph.arguments] == [[None, 2.0, {"alpha": 1}], [None]]
    assert graph.nodes.reads.lists() == [[0], [1]] and graph.nodes.makes.lists() == [[1], [2]]
    assert graph.nodes.moves.tolist() == [False, True]
    assert graph.values.maker.tolist() == [-1, 0, 1]
    assert (
        graph.values.shape == [(2, 8), (2, 8), (8, 2)] and graph.values.numel.tolist() == [16] * 3
    )
    assert graph.values.roundoff.tolist() == [2.0**-24] * 3
    assert graph.values.name[0] == "x" and graph.leaf_kinds == ["input"]
    assert graph.lines[graph.nodes.line[1]] == ("model.py", 9, "forward", "return y.t()")
    assert graph.ends.tolist() == [2] and graph.end_names == ["out"]
    assert graph.modules == ["Net:mlp"]


def test_a_value_without_a_row_is_a_leaf_of_which_nothing_is_known():
    graph = graph_of_rows(rows()[1:], {}).graph
    assert graph.values.numel.tolist() == [16, 16, -1]
    assert graph.leaf_kinds == ["unseen"]
    assert np.isnan(graph.values.sketch[2]).all()


def test_several_results_of_an_operation_are_one_node():
    split = [
        PLACE
        | {"tensor": f"op[0][{k}]", "op": "aten.split.Tensor", "args": [{"value": 0}, 4, 1]}
        | {"reads": [0], "value": k + 1, "makes": k, "moves": True}
        | content(k, [2, 4])
        for k in (0, 1)
    ]
    graph = graph_of_rows([rows()[0], *split], {}).graph
    assert graph.nodes.makes.lists() == [[1, 2]]


def test_the_same_number_in_another_step_is_another_node_and_ends_are_counted():
    second = [row | {"step": 1, "value": row.get("value", 0) + 10} for row in rows()]
    graph = graph_of_rows(rows() + second, {"lines": LINES}).graph
    assert len(graph.nodes) == 4
    assert graph.end_names == ["out", "out#2"]


def test_what_is_made_after_the_last_end_and_not_read_is_an_end_without_a_name():
    view = rows()[3] | {"tensor": "op[2]", "reads": [2], "value": 3}
    last = rows()[1] | {"tensor": "op[3]", "reads": [2], "value": 4}
    graph = graph_of_rows([*rows(), view, last], {"operations_cut": True}).graph
    assert graph.end_names == ["out", ""] and graph.ends.tolist()[1] == 4
    assert graph.is_cut
    backward = last | {"phase": "backward"}
    assert graph_of_rows([*rows(), backward], {}).graph.end_names == ["out", ""]


def test_a_gradient_that_is_not_read_is_no_end_where_an_optimizer_reads_others():
    both = [rows()[0], *training_rows(0, 0)]
    unread = {"op": "mm", "tensor": "op[3]", "reads": [1], "value": 4, "phase": "backward"}
    gradient = PLACE | {"step": 0} | unread | content(4, [2, 8], phase="backward")
    assert "" not in graph_of_rows([*both, gradient], {}).graph.end_names


def training_rows(step: int, start: int) -> list[dict]:
    """Return a forward, a backward pass and an update: x -> out -> gradient -> parameter."""
    place = PLACE | {"step": step}
    return [
        place
        | {"tensor": "op[0]", "op": "mul", "reads": [start], "value": start + 1, "makes": 0}
        | content(start + 1, [2, 8]),
        place | {"tensor": "end[0]", "end": "out", "value": start + 1},
        place
        | {"tensor": "op[1]", "op": "mm", "reads": [start + 1], "value": start + 2, "makes": 0}
        | content(start + 2, [2, 8], phase="backward"),
        place
        | {"tensor": "op[2]", "op": "add_", "reads": [start, start + 2], "value": start + 3}
        | content(start + 3, [2, 8], phase="update", makes=0),
        place | {"tensor": "end[1]", "end": "param.w", "value": start + 3, "phase": "update"},
    ]


def test_the_ends_of_a_training_are_its_gradients_and_last_parameters():
    both = [rows()[0], *training_rows(0, 0), *training_rows(1, 3)]
    evaluation = PLACE | {"step": 1, "tensor": "op[3]", "op": "mul", "reads": [6], "value": 7}
    returned = PLACE | {"step": 1, "tensor": "end[2]", "end": "out", "value": 7}
    graph = graph_of_rows([*both, evaluation | content(7, [2, 8]), returned], {}).graph
    names = ["grad.mlp.w", "grad.mlp.w#2", "param.mlp.w", "out", "out#2", "out#3"]
    assert graph.end_names == names
    assert [graph.values.statistics.shape[0], *graph.passed.tolist()] == [
        8, False, False, False, True, True, False
    ]  # fmt: skip
    ends = compare_graphs(graph, graph_of_rows(both, {}).graph).ends
    assert [pair.name for pair in ends] == names[:3]


def test_logits_that_a_loss_makes_flat_are_passed_on():
    """The model returns a view of its last product, the loss reads another one of the product."""
    product, end, *others = training_rows(0, 0)
    view = PLACE | {"tensor": "op[3]", "op": "_unsafe_view", "reads": [1], "value": 4, "makes": 0}
    whole = view | content(4, [1, 2, 8], moves=True)
    half = view | content(4, [1, 8], moves=True)
    for made, is_passed in ((whole, True), (half, False)):
        program = [rows()[0], product, made, end | {"value": 4}, *others]
        graph = graph_of_rows(program, {}).graph
        passed = dict(zip(graph.end_names, graph.passed.tolist(), strict=True))
        assert passed["out"] is is_passed


def test_a_parameter_that_is_copied_back_after_the_step_ends_with_the_copy():
    *step, end = training_rows(0, 0)  # the optimizer changes a copy of the parameter
    copied = PLACE | {"tensor": "op[3]", "op": "copy_", "reads": [3], "value": 4, "replaces": 0}
    copied |= content(4, [2, 8])
    graph = graph_of_rows([rows()[0], *step, end | {"value": 0}, copied], {}).graph
    ends = dict(zip(graph.end_names, graph.ends.tolist(), strict=True))
    node = graph.values.maker[ends["param.mlp.w"]]
    assert graph.operations[graph.nodes.operation[node]] == "copy_"


@pytest.mark.parametrize(("has_loops", "ends"), [(False, {2, 9}), (True, {2, 3, 9})])
def test_what_each_of_several_loops_makes_last_is_an_end(has_loops, ends):
    """A second sampler begins after what the first one makes of its last output."""
    sample = PLACE | {"tensor": "op[2]", "op": "mul", "reads": [2], "value": 3, "makes": 0}
    again = PLACE | {
        "loop": 1,
        "tensor": "op[3]",
        "op": "mul",
        "reads": [0],
        "value": 9,
        "makes": 0,
    }
    returned = PLACE | {"loop": 1, "tensor": "end[1]", "end": "out", "value": 9}
    both = [*rows(), sample | content(3, [8, 2]), again | content(9, [2, 8]), returned]
    graph = graph_of_rows(both, {}, has_loops=has_loops).graph
    made = {0: 0, 1: 1, 2: 2, 3: 3, 4: 9}  # the values in the order of the rows
    assert {made[end] for end in graph.ends.tolist()} == ends


def test_memory_that_is_written_to_afterwards_is_no_end():
    """A table of losses: it is read as a whole for the place of the last one, which is then written."""

    def row(op: str, number: int, reads: list[int], **fields) -> dict:
        own = {"tensor": f"op[{number}]", "op": op, "reads": reads, "value": number, "makes": 0}
        return PLACE | own | content(number, [2, 8]) | fields

    table = row("otel_torch.reread", 3, [1, 2], moves=True)
    place = row("aten.select.int", 4, [3], moves=True)
    written = row("aten.copy_.default", 5, [0], moves=True)
    last = row("aten.mul.Tensor", 6, [2])
    graph = graph_of_rows([*rows(), table, place, written, last], {}).graph
    assert dict(zip(graph.ends.tolist(), graph.end_names, strict=True)) == {2: "out", 6: ""}


def test_what_is_made_of_inputs_alone_for_the_next_step_is_no_end():
    """Both prompts in one batch are made again for each step; of two equal halves the half counts."""

    def row(op: str, number: int, reads: list[int], **fields) -> dict:
        own = {"tensor": f"op[{number}]", "op": op, "reads": reads, "value": number, "makes": 0}
        return PLACE | own | content(number, [2, 8]) | fields

    prompts = row("aten.cat.default", 3, [0, 0], moves=True)
    scaled = row("aten.mul.Tensor", 4, [0])
    latents = row("aten.mul.Tensor", 5, [2])
    both = row("aten.cat.default", 6, [5, 5], moves=True)
    graph = graph_of_rows([*rows(), prompts, scaled, latents, both], {}).graph
    assert dict(zip(graph.ends.tolist(), graph.end_names, strict=True)) == {2: "out", 5: ""}


def test_what_is_made_of_a_view_may_be_read_of_what_that_is_a_view_of():
    """Logits of one position have the memory of the product that all logits are a view of."""

    def row(op: str, number: int, reads: list[int], **fields) -> dict:
        own = {"tensor": f"op[{number}]", "op": op, "reads": reads, "value": number, "makes": 0}
        return PLACE | own | content(number, [2, 8]) | fields

    scores = row("aten._log_softmax.default", 3, [1])
    graph = graph_of_rows([*rows(), scores], {}).graph
    assert dict(zip(graph.ends.tolist(), graph.end_names, strict=True)) == {2: "out", 3: ""}


def test_what_one_index_has_chosen_of_several_values_are_ends_each():
    """A detector picks scores and labels by one index, and prints the sum of the scores alone."""

    def row(op: str, number: int, reads: list[int], shape: list[int], **fields) -> dict:
        own = {"tensor": f"op[{number}]", "op": op, "reads": reads, "value": number, "makes": 0}
        return PLACE | own | content(number, shape) | fields

    whole = {"dtype": "torch.int64"}
    program = [
        rows()[0],
        row("aten.mul.Tensor", 1, [0], [2, 8]),
        row("aten.argsort.default", 2, [1], [40], **whole),
        row("aten.argmax.default", 3, [1], [40], **whole),
        row("aten.index.Tensor", 4, [1, 2], [20], moves=True),
        row("aten.index.Tensor", 5, [3, 2], [20], moves=True, **whole),
        row("aten.sum.default", 6, [4], []),
    ]
    assert set(graph_of_rows(program, {}).graph.ends.tolist()) == {4, 5, 6}


def write_recording(path: Path, seed: int, *further: dict) -> Path:
    made, ended = rows(seed=seed)[1], PLACE | {"tensor": "end[0]", "end": "out", "value": 1}
    path.write_text("".join(json.dumps(row) + "\n" for row in (rows()[0], made, *further, ended)))
    path.with_suffix(".meta.json").write_text(json.dumps({"lines": LINES}))
    return path


def test_parts_are_readings_of_their_value_and_come_last(tmp_path):
    part = PLACE | {"op": "otel_torch.part", "reads": [1], "reading": True}
    parts = [
        part | {"tensor": f"part[0][{n}]", "value": 2 + n, "makes": n} | content(5 + n, [1, 8])
        for n in (0, 1)
    ]
    graph, places, *_ = read_graph(
        RecordingSource(write_recording(tmp_path / "one.jsonl", 1, *parts))
    )
    assert graph.nodes.is_reading.tolist() == [False, True]
    assert (graph.nodes.reads[1].tolist(), graph.nodes.makes[1].tolist()) == ([1], [2, 3])
    assert [place.tensor for place in places] == ["leaf[0]", "op[0]", "part[0][0]", "part[0][1]"]
    assert graph.end_names == ["out"]


def test_ranks_beside_a_process_without_parts_are_compared_and_it_is_said(tmp_path):
    one, first, second = (tmp_path / f"{name}.jsonl" for name in ("one", "rank0", "rank1"))
    for path, seed in ((one, 1), (first, 1), (second, 1)):
        write_recording(path, seed)
    first, second, one = map(RecordingSource, (first, second, one))
    report = compare_operations(Sides(one, first), None, further_ranks=[second])
    assert report.verdict == "match"
    assert [text for text in report.warnings if "OTEL_TORCH_GRAPH_PARTS=2" in text]


def test_ranks_are_one_graph_beside_that_of_one_process(tmp_path):
    one = read_graph(RecordingSource(write_recording(tmp_path / "one.jsonl", 1))).graph
    paths = [write_recording(tmp_path / f"rank{rank}.jsonl", 1 + rank) for rank in (0, 1)]
    two = read_graph(*map(RecordingSource, paths)).graph
    assert two.nodes.is_reading.tolist() == [False, False, True]  # the last one is their sum
    assert two.end_names == ["out", "out"]
    assert [pair.is_right for pair in compare_graphs(one, two).ends] == [True, False]
    assert two.lines[two.nodes.line[1]][1] == 7


def test_a_complex_number_is_two_numbers():
    pairs = rows()[1] | {"dtype": "torch.complex64"}
    assert graph_of_rows([rows()[0], pairs], {}).graph.values.numel.tolist() == [16, 32]


def test_parts_of_a_fused_operation_know_it():
    part = rows()[1] | {"tensor": "op[5]", "value": 7, "inside": 0}
    graph = graph_of_rows([*rows(), part], {}).graph
    assert graph.nodes.inside.tolist() == [-1, -1, 0]


def test_the_line_of_a_backward_operation_is_that_of_its_forward():
    backward = rows()[1] | {"tensor": "op[9]", "value": 9, "phase": "backward", "forward_line": 1}
    graph = graph_of_rows([*rows(), backward], {"lines": LINES}).graph
    assert graph.lines[graph.nodes.line[2]][1] == 9 and graph.phases == ["forward", "backward"]


def test_a_recording_is_read_from_its_file(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    (tmp_path / "run.meta.json").write_text(json.dumps({"lines": LINES}))
    graph = read_graph(RecordingSource(path)).graph
    assert len(graph.values) == 3
    assert graph.lines[graph.nodes.line[0]][1] == 7


def test_a_recording_of_modules_alone_is_refused(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps(PLACE | {"tensor": "out", "mean": 0.1}) + "\n")
    with pytest.raises(ValueError, match=r"run\.jsonl: holds no operations"):
        read_graph(RecordingSource(path))


def test_two_recordings_are_compared_down_to_the_line():
    graphs = [graph_of_rows(rows(*case), {"lines": LINES}).graph for case in ((2.0, 1), (3.0, 5))]
    (fault,) = compare_graphs(*graphs).faults
    assert fault.explanation.reference == (2.0,) and fault.explanation.port == (3.0,)
    assert graphs[1].lines[graphs[1].nodes.line[fault.port.nodes[0]]][1] == 7


def test_callers_that_an_edited_file_makes_a_loop_of_end() -> None:
    lines = [("a.py", 1, "f", "")] * 4
    graph = RecordedGraph(GraphBuilder().finish(), [], lines, [1, 0, 1, -5])
    calls = {line: graph.calls_of(line) for line in (None, 0, 1, 2, 3, 9)}
    assert calls == {None: [], 0: [], 1: [0], 2: [1, 0], 3: [], 9: []}
