"""Makes the rows of each operation: what it reads, what it makes, and where it stands.

An operation passes by in two halves, because it may write to what it reads:

    started = recorder.before(operation, args, kwargs)   numbers what it reads, makes leaves' rows
    result = operation(*args, **kwargs)
    recorder.after(started, result)                      numbers and measures what it made
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from otel_torch import torch_private
from otel_torch.graph.graph import AXIS_LAST, PUT
from otel_torch.recording.graph_values import PUT_LABEL
from otel_torch.sources.operations.arguments import describe_arguments
from otel_torch.sources.operations.autograd_lines import AutogradLines
from otel_torch.sources.operations.graph_rows import (
    COLUMNS,
    COLUMNS_WITH_ROWS,
    UNMEASURED,
    GraphRow,
    MeasuredValue,
    make_row,
    measure_value,
)
from otel_torch.sources.operations.operation_kinds import SHARES_MEMORY, OperationKind, draws_now
from otel_torch.sources.operations.places import BACKWARD, Places
from otel_torch.sources.operations.program_values import Look, ProgramValues, Value, memory_of
from otel_torch.sources.operations.source_lines import SourceLines
from otel_torch.sources.tensors.tensor_reader import RecordedCall
from otel_torch.statistics.measure import Measurement, measure
from otel_torch.statistics.rank_cuts import PART, cuts_of
from otel_torch.statistics.row_layout import SCALARS

# the operation of a value that others have written piece by piece, or through other views
REREAD = "otel_torch.reread"

# what looks at an end
_NO_OPERATION = OperationKind(name="", is_of_torch=True)


@dataclass(slots=True)
class Started:
    """An operation that is about to run.

    numbers: of the values of its tensors, by their ids. reads: in the order of the arguments.
    tensors: what it reads. written: what it writes to. replaces: the numbers of the values of these
    that it does not read, by their ids.
    """

    operation: Any
    kind: OperationKind
    args: Sequence[Any]
    kwargs: dict[str, Any]
    line: int | None
    call: RecordedCall
    forward_line: int | None
    numbers: dict[int, int] = field(default_factory=dict)
    reads: list[int] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    written: list[torch.Tensor] = field(default_factory=list)
    replaces: dict[int, int] = field(default_factory=dict)
    number: int | None = None

    def reads_all_of(self, made: torch.Tensor) -> bool:
        """Return whether a tensor that was read has as many elements as one that was made."""
        return any(tensor.numel() == made.numel() for tensor in self.tensors)


@dataclass(slots=True)
class _Pending:
    """A value that is made by an exchange with other ranks, which may still go on."""

    tensor: weakref.ref[torch.Tensor]
    value: Value
    row: GraphRow
    started: Started


class _Inside(threading.local):
    """The numbers of the fused operations that this thread breaks up, the innermost last."""

    def __init__(self) -> None:
        self.numbers: list[int | None] = []


class OperationRecorder:
    """Makes rows of operations.

    Args:
        places: say which call runs, and what a leaf is.
        add: takes the rows, in order.
        meet: given each value's loop, step, label and tensor before it is measured; returns what
            the tensor held, if it has put something else there.
        parts: into how many parts along each axis each value is cut and measured, too; 0 for none.
        rows: whether each row along the last axis of a value is measured, too.
        axes: whether each value is measured with each axis moved last, too, unless it has the same
            elements as another one.
    """

    def __init__(
        self,
        places: Places,
        add: Callable[[GraphRow], None],
        meet: Callable[[int, int, str, torch.Tensor], torch.Tensor | None] | None = None,
        parts: int = 0,
        rows: bool = False,
        axes: bool = False,
    ) -> None:
        self._places, self._add, self._meet, self.parts = places, add, meet, parts
        self._axes = axes
        self.columns = COLUMNS_WITH_ROWS if rows else COLUMNS
        self.values = ProgramValues()
        self.lines = SourceLines()
        self.inside = _Inside()
        self._origins: dict[int, tuple[int | None, RecordedCall]] = {}
        self.autograd = AutogradLines[tuple[int | None, RecordedCall]](self._origins)
        self._value_numbers = itertools.count()
        self._counts: dict[tuple[str, int, int], int] = defaultdict(int)
        self._pending: dict[object, list[_Pending]] = defaultdict(list)  # by memory
        self._has_gap = False  # operations ran that were not seen
        self._changed: set[int] = set()  # memories that were written to since the first forward

    def forget(self) -> None:
        """Forget what tensors hold: operations run that are not seen."""
        self.finish_pending()
        self.values.forget()
        self._origins.clear()
        self._has_gap = True

    # -- operations

    def before(
        self, operation: Any, args: Sequence[Any], kwargs: dict[str, Any], kind: OperationKind
    ) -> Started:
        """Number what an operation reads; `operation` is None for a kernel that torch knows not."""
        line = self.lines.current()
        call = self._places.current_call()
        forward_line = None
        if call.phase == BACKWARD:
            origin = self.autograd.current()
            if origin is not None:
                forward_line = origin[0]
                call = self._places.in_phase(origin[1], BACKWARD)
        self.autograd.note((line, call))
        started = Started(operation, kind, args, kwargs, line, call, forward_line)
        for place, tensor in _tensors_of(args):
            self._start_tensor(
                started, tensor, is_written=place in kind.written, is_read=place not in kind.unread
            )
        for name, argument in kwargs.items():
            for _, tensor in _tensors_of((argument,)):
                self._start_tensor(
                    started,
                    tensor,
                    is_written=name in kind.written_names,
                    is_read=name not in kind.unread_names,
                )
        return started

    def _start_tensor(
        self, started: Started, tensor: torch.Tensor, *, is_written: bool, is_read: bool
    ) -> None:
        if is_written:
            started.written.append(tensor)
            replaced = None if is_read else self.values.look(tensor).value
            if replaced is not None:
                started.replaces[id(tensor)] = replaced.number
            if self._places.has_begun:
                self._changed.add(memory_of(tensor))
        if not is_read or started.kind.reads_shapes:
            return
        if is_written and not started.kind.is_of_torch and self.values.look(tensor).holds_nothing:
            return  # the memory for the result of a kernel
        number = self._read(started, tensor)
        if number is not None:
            started.tensors.append(tensor)
            started.reads.append(number)
            started.numbers[id(tensor)] = number

    def _read(self, started: Started, tensor: torch.Tensor) -> int | None:
        """Return the number of what a tensor holds; None for memory that holds nothing yet."""
        if self._pending and not started.kind.is_collective:
            for pending in self._pending.pop(memory_of(tensor), ()):
                self._finish(pending, is_there=True)
        look = self.values.look(tensor)
        value = look.value
        if value is not None and self._still_holds(tensor, value):
            return value.number
        if value is None and look.layers:
            return self._add_reread(started, tensor, look)
        if value is None and look.is_unset and (started.kind.moves or started.kind.leaves_unset):
            return None
        return self._add_leaf(started, tensor, look)

    def _still_holds(self, tensor: torch.Tensor, value: Value) -> bool:
        """Return whether nobody has written to a tensor unseen.

        On a CPU the numbers show that, on a device torch's count of changes. While a fused
        operation is broken up, no code of the program runs.
        """
        if self.inside.numbers:
            return True
        if not tensor.is_cpu:
            return not self.values.was_changed_unseen(tensor)
        row = measure(tensor, SCALARS).row
        return value.has(None if row is None or isinstance(row, torch.Tensor) else row)

    def after(self, started: Started, result: Any) -> None:
        """Make the rows of what an operation has made."""
        kind, made = started.kind, []
        written = {id(tensor) for tensor in started.written}
        for _, tensor in _tensors_of((result,)):
            if id(tensor) in written:
                continue
            if kind.leaves_unset:
                self.values.leave_unset(tensor)
                continue
            look = self.values.look(tensor)
            if look.value is not None:
                continue  # the same tensor again, as `detach` returns it
            if look.is_known and not look.layers and look.is_unset:
                continue  # a view of memory that holds nothing
            made.append((tensor, look.is_known))
        for tensor in started.written:
            if kind.name in SHARES_MEMORY:
                self.values.leave_unset(tensor)  # others have written it, another process perhaps
            else:
                made.append((tensor, False))
        if not made:
            return
        number = started.number = self._next("op", started.call)
        reuse = self._reusable(started, made)
        for index, (tensor, is_view) in enumerate(made):
            label = f"op[{number}]" if len(made) == 1 else f"op[{number}][{index}]"
            measured, own = UNMEASURED, None
            if not kind.is_collective:
                own = self._replaced(started.call, label, tensor)
                measured = reuse or measure_value(tensor if own is None else own, self.columns)
            value = self._new_value(measured)
            row = self._operation_row(started, label, value, index, tensor, measured)
            if own is not None:
                self._add(row)
                self._add_put(started, value, label, tensor)
                continue
            (self.values.see if is_view else self.values.write)(tensor, value)
            if kind.is_collective:
                pending = _Pending(weakref.ref(tensor), value, row, started)
                self._pending[memory_of(tensor)].append(pending)
            self._add(row)
            if not kind.is_collective:
                self._add_parts(started.call, value, tensor)
                if "moves" not in row.fields or not started.reads_all_of(tensor):
                    self._add_axes(started.call, value, tensor)

    def _replaced(
        self, call: RecordedCall, label: str, tensor: torch.Tensor
    ) -> torch.Tensor | None:
        """Show a value to who waits for it; return it if the tensor holds another one now."""
        if self._meet is None or self.inside.numbers:
            return None
        return self._meet(call.loop, call.step, label, tensor)

    def _add_put(self, started: Started, own: Value, label: str, tensor: torch.Tensor) -> int:
        """Add what was put in the place of a value; return its number."""
        measured = measure_value(tensor, self.columns)
        value = self._new_value(measured)
        fields: dict[str, Any] = {
            "op": PUT,
            "args": [{"value": own.number}],
            "reads": [own.number],
            "value": value.number,
            "makes": 0,
        }
        self._add_lines(fields, started)
        self.values.write(tensor, value)
        self._add(make_row(started.call, f"{PUT_LABEL}{label}", measured, fields))
        return value.number

    def _reusable(
        self, started: Started, made: list[tuple[torch.Tensor, bool]]
    ) -> MeasuredValue | None:
        """Return what was measured already of the elements that were made, if the operation keeps
        them all and in their order: a view, a copy, a cast to a wider type.
        """
        if len(made) != 1 or len(started.tensors) != 1:
            return None
        (tensor, is_view), base = made[0], started.tensors[0]
        if not (is_view and started.kind.moves) and not started.kind.copies:
            return None
        if tensor.numel() != base.numel() or not _holds_exactly(tensor.dtype, base.dtype):
            return None
        if not (tensor.is_contiguous() and base.is_contiguous()):
            return None
        if self.columns is not COLUMNS and tensor.shape[-1:] != base.shape[-1:]:
            return None  # other rows
        value = self.values.look(base).value
        if value is None or value.row is None:
            return None
        numel = tensor.numel()
        shape, dtype = list(tensor.shape), str(tensor.dtype)
        return MeasuredValue(Measurement(None, self.columns, numel, numel, shape, dtype), value.row)

    def _operation_row(
        self,
        started: Started,
        label: str,
        value: Value,
        index: int,
        tensor: torch.Tensor,
        measured: MeasuredValue,
    ) -> GraphRow:
        kind, args, kwargs = started.kind, started.args, started.kwargs
        numbers = started.numbers
        fields: dict[str, Any] = {
            "op": kind.name,
            "args": describe_arguments(args, kwargs, lambda tensor: numbers.get(id(tensor))),
            "reads": started.reads,
            "value": value.number,
            "makes": index,
        }
        sources = started.tensors if kind.written == () else _tensors_behind(args)
        keeps_type = all(source.dtype is tensor.dtype for source in sources)
        if kind.moves or (kind.copies and keeps_type):
            fields["moves"] = True
        elif kind.copies:
            fields["casts"] = True
        if draws_now(kind, started.operation, args, kwargs):
            fields["random"] = True
        if kind.is_collective:
            fields["collective"] = True
            groups = map(torch_private.ranks_of_group, (*args, *kwargs.values()))
            if (group := next(filter(None, groups), None)) is not None:
                fields["group"] = group
        if id(tensor) in started.replaces:
            fields["replaces"] = started.replaces[id(tensor)]
        self._add_lines(fields, started)
        return make_row(started.call, label, measured, fields)

    def _add_lines(self, fields: dict[str, Any], started: Started) -> None:
        if started.line is not None:
            fields["line"] = started.line
        if started.forward_line is not None:
            fields["forward_line"] = started.forward_line
        if self.inside.numbers and self.inside.numbers[-1] is not None:
            fields["inside"] = self.inside.numbers[-1]

    # -- other values

    def _add_reread(self, started: Started, tensor: torch.Tensor, look: Look) -> int:
        """Add what a tensor shows after others have written to its memory."""
        call = started.call
        # told by who reads it: a value that is put in place is read again, and moves no other label
        depth, next_operation = len(self.inside.numbers), self._counts["op", call.loop, call.step]
        label = f"{'inside ' * depth}reread[{next_operation}][{len(started.reads)}]"
        own = self._replaced(call, label, tensor)
        measured = measure_value(tensor if own is None else own, self.columns)
        value = self._new_value(measured)
        reads = [layer.number for layer in look.layers]
        fields: dict[str, Any] = {
            "op": REREAD,
            "args": [{"value": number} for number in reads],
            "reads": reads,
            "value": value.number,
            "makes": 0,
            "moves": True,
        }
        self._add_lines(fields, started)
        self._add(make_row(call, label, measured, fields))
        if own is not None:
            return self._add_put(started, value, label, tensor)
        self.values.see(tensor, value)
        self._add_parts(call, value, tensor)
        return value.number

    def _add_leaf(self, started: Started, tensor: torch.Tensor, look: Look) -> int:
        """Add a value that no operation has made."""
        named = self._places.name_of(tensor)
        leaf = named.leaf
        if look.value is not None or look.is_unset:
            leaf = "unseen"
        elif not named.name and "lift_fresh" in started.kind.name:
            leaf = "constant"
        if self._has_gap and (leaf in ("input", "unseen") or memory_of(tensor) in self._changed):
            leaf = "unrecorded"
        call = started.call
        if named.module is not None:
            call = self._places.in_module(call, named.module, named.model)
        label = f"leaf[{self._next('leaf', call)}]"
        self._replaced(call, label, tensor)
        measured = measure_value(tensor, self.columns)
        value = self._new_value(measured)
        fields: dict[str, Any] = {"leaf": leaf, "name": named.name, "value": value.number}
        self._add_lines(fields, started)
        if named.line is not None:
            fields["line"] = named.line
        self.values.write(tensor, value)
        self._add(make_row(call, label, measured, fields))
        self._add_parts(call, value, tensor)
        self._add_axes(call, value, tensor)
        return value.number

    def _add_axes(self, call: RecordedCall, value: Value, tensor: torch.Tensor) -> None:
        """Add a value with each of its axes moved last, as another program may have it."""
        for axis in movable_axes(tensor.shape) if self._axes else ():
            measured = measure_value(tensor.detach().movedim(axis, -1), self.columns)
            fields: dict[str, Any] = {
                "op": AXIS_LAST,
                "args": [{"value": value.number}, axis],
                "reads": [value.number],
                "value": self._new_value(measured).number,
                "makes": 0,
                "reading": True,
            }
            self._add(make_row(call, f"axis[{self._next('axis', call)}]", measured, fields))

    def _add_parts(self, call: RecordedCall, whole: Value, tensor: torch.Tensor) -> None:
        """Add the parts that ranks may have of a value, cut along each of its axes."""
        for cut in cuts_of(tensor.shape, self.parts):
            parts = [tensor.detach()]
            for axis, count in cut.items():
                parts = [part for own in parts for part in own.chunk(count, axis)]
            number = self._next("part", call)
            for place, part in enumerate(parts):
                measured = measure_value(part, self.columns)
                fields: dict[str, Any] = {
                    "op": PART,
                    "args": [{"value": whole.number}, {str(axis): n for axis, n in cut.items()}],
                    "reads": [whole.number],
                    "value": self._new_value(measured).number,
                    "makes": place,
                    "reading": True,
                }
                self._add(make_row(call, f"part[{number}][{place}]", measured, fields))

    def add_ends(
        self, call: RecordedCall, tensors: Sequence[tuple[str, torch.Tensor, str | None]]
    ) -> None:
        """Add ends: (name, tensor, module) with the module of a parameter, None for the call's."""
        started = Started(None, _NO_OPERATION, (), {}, None, call, None)
        for name, tensor, module in tensors:
            number = self._read(started, torch_private.local_part(tensor))
            if number is None:
                continue
            started.reads.append(number)
            owner = call if module is None else self._places.in_module(call, module)
            label = f"end[{self._next('end', owner)}]"
            self._add(make_row(owner, label, UNMEASURED, {"end": name, "value": number}))

    @property
    def is_waiting(self) -> bool:
        """Whether rows were added that are not measured yet: a flush should wait for them."""
        return bool(self._pending)

    def finish_pending(self) -> None:
        """Measure what other ranks have sent and the program has not read: the step ends."""
        while self._pending:
            for pending in self._pending.popitem()[1]:
                self._finish(pending, is_there=False)

    def _finish(self, pending: _Pending, *, is_there: bool) -> None:
        """Measure what other ranks have sent.

        Args:
            is_there: The program reads it, so it has waited for it: another value may be put there.
        """
        tensor = pending.tensor()
        if tensor is None:
            return
        started, label = pending.started, pending.row.label
        own = self._replaced(started.call, label, tensor) if is_there else None
        measured = measure_value(tensor if own is None else own, self.columns)
        pending.row.measurement = measured.measurement
        pending.row.packed = pending.value.row = measured.packed
        if own is not None:
            self._add_put(started, pending.value, label, tensor)

    def _new_value(self, measured: MeasuredValue) -> Value:
        return Value(next(self._value_numbers), measured.packed)

    def _next(self, kind: str, call: RecordedCall) -> int:
        key = kind, call.loop, call.step
        self._counts[key] += 1
        return self._counts[key] - 1


def _holds_exactly(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Return whether every number of a type is one of another type."""
    if wide is narrow:
        return True
    if not (wide.is_floating_point and narrow.is_floating_point):
        return False
    wide_range, narrow_range = torch.finfo(wide), torch.finfo(narrow)
    try:
        return (
            wide_range.eps <= narrow_range.eps
            and wide_range.max >= narrow_range.max
            and wide_range.smallest_normal <= narrow_range.smallest_normal
        )
    except NotImplementedError:  # two numbers in a byte
        return False


def movable_axes(shape: Sequence[int]) -> list[int]:
    """Return the axes that may stand last in another program: a move of each changes the order of
    the elements.

    The last two of several are not exchanged if they have one size: whether scores are transposed
    is not a matter of layout. Whether a weight is, which has two, is.

    >>> movable_axes((1, 3, 4, 5, 1)), movable_axes((4,)), movable_axes((2, 8, 8))
    ([1, 2], [], [0])
    >>> movable_axes((8, 8))
    [0]
    """
    axes = [axis for axis, size in enumerate(shape) if size > 1]
    are_twins = len(axes) > 2 and shape[axes[-1]] == shape[axes[-2]]
    return axes[: -2 if are_twins else -1]


def _tensors_of(values: Sequence[Any]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the tensors of a call's values, and those of lists, with the position of each value."""
    for place, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            yield place, value
        elif isinstance(value, (list, tuple)):
            for _, tensor in _tensors_of(value):
                yield place, tensor


def _tensors_behind(args: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors behind the first argument: what a copy in place copies."""
    return [tensor for _, tensor in _tensors_of(args[1:])]
