"""The plain data that passes from sources to sinks: records of tensors, and scopes of time. Knows
no torch and no SDK.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

Statistic = float | int | str | list[int]

# statistics that mean something to a comparison only: they stay in the recording
FINGERPRINTS = frozenset({"sketch", "row_sketch"})


def spell(value: Any) -> Any:
    """A statistic as JSON and OpenTelemetry backends can carry it: one NaN double makes Jaeger
    answer 500 for the service.

    >>> spell(float("-inf")), spell(0.5)
    ('-Infinity', 0.5)
    """
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    return value


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor stands in the run: what lines two programs up that name and cut things
    differently.

    class_name: of the module. argument: what forward's signature calls an input. value: a number,
    the same for the same tensor by identity, in order of first sight; storage: likewise of its
    memory, None where it has none. order: when the call was entered and left, counted over all
    calls; None where nobody told. parent: when the enclosing call was entered. shard: `shape`,
    `offset` and `partial` of a distributed tensor's part.
    """

    class_name: str
    argument: str | None
    value: int
    storage: int | None
    order: tuple[int | None, int | None]
    parent: int | None
    shard: dict[str, Any] | None

    def fields(self) -> dict[str, Any]:
        """As a recording writes them."""
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


@dataclass(slots=True)
class Record:
    """One tensor of one module call: who, when, and what its numbers were.

    `place` is known where two programs are to be lined up. `data` holds the whole tensor, on the
    host, where that was asked for; the sink that writes it takes it out. `stats` holds the
    requested statistics in their table's order; one that is not defined for the tensor (the mean of
    an empty one) is absent. `time_ns` is when the tensor was seen, in Unix nanoseconds; it never
    reaches a recording.
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
    place: Place | None = None

    def key(self) -> dict[str, Any]:
        """The fields that identify the record, in the order in which a recording writes them."""
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
    """A stretch of time that sinks may turn into a span: a region, a pipeline stage, a step, an
    outermost forward.

    kind: `region` (entered at a call site), `natural` (a region found without one), `stage`, `step`
    or `forward`. name: the span's name, complete. lexical: opened and closed by one thread in
    nested order, so that it may become that thread's current span; a step of a training loop is not
    (it opens in the first forward and closes in the optimizer). attributes: OpenTelemetry attribute
    values only. error: what ended it, if it was an exception. bounded: the loop's length is known
    (`trace_step`, a denoise schedule); training: an optimizer drives it. device_s: measured device
    time in seconds, None where it was not measured. events: (time_ns, name, attributes) that belong
    on the span; sinks read them when it closes.
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


@dataclass(frozen=True, slots=True)
class Batch:
    """Records that became readable together. `step` is the step scope that they belong to, still
    open or just closing.
    """

    records: list[Record]
    step: Scope | None


class Losses:
    """What did not arrive, by what it was and why. Everything that drops something counts it here.

    >>> losses = Losses(); losses.count("record", "queue_full", 3); losses.items()
    [('record', 'queue_full', 3)]
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()  # the program's threads count here, and those that send

    def count(self, what: str, reason: str, number: int = 1) -> None:
        """Count `number` of `what` (`record`, `span`, `span_event`, `log_event`, `metric_point`)
        lost for `reason`.
        """
        if number:
            with self._lock:
                self._counts[what, reason] += number

    def describe(self) -> str:
        """All of it in one line; empty where nothing was lost.

        >>> losses = Losses(); losses.count("metric_point", "refused", 2); losses.count("span", "shutdown"); losses.describe()
        '2 metric points (refused), 1 span (shutdown)'
        """
        return ", ".join(
            f"{number} {what.replace('_', ' ')}{'s' * (number != 1)} ({reason})"
            for what, reason, number in self.items()
        )

    def items(self) -> list[tuple[str, str, int]]:
        """(what, reason, number), sorted."""
        return [(what, reason, number) for (what, reason), number in sorted(self._counts.items())]
