"""The share of dead units behind each ReLU: those that were zero in every sample of a batch.

A unit that no sample activates gets no gradient, so that its weights stay as they are. Rows of
phase `train`, from the forward hooks of modules whose outputs are recorded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from otel_torch import torch_private
from otel_torch.process.console import say_once
from otel_torch.sources.models.model import Model, ModuleSite
from otel_torch.sources.modules.hooks import ModuleHookManager, SessionHook, has_hook, remove_hooks
from otel_torch.sources.modules.module_dict import ModuleDict
from otel_torch.sources.steps.active_steps import ActiveStep
from otel_torch.sources.steps.forwards import Inputs
from otel_torch.sources.steps.training_steps import TrainingStep
from otel_torch.sources.training.training_rows import TrainingRows
from otel_torch.statistics.norms import measure_numbers, whole_values
from otel_torch.statistics.reduce import widest

_HOOK = "otel_torch.dead_units"
# classes, with their subclasses, whose outputs are zero or positive; the last is of transformers
_RELU_LIKE = frozenset({"ReLU", "ReLU6", "ReLUSquaredActivation"})
# after these the channels are dimension 1, after those the last dimension
_CHANNELS_FIRST = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm,
)  # fmt: skip
_CHANNELS_LAST = (nn.Linear,)
# of fewer values of a unit too many are zero by chance
_FEWEST_VALUES = 8


class _UnitsHook(SessionHook):
    """Sees the outputs of one module. `channel`: the dimension of its units; None if not known."""

    __slots__ = ("_channel", "_observe", "_site")
    hook_name = _HOOK

    def __init__(
        self,
        observe: Callable[[ModuleSite, int | None, Any], None],
        site: ModuleSite,
        channel: int | None,
    ) -> None:
        self._observe, self._site, self._channel = observe, site, channel

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        if not torch.compiler.is_compiling():
            self._observe(self._site, self._channel, output)
        return output


class DeadUnits:
    """Records the share of dead units for one session.

    Args:
        is_observed: whether the outputs of a module are recorded. Only such modules get a hook:
            to put one on others could make torch or a compiler choose another path.
    """

    def __init__(self, rows: TrainingRows, is_observed: Callable[[nn.Module], bool]) -> None:
        self._rows, self._is_observed = rows, is_observed
        self._attached: ModuleDict[bool] = ModuleDict()
        # how many modules each model had when they got their hooks
        self._sizes: weakref.WeakKeyDictionary[Model, int] = weakref.WeakKeyDictionary()

    def forward_starting(self, active: ActiveStep, inputs: Inputs) -> None:
        """Put hooks on the modules of a model that is trained."""
        model = active.model
        if isinstance(model, Model) and self._sizes.get(model) != len(model.sites):
            self._sizes[model] = len(model.sites)
            self._attach(model)

    def _attach(self, model: Model) -> None:
        channel = None
        for site in list(model.sites.values()):
            module = site.module()
            if isinstance(module, _CHANNELS_FIRST):
                channel = 1
            elif isinstance(module, _CHANNELS_LAST):
                channel = -1
            elif (
                module is not None
                and not _RELU_LIKE.isdisjoint(base.__name__ for base in type(module).__mro__)
                and self._is_observed(module)
                and not has_hook(module, _HOOK)
            ):
                hook = _UnitsHook(self._observe, site, channel)
                ModuleHookManager.get_from_or_default(module).append_forward_hook(hook)
                self._attached[module] = True

    def uninstall(self) -> None:
        remove_hooks(self._attached, _HOOK)
        self._attached.clear()
        self._sizes.clear()

    def _observe(self, site: ModuleSite, channel: int | None, output: Any) -> None:
        """Record the share of dead units among the outputs of a call, in a detailed step."""
        try:
            model = site.model
            context = model.forward_context
            if context is None or not context.recording or context.phase != "forward":
                return
            step = TrainingStep(context.step, context.loop, context.active.scope)
            if (
                self._rows.are_detailed(step)
                and torch_private.graph_task_id() == -1  # no recomputation
                and isinstance(output, Tensor)
                and self._rows.are_wanted(model, step)
                and self._rows.has_module(site.name)
                and (share := dead_share(output, channel)) is not None
            ):
                self._rows.add(model, step, "dead", measure_numbers(share)[0], site.name)
        except Exception as error:
            say_once(f"dead units are not recorded: {type(error).__name__}: {error}")


@torch_private.unobserved
def dead_share(output: Tensor, channel: int | None) -> Tensor | None:
    """Return the share of units that are zero in all samples; None if it would say nothing.

    Args:
        output: of a ReLU or a similar function, of shape (batch, …).
        channel: the dimension whose indices are the units. By default 1 for images and videos (four
            and more dimensions), else the last one.

    Returns:
        shape (1,), on the device of the output, without waiting for it.

    >>> dead_share(torch.eye(8, 16), None)
    tensor([0.5000], dtype=torch.float64)
    """
    values = whole_values(output)
    if values is None or values.dim() != output.dim() or values.dim() < 2:
        return None
    if channel is None:
        channel = 1 if values.dim() >= 4 else -1
    units = values.shape[channel]
    if not units or values.numel() < _FEWEST_VALUES * units:
        return None
    others = [dim for dim in range(values.dim()) if dim != channel % values.dim()]
    # the largest, because these outputs are not negative; a NaN is not zero
    is_dead = values.amax(others) == 0
    return is_dead.to(widest(values.device)).mean().reshape(1)
