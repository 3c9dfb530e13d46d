"""Records the parameters of models, once, and their gradients before each optimizer step."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from otel_torch import torch_private
from otel_torch.process.console import say_once
from otel_torch.session import Session
from otel_torch.sources.events import RunEvents
from otel_torch.sources.module_names import class_name
from otel_torch.sources.modules import Model
from otel_torch.sources.parameter_data import gradient_of, value_of
from otel_torch.sources.selection import ModuleSelection
from otel_torch.sources.tensor_measurer import TensorMeasurer
from otel_torch.sources.tensor_reader import RecordedCall
from otel_torch.sources.training_steps import TrainingStep


class ParameterObserver:
    """Measures parameters and their gradients, as OTEL_TORCH_CAPTURE asks for."""

    def __init__(
        self,
        session: Session,
        selection: ModuleSelection,
        measurer: TensorMeasurer,
        events: RunEvents,
    ) -> None:
        self._settings = session.settings
        self._selection, self._measurer = selection, measurer
        capture = session.settings.capture
        self._parity = "parity" in capture
        if "parameters" in capture:
            events.model_starting.append(self.record_parameters)
            if "gradients" in capture:
                events.gradients_ready.append(self.record_gradients)

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
                    value = value_of(tensor)
                    if value is None:
                        say_once(
                            f"{model.name}: parameters that are spread over several ranks are not "
                            f"recorded (for example {name + '.' + key!r})"
                        )
                    else:
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
        step, loop, scope = training_step
        if step not in self._settings.steps:
            return
        counts = model.calls.of("parameters", loop, step)
        for name, module in self._selection.modules(model):
            for key, parameter in module._parameters.items():
                if parameter is None or id(parameter) not in parameter_ids:
                    continue
                gradient = gradient_of(parameter)
                if gradient is not None:
                    if scale is not None:
                        gradient = _divide(gradient, scale)
                    # several optimizers may hold the same parameter
                    number = model.calls.count(counts, f"{name}.{key}")
                    call = RecordedCall(
                        model.name, name, step, number, loop, "backward", None, step_scope=scope
                    )
                    self._measurer.add(call, [(f"param_grad.{key}", gradient)])


@torch_private.unobserved
def _divide(gradient: Tensor, scale: Tensor) -> Tensor:
    return gradient / scale.to(gradient.device)
