"""Fill a graph from the rows of a recording of operations (`OTEL_TORCH_CAPTURE=graph`).

Rows of other kinds, which the same file may hold, are passed over. Rows may come in any order, but
operations must come in the order in which they ran.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from otel_torch.graph.builder import GraphBuilder
from otel_torch.graph.equality import LEAST_NUMEL
from otel_torch.graph.graph import NOTHING, PUT, Graph
from otel_torch.parity.finding import CodeLine
from otel_torch.parity.operations.join_ranks import join_ranks
from otel_torch.parity.operations.program_ends import (
    ROUNDING_DTYPES,
    RecordedProgram,
    ends_of,
)
from otel_torch.parity.operations.rank_readings import readings_of_ranks, sketch_of
from otel_torch.parity.recording_source import RecordingSource
from otel_torch.parity.tolerance import half_ulp
from otel_torch.recording.rows import Row
from otel_torch.statistics.row_layout import ROW_NUMBERS
from otel_torch.statistics.sketch_format import SIZE

_NUMBER = re.compile(r"op\[(\d+)\]")
# an operand of which an operation reads the shape alone, or which it overwrites
_UNREAD = "unread"
# the columns that index the table of lines
_LINES = frozenset({"line", "forward_line"})
# those that number a value
_VALUES = frozenset({"value", "replaces"})
# values of one rank: more than a recording has rows
_RANK_SHIFT = 40
# functions of angles, by their names without overloads
_OF_ANGLES = frozenset({"aten.sin", "aten.cos", "aten.sin_", "aten.cos_", "aten.polar"})
# what rounds to whole numbers, likewise, but for a cast to a dtype of such
_TO_WHOLE = frozenset(
    f"aten.{name}{mark}" for name in ("round", "floor", "ceil", "trunc") for mark in ("", "_")
)
# words in the names of collectives that hand each rank only a part of what the others give
_OF_PARTS = "alltoall", "all_to_all", "reduce_scatter"
# dtypes of complex numbers round as their parts do
_PARTS = {"torch.complex64": "torch.float32", "torch.complex128": "torch.float64"}


class RecordedPlace(NamedTuple):
    """Where and when a value was recorded; None where the recording does not say.

    Attributes:
        line: Index into the recording's `lines`; of a backward pass that of the forward.
    """

    model: str | None = None
    module: str | None = None
    tensor: str | None = None
    loop: int | None = None
    step: int | None = None
    call: int | None = None
    phase: str | None = None
    rank: int | None = None
    line: int | None = None

    @classmethod
    def of(cls, row: Row) -> RecordedPlace:
        """Return the place of a row."""
        place = cls(*(row.get(name) for name in cls._fields))
        return place._replace(line=_line_number(row))


class RecordedGraph(NamedTuple):
    """A graph, the place of each of its values in the recording, and the recording's `lines`.

    Attributes:
        callers: For each line, the one that called its function.
    """

    graph: Graph
    places: list[RecordedPlace]
    lines: Sequence[Sequence[Any]]
    callers: Sequence[int | None]

    def calls_of(self, line: int | None) -> list[int]:
        """Return the lines that have called the function of a line, the nearest first."""
        calls: list[int] = []
        while line is not None and line < len(self.callers):
            caller = self.callers[line]
            # a line is entered after its caller: what an edited file says otherwise could be a loop
            line = caller if caller is not None and 0 <= caller < line else None
            if line is not None:
                calls.append(line)
        return calls

    def stack_of(self, value: int) -> list[CodeLine]:
        """Return the line of a value, and those that have called its function, the nearest first;
        nothing if its line was not recorded.
        """
        line = self.places[value].line
        if line is None or not 0 <= line < len(self.lines):
            return []
        return [CodeLine(*self.lines[index]) for index in (line, *self.calls_of(line))]


def read_graph(*ranks: RecordingSource, has_loops: bool = False) -> RecordedGraph:
    """Read the graph of a recording, or one graph of the recordings of several ranks.

    Args:
        has_loops: Whether results of each loop are ends, and not only those of the last one.

    Raises:
        RecordingError: A file is missing or not a recording.
        ValueError: It holds no operations.
    """
    of_ranks: list[list[Row]] = []
    lines: list[Any] = []
    callers: list[int | None] = []
    is_cut = False
    for rank, source in enumerate(ranks):
        meta = source.metadata()
        if len(ranks) > 1:
            of_ranks.append([_of_rank(row, rank, len(lines)) for row in source.rows()])
        own = meta.get("lines", ())
        # recordings of earlier versions have no callers
        known = [*meta.get("callers", ()), *(None for _ in own)][: len(own)]
        callers += [None if caller is None else caller + len(lines) for caller in known]
        lines += own
        is_cut = is_cut or bool(meta.get("operations_cut"))
    try:
        metadata = {"lines": lines, "callers": callers, "operations_cut": is_cut}
        rows = join_ranks(of_ranks) if of_ranks else ranks[0].rows()
        return graph_of_rows(rows, metadata, has_loops=has_loops)
    except ValueError as error:
        raise ValueError(f"{ranks[0]}: {error}") from None


def _of_rank(row: Row, rank: int, first_line: int) -> Row:
    """Return a row whose values and lines are told from those of other ranks."""
    own: Row = {**row, "rank": rank}
    for name in _LINES & row.keys():
        own[name] = None if row[name] is None else row[name] + first_line
    for name in _VALUES & row.keys():
        own[name] = _value_of_rank(row[name], rank)
    if row.get("reads"):
        own["reads"] = [_value_of_rank(number, rank) for number in row["reads"]]
    return own


def _value_of_rank(number: int, rank: int) -> int:
    return number + (rank << _RANK_SHIFT)


def graph_of_rows(
    rows: Iterable[Row], metadata: Mapping[str, Any], *, has_loops: bool = False
) -> RecordedGraph:
    """Return the graph of rows.

    Args:
        rows: Rows of operations, leaves and ends; others are passed over.
        metadata: Of the recording; its `lines` are the table that rows index, and `callers` say
            which of them called the function of each.
        has_loops: Whether results of each loop are ends.

    Raises:
        ValueError: There are no operations.
    """
    lines = [tuple(line) for line in metadata.get("lines", ())]
    callers = metadata.get("callers", ())
    filler = _GraphFiller(lines, callers, bool(metadata.get("operations_cut")), has_loops)
    for row in rows:
        if "op" in row:
            filler.add_operation(row)
        elif "leaf" in row:
            filler.add_leaf(row)
        elif "end" in row:
            filler.add_end(row)
    return filler.finish()


class _GraphFiller:
    """Turns rows into a graph.

    Value numbers of the recording become indices when they are first met, so that an operation may
    read a value whose own row comes later.
    """

    def __init__(
        self,
        lines: list[tuple[Any, ...]],
        callers: Sequence[int | None],
        is_cut: bool,
        has_loops: bool,
    ) -> None:
        self._lines, self._callers, self._has_loops = lines, callers, has_loops
        self._builder = GraphBuilder(SIZE, is_cut)
        self._rows: dict[int, tuple[Row, int]] = {}  # value number -> its row and its maker
        self._nodes: list[Row] = []
        self._node_of: dict[tuple[Any, ...], int] = {}
        self._parts: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
        self._ends: list[Row] = []

    def add_operation(self, row: Row) -> None:
        """Note a value that an operation made; the operation, too, if it is its first one."""
        if row.get("reading"):
            cut = str(row["tensor"]).partition("]")[0]
            self._parts[row.get("rank"), row.get("loop"), row.get("step"), cut].append(row)
            return
        match = _NUMBER.match(str(row["tensor"]))
        number = match[1] if match else len(self._nodes)
        key = row.get("rank"), row.get("loop"), row.get("step"), number
        node = self._node_of.get(key, NOTHING)
        if node == NOTHING or not row.get("makes"):
            node = self._node_of[key] = len(self._nodes)
            self._nodes.append(row)
        self._rows.setdefault(row["value"], (row, node))

    def add_leaf(self, row: Row) -> None:
        """Note a value that no operation made."""
        self._rows.setdefault(row["value"], (row, NOTHING))

    def add_end(self, row: Row) -> None:
        """Note what a program returned."""
        self._ends.append(row)

    def finish(self) -> RecordedGraph:
        """Return the graph. Raises ValueError without operations."""
        if not self._nodes:
            raise ValueError("holds no operations; record with OTEL_TORCH_CAPTURE=graph")
        builder = self._builder
        read = [row.get("reads") or [] for row in self._nodes]
        numbers = dict.fromkeys(self._rows)
        numbers |= dict.fromkeys(number for reads in read for number in reads)
        numbers |= dict.fromkeys(row["value"] for row in self._ends)
        index = {number: place for place, number in enumerate(numbers)}
        for row, reads in zip(self._nodes, read, strict=True):
            whole = row.get("inside")
            name = str(row["op"]).rpartition(".")[0]
            builder.add_node(
                str(row["op"]),
                # nothing comes through to what a trial has put in the place of a value
                [] if row["op"] == PUT else [index[number] for number in reads],
                arguments=_argument_text(row.get("args")),
                moves=bool(row.get("moves")),
                casts=bool(row.get("casts")),
                random=bool(row.get("random")),
                line=self._line(row),
                module=_module(row),
                phase=str(row.get("phase", "forward")),
                inside=NOTHING
                if whole is None
                else self._node_of.get(
                    (row.get("rank"), row.get("loop"), row.get("step"), str(whole)), NOTHING
                ),
                is_vague=bool(row.get("group")) and any(word in name for word in _OF_PARTS),
                is_of_angles=name in _OF_ANGLES,
                rounds_to_whole=name in _TO_WHOLE,
            )
        made = [self._rows.get(number, ({}, NOTHING)) for number in numbers]
        for row, maker in made:
            self._add_value(row, maker)
        program = RecordedProgram(self._nodes, read, self._rows, self._ends, self._has_loops)
        weights = self._weights(index)
        for end in ends_of(program):
            weight = weights.get((program.rank(end.value), end.parameter), NOTHING)
            builder.add_end(end.name, index[end.value], is_passed=end.is_passed, weight=weight)
        places = [RecordedPlace.of(row) for row, _ in made]
        places += self._add_readings(index)
        return RecordedGraph(builder.finish(), places, self._lines, self._callers)

    def _weights(self, index: Mapping[int, int]) -> dict[tuple[int, str], int]:
        """Return each rank's parameters, as they were at first, by their names."""
        weights: dict[tuple[int, str], int] = {}
        for number, (row, _) in self._rows.items():
            if row.get("leaf") == "parameter":
                name = ".".join(filter(None, (row.get("module"), str(row.get("name", "")))))
                weights.setdefault((int(row.get("rank") or 0), name), index[number])
        return weights

    def _add_readings(self, index: Mapping[int, int]) -> Iterator[RecordedPlace]:
        """Add the parts of values, and what the values of ranks may be together; yield the places
        of what is added.
        """
        for rows in self._parts.values():
            node = self._builder.add_node(
                str(rows[0]["op"]),
                [index[rows[0]["reads"][0]]],
                arguments=_argument_text(rows[0].get("args")),
                moves=True,
                is_reading=True,
            )
            for row in rows:
                self._add_value(row, node)
                yield RecordedPlace.of(row)
        for reading in readings_of_ranks(self._rows, self._lines):
            values = [index[number] for number in reading.values]
            node = self._builder.add_node(reading.name, values, moves=True, is_reading=True)
            self._add_value(reading.row, node)
            yield RecordedPlace()

    def _line(self, row: Row) -> tuple[Any, ...] | None:
        """Return the line of a row: of an operation of a backward pass that of its forward."""
        number = _line_number(row)
        if not isinstance(number, int) or number >= len(self._lines):
            return None
        return self._lines[number]

    def _add_value(self, row: Row, maker: int) -> None:
        is_known = "shape" in row  # what a collective makes after the last step is not measured
        shape = tuple(row.get("shape") or ())
        dtype = str(row.get("dtype", ""))
        self._builder.add_value(
            shape=shape,
            # a complex number is two numbers of the sketch
            numel=math.prod(shape) * (2 if dtype in _PARTS else 1) if is_known else -1,
            dtype=dtype,
            roundoff=_roundoff(dtype),
            nonfinite=int(row.get("nonfinite") or 0),
            sketch=sketch_of(row),
            statistics={name: x for name, x in row.items() if isinstance(x, float | int)},
            maker=maker,
            leaf=None if maker >= 0 else str(row.get("leaf", "unseen")),
            rows=_rows_of(row),
            unrecorded=row.get("leaf") == "unrecorded",
            name=str(row.get("name", "")),
            line=self._line(row),
            module=_module(row),
            process=row.get("rank") or 0,
        )


def _line_number(row: Row) -> Any:
    """Return the index of a row's line: of an operation of a backward pass that of its forward."""
    forward = row.get("forward_line")
    return row.get("line") if forward is None else forward


def _module(row: Row) -> str:
    """Return the name of a row's module with its model's."""
    return f"{row.get('model', '')}:{row.get('module', '')}"


def _rows_of(row: Row) -> NDArray[np.float64] | None:
    """Return the linear part of the sketches of a value's rows; None unless all were recorded and
    are long enough to tell anything.
    """
    shape = row.get("shape") or ()
    if not row.get("rows") or not shape or shape[-1] < LEAST_NUMEL:
        return None
    rows = np.frombuffer(base64.b64decode(row["rows"]), "<f4").reshape(-1, ROW_NUMBERS)
    if len(rows) < math.prod(shape[:-1]):
        return None
    return rows[:, : ROW_NUMBERS - 1].astype(np.float64)


def _roundoff(dtype: str) -> float:
    if not any(word in dtype for word in ROUNDING_DTYPES):
        return 0.0
    return half_ulp([_PARTS.get(dtype, dtype)])


def _argument_text(arguments: Any) -> str:
    """Return arguments as JSON text without operands.

    >>> _argument_text([{"value": 3}, 2, [{"value": 4}], {"alpha": 0.5}])
    '[null, 2, [null], {"alpha": 0.5}]'
    """
    return json.dumps(_without_operands(arguments or []))


def _without_operands(item: Any) -> Any:
    if isinstance(item, list):
        return [_without_operands(part) for part in item]
    if isinstance(item, dict):
        if item.keys() == {"value"}:
            return _UNREAD if item["value"] is None else None
        return {name: _without_operands(part) for name, part in item.items()}
    return item
