"""One program's run, put together from the rows of its recording: calls, the values that pass
between them, parameters.

Rows say which tensor of which call; to see where a value was made and who used it, one needs the
calls as a tree and the tensors that are the same number for number as one value.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from otel_torch.recording.rows import Row

Sketch = NDArray[np.float64]
RoleSide = Literal["input", "output"]

_INTEGERS = ("torch.int", "torch.uint", "torch.bool")


@dataclass(slots=True, eq=False)
class TensorValue:
    """What a tensor holds, whatever it is called, viewed or passed on as: rows of equal numbers are
    one value.

    roles: in time order; the first is its birth. sketch: float64, shape (64,), None where the
    recording has none.
    """

    numel: int
    sketch: Sketch | None
    row: Row
    roles: list[Role] = field(default_factory=list)
    shapes: set[tuple[int, ...]] = field(default_factory=set)

    @property
    def birth(self) -> Role:
        """Where the value first was seen: born as an output it was made by that module, as an input
        by the code before it.
        """
        return self.roles[0]

    @property
    def is_finite(self) -> bool:
        """Whether every number of it is."""
        return not self.row.get("nonfinite") and all(
            not isinstance(x := self.row.get(name), float) or math.isfinite(x)
            for name in ("sum", "abs_mean", "min", "max")
        )

    @property
    def is_constant(self) -> bool:
        """Whether it is one number many times (zeros, ones, an open mask): equal to others by
        chance.
        """
        low, high = self.row.get("min"), self.row.get("max")
        return low is not None and low == high

    @property
    def is_integer(self) -> bool:
        """Whether it holds whole numbers or truth values."""
        return str(self.row.get("dtype", "")).startswith(_INTEGERS)


@dataclass(slots=True, eq=False)
class Role:
    """One row: a value as the input or output of one call. `time` orders the roles of a program."""

    call: ModuleCall
    side: RoleSide
    tensor: str
    argument: str | None
    value: TensorValue
    row: Row
    time: int


@dataclass(slots=True, eq=False)
class ModuleCall:
    """One call of a module. entered, left: in the program's order of events; parent: the enclosing
    call, as recorded.
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
        """Its inputs or its outputs."""
        return self.inputs if side == "input" else self.outputs


@dataclass(slots=True, eq=False)
class Parameter:
    """A parameter or buffer as it was before the first forward. `module` and `name` make its full
    name.
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
    """A stretch of a run, usually one outermost forward: its calls in order of entering, its
    values, and every role of these in time order.
    """

    calls: list[ModuleCall]
    values: list[TensorValue]
    roles: list[Role]

    @property
    def outermost(self) -> list[ModuleCall]:
        """The calls that no recorded call encloses."""
        return [call for call in self.calls if call.parent is None]


@dataclass(slots=True)
class ModuleEntry:
    """A line of a model's table of modules."""

    model: str
    module: str
    cls: str
    called: bool
    parameters: list[str]
    aliases: list[str]


def decode(text: Any) -> Sketch | None:
    """A sketch from a recording's base64; None for anything else.

    >>> decode("AACAPwAAAAA=")
    array([1., 0.])
    """
    sketch = sketch_bytes(text)
    return None if sketch is None else np.frombuffer(sketch, dtype="<f4").astype(np.float64)


def sketch_bytes(text: Any) -> bytes | None:
    """What base64 spells, None where it spells no float32 numbers."""
    if not isinstance(text, str):
        return None
    try:
        sketch = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return None if len(sketch) % 4 else sketch


def build_program(
    rows: Iterable[Row], sketches: Mapping[int, bytes] = MappingProxyType({})
) -> Program:
    """Put calls and values together from the rows of one stretch, in the recording's order.

    sketches: of values that were seen before this stretch, by number: a row says a value's sketch
    at first sight only. Of rows that say no call, those of one name within a step are further
    calls.
    """
    calls: dict[Any, ModuleCall] = {}
    values: dict[Any, TensorValue] = {}
    by_number: dict[int, TensorValue] = {}
    ordered: list[tuple[int, ModuleCall]] = []
    parents: list[tuple[ModuleCall, int]] = []
    entered: dict[int, ModuleCall] = {}
    times: Counter[Any] = Counter()
    for position, row in enumerate(rows):
        order = row.get("order") or (None, None)
        key = order[0] if order[0] is not None else _call_key(row, times)
        call = calls.get(key)
        if call is None:
            call = calls[key] = ModuleCall(
                row.get("model") or "", row["module"], row.get("class") or "", row.get("loop"), row["step"], row.get("call"),
                row.get("phase") or "forward", order[0] if order[0] is not None else position, position,
            )  # fmt: skip
            ordered.append((call.entered, call))
            if order[0] is not None:
                entered[order[0]] = call
                if row.get("parent") is not None:
                    parents.append((call, row["parent"]))
        if order[1] is not None:
            call.exited = order[1]
        elif order[0] is None:
            call.exited = position
        side: RoleSide = "input" if row["tensor"].startswith("in") else "output"
        value = _value_of(row, values, by_number, sketches)
        role = Role(call, side, row["tensor"], row.get("argument"), value, row, 0)
        call.roles(side).append(role)
        value.roles.append(role)
        if isinstance(row.get("shape"), list):
            value.shapes.add(tuple(row["shape"]))
    found = [call for _, call in sorted(ordered, key=lambda pair: pair[0])]
    for call, parent in parents:
        # a call without a tensor has no rows; then the one around it
        call.parent = entered.get(parent) or _around(call, found)
    if not entered:
        _adopt_by_name(found)
    for call in found:
        if call.parent is not None:
            call.parent.children.append(call)
    for call in found:
        for role in call.inputs:
            role.time = call.entered
        for role in call.outputs:
            role.time = call.exited if call.exited >= 0 else call.entered
    for value in values.values():
        value.roles.sort(key=lambda role: role.time)
    roles = sorted(
        (role for value in values.values() for role in value.roles), key=lambda role: role.time
    )
    return Program(found, list(values.values()), roles)


def _around(call: ModuleCall, calls: list[ModuleCall]) -> ModuleCall | None:
    """The innermost recorded call during which another one was made."""
    holders = [
        other for other in calls if other.entered < call.entered and call.exited < other.exited
    ]
    return max(holders, key=lambda other: other.entered, default=None)


def _value_of(
    row: Row,
    values: dict[Any, TensorValue],
    by_number: dict[int, TensorValue],
    sketches: Mapping[int, bytes],
) -> TensorValue:
    """The value of a row: known by its number, or by having the very numbers of one that is there."""
    number = row.get("value")
    if isinstance(number, int) and number in by_number:
        return by_number[number]
    numel = _numel(row)
    sketch = sketch_bytes(row.get("sketch"))
    if sketch is None and isinstance(number, int):
        sketch = sketches.get(number)
    content: Any
    if row.get("nonfinite") or (
        sketch is None and not any(name in row for name in ("sum", "abs_mean"))
    ):
        content = ("number", number) if number is not None else ("row", id(row))
    elif sketch is not None:
        content = (numel, sketch)
    else:
        content = (
            numel,
            *(row.get(name) for name in ("sum", "abs_mean", "min", "max", "l2", "std", "mean")),
        )
    value = values.get(content)
    if value is None:
        numbers = None if sketch is None else np.frombuffer(sketch, dtype="<f4").astype(np.float64)
        value = values[content] = TensorValue(numel, numbers, row)
    if isinstance(number, int):
        by_number[number] = value
    return value


def _numel(row: Row) -> int:
    numel, shape = row.get("numel"), row.get("shape")
    if isinstance(numel, int):
        return numel
    if isinstance(shape, list) and all(isinstance(size, int) for size in shape):
        return math.prod(shape)
    return -1


def _call_key(row: Row, times: Counter[Any]) -> Any:
    """What tells calls apart that were not recorded as such; a tensor that comes again is of a
    further call.
    """
    names = tuple(row.get(name) for name in ("model", "module", "loop", "step", "call", "phase"))
    times[names, row["tensor"]] += 1
    return names, times[names, row["tensor"]]


def _adopt_by_name(calls: list[ModuleCall]) -> None:
    """Without recorded parents: a call lies in the next call, by time, of the module that its name
    says holds it; where there is none, for rows may have been written in any order, in the last one
    before it.
    """
    pending: dict[tuple[str, str], list[ModuleCall]] = defaultdict(
        list
    )  # by the names of the modules around them
    last: dict[tuple[str, str], ModuleCall] = {}
    for call in sorted(calls, key=lambda call: call.exited):
        for child in pending.pop(call.module_path, ()):
            if child.parent is None:
                child.parent = call
        last[call.module_path] = call
        for around in _names_around(call.module):
            pending[call.model, around].append(call)
    for call in calls:
        if call.parent is None:
            holders = (last.get((call.model, around)) for around in _names_around(call.module))
            call.parent = next((holder for holder in holders if holder is not None), None)


def _names_around(module: str) -> Iterator[str]:
    """The names of the modules that hold it, the innermost first."""
    while module:
        module = module.rpartition(".")[0]
        yield module


def build_parameters(rows: Iterable[Row]) -> list[Parameter]:
    """The parameters and buffers among the rows of phase `attach`; one that goes by several names
    once for each.
    """
    found = []
    sketches: dict[int, tuple[Any, Any]] = {}
    for row in rows:
        kind, _, name = row["tensor"].partition(".")
        if kind not in ("param", "buffer"):
            continue
        number = row.get("value")
        texts = row.get("sketch"), row.get("row_sketch")
        if isinstance(number, int):
            texts = sketches.setdefault(number, texts)
        shape = tuple(row["shape"]) if isinstance(row.get("shape"), list) else ()
        found.append(
            Parameter(
                row.get("model") or "", row["module"], name, row, decode(texts[0]), decode(texts[1]), shape, _numel(row),
                kind == "buffer",
            )
        )  # fmt: skip
    return found


def read_module_table(meta: dict[str, Any]) -> list[ModuleEntry]:
    """The modules of every model, from a recording's metadata; empty where it has no table."""
    found = []
    models = meta.get("models")
    for model, facts in models.items() if isinstance(models, dict) else ():
        table = facts.get("table") if isinstance(facts, dict) else None
        for line in table if isinstance(table, list) else ():
            if isinstance(line, dict) and isinstance(line.get("module"), str):
                found.append(
                    ModuleEntry(
                        model, line["module"], str(line.get("class", "")), line.get("called") is not False,
                        [str(name) for name in line.get("parameters") or ()], [str(name) for name in line.get("aliases") or ()],
                    )
                )  # fmt: skip
    return found
