"""The operations of a region as lines that people read: `%7 = sub(%5, 8)`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from otel_torch.graph.graph import Graph, Indices
from otel_torch.graph.states import RIGHT
from otel_torch.parity.finding import ListedOperation
from otel_torch.parity.operations.labels import code_line, short_name


def list_operations(graph: Graph, nodes: Sequence[int], states: Indices) -> list[ListedOperation]:
    """Return operations in the order of execution.

    Args:
        states: Of the graph's values.
    """
    return [
        ListedOperation(
            _text(graph, node),
            code_line(graph, int(graph.nodes.line[node])),
            bool((states[graph.nodes.makes[node]] == RIGHT).all()),
        )
        for node in nodes
    ]


def _text(graph: Graph, node: int) -> str:
    operands = (_name(graph, int(value)) for value in graph.nodes.reads[node])
    arguments = json.loads(graph.arguments[graph.nodes.argument[node]])
    listed = ", ".join(_argument(argument, operands) for argument in arguments)
    made = ", ".join(_name(graph, int(value)) for value in graph.nodes.makes[node])
    return f"{made} = {short_name(graph.operations[graph.nodes.operation[node]])}({listed})"


def _argument(argument: Any, operands: Iterator[str]) -> str:
    """Return an argument; each None stands for the next operand, or for no tensor at all."""
    if argument is None:
        return next(operands, "None")
    if isinstance(argument, list):
        return f"[{', '.join(_argument(part, operands) for part in argument)}]"
    if isinstance(argument, dict):
        parts = (f"{name}={_argument(value, operands)}" for name, value in argument.items())
        return ", ".join(parts)
    return str(argument)


def _name(graph: Graph, value: int) -> str:
    return graph.values.name[value] or f"%{value}"
