"""The rows of phase `train`: one number each, of a model or of one of its modules."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence

from torch import Tensor

from otel_torch.records import Scope
from otel_torch.session import Session
from otel_torch.sources.models.model import Model
from otel_torch.sources.models.selection import ModuleSelection
from otel_torch.sources.steps.active_steps import Position
from otel_torch.sources.steps.optimizers import Optimizers
from otel_torch.sources.steps.training_steps import TrainingStep
from otel_torch.sources.tensors.tensor_reader import MeasuredTensor, RecordedCall
from otel_torch.statistics.graph_capture import is_capturing
from otel_torch.statistics.measure import Measurement
from otel_torch.statistics.norms import measure_numbers
from otel_torch.training_quantities import PHASE

# of the steps after the first ones, every tenth has the rows that take a pass over all parameters
# or are many, so that they cost a tenth
_FIRST, _EVERY = 10, 10
# of rows that are held until their step is over
ENDED = Scope("step", "torch.step", end_ns=1)


class TrainingRows:
    """Adds the rows of one session to its recorder."""

    def __init__(
        self, session: Session, selection: ModuleSelection, optimizers: Optimizers
    ) -> None:
        self._session, self._steps = session, session.settings.steps
        self._selection, self._optimizers = selection, optimizers
        # of models without an optimizer, which may turn out to be trained: a step and its rows
        self._held: weakref.WeakKeyDictionary[Model, tuple[TrainingStep, list[MeasuredTensor]]]
        self._held = weakref.WeakKeyDictionary()

    def are_wanted(self, model: Model, step: TrainingStep) -> bool:
        """Return whether the settings select a step of a model, and something takes its rows."""
        return (
            step.step in self._steps
            and self._selection.has_model(model.name)
            and not is_capturing()
            and any(sink.has_destination for sink in self._session.recorder.sinks)
        )

    @staticmethod
    def are_detailed(step: TrainingStep | Position) -> bool:
        """Return whether a step has the rows of modules, and those of the parameters."""
        return step.step < _FIRST or step.step % _EVERY == 0

    def has_module(self, name: str) -> bool:
        return self._selection.has_module(name)

    def add(
        self,
        model: Model,
        step: TrainingStep,
        label: str,
        measurement: Measurement,
        module: str = "",
    ) -> None:
        """Add one row. A row of the same name in the same step gets the next call number."""
        self._add(model, step, [(module, label)], [measurement])

    def add_numbers(
        self,
        model: Model,
        step: TrainingStep,
        labels: Sequence[tuple[str, str]],
        numbers: Tensor | Sequence[float],
    ) -> None:
        """Add a row for each number; `labels` has the module and the label of each."""
        self._add(model, step, labels, measure_numbers(numbers))

    def add_of_untrained(self, model: Model, step: TrainingStep, label: str, number: float) -> None:
        """Add a row of a model that no optimizer has trained."""
        self._add(model, step, [("", label)], measure_numbers([number]), is_trained=True)

    def _add(
        self,
        model: Model,
        step: TrainingStep,
        labels: Sequence[tuple[str, str]],
        measurements: Sequence[Measurement],
        *,
        is_trained: bool = False,
    ) -> None:
        counts, now = model.calls.of(PHASE, step.loop, step.step), time.time_ns()
        rows = []
        for (module, label), measurement in zip(labels, measurements, strict=True):
            call = RecordedCall(
                model.name,
                module,
                step.step,
                model.calls.count(counts, f"{module}.{label}"),
                step.loop,
                PHASE,
                None,
                step_scope=step.scope,
            )
            rows.append(MeasuredTensor(call, label, measurement, now))
        is_trained = is_trained or model.clock.is_trained
        if not (is_trained or self._optimizers.training(model)):
            self._hold(model, step, rows)
            return
        if (held := self._held.pop(model, None)) is not None:
            rows = held[1] + rows
        for row in rows:
            self._session.recorder.add(row)

    def _hold(self, model: Model, step: TrainingStep, rows: list[MeasuredTensor]) -> None:
        """Keep rows until the next step shows whether the parameters have changed."""
        held = self._held.get(model)
        if held is None or held[0][:2] != step[:2]:
            held = self._held[model] = step, []
        for row in rows:
            row.call.step_scope = ENDED
        held[1].extend(rows)
