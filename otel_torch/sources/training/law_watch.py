"""Asks while a program trains which laws of training it breaks, and says each once.

The rows of phase `train` are read where they become records, so that nothing waits for a device.
The laws are asked after a few steps, three times as many, and so on, and at the end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from otel_torch.laws.facts import FEWEST_STEPS, BrokenLaw
from otel_torch.laws.series import SeriesName, TrainingSeries
from otel_torch.laws.table import SETTING, broken_laws
from otel_torch.process.console import say
from otel_torch.records import LoopStep, Record
from otel_torch.session import Session
from otel_torch.sources.events import RunEvents
from otel_torch.sources.models.model import Model
from otel_torch.sources.source import Source
from otel_torch.sources.steps.training_steps import TrainingStep
from otel_torch.sources.steps.updates import OptimizerStep
from otel_torch.sources.tensors.compact_records import ReadRecords, ReadRows
from otel_torch.sources.training.training_rows import ENDED, TrainingRows
from otel_torch.training_quantities import PHASE, row_label

# how many times as many steps pass until the laws are asked again
_RARER = 3
# steps whose rows are kept: 16 bytes a number
_MOST_STEPS = 1000


class LawWatch(Source):
    """Checks the training of one session.

    Args:
        metadata: returns what the metadata of a recording say of the training.

    Attributes:
        broken: the laws that were broken so far.
    """

    def __init__(
        self,
        session: Session,
        rows: TrainingRows,
        events: RunEvents,
        metadata: Callable[[], dict[str, Any]],
    ) -> None:
        self.broken: list[BrokenLaw] = []
        self._session, self._rows, self._metadata = session, rows, metadata
        self._series, self._called = TrainingSeries(), set[str]()
        self._due = FEWEST_STEPS + 1
        # by the name of a model: where it was trained last
        self._latest: dict[str, tuple[weakref.ref[Model], TrainingStep]] = {}
        events.optimizer_stepped.append(self.optimizer_stepped)
        events.optimizer_skipped.append(self.optimizer_stepped)

    def observe(self, records: Sequence[Record], _: ReadRows) -> None:
        """Keep the rows of the training among the records of a flush."""
        steps = len(self._series.steps)
        if steps > _MOST_STEPS or not isinstance(records, ReadRecords):
            return
        for record in records.own_records():
            if record.phase == PHASE:
                name = SeriesName(record.model, record.module, record.tensor)
                step = LoopStep(record.loop, record.step)
                self._series.add_value(name, step, record.stats.get("mean"))
            elif steps < FEWEST_STEPS:
                self._called.add(record.module)
        if steps < FEWEST_STEPS:
            self._called.update(records.modules_of_compact_rows())

    def optimizer_stepped(self, step: OptimizerStep) -> None:
        """Ask the laws, if enough steps were made since the last time."""
        for model, _, position in step.updates:
            self._latest[model.name] = weakref.ref(model), position
        if len(self._series.steps) >= self._due:
            self._due *= _RARER
            self._check(has_ended=False)

    def finish(self) -> None:
        """Ask once more: some laws can only be asked at the end."""
        self._session.recorder.flush(None, wait=True)
        if self._series.rows:
            self._check(has_ended=True)

    def _check(self, *, has_ended: bool) -> None:
        """Say the laws that were not broken before, and add a row for each."""
        off = {SETTING: ",".join(self._session.settings.laws_off)}
        metadata = self._metadata() | {"ended_cleanly": has_ended, "settings": off}
        known = {(law.law, law.model) for law in self.broken}
        for law in broken_laws(self._series, metadata, self._called):
            if (law.law, law.model) not in known:
                self.broken.append(law)
                say(f"{law.model}: {law.text} (law: {law.law})")
                self._add_row(law, has_ended)

    def _add_row(self, law: BrokenLaw, has_ended: bool) -> None:
        reference, step = self._latest.get(law.model, (None, None))
        model = None if reference is None else reference()
        if model is not None and step is not None and self._rows.are_wanted(model, step):
            step = step._replace(scope=ENDED) if has_ended else step
            self._rows.add_numbers(model, step, [("", row_label("broken_law", law.law))], [1.0])
