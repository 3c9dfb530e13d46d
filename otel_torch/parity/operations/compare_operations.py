"""Compare two recordings of operations, and report their faults by line.

recordings -> graphs -> GraphComparison (otel_torch/graph) -> findings -> Report
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from otel_torch.graph.compare import FaultPlace, GraphComparison, GraphFault, compare_graphs
from otel_torch.graph.graph import NOTHING, WEIGHT_KINDS, Graph
from otel_torch.graph.states import RIGHT, WRONG, ComparedProgram
from otel_torch.parity.before_the_run import setup_differences
from otel_torch.parity.environment import environment_differences
from otel_torch.parity.finding import (
    CodeLine,
    ComparedPair,
    Finding,
    Kind,
    ListedOperation,
    Region,
    Report,
    Side,
    State,
    UncomparedTensor,
)
from otel_torch.parity.loaded_recording import captures_of, selection_of
from otel_torch.parity.operations.coarser_dtype import warn_of_coarser_dtype
from otel_torch.parity.operations.explain_difference import explain_difference
from otel_torch.parity.operations.labels import code_line
from otel_torch.parity.operations.list_operations import list_operations
from otel_torch.parity.operations.python_lines import python_lines
from otel_torch.parity.operations.read_graph import RecordedGraph, RecordedPlace, read_graph
from otel_torch.parity.recording_source import RecordingSource
from otel_torch.parity.sides import Sides
from otel_torch.recording.metadata import describe_early_end
from otel_torch.rendering.words import plural


def hold_operations(sources: Sides[RecordingSource]) -> bool:
    """Return whether both recordings hold operations."""
    return all("graph" in captures_of(source.metadata()) for source in sources)


def compare_operations(
    sources: Sides[RecordingSource],
    noise: RecordingSource | None,
    progress: Callable[[str], None] = lambda text: None,
    further_ranks: Sequence[RecordingSource] = (),
) -> Report:
    """Compare two recordings made with OTEL_TORCH_CAPTURE=graph.

    Args:
        further_ranks: The recordings of the port's other ranks, if the reference is one process.
        noise: The reference recorded again with OTEL_TORCH_NOISE, if any.
        progress: Called with a short text from time to time.

    Raises:
        RecordingError: A file cannot be read.
        ValueError: A recording holds no operations, or `noise` is of another program.
    """
    progress("reading operations")
    recorded = Sides(read_graph(sources.reference), read_graph(sources.port, *further_ranks))
    noisy = None if noise is None else read_graph(noise).graph
    progress("comparing operations")
    comparison = compare_graphs(recorded.reference.graph, recorded.port.graph, noisy)
    report = report_comparison(sources, recorded, comparison)
    if noise is None and comparison.is_match and comparison.is_vague:
        most = max(pair.limit for pair in comparison.ends)
        report.warnings.append(
            f"as far as a model of errors can tell, an output may be off by {most:.1g} of its size "
            "by rounding alone, and a fault may hide in it: record the reference once more with "
            "OTEL_TORCH_NOISE=1, and give that with --noise"
        )
    if further_ranks and not comparison.programs[0].parts:
        ranks = 1 + len(further_ranks)
        report.warnings.append(
            f"the reference was recorded without the parts that {ranks} ranks may have of its "
            f"values: record it again with OTEL_TORCH_GRAPH_PARTS={ranks}"
        )
    if report.verdict == "diverged" and comparison.may_move_axes:
        report.warnings.append(
            "the programs have the same numbers in tensors whose axes are in another order: record "
            "both with OTEL_TORCH_GRAPH_AXES=1 for a closer place, or use `otel-torch bisect`"
        )
    if hidden := len(comparison.faults) - len(report.introduced):
        report.warnings.append(
            f"{plural(hidden, 'further place')} may be at fault or another way to write the same: "
            "what comes after the first finding does not tell. Mend that, and compare again"
        )
    return report


def report_comparison(
    sources: Sides[RecordingSource], recorded: Sides[RecordedGraph], comparison: GraphComparison
) -> Report:
    """Return what a comparison of two recordings says.

    Raises:
        RecordingError: The metadata of a recording cannot be read.
    """
    report = Report(
        "match", reference=str(sources.reference), port=str(sources.port), by_operations=True
    )
    metas = sources.map(lambda source: source.metadata(report.warnings.append))
    report.environment = environment_differences(*metas)
    report.setup = setup_differences(*metas)
    report.selections = selection_of(metas.reference), selection_of(metas.port)
    for source, meta in zip(sources, metas, strict=True):
        for early in describe_early_end(source.path, meta):
            report.leave_out(early)
    if coarser := warn_of_coarser_dtype(*comparison.graphs):
        report.warnings.append(coarser)
    report.pairs = int((comparison.partners[1] != NOTHING).sum())
    if not comparison.is_comparable:
        report.verdict = "incomparable"
        report.reason = _why_incomparable(comparison)
        return report
    report.compared = _compared_pairs(comparison, recorded)
    for side, names in zip(("reference", "port"), comparison.unpaired_ends, strict=True):
        for name in names:
            report.unpaired[side].append(UncomparedTensor("", "", name))
    faults = [
        fault for fault in comparison.faults if fault is comparison.faults[0] or _is_sure(fault)
    ]
    report.introduced = [make_finding(comparison, fault, recorded) for fault in faults]
    report.first = next(iter(report.introduced), None)
    if comparison.faults:
        report.operations = region_operations(comparison, comparison.faults[0])
    if not comparison.is_match:
        report.verdict = "diverged"
    if comparison.lacked_rows:
        report.leave_out(_describe_lacked_rows(comparison))
    report.judge_whole()
    return report


def region_operations(
    comparison: GraphComparison, fault: GraphFault
) -> tuple[list[ListedOperation], list[ListedOperation]]:
    """Return the operations of a fault's region in the reference and in the port."""
    reference, port = (
        list_operations(graph, () if place is None else place.region or place.nodes[:1], states)
        for graph, place, states in zip(
            comparison.graphs, fault.places, comparison.states, strict=True
        )
    )
    return reference, port


def _why_incomparable(comparison: GraphComparison) -> str:
    if any(graph.is_cut for graph in comparison.graphs):
        return "one of the programs goes on after what was recorded of it: record more steps"
    sides = zip(("reference", "port"), comparison.graphs, strict=True)
    empty = [side for side, graph in sides if not len(graph.ends)]
    if empty:
        return (
            f"the {' and the '.join(empty)} returned nothing that was recorded, and made no tensor "
            "that is read no more: keep what should be compared until the program ends"
        )
    text = "no output of one program has the size of the other's: they compute different things"
    text += _other_inputs(comparison)
    if not comparison.has_rows:
        text += ". If these are the same tokens in other batches, record both with"
        text += " OTEL_TORCH_GRAPH_ROWS=1"
    return text


def _describe_lacked_rows(comparison: GraphComparison) -> str:
    rows = plural(comparison.lacked_rows, "row")
    return (
        f"{rows} of the reference's outputs are in no output of the port, and were not compared"
        f"{_other_inputs(comparison)}"
    )


def _other_inputs(comparison: GraphComparison) -> str:
    """Return the inputs of one name that have other shapes, as the end of a sentence."""
    text = ""
    shapes, shapes_of_port = map(_input_shapes, comparison.graphs)
    for name, shape in shapes.items():
        if name in shapes_of_port and shapes_of_port[name] != shape:
            own, its = list(shape), list(shapes_of_port[name])
            text += f"; input `{name}` has shape {own} in the reference and {its} in the port"
    return text


def _input_shapes(graph: Graph) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the inputs that have a name; of several the first."""
    values = graph.values
    inputs = [value for value in graph.leaves_of("input") if values.name[value]]
    return {values.name[value]: values.shape[value] for value in reversed(inputs)}


# -- findings

# functions that are no helpers: each module has weights of its own, and nothing calls a script
_NO_HELPERS = ("forward", "__call__", "<module>")
_OTHER_READS = ("arguments", "operand", "exchanged", "rows", "random")
# what differs in code that a number of Python may have misled
_OTHER_CODE = ("operation", "missing", "extra", "cast", "other")
# how many lines before it a name that the line at fault reads may be set to be shown with it
_NEAR = 4


def _is_sure(fault: GraphFault) -> bool:
    """Return whether a fault behind the first one is no mere suspicion."""
    return fault.is_certain and None not in fault.places


class _Half(NamedTuple):
    """What a fault is in one program; nothing where that program has no place."""

    recorded: RecordedPlace = RecordedPlace()
    side: Side | None = None
    line: CodeLine | None = None
    region: tuple[CodeLine, CodeLine] | None = None
    callers: tuple[CodeLine, ...] = ()
    set_by: tuple[CodeLine, ...] = ()


def make_finding(
    comparison: GraphComparison, fault: GraphFault, recorded: Sides[RecordedGraph]
) -> Finding:
    """Return a fault in the names of both programs."""
    reads_others = fault.explanation.kind in _OTHER_READS
    reference, port = (
        _half(program, place, own, reads_others)
        for program, place, own in zip(
            comparison.programs, _explained_places(fault), recorded, strict=True
        )
    )
    if fault.explanation.kind in _OTHER_CODE:
        port = port._replace(set_by=_set_by(comparison.graphs[1], port.line, port.callers))
    return Finding(
        model=reference.recorded.model,
        module=reference.recorded.module,
        tensor=reference.recorded.tensor,
        loop=reference.recorded.loop,
        step=reference.recorded.step,
        call=reference.recorded.call,
        phase=reference.recorded.phase or port.recorded.phase,
        port_model=port.recorded.model,
        port_module=port.recorded.module,
        port_tensor=port.recorded.tensor,
        port_loop=port.recorded.loop,
        port_step=port.recorded.step,
        port_call=port.recorded.call,
        rank=port.recorded.rank if reference.recorded.rank is None else reference.recorded.rank,
        side=reference.side,
        port_side=port.side,
        kind=_kind(comparison, fault),
        error=fault.error,
        floor=fault.limit,
        explanation=explain_difference(comparison, fault),
        before="right" if fault.is_certain else "partly",
        line=reference.line,
        port_line=port.line,
        region=Region(reference.region, port.region),
        callers=reference.callers,
        port_callers=port.callers,
        set_by=reference.set_by,
        port_set_by=port.set_by,
    )


def _explained_places(fault: GraphFault) -> tuple[FaultPlace | None, FaultPlace | None]:
    """Return the places of a fault, beginning with the operations that the explanation is about."""
    if fault.explanation.nodes is None or None in fault.places or fault.begins_at_leaf:
        return fault.places
    first, second = (
        place and replace(place, nodes=(node, *place.nodes))
        for place, node in zip(fault.places, fault.explanation.nodes, strict=True)
    )
    return first, second


def _half(
    program: ComparedProgram,
    place: FaultPlace | None,
    recorded: RecordedGraph,
    reads_others: bool,
) -> _Half:
    """Return one program's half of a finding.

    Args:
        reads_others: The operation is the same in both programs, and reads something else: the
            region begins where Python has chosen that.
    """
    if place is None:
        return _Half()
    graph, line = program.graph, _line(program.graph, place)
    callers = _callers(program, place, recorded)
    if callers and _is_right_elsewhere(program, place, recorded):
        line, *callers = callers
    set_by = _set_by(graph, line, callers) if reads_others else ()
    return _Half(
        _recorded_place(graph, place, recorded.places),
        _side(graph, place),
        line,
        _region(graph, place, line, set_by),
        tuple(callers),
        set_by,
    )


def _set_by(
    graph: Graph, line: CodeLine | None, callers: Sequence[CodeLine]
) -> tuple[CodeLine, ...]:
    """Return the lines that set in Python what a line reads."""
    if line is None:
        return ()
    return python_lines(line, callers, {(str(own[0]), int(own[1])) for own in graph.lines if own})


def _callers(
    program: ComparedProgram, place: FaultPlace, recorded: RecordedGraph
) -> list[CodeLine]:
    """Return the lines that have called the function of a fault's line, the nearest first."""
    if place.leaf != NOTHING:
        value = place.leaf
    elif place.nodes and program.makes[place.nodes[0]]:
        value = program.makes[place.nodes[0]][0]
    else:
        return []
    return recorded.stack_of(value)[1:]


def _is_right_elsewhere(
    program: ComparedProgram, place: FaultPlace, recorded: RecordedGraph
) -> bool:
    """Return whether a helper's operation at fault is right where other lines call the helper: what
    this one gives it is at fault then, and not the helper.
    """
    line = None if place.leaf != NOTHING else _line(program.graph, place)
    if line is None or line.function.rpartition(".")[2] in _NO_HELPERS:
        return False
    nodes = program.graph.nodes
    own = place.nodes[0]
    same = np.flatnonzero(
        (nodes.line == nodes.line[own]) & (nodes.operation == nodes.operation[own])
    )
    callers = {
        node: recorded.stack_of(program.makes[node][0])[1:2]
        for node in same.tolist()
        if program.makes[node]
    }
    return any(
        caller != callers.get(own)
        and all(program.state[value] == RIGHT for value in program.makes[node])
        and any(program.is_informed[value] for value in program.makes[node])
        for node, caller in callers.items()
    )


def _recorded_place(graph: Graph, place: FaultPlace, places: list[RecordedPlace]) -> RecordedPlace:
    """Return where the first value at fault was recorded."""
    if place.leaf == NOTHING:
        if not place.nodes:
            return RecordedPlace()
        made = graph.nodes.makes[place.nodes[0]]
        return places[int(made[0])] if len(made) else RecordedPlace()
    recorded = places[place.leaf]
    if graph.leaf_kinds[graph.values.leaf[place.leaf]] in WEIGHT_KINDS:
        return recorded._replace(tensor=f"param.{graph.values.name[place.leaf]}")
    return recorded


def _side(graph: Graph, place: FaultPlace) -> Side:
    if place.leaf == NOTHING:
        return "output"
    kind = graph.leaf_kinds[graph.values.leaf[place.leaf]]
    return "parameter" if kind in WEIGHT_KINDS else "input"


def _kind(comparison: GraphComparison, fault: GraphFault) -> Kind:
    if fault.reference is None or fault.port is None:
        return "missing"
    leaves = [
        place.leaf != NOTHING and graph.leaf_kinds[graph.values.leaf[place.leaf]] in WEIGHT_KINDS
        for graph, place in zip(comparison.graphs, (fault.reference, fault.port), strict=True)
    ]
    if any(leaves):
        return "weights"
    return "layout" if fault.explanation.kind == "order" else "value"


def _line(graph: Graph, place: FaultPlace) -> CodeLine | None:
    if place.leaf != NOTHING:
        return code_line(graph, int(graph.values.line[place.leaf]))
    return code_line(graph, int(graph.nodes.line[place.nodes[0]])) if place.nodes else None


def _region(
    graph: Graph, place: FaultPlace, line: CodeLine | None, set_by: Sequence[CodeLine]
) -> tuple[CodeLine, CodeLine] | None:
    """Return the first and the last line of a region, in the function of the line at fault."""
    nodes = place.region or place.nodes[:1]
    lines = [code_line(graph, int(graph.nodes.line[node])) for node in nodes]
    known = [line for line in lines if line is not None]
    own = line or next(iter(known), None)
    if own is None:
        return None
    same = [line for line in known if (line.file, line.function) == (own.file, own.function)]
    near = own.line - _NEAR
    same += [line for line in set_by if line.file == own.file and near <= line.line < own.line]
    same.sort(key=lambda line: line.line)
    return (same[0], same[-1]) if same else (own, own)


# -- pairs


def _compared_pairs(
    comparison: GraphComparison, recorded: Sides[RecordedGraph]
) -> list[ComparedPair]:
    """Return each value of the reference beside the one of the port that it is most like."""
    partners, states = comparison.partners[0], comparison.states[0]
    errors, limits = comparison.errors[0], comparison.limits
    named = [_values_at_fault(comparison, side) for side in (0, 1)]
    pairs: list[ComparedPair] = []
    for value in np.flatnonzero((partners != NOTHING) & (states != WRONG)).tolist():
        partner = int(partners[value])
        own, other = recorded.reference.places[value], recorded.port.places[partner]
        if own.model is None or other.model is None:
            continue
        error = float(errors[value])
        state: State = "right" if states[value] == RIGHT else "layout"
        if value in named[0] or partner in named[1]:
            state = "introduced"
        pairs.append(
            ComparedPair(
                model=own.model,
                module=own.module or "",
                tensor=own.tensor or "",
                side="output",
                loop=own.loop,
                step=own.step,
                call=own.call,
                port_model=other.model,
                port_module=other.module or "",
                port_tensor=other.tensor or "",
                port_side="output",
                port_loop=other.loop,
                port_step=other.step,
                port_call=other.call,
                depth=len(pairs),
                error=None if np.isnan(error) else error,
                floor=float(np.hypot(limits[0][value], limits[1][partner])),
                state=state,
                port_rank=other.rank,
            )
        )
    return pairs


def _values_at_fault(comparison: GraphComparison, side: int) -> set[int]:
    """Return what is made, or read, at the places of faults in one program."""
    places = [fault.places[side] for fault in comparison.faults]
    makes = comparison.graphs[side].nodes.makes
    made = {
        int(value) for place in places if place for node in place.nodes for value in makes[node]
    }
    return made | {place.leaf for place in places if place}
