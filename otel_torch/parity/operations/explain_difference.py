"""What differs between two regions of operations, as a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from otel_torch.graph.compare import GraphComparison, GraphFault
from otel_torch.graph.equality import TERM
from otel_torch.graph.explanation import Kind
from otel_torch.graph.graph import NOTHING, PUT, WEIGHT_KINDS, Graph
from otel_torch.parity.operations.labels import code_line, short_name
from otel_torch.parity.sides import Sides

_LEAF_WORDS = {
    "parameter": "parameter",
    "buffer": "buffer",
    "input": "input",
    "unrecorded": "input from steps that were not recorded,",
}
# operations and operands that a sentence lists; more are counted
_MOST_NAMES = 4

# operations of the recording alone
_OWN = "otel_torch."
# where one program needs many operations, most of them are no fault
_OTHER_WAY = "{reference} in the reference and {port} in the port come to different values."

_SENTENCES: dict[Kind, str] = {
    "arguments": "`{operation}` has {reference} in the reference and {port} in the port.",
    "operation": "The reference computes {reference} where the port computes {port}.",
    "exchanged": "The operands of `{operation}` come in another order.",
    "operand": "`{operation}` reads {reference} in the reference and {port} in the port.",
    "missing": "The port leaves out {reference}.",
    "extra": "Only the port computes {port}.",
    "order": "The same numbers are in another order.",
    "rows": "`{operation}` takes {port} of a table, and the reference computes {reference} of it.",
    "features": "`{operation}` reads {port} in another order than the reference does, but "
    "{reference} in the same one.",
    "cast": "The dtype changes in another place: {reference} in the reference, {port} in the port.",
    "rounded": "The port rounds to {port} here, and the reference does not.",
    "random": "Both programs draw random numbers here.",
    "leaf": "{reference} of the reference and {port} of the port have different contents.",
    "end": "Each program computes what the other returns, but returns something else.",
    "other": "",
}


def explain_difference(comparison: GraphComparison, fault: GraphFault) -> str:
    """Return what differs at a fault; empty where no simple difference explains it.

    Args:
        comparison: Of which `fault` is one.
    """
    explanation = fault.explanation
    if explanation.kind == "leaf" and (shapes := _other_shapes(comparison, fault)):
        return shapes
    describe = _DESCRIPTIONS.get(explanation.kind, _of_names)
    items = Sides(list(explanation.reference), list(explanation.port))
    if describe is _of_names:
        items = items.map(_of_program)
        if explanation.kind in ("missing", "extra") and not any(items):
            return ""
    sides = Sides(*map(describe, comparison.graphs, items))
    is_long = explanation.kind == "operation" and any(len(own) > _MOST_NAMES for own in items)
    template = _OTHER_WAY if is_long else _SENTENCES[explanation.kind]
    sentence = template.format(
        operation=short_name(explanation.operation),
        reference=sides.reference,
        port=sides.port,
    )
    return " ".join(filter(None, (sentence, _terms(comparison, fault))))


def _terms(comparison: GraphComparison, fault: GraphFault) -> str:
    """Return that one operation has terms of a sum in one program, and the sum in the other."""
    reference, port = comparison.programs
    nodes = [place.nodes[0] for place in fault.places if place is not None and place.nodes]
    if len(nodes) < 2 or reference.operation[nodes[0]] != port.operation[nodes[1]]:
        return ""
    have_terms = [TERM in reference.relations(nodes[0]), TERM in port.relations(nodes[1])]
    if have_terms[0] == have_terms[1]:
        return ""
    with_terms, other = ("reference", "port") if have_terms[0] else ("port", "reference")
    return (
        f"Each rank of the {with_terms} has a term here, and the {other} their sum: the reduction "
        "over the ranks is missing, or comes later."
    )


def _other_shapes(comparison: GraphComparison, fault: GraphFault) -> str:
    """Return the shapes of two inputs of other sizes; empty for other leaves.

    Weights may have other sizes because the port stacks them.
    """
    values = fault.explanation.reference[0], fault.explanation.port[0]
    tables = [graph.values for graph in comparison.graphs]
    sizes = [table.numel[value] for table, value in zip(tables, values, strict=True)]
    is_input = all(
        graph.leaf_kinds[graph.values.leaf[value]] == "input"
        for graph, value in zip(comparison.graphs, values, strict=True)
    )
    if not is_input or sizes[0] == sizes[1]:
        return ""
    names = [_value(graph, value) for graph, value in zip(comparison.graphs, values, strict=True)]
    shapes = [list(table.shape[value]) for table, value in zip(tables, values, strict=True)]
    return (
        f"{names[0]} has shape {shapes[0]} in the reference, {names[1]} has {shapes[1]} in the "
        "port."
    )


def _of_program(names: Sequence[Any]) -> list[Any]:
    """Return the names of operations without those that only the recording has."""
    return [name for name in names if not str(name).startswith(_OWN)]


def _of_names(graph: Graph, names: Sequence[Any]) -> str:
    """List names of operations, without what only rearranges beside something that computes."""
    return _listed([f"`{short_name(str(name))}`" for name in names]) or "nothing"


def _of_arguments(graph: Graph, arguments: Sequence[Any]) -> str:
    return _listed([_argument(argument) for argument in arguments]) or "no such argument"


def _argument(argument: Any) -> str:
    """Return an argument as people write it.

    >>> _argument({"alpha": 0.5}), _argument([0, 2]), _argument(None)
    ('alpha=0.5', '[0, 2]', 'a tensor')
    """
    if argument is None:
        return "a tensor"
    if isinstance(argument, dict):
        return ", ".join(f"{name}={_argument(value)}" for name, value in argument.items())
    return argument if isinstance(argument, str) else json.dumps(argument)


def _of_values(graph: Graph, values: Sequence[Any]) -> str:
    return _listed([_value(graph, int(value)) for value in values]) or "nothing else"


def _of_rows(graph: Graph, rows: Sequence[Any]) -> str:
    return f"{'row' if len(rows) == 1 else 'rows'} {_listed([str(row) for row in rows])}"


# how what stands on a side is described; names of operations elsewhere
_DESCRIPTIONS: dict[Kind, Callable[[Graph, Sequence[Any]], str]] = {
    "arguments": _of_arguments,
    "operand": _of_values,
    "features": _of_values,
    "leaf": _of_values,
    "rows": _of_rows,
    "rounded": _of_arguments,
}


def _value(graph: Graph, value: int) -> str:
    """Return what a value is: the name of a leaf, else the operation and the line that made it."""
    value = _weight_behind(graph, value)
    leaf, name = graph.values.leaf[value], graph.values.name[value]
    if leaf >= 0:
        kind = graph.leaf_kinds[leaf]
        module = graph.modules[graph.values.module[value]].partition(":")[2]
        path = f"{module}.{name}" if module and kind in WEIGHT_KINDS else name
        word = _LEAF_WORDS.get(kind, "constant")
        return f"the {word} `{path}`" if path else f"a {word}"
    maker = graph.values.maker[value]
    if maker == NOTHING:
        return "a value"
    operation = graph.operations[graph.nodes.operation[maker]]
    line = code_line(graph, int(graph.nodes.line[maker]))
    where = "" if line is None else f" of {line.file.rpartition('/')[2]}:{line.line}"
    if operation == PUT:
        return f"the exchanged value{where}"
    return f"the result of `{short_name(operation)}`{where}"


def _weight_behind(graph: Graph, value: int) -> int:
    """Return the weight that a value is a view or a transpose of; for other values, the value."""
    values, nodes, behind = graph.values, graph.nodes, value
    while (maker := values.maker[behind]) >= 0 and nodes.moves[maker]:
        reads = nodes.reads[maker].tolist()
        if len(reads) != 1 or reads[0] < 0 or values.numel[reads[0]] != values.numel[value]:
            return value
        (behind,) = reads
    leaf = values.leaf[behind]
    return behind if leaf >= 0 and graph.leaf_kinds[leaf] in WEIGHT_KINDS else value


def _listed(items: Sequence[str]) -> str:
    """Join a few items with commas.

    >>> _listed(["a", "b"]), _listed(list("abcdef"))
    ('a, b', 'a, b, c, d and 2 more')
    """
    distinct = list(dict.fromkeys(items))
    more = len(distinct) - _MOST_NAMES
    text = ", ".join(distinct[:_MOST_NAMES])
    return f"{text} and {more} more" if more > 0 else text
