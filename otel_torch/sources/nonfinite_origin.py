"""Finds who produced the first NaN or Inf of a run, and says so at once.

A hook that sees one on a CPU examines the inputs of the calls that are running
(`nonfinite_evidence.py`). The end of the outermost forward then flushes, and the flush brings all
records in order of execution: the first that matters (`nonfinite_suspects.py`) is the origin. On a
device the numbers are known only then, so that nothing waits for it, and the inputs are known only
if they are recorded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from otel_torch.process.console import say, say_once
from otel_torch.records import Record
from otel_torch.session import Session
from otel_torch.sources.events import RunEvents
from otel_torch.sources.modules import Model
from otel_torch.sources.nonfinite_error import NonFiniteError
from otel_torch.sources.nonfinite_evidence import (
    EnclosingCall,
    Examined,
    examine_running_calls,
    examine_weights,
)
from otel_torch.sources.nonfinite_judge import LastUpdate, Scene, judge
from otel_torch.sources.nonfinite_report import UNRECORDED, Origin, named, number, place
from otel_torch.sources.nonfinite_suspects import (
    Row,
    comes_out,
    first_that_matters,
    is_alarming,
    is_nonfinite,
)
from otel_torch.sources.source import Source
from otel_torch.sources.tensor_reader import RecordedCall
from otel_torch.statistics.row_layout import NONFINITE, largest_magnitude, nonfinite_kind

if TYPE_CHECKING:
    from otel_torch.sources.operations import Operations

# how many records of earlier steps are kept, to tell how a value grew
_HISTORY = 5000
_TREND = 3  # steps
# how many calls of a step are examined: what follows a NaN has it, too
_EXAMINED = 16
# producers that are code inside a model
_COMPUTED = ("module", "glue")


class _Call(NamedTuple):
    """What identifies the call of a record."""

    model: str
    module: str
    loop: int
    step: int
    call: int
    phase: str

    @classmethod
    def of(cls, record: Record | RecordedCall) -> _Call:
        return cls(*(getattr(record, name) for name in cls._fields))


class NonFiniteOrigin(Source):
    """Looks for the first NaN or Inf that matters. Nothing here waits for a device.

    Args:
        report: takes whether each recorded tensor is finite: the budget's.
        operations: records those of the module that is found, under `zoom`.
    """

    def __init__(
        self,
        session: Session,
        events: RunEvents,
        *,
        report: Callable[[Hashable, bool], None] | None,
        operations: Operations | None,
    ) -> None:
        self._session, self._report, self._operations = session, report, operations
        self.origin: Origin | None = None
        self._error: NonFiniteError | None = None
        self._evidence: dict[_Call, list[EnclosingCall]] = {}
        self._history: deque[tuple[list[Record], list[Row]]] = deque()
        self._optimizer = "an optimizer"
        self._first_weights: dict[str, dict[str, Examined]] = {}  # by model
        events.nonfinite_call.append(self.examine)
        events.gradients_ready.append(self._before_update)
        events.program_resumes.append(self.stop_program)

    def finish(self) -> None:
        """Repeat at the end what was found."""
        if self.origin is not None:
            say(f"the run has NaN or Inf; {self.origin.line()}")

    # -- what is seen

    @property
    def _is_over(self) -> bool:
        """Whether the origin is known as well as it will be."""
        return self.origin is not None and self.origin.producer != UNRECORDED

    def examine(self, call: RecordedCall, tensors: list[tuple[str, Tensor]]) -> None:
        """Examine the running calls: a tensor of the innermost one has a NaN or Inf."""
        if self._is_over:
            return
        key = _Call.of(call)
        newest = next(reversed(self._evidence), None)
        if newest is not None and (newest.step, newest.loop) != (key.step, key.loop):
            self._evidence.clear()
        if key not in self._evidence and len(self._evidence) < _EXAMINED:
            written = [tensor for label, tensor in tensors if label.startswith("out")]
            self._evidence[key] = examine_running_calls(written)

    def _before_update(self, model: Model, *_: Any) -> None:
        """Keep the sizes of a model's weights before its first update."""
        root = model.root()
        if not self._is_over and model.name not in self._first_weights and root is not None:
            weights = examine_weights(root, recurse=True)
            self._first_weights[model.name] = {weight.name: weight for weight in weights}

    def observe(self, records: list[Record], rows: list[Row]) -> None:
        """Look at what a flush has read, in order of execution."""
        if self._report is not None:
            for record, row in zip(records, rows, strict=True):
                self._report(_tensor(record), row is None or not row[NONFINITE])
        if self._is_over:
            self._follow_zoom(records, rows)
            return
        try:
            bad = [i for i, row in enumerate(rows) if row is not None and row[NONFINITE]]
            index = first_that_matters(records, rows, bad)
            if index is None:
                self._remember(records, rows)
            else:
                self._found(self._explain(records, rows, bad, index))
        except Exception as error:
            say_once(f"a NaN or Inf was not followed: {type(error).__name__}: {error}")

    def observe_unrecorded(self, call: RecordedCall, label: str, row: Row) -> None:
        """Look at an output of a forward that the budget left out."""
        if self._report is not None:
            self._report((call.model, "", label, call.phase), not is_nonfinite(row))
        if self.origin is None and is_alarming(row):
            assert row is not None
            text = (
                f"something inside {call.model} or its input: that step was not recorded "
                "(OTEL_TORCH_BUDGET), the next ones are"
            )
            where = {name: getattr(call, name) for name in ("loop", "step", "call", "phase")}
            kind = nonfinite_kind(row) or ""
            self._found(Origin(kind, UNRECORDED, call.model, "", label, **where, text=text))

    def _remember(self, records: list[Record], rows: list[Row]) -> None:
        self._history.append((records, rows))
        while sum(len(kept) for kept, _ in self._history) > _HISTORY:
            self._history.popleft()

    # -- what is found

    def _explain(
        self, records: list[Record], rows: list[Row], bad: list[int], index: int
    ) -> Origin:
        overflow = self._first_overflow(records, rows, [i for i in bad if i < index])
        index = index if overflow is None else overflow
        record, row = records[index], rows[index]
        assert row is not None
        verdict = judge(self._scene(records, index))
        trend = self._trend(record) if verdict.producer in _COMPUTED else []
        masks = [] if overflow is not None else self._masks(records, rows, bad, index)
        return Origin(
            verdict.kind or nonfinite_kind(row) or "",
            verdict.producer,
            **place(record) | {"module": verdict.module},
            text=verdict.text,
            details=(*verdict.details, *trend, *masks),
        )

    def _scene(self, records: list[Record], index: int) -> Scene:
        record, settings = records[index], self._session.settings
        call = _Call.of(record)
        before = [_Call.of(other) for other in records[:index]]
        prefix = f"{record.module}." if record.module else ""
        update = None
        if (first := self._first_weights.get(record.model)) is not None:
            text = f"the update after step {record.step - 1} by {self._optimizer}"
            update = LastUpdate(text, first)
        return Scene(
            record,
            self._evidence.get(call, ()),
            has_inner=record.tensor.startswith("out")
            and any(
                other.module != record.module
                and other.module.startswith(prefix)
                and other[2:4] == call[2:4]
                and other.model == call.model
                for other in before
            ),
            has_inputs=call in before and "inputs" in settings.capture,
            all_recorded=settings.modules is settings.exclude is settings.models is None,
            update=update,
        )

    def _first_overflow(
        self, records: list[Record], rows: list[Row], earlier: list[int]
    ) -> int | None:
        """Return the first -Inf that a module with weights produced: no mask, but an overflow."""
        for index in earlier:
            calls = self._evidence.get(_Call.of(records[index]))
            module = calls[0].site.module() if calls else None
            if (
                module is not None
                and next(module.parameters(recurse=False), None) is not None
                and comes_out(records, rows, index, is_nonfinite)
            ):
                return index
        return None

    def _masks(
        self, records: list[Record], rows: list[Row], bad: list[int], index: int
    ) -> list[str]:
        """Return where -Inf came from, if a module had it before."""
        for earlier in bad:
            if earlier < index and comes_out(records, rows, earlier, is_nonfinite):
                record = records[earlier]
                return [f"-Inf since {record.tensor} of {record.module!r}"]
        return []

    def _trend(self, record: Record) -> list[str]:
        """Return how large the tensor was in the last steps."""
        sizes = {}
        for records, rows in self._history:
            for other, row in zip(records, rows, strict=True):
                if row is not None and _tensor(other) == _tensor(record):
                    sizes[other.loop, other.step] = largest_magnitude(row)
        last = list(sizes.items())[-_TREND:]
        if not last:
            return []
        steps = ", ".join(str(step) for (_, step), _ in last)
        values = ", ".join(number(size) for _, size in last)
        return [f"largest |{record.tensor}| at step{'s' * (len(last) > 1)} {steps}: {values}"]

    def _found(self, origin: Origin) -> None:
        if self.origin is not None:
            earlier = f"seen first at step {self.origin.step}, which was not recorded"
            origin = replace(origin, details=(*origin.details, earlier))
        self.origin = origin
        say(origin.line())
        if self._is_over:
            self._history.clear()
            self._evidence.clear()
            if self._operations is not None and origin.producer in _COMPUTED:
                self._operations.zoom(origin.model, origin.module)
        if self._session.settings.on_nonfinite == "stop":
            self._error = NonFiniteError(origin.line())

    def _follow_zoom(self, records: list[Record], rows: list[Row]) -> None:
        """Say which operation had the first NaN or Inf in the next call of the module found."""
        operations, origin = self._operations, self.origin
        if operations is None or origin is None or not operations.is_zoomed:
            return
        where = origin.model, origin.module
        zoomed = [
            (record, row)
            for record, row in zip(records, rows, strict=True)
            if record.tensor.startswith("op[") and (record.model, record.module) == where
        ]
        if not zoomed:
            return
        operations.end_zoom()
        name, step = named(*where), zoomed[0][0].step
        for record, row in zoomed:
            if is_nonfinite(row):
                say(f"operations of {name} at step {step}: the first NaN or Inf is {record.tensor}")
                return
        say(f"operations of {name} at step {step}: all {len(zoomed)} are finite")

    def stop_program(self) -> None:
        """Raise the error that ends the program, if it is to end."""
        error, self._error = self._error, None
        if error is not None:
            self._session.recorder.drain(1.0)
            raise error


def _tensor(record: Record) -> tuple[str, str, str, str]:
    return record.model, record.module, record.tensor, record.phase


def _describe(optimizer: Optimizer) -> str:
    """Return an optimizer's class, with the settings that explode an update."""
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    settings = ", ".join(
        f"{name} {group[name]:g}" for name in ("lr", "eps") if isinstance(group.get(name), float)
    )
    return f"{type(optimizer).__name__}" + (f" ({settings})" if settings else "")
