"""The graph of what a program computed: values, the nodes that made them, and the ends.

Columns, not objects: a recording has 100,000 values. Names of operations, their arguments, lines
and modules are labels that are compared and never read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Flags = NDArray[np.bool_]

# statistics that no order of the elements changes, in the order of the columns
ORDER_FREE = ("abs_mean", "mean", "std", "min", "max")
ABS_MEAN, MEAN, STD, MIN, MAX = range(len(ORDER_FREE))
NOTHING = -1
# the kinds of leaves that a model owns
WEIGHT_KINDS = ("parameter", "buffer")
# the operation of a value of the reference that a trial has put in the place of the port's own
PUT = "otel_torch.put"
# the reading of a value with one of its axes moved last
AXIS_LAST = "otel_torch.axis_last"
# the model of operations that run before the first forward of any model
PROGRAM = "program"
# the phases of a training behind its forwards
BEHIND_FORWARDS = ("backward", "update")


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Lists of numbers, one after the other in one array (compressed rows).

    >>> rows = Rows.of([[3, 1], [], [2]])
    >>> rows[0].tolist(), rows[1].tolist(), len(rows), rows.owners().tolist()
    ([3, 1], [], 3, [0, 0, 2])
    """

    starts: Indices
    content: Indices

    @classmethod
    def of(cls, lists: list[list[int]]) -> Rows:
        """Pack lists."""
        starts = np.zeros(len(lists) + 1, np.int64)
        np.cumsum([len(row) for row in lists], out=starts[1:])
        return cls(starts, np.array([item for row in lists for item in row], np.int64))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> Indices:
        return self.content[self.starts[row] : self.starts[row + 1]]

    def owners(self) -> Indices:
        """Return the row of each item."""
        return np.repeat(np.arange(len(self)), np.diff(self.starts))

    def lists(self) -> list[list[int]]:
        """Return the lists."""
        content, starts = self.content.tolist(), self.starts.tolist()
        return [content[start:end] for start, end in pairwise(starts)]

    def transpose(self, count: int) -> Rows:
        """Return, for each of `count` items, the rows that hold it.

        >>> Rows.of([[1, 0], [1]]).transpose(3).lists()
        [[0], [0, 1], []]
        """
        is_item = self.content >= 0
        items, owners = self.content[is_item], self.owners()[is_item]
        order = np.argsort(items, kind="stable")
        starts = np.searchsorted(items[order], np.arange(count + 1))
        return Rows(starts, owners[order])


@dataclass(frozen=True, slots=True, eq=False)
class RowSketches:
    """Fingerprints of the rows along the last axis of values.

    Attributes:
        owner: The value of each row, ascending.
        content: Linear fingerprints that zeros at the end of a row do not change, shape
            (rows, width).
        first_owner: The first value with the same content as each row.
    """

    owner: Indices
    content: Floats
    first_owner: Indices

    def of(self, value: int) -> Floats:
        """Return those of a value, shape (rows, width)."""
        first, end = np.searchsorted(self.owner, [value, value + 1])
        content: Floats = self.content[first:end]
        return content


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """The content of tensors, each at one time.

    Attributes:
        numel: Elements; -1 where nothing is known.
        sketch: Linear fingerprints, shape (values, width); NaN where unknown.
        statistics: Shape (values, len(ORDER_FREE)); NaN where unknown.
        nonfinite: Elements that are NaN or Inf.
        roundoff: Unit roundoff of the dtype; 0 for integers and booleans.
        maker: The node that made each; NOTHING for a leaf.
        leaf: Index into `leaf_kinds` of the graph; NOTHING for a value that a node made.
        unrecorded: Leaves that nodes may have made which were not recorded.
        name: What a leaf is called, "" for others.
        line: Index into the graph's `lines` (of a leaf: where it was first used).
        module: Index into the graph's `modules`.
        shape: Sizes.
        dtype: Index into the graph's `dtypes`.
        rows: Of the values of which each row was measured.
        process: Which of the program's processes has it.
    """

    numel: Indices
    sketch: Floats
    statistics: Floats
    nonfinite: Indices
    roundoff: Floats
    maker: Indices
    leaf: Indices
    unrecorded: Flags
    name: list[str]
    line: Indices
    module: Indices
    shape: list[tuple[int, ...]]
    dtype: Indices
    rows: RowSketches
    process: Indices

    def __len__(self) -> int:
        return len(self.numel)


@dataclass(frozen=True, slots=True, eq=False)
class Nodes:
    """Operations, in the order in which they ran.

    Attributes:
        operation: Index into the graph's `operations`.
        argument: Index into the graph's `arguments`.
        reads: The values that each reads, in the order of its arguments.
        makes: The values that each makes.
        moves, casts, random: It only rearranges or selects; it only changes the dtype; it draws
            numbers.
        line, module: Indices into the graph's tables.
        inside: The node of which this one is a part; NOTHING for most.
        is_reading: It is none of the program's: what it makes is another way to read what it reads,
            such as the sum of what ranks have. Where that is right, they are.
        is_vague: Which of `reads` it really reads is not known, so that what it makes acquits none.
        is_of_angles: It is a function of angles, which returns where they have made a full turn.
        rounds_to_whole: It rounds numbers to whole ones, as pixels are.
        phase: Index into the graph's `phases`.
    """

    operation: Indices
    argument: Indices
    reads: Rows
    makes: Rows
    moves: Flags
    casts: Flags
    random: Flags
    line: Indices
    module: Indices
    inside: Indices
    is_reading: Flags
    is_vague: Flags
    is_of_angles: Flags
    rounds_to_whole: Flags
    phase: Indices

    def __len__(self) -> int:
        return len(self.operation)


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """A program's values, nodes and ends, with the tables that their labels index.

    Attributes:
        ends: The values that the program returned.
        end_names: What each of them is called.
        end_weights: The leaf that each is the gradient or the update of; NOTHING for others.
        passed: Ends that do not count where both programs have later ones that come from such.
        arguments: Arguments of operations as JSON text, operands replaced.
        lines: `(file, line, function, text)`.
        is_cut: Whether the program went on after what was recorded of it.
    """

    values: Values
    nodes: Nodes
    ends: Indices
    end_names: list[str]
    end_weights: Indices
    passed: Flags
    operations: list[str]
    arguments: list[str]
    modules: list[str]
    lines: list[tuple[Any, ...]]
    leaf_kinds: list[str]
    dtypes: list[str]
    phases: list[str] = field(default_factory=lambda: ["forward"])
    is_cut: bool = False

    @property
    def has_rows(self) -> bool:
        """Whether rows of values were measured."""
        return len(self.values.rows.owner) > 0

    @property
    def is_put(self) -> Flags:
        """Which values a trial has put in the place of the program's own."""
        return self.made_by(self.nodes_of(PUT))

    @property
    def has_backward(self) -> bool:
        """Whether the program computes gradients."""
        return "backward" in self.phases

    @property
    def is_before_models(self) -> Flags:
        """Which nodes ran before any model's forward: all of them in a program without models."""
        is_before = [name.startswith(f"{PROGRAM}:") for name in self.modules]
        nodes: Flags = np.array(is_before, bool)[self.nodes.module]
        return nodes

    @property
    def is_split(self) -> bool:
        """Whether values are also read as parts or terms of others."""
        return bool((self.nodes.is_reading & ~self.nodes_of(AXIS_LAST)).any())

    def leaves_of(self, kind: str) -> list[int]:
        """Return the leaves of a kind."""
        leaf = self.values.leaf
        return [
            value
            for value in np.flatnonzero(leaf != NOTHING).tolist()
            if self.leaf_kinds[leaf[value]] == kind
        ]

    def nodes_of(self, operation: str) -> Flags:
        """Return which nodes run an operation."""
        is_same = [name == operation for name in self.operations]
        nodes: Flags = np.array(is_same, bool)[self.nodes.operation]
        return nodes

    def made_by(self, nodes: Flags) -> Flags:
        """Return which values some nodes have made."""
        is_made: Flags = np.append(nodes, False)[self.values.maker]
        return is_made

    def readers(self) -> Rows:
        """Return the nodes that read each value."""
        return self.nodes.reads.transpose(len(self.values))
