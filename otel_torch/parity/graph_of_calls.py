"""A forward as a graph: what a module's call computes, and what the code between two calls may.

Of a call without recorded calls inside, it is known what it reads and makes. A value that was first
seen on its way into a call was made by the code of the call around it, of what that code had by
then: its own inputs, its weights, what the calls inside returned. Which of these is not known.

    call              reads                               makes
    norm              norm in[0], norm.weight             norm out
    code of the root  root in[0], norm out   (any of it)  attn in[0]
    attn              attn in[0], attn.weight             attn out
    code of the root  …, attn out            (any of it)  root out
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from otel_torch.graph.builder import GraphBuilder
from otel_torch.graph.graph import NOTHING, ORDER_FREE, Graph
from otel_torch.parity.call_graph import ModuleCall, Parameter, Program, Role, Sketch, TensorValue
from otel_torch.parity.modules import ModulePath
from otel_torch.parity.parameter_names import pattern
from otel_torch.parity.tolerance import half_ulp
from otel_torch.recording.rows import Row
from otel_torch.statistics.sketch_format import SIZE

# the operation of the code between two calls
_CODE = ""
# how many of the last values of its size a sum may have as terms, and how many roundings it is off
_MOST_TERMS, _ROUNDINGS = 12, 8.0


@dataclass(frozen=True, slots=True, eq=False)
class GraphOfCalls:
    """The graph of a forward, and what its numbers stand for.

    Attributes:
        births: By value: the first row in which it was seen, or the parameter that it is.
        calls: By node: the call whose own code it is; None for the program around all of them.
        values: The number of each value.
        parameters: The number of each parameter.
    """

    graph: Graph
    births: list[Role | Parameter]
    calls: list[ModuleCall | None]
    values: dict[TensorValue, int]
    parameters: dict[Parameter, int]


def graph_of_calls(
    program: Program,
    weights: Iterable[Parameter],
    uncalled: Collection[ModulePath],
    order: Mapping[ModulePath, int],
    ends: Iterable[TensorValue],
    operations: Mapping[ModuleCall, str],
    exchanged: Collection[Role] = (),
) -> GraphOfCalls:
    """Return the graph of a forward.

    Args:
        weights: Parameters that are compared.
        uncalled: Modules of the table that are never called: the code around them may read their
            weights.
        order: The place of each module in the table. What comes before a module in it may be read
            for its input.
        ends: What counts as a result.
        operations: What calls are named by, if that is not their class.
        exchanged: What was recorded, and then exchanged for another value, so that nothing reads
            it.
    """
    filler = _Filler(program, order, operations, exchanged)
    for weight in weights:
        filler.add_weight(weight, uncalled)
    for call, is_entered in _events(program):
        if is_entered:
            filler.enter(call)
        else:
            filler.leave(call)
    return filler.finish(ends)


def _events(program: Program) -> list[tuple[ModuleCall, bool]]:
    """Return calls in the order in which they are entered (True) and left."""
    times = [(call.entered, 0, place) for place, call in enumerate(program.calls)]
    times += [
        (max(call.entered, call.exited), 1, place) for place, call in enumerate(program.calls)
    ]
    return [(program.calls[place], not is_left) for _, is_left, place in sorted(times)]


class _Filler:
    def __init__(
        self,
        program: Program,
        order: Mapping[ModulePath, int],
        operations: Mapping[ModuleCall, str],
        exchanged: Collection[Role],
    ) -> None:
        self._order, self._operations, self._exchanged = order, operations, exchanged
        self._called = {call.module_path for call in program.calls}
        self._builder = GraphBuilder(SIZE)
        # whether the program itself has results to go on with
        self._has_returned = False
        self._births: list[Role | Parameter] = []
        self._sketches: list[Sketch | None] = []
        self._numel: list[int] = []
        self._calls: list[ModuleCall | None] = []
        self._values: dict[TensorValue, int] = {}
        self._parameters: dict[Parameter, int] = {}
        # what the code of a call may read: its weights, its inputs and what its calls returned
        self._weights: dict[ModulePath, list[tuple[int, int]]] = defaultdict(list)
        self._held: dict[ModuleCall | None, dict[int, None]] = defaultdict(dict)

    def add_weight(self, weight: Parameter, uncalled: Collection[ModulePath]) -> None:
        """Add a parameter, and note whose code reads it."""
        if weight in self._parameters:
            return
        kind = "buffer" if weight.is_buffer else "parameter"
        number = self._add(weight, weight.row, weight.numel, weight.sketch, NOTHING, kind)
        self._parameters[weight] = number
        model, name = weight.module_path
        while (model, name) in uncalled and (model, name) not in self._called and name:
            name = name.rpartition(".")[0]
        is_own = (model, name) == weight.module_path
        place = -1 if is_own else self._order.get(weight.module_path, -1)
        self._weights[model, name].append((place, number))

    def enter(self, call: ModuleCall) -> None:
        """Hand its inputs to a call."""
        around = self._held[call.parent]
        for role in call.inputs:
            if role.value not in self._values:
                maker, until = call.parent, self._order.get(call.module_path)
                if maker is None and not self._has_returned:
                    self._values[role.value] = self._add_value(role, NOTHING, "input")
                else:
                    terms = self._terms_of(role.value, maker)
                    node = self._add_code(maker, role, not terms, until, terms)
                    self._values[role.value] = self._add_value(role, node, None)
            around[self._values[role.value]] = None
            if role not in self._exchanged:
                self._held[call][self._values[role.value]] = None

    def leave(self, call: ModuleCall) -> None:
        """Hand the outputs of a call to the code around it."""
        node = NOTHING
        around = self._held[call.parent]
        self._has_returned = self._has_returned or call.parent is None
        if not call.inputs and not call.children:  # its inputs may not have been recorded
            self._held[call] |= around
        for role in call.outputs:
            if role.value not in self._values:
                if node == NOTHING:
                    terms = self._terms_of(role.value, call) if call.children else []
                    is_vague = bool(call.children) or not call.inputs
                    node = self._add_code(call, role, is_vague and not terms, None, terms)
                self._values[role.value] = self._add_value(role, node, None)
            if role not in self._exchanged:
                around[self._values[role.value]] = None
        if not call.outputs:  # nor may its outputs
            around |= self._held[call]
        self._held.pop(call, None)

    def _terms_of(self, value: TensorValue, code: ModuleCall | None) -> list[int]:
        """Return what code has made a value of, if that is one value times a number, or the sum of
        two such: a scaled embedding, a residual. Their sketches tell.
        """
        if value.sketch is None or not np.isfinite(value.sketch).all():
            return []
        known = [
            (number, sketch)
            for number in self._held[code]
            if (sketch := self._sketches[number]) is not None
            if len(sketch) == len(value.sketch)
            if self._numel[number] == value.numel and np.isfinite(sketch).all()
        ][-_MOST_TERMS:]
        rounds = _ROUNDINGS * half_ulp([str(value.row.get("dtype", ""))])
        slack = rounds * float(np.linalg.norm(value.sketch))
        for count in (1, 2):
            for terms in combinations(known, count):
                columns = np.stack([sketch for _, sketch in terms], axis=1)
                fitted, _, rank, _ = np.linalg.lstsq(columns, value.sketch)
                rest = np.linalg.norm(columns @ fitted - value.sketch)
                if rank == count and rest <= slack:
                    return [number for number, _ in terms]
        return []

    def _add_code(
        self,
        call: ModuleCall | None,
        made: Role,
        is_vague: bool,
        until: int | None = None,
        terms: Sequence[int] = (),
    ) -> int:
        """Add what the code of a call does now.

        Args:
            call: None for the program around all calls.
            made: The first value that it makes.
            until: The place in the table of the module that it calls next.
            terms: What it reads, if that is known; else all that it has.
        """
        self._calls.append(call)
        path = call.module_path if call is not None else ("", "")
        weights = self._weights[path] if call is not None else []
        if terms:
            reads = [*terms, *(weight for place, weight in weights if place < 0)]
        else:
            before = (weight for place, weight in weights if until is None or place < until)
            reads = [*self._held[call], *before]
        return self._builder.add_node(
            _CODE if call is None or call.children else self._operations.get(call, call.cls),
            reads,
            line=(pattern(made.call.module), made.tensor),  # of each block the same
            module=_name_of(path),
            is_vague=is_vague,
        )

    def _add_value(self, role: Role, maker: int, leaf: str | None) -> int:
        value = role.value
        return self._add(role, value.row, value.numel, value.sketch, maker, leaf)

    def _add(
        self,
        birth: Role | Parameter,
        row: Row,
        numel: int,
        sketch: Sketch | None,
        maker: int,
        leaf: str | None,
    ) -> int:
        self._sketches.append(sketch)
        self._numel.append(numel)
        statistics = {name: row[name] for name in ORDER_FREE if _is_number(row.get(name))}
        sketch = _sketch_of_statistics(statistics) if sketch is None else _of_one_length(sketch)
        shape, dtype = row.get("shape"), str(row.get("dtype", ""))
        path = birth.call.module_path if isinstance(birth, Role) else birth.module_path
        self._births.append(birth)
        return self._builder.add_value(
            shape=tuple(shape) if isinstance(shape, list) else (),
            numel=numel if sketch is not None else -1,
            dtype=dtype,
            roundoff=half_ulp([dtype]) if "float" in dtype or "complex" in dtype else 0.0,
            nonfinite=int(row.get("nonfinite") or 0),
            sketch=sketch,
            statistics=statistics,
            maker=maker,
            leaf=leaf,
            name=birth.full_name if isinstance(birth, Parameter) else "",
            module=_name_of(path),
        )

    def finish(self, ends: Iterable[TensorValue]) -> GraphOfCalls:
        """Return the graph."""
        for value in ends:
            self._builder.add_end("", self._values[value])
        return GraphOfCalls(
            self._builder.finish(), self._births, self._calls, self._values, self._parameters
        )


def _name_of(path: ModulePath) -> str:
    return ":".join(path)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _of_one_length(sketch: Sketch) -> Sketch:
    """Return a sketch of the usual length. Those of tokens have the length of all rows, which are
    added up with random signs: equal ones stay equal, and distances are kept on average.
    """
    if len(sketch) == SIZE:
        return sketch
    rows = -(-len(sketch) // SIZE)
    padded = np.pad(sketch, (0, rows * SIZE - len(sketch))).reshape(rows, SIZE)
    signs = np.random.default_rng(SIZE).choice([-1.0, 1.0], padded.shape)
    summed: Sketch = (signs * padded).sum(axis=0)
    return summed


def _sketch_of_statistics(statistics: dict[str, float]) -> Sketch | None:
    """Return statistics in place of a sketch, None if they are not known."""
    known = [statistics.get(name, 0.0) for name in ("abs_mean", "mean", "std")]
    if "abs_mean" not in statistics:
        return None
    return np.pad(np.array(known, np.float64), (0, SIZE - len(known)))
