"""What people call the operations and lines of a graph."""

from __future__ import annotations

from otel_torch.graph.graph import Graph
from otel_torch.parity.finding import CodeLine


def short_name(operation: str) -> str:
    """Return an operation as people call it.

    >>> short_name("aten.sub.Tensor"), short_name("_c10d_functional.all_reduce.default")
    ('sub', 'all_reduce')
    """
    parts = operation.split(".")
    return parts[1] if len(parts) > 2 else operation


def code_line(graph: Graph, index: int) -> CodeLine | None:
    """Return a line of the graph's table; None if it is not known."""
    if index < 0 or not graph.lines[index]:
        return None
    file, number, function, text = graph.lines[index]
    return CodeLine(str(file), int(number), str(function), str(text))
