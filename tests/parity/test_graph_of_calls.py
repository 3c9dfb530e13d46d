"""A forward as a graph: what a call reads and makes, and what the code between two calls may read."""

from __future__ import annotations

from typing import Any

from otel_torch.parity.call_graph import build_parameters, build_program
from otel_torch.parity.graph_of_calls import GraphOfCalls, graph_of_calls


def row(module: str, tensor: str, value: int, order: list[int], parent: int | None) -> Any:
    own = {"model": "M", "module": module, "class": module or "M", "tensor": tensor, "step": 0}
    numbers = {"shape": [4], "numel": 4, "abs_mean": 1.0 + value, "dtype": "torch.float32"}
    return own | numbers | {"value": value, "order": order, "parent": parent}


# norm(x), then `attn` of what the code of the root makes of it; `head` is never called
ROWS = [
    row("", "in[0]", 1, [1, 8], None),
    row("norm", "in[0]", 1, [2, 3], 1),
    row("norm", "out", 2, [2, 3], 1),
    row("attn", "in[0]", 3, [4, 5], 1),
    row("attn", "out", 4, [4, 5], 1),
    row("", "out", 5, [1, 8], None),
]
WEIGHTS = [
    {
        "model": "M",
        "module": module,
        "tensor": "param.weight",
        "shape": [4],
        "abs_mean": 9.0 + place,
    }
    for place, module in enumerate(("norm", "head"))
]


def graph() -> GraphOfCalls:
    program = build_program(ROWS)
    order = {("M", name): place for place, name in enumerate(("", "norm", "attn", "head"))}
    ends = [program.outermost[0].outputs[0].value]
    return graph_of_calls(program, build_parameters(WEIGHTS), {("M", "head")}, order, ends, {})


def described(built: GraphOfCalls) -> list[tuple[str, bool, list[str], list[str]]]:
    """Return each node: whose code it is, whether it is vague, what it reads and makes."""

    def name(value: int) -> str:
        birth = built.births[value]
        return f"{birth.call.module} {birth.tensor}" if hasattr(birth, "call") else birth.full_name

    nodes = built.graph.nodes
    return [
        (
            "" if call is None else call.module,
            bool(nodes.is_vague[node]),
            [name(value) for value in nodes.reads[node].tolist()],
            [name(value) for value in nodes.makes[node].tolist()],
        )
        for node, call in enumerate(built.calls)
    ]


def test_a_call_reads_its_inputs_and_weights_and_code_may_read_all_that_it_has() -> None:
    assert described(graph()) == [
        ("norm", False, [" in[0]", "norm.weight"], ["norm out"]),
        ("", True, [" in[0]", "norm out"], ["attn in[0]"]),
        ("attn", False, ["attn in[0]"], ["attn out"]),
        # what stands behind `attn` in the table may be read for the result alone
        (
            "",
            True,
            [" in[0]", "norm out", "attn in[0]", "attn out", "head.weight"],
            [" out"],
        ),
    ]


def test_what_a_model_is_given_is_a_leaf_and_its_result_an_end() -> None:
    built = graph()
    leaves = [
        built.graph.leaf_kinds[kind] for kind in built.graph.values.leaf.tolist() if kind >= 0
    ]
    assert leaves == ["parameter", "parameter", "input"]
    assert [built.births[end].tensor for end in built.graph.ends.tolist()] == ["out"]  # type: ignore[union-attr]


def test_without_recorded_inputs_a_call_may_read_all_that_came_before_it() -> None:
    rows = [
        row("norm", "out", 2, [2, 3], 1),
        row("attn", "out", 4, [4, 5], 1),
        row("", "out", 5, [1, 8], None),
    ]
    program = build_program(rows)
    ends = [program.outermost[0].outputs[0].value]
    built = graph_of_calls(program, [], set(), {}, ends, {})
    assert described(built) == [
        ("norm", True, [], ["norm out"]),
        ("attn", True, ["norm out"], ["attn out"]),
        ("", True, ["norm out", "attn out"], [" out"]),
    ]
