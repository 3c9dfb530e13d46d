"""The events of a recorded program, and their subscribers.

Sources depend on each other in circles: the model registry finds modules that the observers hook,
and the observers learn from compiled graphs which model runs. So each gets one `RunEvents`, made
before all of them, and subscribes or emits there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from otel_torch.sources.models.model import Model, ModuleSite
    from otel_torch.sources.steps.active_steps import ActiveStep
    from otel_torch.sources.steps.forwards import ForwardContext, Inputs
    from otel_torch.sources.steps.training_steps import TrainingStep
    from otel_torch.sources.steps.updates import OptimizerStep
    from otel_torch.sources.tensors.tensor_reader import RecordedCall

    ForwardBegan = Callable[[Model, ForwardContext, Inputs], None]
    ForwardReturned = Callable[[Model, ForwardContext, Any], None]
    # model, ids of the parameters that are about to change, the training step, by what their
    # gradients are still multiplied
    GradientsReady = Callable[[Model, frozenset[int], TrainingStep, Tensor | None], None]
    # model, ids of the parameters that have changed, the training step that changed them
    Updated = Callable[[Model, frozenset[int], TrainingStep], None]
    # the call, and its inputs or outputs by label
    TensorsOfCall = Callable[[RecordedCall, list[tuple[str, Tensor]]], None]


@dataclass(frozen=True, slots=True)
class RunEvents:
    """The subscribers of one session, in the order in which they are called.

    A source appends its methods in its constructor. The emitter loops over the list itself, because
    a compiled call is a hot path: an event costs one call per subscriber and nothing more.

    Attributes:
        modules_found: modules of a model were seen for the first time, before any of them runs.
        model_starting: the first forward of a model is about to run; its weights are loaded.
        compiled_call: a compiled graph runs the call of a module, which no Python hook sees.
        forward_starting: an outermost forward of any model is about to run.
        forward_began: its step and phase are known; none of its modules has run.
        forward_returned: an outermost forward has returned this; not emitted where its end is not
            seen, as where a program calls a part of a model, or compiled code.
        forward_ended: an outermost forward has ended.
        nonfinite_call: an input or output of the call that this thread is in has a NaN or Inf.
        output_recorded: the outputs of a recorded call were measured.
        program_resumes: an outermost forward, a backward pass or an optimizer's step has ended
            and is recorded. What a subscriber raises, the program gets.
        training_forward: a forward with gradients of a model that is trained is about to run.
        backward_starting: a backward pass from these tensors is about to run.
        backward_ended: it has ended.
        optimizer_stepping: an optimizer is about to step, or to evaluate its closure.
        gradients_ready: the gradients with which it steps are complete, for this model. With a
            closure, it has evaluated that once more.
        optimizer_stepped: it has stepped; the training step goes on.
        optimizer_skipped: a gradient scaler has skipped the step because of a NaN or Inf.
        updated: this model has the new parameters of an optimizer's step.
        step_ended: a step has ended, and its scope is closed.
        step_flushed: the pending tensors were flushed, at the end of a step or between steps. Only
            emitted under OTEL_TORCH_BUDGET.
    """

    modules_found: list[Callable[[Model, list[ModuleSite]], None]] = field(default_factory=list)
    model_starting: list[Callable[[Model], None]] = field(default_factory=list)
    compiled_call: list[Callable[[ModuleSite], None]] = field(default_factory=list)
    forward_starting: list[Callable[[], None]] = field(default_factory=list)
    forward_began: list[ForwardBegan] = field(default_factory=list)
    forward_returned: list[ForwardReturned] = field(default_factory=list)
    forward_ended: list[Callable[[], None]] = field(default_factory=list)
    nonfinite_call: list[TensorsOfCall] = field(default_factory=list)
    output_recorded: list[TensorsOfCall] = field(default_factory=list)
    program_resumes: list[Callable[[], None]] = field(default_factory=list)
    training_forward: list[Callable[[ActiveStep, Inputs], None]] = field(default_factory=list)
    backward_starting: list[Callable[[Sequence[Tensor]], None]] = field(default_factory=list)
    backward_ended: list[Callable[[], None]] = field(default_factory=list)
    optimizer_stepping: list[Callable[[OptimizerStep], None]] = field(default_factory=list)
    gradients_ready: list[GradientsReady] = field(default_factory=list)
    optimizer_stepped: list[Callable[[OptimizerStep], None]] = field(default_factory=list)
    optimizer_skipped: list[Callable[[OptimizerStep], None]] = field(default_factory=list)
    updated: list[Updated] = field(default_factory=list)
    step_ended: list[Callable[[ActiveStep], None]] = field(default_factory=list)
    step_flushed: list[Callable[[], None]] = field(default_factory=list)

    def resume_program(self, error: BaseException | None = None) -> None:
        """Emit `program_resumes`, unless the program gets an error already."""
        if error is None:
            for resume in self.program_resumes:
                resume()
