"""The types of the metadata's fields, against which its reader checks a file that may be edited or
damaged.

A field of another type is left out: a comparison can do without any of them. Unknown fields are
kept, as another version may have added them.

>>> metadata = {"rank": "first", "host": "node-17", "lost": [{"what": {}}]}
>>> for fault in drop_wrong_fields(metadata):
...     print(fault)
`rank` ignored: Expected `int`, got `str`
`lost` ignored: Expected `str`, got `object` - at `$[0].what`
>>> metadata
{'host': 'node-17'}
"""

from __future__ import annotations

from typing import Any

import msgspec

from otel_torch.recording.row_schema import UNREADABLE, Integer, is_deep

Seconds = float | None


class TableEntry(msgspec.Struct):
    """A module of a model's table; `called` is null if its calls were not counted."""

    module: str
    cls: str = msgspec.field(default="", name="class")
    called: bool | None = None
    parameters: list[str] = []
    aliases: list[str] = []


class ModeChange(msgspec.Struct):
    """Which modules are in which mode from an outermost forward of a phase on."""

    phase: str = ""
    loop: Integer = 0
    step: Integer = 0
    call: Integer = 0
    training: list[str] = []
    eval: list[str] = []


class ModelFacts(msgspec.Struct):
    """What is known of a model."""

    modules: Integer = 0
    forwards: Integer = 0
    held_as: list[str] = []
    trained: bool | None = None
    table: list[TableEntry] = []
    modes: list[ModeChange] = []
    configuration: dict[str, Any] = {}
    generation: dict[str, Any] = {}
    dtypes: list[str] = []
    # as a port's own configuration has them
    param_names_mapping: list[list[Any]] = []
    stacked_params_mapping: list[list[Any]] = []


class ParameterGroup(msgspec.Struct):
    """A group of an optimizer: parameters as `model:module.name`, and its settings."""

    parameters: list[str] = []
    settings: dict[str, Any] = {}


class ScheduleEntry(msgspec.Struct):
    """A scheduler of an optimizer: its steps, those before the optimizer's first one, and where a
    loaded state has put it by then.
    """

    cls: str = msgspec.field(default="", name="class")
    changes_rate: bool = False
    steps: Integer = 0
    steps_before: Integer = 0
    resumed_at: int | None = None
    line: str = ""


class OptimizerEntry(msgspec.Struct):
    """An optimizer at its first step."""

    cls: str = msgspec.field(default="", name="class")
    models: list[str] = []
    first_step: Integer = 0
    last_step: Integer = 0
    loaded: bool = False
    state: list[str] = []
    grad_scaler: dict[str, Any] | None = None
    groups: list[ParameterGroup] = []
    copies: list[str] = []
    unheld: list[str] = []
    unused_gradients: list[str] = []
    no_gradient: list[str] = []
    frozen: list[str] = []
    schedulers: list[ScheduleEntry] = []
    lost_load: bool = False


class IdleOptimizer(msgspec.Struct):
    """An optimizer that changes nothing: it has never stepped, or holds tensors of no model."""

    cls: str = msgspec.field(default="", name="class")
    steps: Integer = 0


class TrainingLoopEntry(msgspec.Struct):
    """What is as it should not be in a model that trains, and the lines of its loop by event."""

    parted_weights: list[dict[str, str]] = []
    still_statistics: list[str] = []
    restored_parameters: list[str] = []
    unmoved_parameters: list[str] = []
    unheld_parts: list[str] = []
    overwritten: bool = False
    nothing_loaded: bool = False
    loaded_elsewhere: bool = False
    lines: dict[str, str] = {}


class BrokenLawEntry(msgspec.Struct):
    """A law of training that the run itself has found to be broken, and the line of the loop."""

    law: str
    model: str = ""
    text: str = ""
    line: str = ""


class TrainingSummary(msgspec.Struct):
    """What the training steps of a model took; medians."""

    steps: Integer = 0
    step_s: Seconds = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    device_memory: int | None = None


class LostItems(msgspec.Struct):
    """Items that did not arrive."""

    what: str
    reason: str
    count: Integer


class RegionTimes(msgspec.Struct):
    """How often and how long a region ran, in seconds."""

    count: Integer = 0
    host_total_s: Seconds = None
    host_longest_s: Seconds = None
    device_total_s: Seconds = None
    device_longest_s: Seconds = None


class Isolated(msgspec.Struct):
    """How many tensors of an isolated run were replaced, and which ones were not."""

    inputs: Integer = 0
    outputs: Integer = 0
    outside: Integer = 0
    stayed: list[tuple[str, str, str, str]] = []


class FirstNonFinite(msgspec.Struct):
    """The first NaN or Inf of the run, who produced it, and that as a line of text."""

    line: str
    kind: str = ""
    producer: str = ""
    model: str = ""
    module: str = ""
    tensor: str = ""
    loop: Integer = 0
    step: Integer = 0
    call: Integer = 0
    phase: str = ""
    text: str = ""
    details: list[str] = []
    operation: str | None = None


class ValueDifference(msgspec.Struct):
    """How many whole numbers of a value differed from those put in their place, and the first."""

    count: Integer
    index: list[Integer]
    reference: int | bool
    port: int | bool


class Metadata(msgspec.Struct):
    """All fields that are known; docs/record-format.md says what they mean."""

    schema: str = ""
    run_id: str = ""
    rank: Integer = 0
    world_size: Integer = 1
    host: str = ""
    pid: Integer = 0
    trace_id: str | None = None
    versions: dict[str, str | None] = {}
    kernels: str = ""
    models: dict[str, ModelFacts] = {}
    # file, line, function and text of each line of the graph of operations
    lines: list[tuple[str, Integer, str, str]] = []
    # for each of them, the line that has called its function
    callers: list[Integer | None] = []
    values_put: dict[str, str | None] = {}
    values_not_kept: dict[str, str] = {}
    values_differed: dict[str, ValueDifference] = {}
    values_scaled: dict[str, float] = {}
    models_forgotten: Integer = 0
    optimizers: list[OptimizerEntry] = []
    training: dict[str, TrainingSummary] = {}
    idle_optimizers: list[IdleOptimizer] = []
    training_loops: dict[str, TrainingLoopEntry] = {}
    broken_laws: list[BrokenLawEntry] = []
    environment: dict[str, Any] = {}
    settings: dict[str, str] = {}
    start: str | None = None
    end: str | None = None
    records_written: Integer = 0
    lost: list[LostItems] = []
    regions: dict[str, RegionTimes] = {}
    isolated: Isolated | None = None
    budget: dict[str, Any] | None = None
    nonfinite: FirstNonFinite | None = None
    writing_ended: str | None = None
    ended_cleanly: bool = False


_TYPES = {field.encode_name: field.type for field in msgspec.structs.fields(Metadata)}


def drop_wrong_fields(metadata: dict[str, Any]) -> list[str]:
    """Remove the fields of another type, in place; return a line for each."""
    faults = []
    for name, value in list(metadata.items()):
        fault = _find_fault(name, value)
        if fault:
            faults.append(f"`{name}` ignored: {fault}")
            del metadata[name]
    return faults


def _find_fault(name: str, value: Any) -> str:
    if name not in _TYPES:
        return "nested too deep" if is_deep(value) else ""
    try:
        msgspec.convert(value, _TYPES[name])
    except UNREADABLE as error:
        return str(error)
    return ""
