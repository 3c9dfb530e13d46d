"""Score an answer against the place of the fault that is known by construction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from otel_torch.graph.blame import Rules
from otel_torch.graph.compare import FaultPlace, GraphComparison, GraphFault, compare_graphs
from otel_torch.graph.graph import Graph
from tests.graph.programs import Case, write_program

# what can become of a case, the best first
OUTCOMES = ("line", "region", "listed", "wrong", "missed", "silent", "accused", "no effect")
GOOD = ("line", "region", "silent", "no effect")


def run(case: Case, rules: Rules | None = None) -> tuple[str, GraphComparison]:
    """Return what becomes of a case, and the comparison."""
    graphs = write_program(case.reference), write_program(case.port)
    comparison = compare_graphs(*graphs, rules=rules)
    return outcome(case, graphs, comparison), comparison


def outcome(case: Case, graphs: tuple[Graph, Graph], comparison: GraphComparison) -> str:
    """Return what becomes of a case, a word of `OUTCOMES`."""
    if not case.lines:
        return "accused" if comparison.faults or not comparison.is_match else "silent"
    if not has_effect(case, graphs[1]):
        return "no effect"
    if not comparison.faults:
        return "missed"
    lines = [list(fault_lines(comparison, fault, "nodes")) for fault in comparison.faults]
    if case.lines & set(lines[0]):
        return "line"
    if case.lines & set(fault_lines(comparison, comparison.faults[0], "region")):
        return "region"
    return "listed" if any(case.lines & set(some) for some in lines) else "wrong"


def has_effect(case: Case, port: Graph) -> bool:
    """Return whether a fault changes the port's end by more than rounding does."""
    blocks = tuple(replace(block, fault="") for block in case.port.blocks)
    clean = write_program(replace(case.port, blocks=blocks))
    least = 0.2 if case.port.dtype == "bfloat16" else 1e-3
    ends = [[graph.values.sketch[end] for end in graph.ends] for graph in (clean, port)]
    changes = [np.linalg.norm(a - b) / np.linalg.norm(a) for a, b in zip(*ends, strict=True)]
    return bool(max(changes) > least)


def fault_lines(comparison: GraphComparison, fault: GraphFault, part: str) -> Iterator[str]:
    """Yield the lines of a fault in both programs: of its first node, or of its region."""
    for graph, place in zip(comparison.graphs, fault.places, strict=True):
        if place is not None:
            yield from (graph.lines[graph.nodes.line[node]][1] for node in nodes_of(place, part))
            if place.leaf >= 0:
                yield graph.lines[graph.values.line[place.leaf]][1]


def nodes_of(place: FaultPlace, part: str) -> tuple[int, ...]:
    """Return the nodes of a part of a place."""
    return place.nodes[:1] if part == "nodes" else place.region
