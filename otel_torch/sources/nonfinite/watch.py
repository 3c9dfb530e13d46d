"""Watches for NaN and Inf in the steps that a budget skips: one measurement per outermost forward.

Without it, a value that becomes NaN between two recorded steps would be noticed only when every
later step has it too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from otel_torch.process.console import say_once
from otel_torch.sources.events import RunEvents
from otel_torch.sources.models.model import Model, ModuleSite
from otel_torch.sources.modules.hooks import ModuleHookManager, SessionHook, has_hook, remove_hooks
from otel_torch.sources.modules.module_dict import ModuleDict
from otel_torch.sources.modules.module_names import all_parameters
from otel_torch.sources.nonfinite.suspects import Row
from otel_torch.sources.source import Source
from otel_torch.sources.tensors import compiled
from otel_torch.sources.tensors.tensor_reader import RecordedCall
from otel_torch.sources.tensors.values import walk
from otel_torch.statistics.measure import Measurement, measure, prepare_devices
from otel_torch.statistics.read_rows import RowTransfer
from otel_torch.statistics.row_layout import RANGE

_HOOK = "otel_torch.watch"
# takes the row of an output, by its label
Report = Callable[[RecordedCall, str, Row], None]


class _RootHook(SessionHook):
    """Sees the outputs of a model's root."""

    hook_name = _HOOK

    def __init__(self, watch: NonFiniteWatch, site: ModuleSite) -> None:
        self._watch, self._site = watch, site
        self._number = compiled.site_tensor(site, watch)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        if torch.compiler.is_compiling():
            compiled.observe_outputs(self._number, output)
        else:
            self._watch.on_output(self._site.model, output)
        return output


class NonFiniteWatch(Source, compiled.Observer):
    """Measures the outputs of outermost forwards that are not recorded.

    `report` is called for each output once its measurement has reached the host, at the end of that
    step or of a later one. Nothing here waits for a device or raises into a forward.
    """

    def __init__(self, report: Report, events: RunEvents) -> None:
        self._report = report
        self._pending: list[tuple[RecordedCall, str, Measurement]] = []
        self._reading: deque[tuple[list[tuple[RecordedCall, str]], RowTransfer]] = deque()
        self._attached: ModuleDict[bool] = ModuleDict()
        events.step_flushed.append(self.collect)

    def attach(self, model: Model, sites: list[ModuleSite]) -> None:
        """Hook the root of the model, if it is among the new `sites`."""
        for site in sites:
            root = site.module()
            if root is None or root is not model.root() or has_hook(root, _RootHook.name()):
                continue
            try:
                manager = ModuleHookManager.get_from_or_default(root)
                manager.append_forward_hook(_RootHook(self, site))
                self._attached[root] = True
                prepare_devices(all_parameters(root), RANGE)
            except Exception as error:
                say_once(
                    f"{model.name} is not watched between recorded steps: "
                    f"{type(error).__name__}: {error}"
                )

    def uninstall(self) -> None:
        remove_hooks(self._attached, _HOOK)
        self._attached.clear()

    def on_output(self, model: Model, output: Any) -> None:
        """Measure what an outermost forward of `model` returned, if it is not recorded."""
        self._watch(model, lambda: walk(output, "out"))

    def on_compiled_tensors(
        self,
        site: ModuleSite,
        tensors: list[tuple[str, torch.Tensor]],
        *,
        entering: bool,
        differentiable: bool,
    ) -> None:
        """Measure what a compiled root returned, if its forward is not recorded."""
        self._watch(site.model, lambda: tensors)

    def _watch(
        self, model: Model, tensors_of: Callable[[], Iterable[tuple[str, torch.Tensor]]]
    ) -> None:
        try:
            context = model.forward_context
            if context is None or context.recording:
                return
            for label, tensor in tensors_of():
                measured = measure(tensor, RANGE)
                if measured.row is not None:
                    place = context.step, 0, context.loop, context.phase, context.branch
                    self._pending.append((RecordedCall(model.name, "", *place), label, measured))
        except Exception as error:
            say_once(f"{model.name}: an output was not watched: {type(error).__name__}: {error}")

    def collect(self) -> None:
        """Report the measurements that have reached the host, and start reading the new ones."""
        try:
            pending, self._pending = self._pending, []
            if pending:
                outputs = [(call, label) for call, label, _ in pending]
                transfer = RowTransfer([measured for _, _, measured in pending])
                self._reading.append((outputs, transfer))
            while self._reading and self._reading[0][1].is_ready():
                outputs, transfer = self._reading.popleft()
                for (call, label), row in zip(outputs, transfer.fetch(), strict=True):
                    self._report(call, label, row)
        except Exception as error:
            say_once(f"the outputs of a step were not watched: {type(error).__name__}: {error}")
