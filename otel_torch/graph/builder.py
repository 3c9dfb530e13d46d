"""Build a graph value by value, in any order in which a recording or a test knows them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from otel_torch.graph.distances import distinct
from otel_torch.graph.graph import (
    NOTHING,
    ORDER_FREE,
    Graph,
    Indices,
    Nodes,
    Rows,
    RowSketches,
    Values,
)


class Labels(dict[Any, int]):
    """Numbers labels in order of first use."""

    def __missing__(self, label: Any) -> int:
        number = self[label] = len(self)
        return number


@dataclass(slots=True)
class GraphBuilder:
    """Collects values, nodes and ends; `finish` returns the graph.

    Args:
        width: Numbers in a sketch.
        is_cut: Whether the program went on after what is known of it.
    """

    width: int = 64
    is_cut: bool = False
    _values: list[tuple[Any, ...]] = field(default_factory=list)
    _shapes: list[tuple[int, ...]] = field(default_factory=list)
    _names: list[str] = field(default_factory=list)
    _sketches: list[Any] = field(default_factory=list)
    _rows: dict[int, Any] = field(default_factory=dict)
    _statistics: list[Sequence[float]] = field(default_factory=list)
    _nodes: list[tuple[Any, ...]] = field(default_factory=list)
    _reads: list[list[int]] = field(default_factory=list)
    _makes: list[list[int]] = field(default_factory=list)
    _ends: list[tuple[str, int, bool, int]] = field(default_factory=list)
    _operations: Labels = field(default_factory=Labels)
    _arguments: Labels = field(default_factory=Labels)
    _modules: Labels = field(default_factory=Labels)
    _lines: Labels = field(default_factory=Labels)
    _kinds: Labels = field(default_factory=Labels)
    _dtypes: Labels = field(default_factory=Labels)
    _phases: Labels = field(default_factory=Labels)

    def add_value(
        self,
        *,
        shape: tuple[int, ...] = (),
        dtype: str = "",
        roundoff: float = 0.0,
        numel: int | None = None,
        nonfinite: int = 0,
        sketch: Any = None,
        rows: Any = None,
        statistics: Mapping[str, float] | None = None,
        maker: int = NOTHING,
        leaf: str | None = None,
        unrecorded: bool = False,
        name: str = "",
        line: Any = None,
        module: str = "",
        process: int = 0,
    ) -> int:
        """Add a value and return its index.

        Args:
            shape, dtype, numel: Of the tensor; `numel` follows from `shape` unless given, -1 where
                nothing is known.
            roundoff: Unit roundoff of the dtype, 0 for integers.
            sketch: `width` numbers; None where unknown.
            rows: Sketches of its rows, shape (rows, numbers); None where unknown.
            statistics: By name; those in `ORDER_FREE` are used.
            maker: The node that made it.
            leaf: The kind of a leaf; None for a value that a node made.
            unrecorded: Of a leaf: nodes that were not recorded may have made it.
            process: Which of the program's processes has it.
        """
        statistics = statistics or {}
        self._values.append(
            (
                math.prod(shape) if numel is None else numel,
                nonfinite,
                roundoff,
                maker,
                NOTHING if leaf is None else self._kinds[leaf],
                NOTHING if line is None else self._lines[line],
                self._modules[module],
                self._dtypes[dtype],
                unrecorded,
                process,
            )
        )
        self._shapes.append(shape)
        self._names.append(name)
        self._sketches.append(sketch)
        if rows is not None:
            self._rows[len(self._values) - 1] = rows
        self._statistics.append([statistics.get(key, math.nan) for key in ORDER_FREE])
        if maker >= 0:
            self._makes[maker].append(len(self._values) - 1)
        return len(self._values) - 1

    def add_node(
        self,
        operation: str,
        reads: list[int],
        *,
        arguments: str = "[]",
        moves: bool = False,
        casts: bool = False,
        random: bool = False,
        line: Any = None,
        module: str = "",
        phase: str = "forward",
        inside: int = NOTHING,
        is_reading: bool = False,
        is_vague: bool = False,
        is_of_angles: bool = False,
        rounds_to_whole: bool = False,
    ) -> int:
        """Add a node and return its index.

        Args:
            arguments: JSON text without operands: what two equal operations have in common.
        """
        self._nodes.append(
            (
                self._operations[operation],
                self._arguments[arguments],
                moves,
                casts,
                random,
                NOTHING if line is None else self._lines[line],
                self._modules[module],
                inside,
                self._phases[phase],
                is_reading,
                is_vague,
                is_of_angles,
                rounds_to_whole,
            )
        )
        self._reads.append(reads)
        self._makes.append([])
        return len(self._nodes) - 1

    @property
    def node_count(self) -> int:
        """How many nodes there are so far."""
        return len(self._nodes)

    def add_end(
        self, name: str, value: int, *, is_passed: bool = False, weight: int = NOTHING
    ) -> None:
        """Add an end; `weight` is the leaf that it is the gradient or the update of, if any."""
        self._ends.append((name, value, is_passed, weight))

    def finish(self) -> Graph:
        """Return the graph."""
        columns = _columns(self._values, 10, np.float64)
        nodes = _columns(self._nodes, 13, np.int64)
        whole: list[Indices] = [column.astype(np.int64) for column in columns]
        unknown = np.full(self.width, np.nan)
        sketches = [unknown if sketch is None else sketch for sketch in self._sketches]
        return Graph(
            Values(
                numel=whole[0],
                nonfinite=whole[1],
                roundoff=columns[2],
                maker=whole[3],
                leaf=whole[4],
                line=whole[5],
                module=whole[6],
                dtype=whole[7],
                unrecorded=whole[8] > 0,
                name=self._names,
                shape=self._shapes,
                sketch=np.array(sketches, np.float64).reshape(len(sketches), self.width),
                statistics=np.array(self._statistics, np.float64).reshape(-1, len(ORDER_FREE)),
                rows=_row_sketches(self._rows),
                process=whole[9],
            ),
            Nodes(
                operation=nodes[0],
                argument=nodes[1],
                moves=nodes[2].astype(bool),
                casts=nodes[3].astype(bool),
                random=nodes[4].astype(bool),
                line=nodes[5],
                module=nodes[6],
                inside=nodes[7],
                phase=nodes[8],
                is_reading=nodes[9].astype(bool),
                is_vague=nodes[10].astype(bool),
                is_of_angles=nodes[11].astype(bool),
                rounds_to_whole=nodes[12].astype(bool),
                reads=Rows.of(self._reads),
                makes=Rows.of(self._makes),
            ),
            ends=np.array([value for _, value, *_ in self._ends], np.int64),
            end_names=[name for name, *_ in self._ends],
            end_weights=np.array([weight for *_, weight in self._ends], np.int64),
            passed=np.array([is_passed for *_, is_passed, _ in self._ends], bool),
            operations=list(self._operations),
            arguments=list(self._arguments),
            modules=list(self._modules),
            lines=list(self._lines),
            leaf_kinds=list(self._kinds),
            dtypes=list(self._dtypes),
            phases=list(self._phases),
            is_cut=self.is_cut,
        )


def _row_sketches(rows: Mapping[int, Any]) -> RowSketches:
    owner = np.repeat(np.array(list(rows), np.int64), [len(content) for content in rows.values()])
    contents = [np.asarray(content, np.float64) for content in rows.values()]
    content = np.concatenate(contents) if contents else np.zeros((0, 1))
    first, same = distinct(content)
    return RowSketches(owner, content, owner[first[same]])


def _columns(rows: list[tuple[Any, ...]], count: int, dtype: Any) -> list[Any]:
    """Return the columns of rows of numbers."""
    if not rows:
        return [np.zeros(0, dtype)] * count
    return list(np.array(rows, dtype).T.copy())
