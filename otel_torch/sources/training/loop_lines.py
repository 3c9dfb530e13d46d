"""Which lines of a program train a model: of each event of the loop the one that was first seen."""

from __future__ import annotations

from otel_torch.sources.models.model import Model
from otel_torch.sources.program_lines import ProgramLine, current_line, place_of
from otel_torch.sources.steps.active_steps import ActiveStep
from otel_torch.sources.steps.forwards import ForwardContext, Inputs
from otel_torch.sources.steps.updates import OptimizerStep


class LoopLines:
    """The lines of one session's loops, as `file:line`."""

    def __init__(self) -> None:
        self._lines: dict[str, dict[str, str]] = {}  # by the name of a model, and by event

    def training_forward(self, active: ActiveStep, _: Inputs) -> None:
        """Note where a model is called to train."""
        if isinstance(active.model, Model):
            self._note(active.model, "forward")

    def forward_began(self, model: Model, context: ForwardContext, _: Inputs) -> None:
        if context.phase == "eval":
            self._note(model, "evaluation")

    def optimizer_stepping(self, step: OptimizerStep) -> None:
        for model, _, _ in step.updates:
            self._note(model, "step")

    def clipped(self, model: Model, line: ProgramLine | None) -> None:
        """Note where gradients are clipped too early or too late."""
        self._lines.setdefault(model.name, {}).setdefault("clip", place_of(line))

    def of(self, model: str) -> dict[str, str]:
        """Return the lines of a model by event, those that are known."""
        return {event: line for event, line in self._lines.get(model, {}).items() if line}

    def _note(self, model: Model, event: str) -> None:
        own = self._lines.setdefault(model.name, {})
        if event not in own:
            own[event] = place_of(current_line())
