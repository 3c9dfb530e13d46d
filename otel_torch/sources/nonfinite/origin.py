"""Finds who produced the first NaN or Inf of a run, and says so at once.

In a forward, a hook that sees one on a CPU examines the inputs of the calls that are running
(`nonfinite_evidence.py`). The end of the outermost forward then flushes, and the flush brings all
records in order of execution: the first that matters (`nonfinite_suspects.py`) is the origin. On a
device the numbers are known only then, so that nothing waits for it, and the inputs are known only
if they are recorded. Behind the forward, the rows of phase `train` tell (`nonfinite_training.py`).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from otel_torch import torch_private
from otel_torch.process.console import say, say_once
from otel_torch.records import Record
from otel_torch.session import Session
from otel_torch.sources.events import RunEvents
from otel_torch.sources.models.model import Model
from otel_torch.sources.nonfinite.error import NonFiniteError
from otel_torch.sources.nonfinite.evidence import (
    EnclosingCall,
    Examined,
    examine,
    examine_running_calls,
    examine_weights,
)
from otel_torch.sources.nonfinite.history import RecentRecords
from otel_torch.sources.nonfinite.judge import LastUpdate, Scene, Verdict, judge
from otel_torch.sources.nonfinite.report import UNRECORDED, Origin, named, number, place
from otel_torch.sources.nonfinite.suspects import (
    FORWARD_PHASES,
    Row,
    comes_out,
    first_that_comes_out,
    is_alarming,
    is_nonfinite,
)
from otel_torch.sources.nonfinite.training import (
    examine_gradients,
    judge_backward,
    judge_training,
    modules_in_order,
    training_faults,
)
from otel_torch.sources.source import Source
from otel_torch.sources.steps.updates import OptimizerStep
from otel_torch.sources.tensors.compact_records import ReadRows
from otel_torch.sources.tensors.tensor_reader import RecordedCall
from otel_torch.statistics.row_layout import NONFINITE, nonfinite_kind

if TYPE_CHECKING:
    from otel_torch.sources.nonfinite.replay import Replays
    from otel_torch.sources.tensors.operations import Operations

# how many calls of a step are examined: what follows a NaN has it, too
_EXAMINED = 16
# how many calls of a module are examined: one that goes on having Inf has it on purpose
_LOOKS = 8
# so many skipped steps in a row, with a scale below 1, are no search for the right scale
_FEW_SKIPS = 3
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
        operations: records those of the module that is found, under `zoom`, if a replay of its
            forward does not tell.
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
        self._looks: Counter[tuple[str, str]] = Counter()  # by model and module
        self._evidence: dict[_Call, list[EnclosingCall]] = {}
        self._replays = None if operations is None else _make_replays()
        self._history = RecentRecords()
        self._optimizer = "an optimizer"
        self._trained: dict[str, weakref.ref[Model]] = {}
        self._skips = 0  # how many steps a gradient scaler has skipped in a row
        self._first_weights: dict[str, dict[str, Examined]] = {}  # by model
        events.nonfinite_call.append(self.examine)
        events.gradients_ready.append(self._before_update)
        events.optimizer_stepping.append(self._on_stepping)
        events.optimizer_skipped.append(self._on_skipped)
        events.program_resumes.append(self.stop_program)

    def finish(self) -> None:
        """Repeat at the end what was found."""
        if self.origin is not None:
            say(f"the run has NaN or Inf; {self.origin.line()}")

    # -- what is seen

    @property
    def _is_over(self) -> bool:
        return self.origin is not None and self.origin.producer != UNRECORDED

    def examine(self, call: RecordedCall, tensors: list[tuple[str, Tensor]]) -> None:
        """Examine the running calls: a tensor of the innermost one has a NaN or Inf."""
        if call.phase not in FORWARD_PHASES:
            return
        self._looks[call.model, call.module] += 1
        if self._is_over or self._looks[call.model, call.module] > _LOOKS:
            return
        try:
            self._examine(_Call.of(call), tensors)
        except Exception as error:
            say_once(f"a NaN or Inf was not followed: {type(error).__name__}: {error}")

    def _examine(self, key: _Call, tensors: list[tuple[str, Tensor]]) -> None:
        if any(examine(label, tensor).kind in ("NaN", "Inf") for label, tensor in tensors):
            self._session.recorder.hurry()
        newest = next(reversed(self._evidence), None)
        if newest is not None and (newest.step, newest.loop) != (key.step, key.loop):
            self._evidence.clear()
            if self._replays is not None:
                self._replays.clear()
        if key not in self._evidence and len(self._evidence) < _EXAMINED:
            written = [tensor for label, tensor in tensors if label.startswith("out")]
            self._evidence[key] = calls = examine_running_calls(written)
            if self._replays is not None:
                self._replays.add(key, calls, tensors)

    def _before_update(self, model: Model, *_: Any) -> None:
        """Keep the sizes of a model's weights before its first update."""
        root = model.root()
        self._trained[model.name] = weakref.ref(model)
        if not self._is_over and model.name not in self._first_weights and root is not None:
            weights = examine_weights(root, recurse=True)
            self._first_weights[model.name] = {weight.name: weight for weight in weights}

    def _on_stepping(self, optimizer_step: OptimizerStep) -> None:
        self._optimizer, self._skips = _describe(optimizer_step.optimizer), 0

    def _on_skipped(self, optimizer_step: OptimizerStep) -> None:
        """Look at a gradient scaler that skips every step: no scale makes the gradients finite."""
        self._skips += 1
        scale = torch_private.scale_of(optimizer_step.scaler)
        if self._is_over or self._skips < _FEW_SKIPS or scale is None or not scale.is_cpu:
            return
        if (value := float(scale)) < 1 and optimizer_step.updates:
            model, _, (step, loop, *_) = optimizer_step.updates[0]
            module, text = judge_backward(
                model.name, self._order_of(model), examine_gradients(model)
            )
            details = (
                f"GradScaler has skipped {self._skips} steps in a row, "
                f"its scale has fallen to {number(value)}",
            )
            where = model.name, module, "grad_norm", loop, step, 0, "train"
            self._found(Origin("NaN", "backward", *where, text=text, details=details))

    def _order_of(self, model: Model) -> list[str]:
        """Return a model's modules as they have run, or, if that is not known, as they are held."""
        order = modules_in_order(record for record, _ in self._history.of_model(model.name))
        return order or [site.names[0][0] for site in model.sites.values() if site.names]

    def observe(self, records: Sequence[Record], rows: ReadRows) -> None:
        """Look at what a flush has read, in order of execution."""
        if self._report is not None:
            for record, row in zip(records, rows, strict=True):
                self._report(_tensor(record), row is None or not row[NONFINITE])
        if self._is_over:
            self._follow_zoom(records, rows)
            return
        try:
            bad = rows.nonfinite()
            self._history.add(records, rows)
            if bad and (origin := self._find(records, rows, bad)) is not None:
                self._found(origin)
        except Exception as error:
            say_once(f"a NaN or Inf was not followed: {type(error).__name__}: {error}")

    def observe_unrecorded(self, call: RecordedCall, label: str, row: Row) -> None:
        """Look at an output of a forward that the budget left out."""
        if self._report is not None:
            self._report((call.model, "", label, call.phase), not is_nonfinite(row))
        if self.origin is None and call.phase in FORWARD_PHASES and is_alarming(row):
            assert row is not None
            text = (
                f"something inside {call.model} or its input: that step was not recorded "
                "(OTEL_TORCH_BUDGET), the next ones are"
            )
            where = {name: getattr(call, name) for name in ("loop", "step", "call", "phase")}
            kind = nonfinite_kind(row) or ""
            self._found(Origin(kind, UNRECORDED, call.model, "", label, **where, text=text))

    # -- what is found

    def _find(
        self, records: Sequence[Record], rows: Sequence[Row], bad: list[int]
    ) -> Origin | None:
        forward = first_that_comes_out(records, rows, bad, is_alarming)
        for index in training_faults(records, bad):
            if forward is not None and forward < index:
                break
            record = records[index]
            step = self._of_step(record)
            if record.tensor == "loss" and (origin := self._masked_origin(step)) is not None:
                return origin
            trained, first = self._trained.get(record.model), self._first_weights.get(record.model)
            verdict = judge_training(
                step,
                record,
                None if trained is None else trained(),
                self._optimizer,
                first or {},
            )
            if verdict is not None:
                details = [*self._history.trend(record), *self._other_ranks(verdict)]
                return _origin(record, rows[index], verdict, details)
        return None if forward is None else self._explain(records, rows, bad, forward)

    def _other_ranks(self, verdict: Verdict) -> list[str]:
        """Return that gradients may be those of other ranks, too."""
        if verdict.producer == "backward" and self._session.job.world_size > 1:
            return ["or another rank did: compare what each rank says"]
        return []

    def _masked_origin(self, step: list[tuple[Record, Row]]) -> Origin | None:
        """Return the origin of a bad loss whose model has -Inf among its outputs, if it has."""
        records, rows = [record for record, _ in step], [row for _, row in step]
        bad = [index for index, row in enumerate(rows) if is_nonfinite(row)]
        index = first_that_comes_out(records, rows, bad, is_nonfinite)
        if index is None:
            return None
        origin = self._explain(records, rows, bad, index)
        return replace(origin, details=(*origin.details, "the loss has it, too"))

    def _of_step(self, record: Record) -> list[tuple[Record, Row]]:
        """Return the records of a record's step, a part of which may have been flushed before."""
        step = record.loop, record.step
        return [
            (other, row)
            for other, row in self._history.of_model(record.model)
            if (other.loop, other.step) == step
        ]

    def _explain(
        self, records: Sequence[Record], rows: Sequence[Row], bad: list[int], index: int
    ) -> Origin:
        overflow = self._first_overflow(records, rows, [i for i in bad if i < index])
        index = index if overflow is None else overflow
        record = records[index]
        verdict = judge(self._scene(records, index))
        trend = self._history.trend(record) if verdict.producer in _COMPUTED else []
        masks = [] if overflow is not None else self._masks(records, rows, bad, index)
        origin = _origin(record, rows[index], verdict, [*trend, *masks])
        if self._replays is None or verdict.producer not in _COMPUTED:
            return origin
        return self._replays.explain(origin, _Call.of(record))

    def _scene(self, records: Sequence[Record], index: int) -> Scene:
        record, settings = records[index], self._session.settings
        call = _Call.of(record)
        # the values of a call, not its parameters: a fused module calls none of those inside
        values = [other for other in records[:index] if other.tensor.startswith(("in", "out"))]
        before = [_Call.of(other) for other in values]
        prefix = f"{record.module}." if record.module else ""
        update = None
        if (first := self._first_weights.get(record.model)) is not None:
            when = f"after step {record.step - 1} " if record.step else ""
            text = f"the update {when}by {self._optimizer}"
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
        self, records: Sequence[Record], rows: Sequence[Row], earlier: list[int]
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
        self, records: Sequence[Record], rows: Sequence[Row], bad: list[int], index: int
    ) -> list[str]:
        """Return where -Inf came from, if a module had it before."""
        before = [other for other in bad if other < index]
        earlier = first_that_comes_out(records, rows, before, is_nonfinite)
        if earlier is None:
            return []
        record = records[earlier]
        return [f"-Inf first in {record.tensor} of {named(record.model, record.module)}"]

    def _found(self, origin: Origin) -> None:
        if self.origin is not None:
            earlier = f"seen first at step {self.origin.step}, which was not recorded"
            origin = replace(origin, details=(*origin.details, earlier))
        self.origin = origin
        say(origin.line())
        if self._is_over:
            self._history.clear()
            self._evidence.clear()
            if (
                self._operations is not None
                and origin.producer in _COMPUTED
                and origin.operation is None
            ):
                self._operations.zoom(origin.model, origin.module)
        if self._session.settings.on_nonfinite == "stop":
            self._error = NonFiniteError(origin.line())

    def _follow_zoom(self, records: Sequence[Record], rows: Sequence[Row]) -> None:
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


def _origin(record: Record, row: Row, verdict: Verdict, details: Sequence[str]) -> Origin:
    assert row is not None
    return Origin(
        verdict.kind or nonfinite_kind(row) or "",
        verdict.producer,
        **place(record) | {"module": verdict.module},
        text=verdict.text,
        details=(*verdict.details, *details),
    )


def _make_replays() -> Replays:
    from otel_torch.sources.nonfinite.replay import Replays  # only `zoom` needs it

    return Replays()


def _tensor(record: Record) -> tuple[str, str, str, str]:
    return record.model, record.module, record.tensor, record.phase


def _describe(optimizer: Optimizer) -> str:
    """Return an optimizer's class, with the settings that explode an update."""
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    settings = ", ".join(
        f"{name} {group[name]:g}" for name in ("lr", "eps") if isinstance(group.get(name), float)
    )
    return f"{type(optimizer).__name__}" + (f" ({settings})" if settings else "")
