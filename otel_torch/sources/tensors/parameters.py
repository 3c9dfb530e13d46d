"""Records the parameters of models before their first forward and after each optimizer step, and
their gradients before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from otel_torch import torch_private
from otel_torch.process.console import say
from otel_torch.session import Session
from otel_torch.sources.events import RunEvents
from otel_torch.sources.models.model import Model
from otel_torch.sources.models.selection import ModuleSelection
from otel_torch.sources.modules.module_names import class_name
from otel_torch.sources.steps.training_steps import TrainingStep
from otel_torch.sources.tensors.parameter_data import gradient_of, is_gradient_spread, value_of
from otel_torch.sources.tensors.tensor_measurer import TensorMeasurer
from otel_torch.sources.tensors.tensor_reader import RecordedCall


class ParameterObserver:
    """Measures parameters and their gradients, as OTEL_TORCH_CAPTURE asks for."""

    def __init__(
        self,
        session: Session,
        selection: ModuleSelection,
        measurer: TensorMeasurer,
        events: RunEvents,
    ) -> None:
        self._session, self._settings = session, session.settings
        self._said: set[tuple[str, str]] = set()  # models and kinds
        self._selection, self._measurer = selection, measurer
        capture = session.settings.capture
        self._parity = "parity" in capture
        if "parameters" in capture:
            events.model_starting.append(self.record_parameters)
            if "gradients" in capture:
                events.gradients_ready.append(self.record_gradients)
        if "updates" in capture:
            events.updated.append(self.record_updates)

    @torch_private.unseen_by_function_modes
    def record_parameters(self, model: Model) -> None:
        """Record a model's parameters right before its first forward, when its weights are loaded.

        Parity recordings have buffers too, because a port may keep as a parameter what the
        reference keeps as a buffer.
        """
        if not self._selection.has_model(model.name):
            return
        for name, module in self._selection.modules(model):
            call = RecordedCall(
                model.name, name, 0, 0, 0, "attach", None, class_name=class_name(module)
            )
            tables: list[tuple[str, Mapping[str, Tensor | None]]]
            tables = [("param", module._parameters)]
            if self._parity:
                tables.append(("buffer", module._buffers))
            for kind, table in tables:
                tensors = []
                for key, tensor in table.items():
                    if tensor is None:
                        continue
                    if (value := self._whole_value(model, name, key, tensor)) is not None:
                        tensors.append((f"{kind}.{key}", value))
                self._measurer.add(call, tensors)

    @torch_private.unseen_by_function_modes
    def record_gradients(
        self,
        model: Model,
        parameter_ids: frozenset[int],
        training_step: TrainingStep,
        scale: Tensor | None = None,
    ) -> None:
        """Record the gradients with which an optimizer is about to step.

        Args:
            parameter_ids: `id` of each parameter that the optimizer holds.
            scale: by what the gradients are multiplied until the optimizer divides by it.
        """
        for owner, key, parameter in self._chosen(model, parameter_ids, training_step):
            gradient = gradient_of(parameter)
            if gradient is not None:
                if scale is not None:
                    gradient = _divide(gradient, scale)
                call = _call_of(model, owner, key, "backward", training_step)
                self._measurer.add(call, [(f"param_grad.{key}", gradient)])
            elif is_gradient_spread(parameter):
                self._count_spread(model, "gradients", f"{owner.name}.{key}")

    @torch_private.unseen_by_function_modes
    def record_updates(
        self, model: Model, parameter_ids: frozenset[int], training_step: TrainingStep
    ) -> None:
        """Record the parameters that an optimizer's step has computed.

        Args:
            parameter_ids: `id` of each parameter that the optimizer holds.
        """
        for owner, key, parameter in self._chosen(model, parameter_ids, training_step):
            if (value := self._whole_value(model, owner.name, key, parameter)) is not None:
                call = _call_of(model, owner, key, "update", training_step)
                self._measurer.add(call, [(f"param.{key}", value)])

    def _chosen(
        self, model: Model, parameter_ids: frozenset[int], training_step: TrainingStep
    ) -> Iterator[tuple[_Owner, str, Tensor]]:
        """Yield the selected parameters of those ids, each with its owner and its name there."""
        if training_step.step not in self._settings.steps:
            return
        if not self._selection.has_model(model.name):
            return
        for name, module in self._selection.modules(model):
            owner = _Owner(name, class_name(module))
            for key, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in parameter_ids:
                    yield owner, key, parameter

    def _whole_value(self, model: Model, module: str, key: str, parameter: Tensor) -> Tensor | None:
        """Return the value of a parameter; None, which is counted, if it is spread over ranks."""
        value = value_of(parameter)
        if value is None:
            self._count_spread(model, "parameters", f"{module}.{key}")
        return value

    def _count_spread(self, model: Model, kind: str, name: str) -> None:
        """Count a tensor of which this rank has only a part, and say so once for each model."""
        self._session.recorder.losses.count("record", "spread_over_ranks")
        if (model.name, kind) not in self._said:
            self._said.add((model.name, kind))
            say(
                f"{model.name}: {kind} that are spread over several ranks are not recorded "
                f"(for example {name.lstrip('.')!r})"
            )


class _Owner(NamedTuple):
    """The module that holds a parameter."""

    name: str
    class_name: str


def _call_of(
    model: Model, owner: _Owner, key: str, phase: str, training_step: TrainingStep
) -> RecordedCall:
    """Return the call of a parameter in a training step: several optimizers may hold it."""
    step, loop, scope = training_step
    kind = "parameters" if phase == "backward" else phase
    number = model.calls.count(model.calls.of(kind, loop, step), f"{owner.name}.{key}")
    return RecordedCall(
        model.name,
        owner.name,
        step,
        number,
        loop,
        phase,
        None,
        class_name=owner.class_name,
        step_scope=scope,
    )


@torch_private.unobserved
def _divide(gradient: Tensor, scale: Tensor) -> Tensor:
    return gradient / scale.to(gradient.device)
