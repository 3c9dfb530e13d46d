"""Rebuild a forward from its rows: the tree of module calls, and the values passed between them.

A row names a tensor of a call. To see which module made a value and which modules used it, calls
are nested by their recorded parents, and rows with equal numbers become one value.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from otel_torch.recording.rows import Row

Sketch = NDArray[np.float64]
_MOST_SKETCHES = 20_000
_Kept = TypeVar("_Kept")
RoleSide = Literal["input", "output"]

_INTEGER_DTYPES = ("torch.int", "torch.uint", "torch.bool")


@dataclass(slots=True, eq=False)
class TensorValue:
    """The content of a tensor, however it is named, viewed or passed on.

    roles: Its rows in time order; the first is its birth. sketch: float64, shape (64,), or None.
    shapes: Every shape in which it was seen.
    """

    numel: int
    sketch: Sketch | None
    row: Row
    roles: list[Role] = field(default_factory=list)
    shapes: set[tuple[int, ...]] = field(default_factory=set)

    @property
    def birth(self) -> Role:
        """The first role: as an output, its module made it; as an input, the code before it did."""
        return self.roles[0]

    @property
    def is_finite(self) -> bool:
        """Whether it has no NaN and no Inf."""
        return not self.row.get("nonfinite") and all(
            not isinstance(x := self.row.get(name), float) or math.isfinite(x)
            for name in ("sum", "abs_mean", "min", "max")
        )

    @property
    def is_constant(self) -> bool:
        """Whether all elements are one number (zeros, an open mask), so that equality is chance."""
        low, high = self.row.get("min"), self.row.get("max")
        return low is not None and low == high

    @property
    def is_integer(self) -> bool:
        """Whether it holds integers or booleans."""
        return str(self.row.get("dtype", "")).startswith(_INTEGER_DTYPES)


@dataclass(slots=True, eq=False)
class Role:
    """One row: a value as an input or output of one call.

    time: Orders the roles of a program.
    """

    call: ModuleCall
    side: RoleSide
    tensor: str
    argument: str | None
    value: TensorValue
    row: Row
    time: int

    @property
    def maker(self) -> ModuleCall | None:
        """The call whose own code made the tensor: of an input, the one around the call."""
        return self.call if self.side == "output" else self.call.parent


def is_informative(role: Role) -> bool:
    """Return whether a tensor was computed, so that equality is not a coincidence."""
    value = role.value
    return not value.is_constant and not value.is_integer and value.numel > 1


def summed_sketch(roles: Sequence[Role]) -> Sketch | None:
    """Return the sketch of a tensor, or of the sum of several; None if it is not known.

    Sketches of tokens have the length of all their rows, and add up only in equal shapes.
    """
    sketches = [role.value.sketch for role in roles if role.value.sketch is not None]
    if len(sketches) < len(roles) or len(set(map(len, sketches))) != 1:
        return None
    total: Sketch = np.sum(sketches, axis=0)
    return total


@dataclass(slots=True, eq=False)
class ModuleCall:
    """One call of a module.

    entered, exited: Positions in the program's order of events. parent: The enclosing call.
    """

    model: str
    module: str
    cls: str
    loop: int | None
    step: int | None
    number: int | None
    phase: str
    entered: int
    exited: int
    parent: ModuleCall | None = None
    children: list[ModuleCall] = field(default_factory=list)
    inputs: list[Role] = field(default_factory=list)
    outputs: list[Role] = field(default_factory=list)

    @property
    def module_path(self) -> tuple[str, str]:
        """The module: (model, name)."""
        return self.model, self.module

    def roles(self, side: RoleSide) -> list[Role]:
        """Return its inputs or its outputs."""
        return self.inputs if side == "input" else self.outputs


@dataclass(slots=True, eq=False)
class Parameter:
    """A parameter or buffer before the first forward; `module` and `name` make its full name.

    sketch: float64, shape (64,), or None. row_sketch: Sketch over rows, which finds the parts of a
    fused weight; the real parts of its numbers, then the imaginary parts.
    """

    model: str
    module: str
    name: str
    row: Row
    sketch: Sketch | None
    row_sketch: Sketch | None
    shape: tuple[int, ...]
    numel: int
    is_buffer: bool

    @property
    def module_path(self) -> tuple[str, str]:
        """The module that owns it: (model, name)."""
        return self.model, self.module

    @property
    def full_name(self) -> str:
        """Its name in a checkpoint."""
        return f"{self.module}.{self.name}" if self.module else self.name


@dataclass(slots=True)
class Program:
    """A stretch of a run, usually one outermost forward.

    calls: In order of entering. roles: In time order.
    """

    calls: list[ModuleCall]
    values: list[TensorValue]
    roles: list[Role]

    @property
    def outermost(self) -> list[ModuleCall]:
        """The calls without a recorded enclosing call."""
        return [call for call in self.calls if call.parent is None]


@dataclass(slots=True)
class ModuleEntry:
    """An entry of a model's table of modules, from a recording's metadata."""

    model: str
    module: str
    cls: str
    called: bool
    parameters: list[str]
    aliases: list[str]


def keep_for_later(sketches: dict[Any, _Kept], value: Any, sketch: _Kept) -> None:
    """Keep a value's sketch for later rows of the value, and drop the oldest if there are many."""
    if len(sketches) >= _MOST_SKETCHES:
        del sketches[next(iter(sketches))]
    sketches[value] = sketch


def decode_sketch(text: Any) -> Sketch | None:
    """Return a sketch from a recording's base64, None for anything else.

    >>> decode_sketch("AACAPwAAAAA=")
    array([1., 0.])
    """
    sketch = sketch_bytes(text)
    return None if sketch is None else _sketch_of(sketch)


def sketch_bytes(text: Any) -> bytes | None:
    """Return the bytes of a sketch in base64, None if they are not float32 numbers."""
    if not isinstance(text, str):
        return None
    try:
        sketch = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return None if len(sketch) % 4 else sketch


def _sketch_of(sketch: bytes) -> Sketch:
    return np.frombuffer(sketch, dtype="<f4").astype(np.float64)


# -- calls and values
# --------------------------------------------------------------------------------------------------


def build_program(
    rows: Iterable[Row], sketches: Mapping[int, bytes] = MappingProxyType({})
) -> Program:
    """Build calls and values from the rows of one forward, in the recording's order.

    Rows without a recorded call are grouped by name; a tensor that repeats within a step starts a
    further call.

    Args:
        sketches: Sketches of values recorded earlier, by number. A row carries the sketch of its
            value only the first time.

    >>> rows = [
    ...     {"module": "fc", "tensor": "in[0]", "step": 0, "order": [1, 2], "sum": 3.0},
    ...     {"module": "fc", "tensor": "out", "step": 0, "order": [1, 2], "sum": 5.0},
    ...     {"module": "act", "tensor": "in[0]", "step": 0, "order": [3, 4], "sum": 5.0},
    ... ]
    >>> program = build_program(rows)
    >>> [call.module for call in program.calls], len(program.values)
    (['fc', 'act'], 2)
    >>> [(role.call.module, role.tensor) for role in program.values[1].roles]
    [('fc', 'out'), ('act', 'in[0]')]
    """
    builder = _ProgramBuilder(sketches)
    for position, row in enumerate(rows):
        builder.add(position, row)
    return builder.finish()


class _ProgramBuilder:
    def __init__(self, sketches: Mapping[int, bytes]) -> None:
        self._sketches = sketches
        self._calls: dict[Any, ModuleCall] = {}
        self._values: dict[Any, TensorValue] = {}
        self._value_by_number: dict[int, TensorValue] = {}
        self._parents: list[tuple[ModuleCall, int]] = []
        self._call_by_entry: dict[int, ModuleCall] = {}
        self._occurrences: Counter[Any] = Counter()

    def add(self, position: int, row: Row) -> None:
        entered, exited = row.get("order") or (None, None)
        key = entered if entered is not None else self._unordered_key(row)
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = self._start_call(position, row, entered)
        if exited is not None:
            call.exited = exited
        elif entered is None:
            call.exited = position
        side: RoleSide = "input" if row["tensor"].startswith("in") else "output"
        value = self._value_of(row)
        role = Role(call, side, row["tensor"], row.get("argument"), value, row, 0)
        call.roles(side).append(role)
        value.roles.append(role)
        if isinstance(row.get("shape"), list):
            value.shapes.add(tuple(row["shape"]))

    def _start_call(self, position: int, row: Row, entered: int | None) -> ModuleCall:
        call = ModuleCall(
            model=row.get("model") or "",
            module=row["module"],
            cls=row.get("class") or "",
            loop=row.get("loop"),
            step=row["step"],
            number=row.get("call"),
            phase=row.get("phase") or "forward",
            entered=position if entered is None else entered,
            exited=position,
        )
        if entered is not None:
            self._call_by_entry[entered] = call
            if row.get("parent") is not None:
                self._parents.append((call, row["parent"]))
        return call

    def _unordered_key(self, row: Row) -> Hashable:
        """Return a key that tells calls apart that were not recorded as such."""
        names = tuple(
            row.get(name) for name in ("model", "module", "loop", "step", "call", "phase")
        )
        self._occurrences[names, row["tensor"]] += 1
        return names, self._occurrences[names, row["tensor"]]

    def _value_of(self, row: Row) -> TensorValue:
        """Return the value with this row's number, or with exactly its content."""
        number = row.get("value")
        if isinstance(number, int) and number in self._value_by_number:
            return self._value_by_number[number]
        numel = _numel(row)
        sketch = sketch_bytes(row.get("sketch"))
        if sketch is None and isinstance(number, int):
            sketch = self._sketches.get(number)
        content = _content(row, number, numel, sketch)
        value = self._values.get(content)
        if value is None:
            numbers = None if sketch is None else _sketch_of(sketch)
            value = self._values[content] = TensorValue(numel, numbers, row)
        if isinstance(number, int):
            self._value_by_number[number] = value
        return value

    def finish(self) -> Program:
        calls = sorted(self._calls.values(), key=lambda call: call.entered)
        self._nest(calls)
        for call in calls:
            for role in call.inputs:
                role.time = call.entered
            for role in call.outputs:
                role.time = call.exited if call.exited >= 0 else call.entered
        values = list(self._values.values())
        for value in values:
            value.roles.sort(key=lambda role: role.time)
        roles = sorted(
            (role for value in values for role in value.roles), key=lambda role: role.time
        )
        return Program(calls, values, roles)

    def _nest(self, calls: list[ModuleCall]) -> None:
        # a call without tensors has no rows; the next enclosing call takes its place
        has_all = all(parent in self._call_by_entry for _, parent in self._parents)
        enclosing = {} if has_all else _enclosing_calls(calls)
        for call, parent in self._parents:
            call.parent = self._call_by_entry.get(parent) or enclosing.get(call)
        if not self._call_by_entry:
            _nest_by_name(calls)
        for call in calls:
            if call.parent is not None:
                call.parent.children.append(call)


def _content(row: Row, number: Any, numel: int, sketch: bytes | None) -> Hashable:
    """Return a key that two rows share if their values are equal."""
    has_statistics = "sum" in row or "abs_mean" in row
    if row.get("nonfinite") or (sketch is None and not has_statistics):
        return ("number", number) if number is not None else ("row", id(row))
    if sketch is not None:
        return numel, sketch
    names = ("sum", "abs_mean", "min", "max", "l2", "std", "mean")
    return (numel, *(row.get(name) for name in names))


def _enclosing_calls(calls: Iterable[ModuleCall]) -> dict[ModuleCall, ModuleCall]:
    """Return the innermost recorded call that was running during the whole of each call.

    Args:
        calls: In the order of entering.
    """
    running: list[ModuleCall] = []
    enclosing = {}
    for call in calls:
        while running and running[-1].exited < call.entered:
            running.pop()
        outer = next((outer for outer in reversed(running) if call.exited < outer.exited), None)
        if outer is not None:
            enclosing[call] = outer
        running.append(call)
    return enclosing


def _numel(row: Row) -> int:
    numel, shape = row.get("numel"), row.get("shape")
    if isinstance(numel, int):
        return numel
    if isinstance(shape, list) and all(isinstance(size, int) for size in shape):
        return math.prod(shape)
    return -1


def _nest_by_name(calls: list[ModuleCall]) -> None:
    """Nest calls without recorded parents by the names of their modules.

    The parent is the next call, by exit time, of a module whose name is a prefix. Rows may be in
    any order, so without a later one it is the last such call before.
    """
    pending: dict[tuple[str, str], list[ModuleCall]] = defaultdict(list)  # by enclosing module
    last: dict[tuple[str, str], ModuleCall] = {}
    for call in sorted(calls, key=lambda call: call.exited):
        for child in pending.pop(call.module_path, ()):
            if child.parent is None:
                child.parent = call
        last[call.module_path] = call
        for prefix in enclosing_names(call.module):
            pending[call.model, prefix].append(call)
    for call in calls:
        if call.parent is None:
            parents = (last.get((call.model, prefix)) for prefix in enclosing_names(call.module))
            call.parent = next((parent for parent in parents if parent is not None), None)


def enclosing_names(module: str) -> Iterator[str]:
    """Yield the names of the modules that contain a module, the innermost first.

    >>> list(enclosing_names("blocks.0.attn"))
    ['blocks.0', 'blocks', '']
    """
    while module:
        module = module.rpartition(".")[0]
        yield module


# -- parameters and modules
# --------------------------------------------------------------------------------------------------


def build_parameters(rows: Iterable[Row]) -> list[Parameter]:
    """Return the parameters and buffers among the rows of phase `attach`, one per name."""
    parameters = []
    sketches: dict[int, tuple[Any, Any]] = {}
    for row in rows:
        kind, _, name = row["tensor"].partition(".")
        if kind not in ("param", "buffer"):
            continue
        number = row.get("value")
        texts = row.get("sketch"), row.get("row_sketch")
        if isinstance(number, int):
            texts = sketches.setdefault(number, texts)
        parameter = Parameter(
            model=row.get("model") or "",
            module=row["module"],
            name=name,
            row=row,
            sketch=decode_sketch(texts[0]),
            row_sketch=decode_sketch(texts[1]),
            shape=tuple(row["shape"]) if isinstance(row.get("shape"), list) else (),
            numel=_numel(row),
            is_buffer=kind == "buffer",
        )
        parameters.append(parameter)
    return parameters


def read_module_table(meta: dict[str, Any]) -> list[ModuleEntry]:
    """Return the modules of every model from a recording's metadata, [] without a table."""
    return [
        ModuleEntry(
            model,
            line["module"],
            cls=line.get("class", ""),
            called=line.get("called") is not False,
            parameters=line.get("parameters", []),
            aliases=line.get("aliases", []),
        )
        for model, facts in meta.get("models", {}).items()
        for line in facts.get("table", ())
    ]
