"""Which values of a recording are the ends of its program: what has to be equal in another one.

Of a training these are the gradients that its optimizer reads and the parameters after the last
step. How it comes to them is its own affair, so that what a forward returns is passed: passes may
be split, and evaluations come in between.
Of any other program they are what models return, and what was made last and is read no more, or
for nothing but the few numbers that the program shows: a mean that it prints.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from otel_torch.graph.equality import LEAST_NUMEL
from otel_torch.graph.graph import NOTHING
from otel_torch.recording.rows import Row

_UPDATE, REREAD = "update", "otel_torch.reread"
# a summary that people read has at most this many numbers, each of this many: a mean by channel
_FEW, _TIMES = 16, 16
# in the names of dtypes that round
ROUNDING_DTYPES = ("float", "complex")
# rank, loop and step
Step = tuple[Any, Any, Any]


@dataclass(frozen=True, slots=True)
class RecordedProgram:
    """The rows of a program.

    Attributes:
        nodes: The first row of each operation, in the order in which they ran.
        reads: The values that each reads.
        values: The row and the maker of each value; NOTHING is the maker of a leaf.
        ends: The rows of ends.
        has_loops: Whether results of each loop count, as of several samplers in one program; else
            only those of the last one.
    """

    nodes: Sequence[Row]
    reads: Sequence[Sequence[int]]
    values: dict[int, tuple[Row, int]]
    ends: Sequence[Row]
    has_loops: bool = False

    def run_of(self, node: int) -> tuple[Any, Any]:
        """Return what a node's results belong to: a rank, and a loop if each has results."""
        row = self.nodes[node]
        return row.get("rank"), row.get("loop") if self.has_loops else None

    def maker(self, value: int) -> int:
        """Return the node that made a value."""
        return self.values[value][1] if value in self.values else NOTHING

    def rank(self, value: int) -> int:
        """Return the rank that has a value; 0 if there is only one."""
        return int(self.values[value][0].get("rank") or 0) if value in self.values else 0

    def is_small(self, value: int) -> bool:
        """Return whether a value has too few elements to tell one place from another."""
        size = self.size(value)
        return size is not None and size < LEAST_NUMEL

    def sums_up(self, node: int, numbers: Sequence[int]) -> bool:
        """Return whether a node makes a few numbers of many."""
        most = max((self.size(value) or 0 for value in self.reads[node]), default=0)
        return all(
            self.is_small(value) or (self.size(value) or most) <= min(_FEW, most // _TIMES)
            for value in numbers
        )

    def numbers_read(self, node: int) -> list[int]:
        """Return the values that a node reads, but for indices and masks."""
        read = self.reads[node]
        rounding = [value for value in read if self._may_round(value)]
        return rounding or list(read)

    def _may_round(self, value: int) -> bool:
        dtype = str(self.values[value][0].get("dtype", "")) if value in self.values else ""
        return any(word in dtype for word in ROUNDING_DTYPES)

    def size(self, value: int) -> int | None:
        """Return how many elements a value has, if that is known."""
        shape = self.values[value][0].get("shape") if value in self.values else None
        return None if shape is None else math.prod(shape)

    def is_update(self, node: int) -> bool:
        """Return whether a node is part of an optimizer's step."""
        return node != NOTHING and self.nodes[node].get("phase") == _UPDATE


class ProgramEnd(NamedTuple):
    """An end.

    Attributes:
        is_passed: Whether the gradients and parameters of a training come from it.
        parameter: Which parameter it is the gradient or the update of; "" for others.
    """

    name: str
    value: int
    is_passed: bool = False
    parameter: str = ""


def ends_of(program: RecordedProgram) -> Iterator[ProgramEnd]:
    """Yield each end; those without a name have an empty one.

    Ends of several ranks have the same names.
    """
    counts: Counter[object] = Counter()
    trained = list(_ends_of_training(program))
    before = _ancestors(program, [end.value for end in trained])
    returned = [
        ProgramEnd(str(row["end"]), row["value"], _is_among(program, row["value"], before))
        for row in program.ends
        if row.get("phase") != _UPDATE
    ]

    def rank_of(end: ProgramEnd) -> int:
        return program.rank(end.value)

    for end in sorted(trained, key=rank_of) + sorted(returned, key=rank_of):
        key = end.name, rank_of(end)
        counts[key] += 1
        is_numbered = end.name and counts[key] > 1
        yield end._replace(name=f"{end.name}#{counts[key]}") if is_numbered else end
    for value in sorted(_results(program), key=program.rank):
        yield ProgramEnd("", value)


def _ends_of_training(program: RecordedProgram) -> Iterator[ProgramEnd]:
    """Yield gradients and parameters after the last step; nothing if no optimizer stepped."""
    updates: defaultdict[Step, dict[str, int]] = defaultdict(dict)
    for row in program.ends:
        if row.get("phase") == _UPDATE:
            name = ".".join(
                filter(None, (row.get("module"), str(row["end"]).removeprefix("param.")))
            )
            updates[_step_of(row)][name] = row["value"]
    for step, read in (_gradients(program) if updates else {}).items():
        names = _names_of_gradients(program, read, updates.get(step, {}))
        for name, value in zip(names, read, strict=True):
            yield ProgramEnd(name and f"grad.{name}", value, parameter=name)
    last = {
        (rank, name): value
        for (rank, *_), update in updates.items()
        for name, value in update.items()
    }
    rows = {number: row for number, (row, _) in program.values.items()}
    replaced = {row["replaces"]: number for number, row in rows.items() if "replaces" in row}
    for (_, name), value in last.items():
        # what an optimizer does not change itself may be copied from elsewhere after its step
        while value in replaced and not program.is_update(program.maker(value)):
            value = replaced[value]
        yield ProgramEnd(f"param.{name}", value, parameter=name)


def _step_of(row: Row) -> Step:
    return row.get("rank"), row.get("loop"), row.get("step")


def _gradients(program: RecordedProgram) -> dict[Step, list[int]]:
    """Return what the operations of each optimizer's step read of what others made."""
    found: defaultdict[Step, dict[int, None]] = defaultdict(dict)
    for node, row in enumerate(program.nodes):
        if program.is_update(node):
            for value in program.reads[node]:
                maker = program.maker(value)
                if maker != NOTHING and not program.is_update(maker):
                    found[_step_of(row)].setdefault(value)
    return {step: list(values) for step, values in found.items()}


def _names_of_gradients(
    program: RecordedProgram, gradients: Sequence[int], parameters: dict[str, int]
) -> list[str]:
    """Return the parameter of each gradient: an optimizer goes through both in one order."""
    changed = sorted(
        (program.maker(value), program.values[value][0].get("makes") or 0, name)
        for name, value in parameters.items()
        if program.is_update(program.maker(value))
    )
    names = [name for *_, name in changed]
    shapes = [
        [program.values[value][0].get("shape") for value in values]
        for values in (gradients, [parameters[name] for name in names])
    ]
    return names if shapes[0] == shapes[1] else [""] * len(gradients)


def _ancestors(program: RecordedProgram, values: Sequence[int]) -> set[int]:
    """Return the values from which some values are computed, and these."""
    wanted = set(values)
    made = _by_maker(program)
    for node in range(len(program.nodes) - 1, NOTHING, -1):
        if not wanted.isdisjoint(made[node]):
            wanted.update(program.reads[node])
    return wanted


def _is_among(program: RecordedProgram, value: int, values: Collection[int]) -> bool:
    """Return whether a value, or what it is a view of as a whole, is among some: logits are a view
    of a product of matrices, and a loss makes that one flat again.
    """
    return any(own in values for own in _seen_whole(program, value))


def _seen_whole(program: RecordedProgram, value: int) -> Iterator[int]:
    """Yield a value, and what it is a view of as a whole."""
    yield value
    while (node := program.maker(value)) != NOTHING and program.nodes[node].get("moves"):
        read = program.reads[node]
        if len(read) != 1 or program.size(read[0]) != program.size(value):
            return
        value = read[0]
        yield value


def _by_maker(program: RecordedProgram) -> defaultdict[int, list[int]]:
    """Return the values that each node makes."""
    made: defaultdict[int, list[int]] = defaultdict(list)
    for value, (_, maker) in program.values.items():
        made[maker].append(value)
    return made


def _made_with(
    program: RecordedProgram, made: Mapping[int, Sequence[int]], values: Collection[int]
) -> set[int]:
    """Return some values and all that is made from them, with what each node makes."""
    found = set(values)
    for node, read in enumerate(program.reads):
        if not found.isdisjoint(read):
            found.update(made.get(node, ()))
    return found


def _results(program: RecordedProgram) -> list[int]:
    """Return the values that a rank, or each of its loops, made after its last end and reads no
    more, or for small values alone.

    Views and slices that nothing reads count as not there, and what memory showed that the program
    then wrote to; nor does what comes of no end, but of inputs alone: it is made for the next step.
    Gradients are left out where an optimizer reads some: what no parameter gets is no result.
    """
    has_update = any(map(program.is_update, range(len(program.nodes))))
    ended = {row["value"] for row in program.ends}
    made = _by_maker(program)
    # what is taken of a whole view may have been read of what it is a view of
    behind = _made_with(
        program, made, {own for value in ended for own in _seen_whole(program, value)}
    )
    last: defaultdict[tuple[Any, Any], int] = defaultdict(lambda: NOTHING)
    for node in map(program.maker, ended):
        if node != NOTHING:
            run = program.run_of(node)
            last[run] = max(last[run], node)
    # what anything is made of, and what anything is made of that tells one place from another
    read, needed, results = set(ended), set(ended), list[int]()
    for node in range(len(program.nodes) - 1, NOTHING, -1):
        row, numbers = program.nodes[node], made[node]
        is_small = program.sums_up(node, numbers)
        if (read if is_small else needed).isdisjoint(numbers):
            if row.get("moves") and (len(set(program.reads[node])) == 1 or row["op"] == REREAD):
                continue
            if ended and behind.isdisjoint(numbers):
                continue
            # squares of gradients of which a norm is shown: the program goes on with the gradients
            is_shown = not read.isdisjoint(numbers)
            if is_shown and not needed.isdisjoint(program.numbers_read(node)):
                read.update(program.reads[node])
                continue
            is_later = node > last[program.run_of(node)]
            is_passed = has_update and row.get("phase") == "backward"
            if is_later and not is_passed and "inside" not in row:
                results += reversed(numbers)
        read.update(program.reads[node])
        if not (is_small and needed.isdisjoint(numbers)):
            needed.update(program.reads[node])
    return results[::-1]
