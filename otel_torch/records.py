"""Plain data that sources pass to sinks: records of tensors, scopes of time, and losses.

Imports neither torch nor OpenTelemetry.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Statistic = float | int | str | list[int]

# statistics that only a comparison of recordings uses; they are not exported
FINGERPRINTS = frozenset({"sketch", "part_sketches", "row_sketch", "hash", "rows"})
# whose records are parameters: before the first forward, and after each optimizer step
PARAMETER_PHASES = frozenset({"attach", "update"})
# of a forward as the program runs it, in training and not
FORWARD_PHASES = ("forward", "eval")

# whose records say which tokens a forward computes
TOKENS = "tokens"


def json_safe(value: Any) -> Any:
    """Return a statistic with NaN or Inf spelled as a string, and any other value unchanged.

    JSON cannot represent them, and Jaeger answers 500 for a service that has sent one NaN.

    >>> json_safe(float("-inf")), json_safe(0.5)
    ('-Infinity', 0.5)
    """
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            return "NaN"
        return "Infinity" if value > 0 else "-Infinity"
    return value


class LoopStep(NamedTuple):
    """A step of a loop: what a record's position in the run is called."""

    loop: int | None
    number: int | None

    def __str__(self) -> str:
        """Return the step, with its loop unless that is the first.

        >>> str(LoopStep(0, 3)), str(LoopStep(1, 3))
        ('step 3', 'step 3 of loop 1')
        """
        step = f"step {self.number}"
        return f"{step} of loop {self.loop}" if self.loop else step


@dataclass(frozen=True, slots=True)
class TensorPosition:
    """Position of a tensor in the run, used to align two programs with different module trees.

    Args:
        class_name: of the module.
        argument: the parameter of `forward` that an input was passed to.
        value: index of the tensor by identity, in order of first appearance.
        storage: likewise of its memory; None if it has none.
        order: the clock of calls when this call was entered and left; None if not known.
        parent: the clock when the enclosing call was entered.
        shard: `shape`, `offset` and `partial` of a distributed tensor's shard.
    """

    class_name: str
    argument: str | None
    value: int
    storage: int | None
    order: tuple[int | None, int | None]
    parent: int | None
    shard: dict[str, Any] | None

    def fields(self) -> dict[str, Any]:
        """Return the fields of a recording's row."""
        fields: dict[str, Any] = {"class": self.class_name}
        if self.argument is not None:
            fields["argument"] = self.argument
        fields |= {
            "value": self.value,
            "storage": self.storage,
            "order": list(self.order),
            "parent": self.parent,
        }
        if self.shard is not None:
            fields["shard"] = self.shard
        return fields


@dataclass(frozen=True, slots=True)
class GraphFields:
    """What a row of the graph of operations has besides its place and its statistics."""

    row: dict[str, Any]

    def fields(self) -> dict[str, Any]:
        """Return the fields of a recording's row."""
        return self.row


@dataclass(slots=True)
class Record:
    """The statistics of one tensor of one module call.

    Args:
        stats: the requested statistics in the order of their table, without those that are not
            defined for the tensor (the mean of an empty one).
        time_ns: when the tensor was seen, in Unix nanoseconds; not part of a recording.
        data: the whole tensor on the host, if requested; the sink that writes it removes it.
        position: set if two programs are to be compared, and in the graph of operations.
    """

    module: str
    tensor: str
    step: int
    call: int
    loop: int
    model: str
    phase: str
    branch: str | None
    stats: dict[str, Statistic]
    time_ns: int
    data: list[Any] | None = None
    position: TensorPosition | GraphFields | None = None

    @property
    def is_of_graph(self) -> bool:
        """Whether this is a row of the graph of operations, which only the recording has."""
        return type(self.position) is GraphFields

    def key(self) -> dict[str, Any]:
        """Return the fields that identify the record, in the order of a recording's row."""
        fields: dict[str, Any] = {
            "module": self.module,
            "tensor": self.tensor,
            "step": self.step,
            "call": self.call,
            "loop": self.loop,
            "model": self.model,
            "phase": self.phase,
        }
        if self.branch is not None:
            fields["branch"] = self.branch
        return fields


@dataclass(slots=True, eq=False)
class Scope:
    """A stretch of time that sinks may turn into a span.

    Args:
        kind: `region` (entered at a call site), `natural` (a region that is detected, without a
            call site), `stage` (of a pipeline), `step`, or `forward` (an outermost one).
        name: the complete name of the span.
        lexical: whether one thread opens and closes it in nested order, so that it may become the
            current span. A training step is not: it opens in the first forward and closes in the
            optimizer.
        attributes: OpenTelemetry attribute values only.
        error: the exception that ended it.
        bounded: whether the length of its loop is known (`trace_step`, a denoise schedule).
        training: whether an optimizer drives its loop.
        device_s: measured device time in seconds, None if not measured.
        events: (time_ns, name, attributes) of its span; sinks read them at `close`.
        has_span: whether it gets a span of its own. A region without one is counted and timed.
    """

    kind: str
    name: str
    lexical: bool = True
    attributes: dict[str, Any] = field(default_factory=dict)
    start_ns: int = 0
    end_ns: int = 0
    error: BaseException | None = None
    bounded: bool = False
    training: bool = False
    device_s: float | None = None
    events: list[tuple[int, str, dict[str, Any]]] = field(default_factory=list)
    has_span: bool = True


class LazyRecords(Sequence[Record]):
    """Records that are made when the first of them is asked for. A slice is one, too."""

    def lines(self) -> bytes | None:
        """Return their lines of a recording, without making them; None if that cannot be done."""
        return None


@dataclass(frozen=True, slots=True)
class Batch:
    """Records that were read together, and the step scope to which they belong, not closed yet."""

    records: Sequence[Record]
    step: Scope | None


class Losses:
    """Counts of what was dropped, by kind and reason. Whatever drops something counts it here.

    >>> losses = Losses(); losses.count("record", "queue_full", 3); losses.items()
    [('record', 'queue_full', 3)]
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()  # several threads count

    def count(self, kind: str, reason: str, number: int = 1) -> None:
        """Add `number` lost items.

        kind: `record`, `span`, `span_event`, `log_event`, `metric_point`, `tensor`, or a part of
            these that a limit has dropped: `attribute`, `link`.
        """
        if number:
            with self._lock:
                self._counts[kind, reason] += number

    def describe(self) -> str:
        """Return all losses in one line; empty if there are none.

        >>> losses = Losses(); losses.count("metric_point", "refused", 2)
        >>> losses.count("span", "shutdown"); losses.describe()
        '2 metric points (refused), 1 span (shutdown)'
        """
        parts = []
        for kind, reason, number in self.items():
            plural = "s" if number != 1 else ""
            parts.append(f"{number} {kind.replace('_', ' ')}{plural} ({reason})")
        return ", ".join(parts)

    def items(self) -> list[tuple[str, str, int]]:
        """Return (kind, reason, number) of each loss, sorted."""
        return [(kind, reason, number) for (kind, reason), number in sorted(self._counts.items())]
