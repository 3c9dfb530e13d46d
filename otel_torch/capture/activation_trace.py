"""FastVideo's activation trace, attached to one model by hand: for a notebook or a test.

A running session records every model. `attach_activation_trace` then adds nothing, so that no
tensor is recorded twice.

    manager = attach_activation_trace(model)
    model(x)  # {"module": "blocks.0", "tensor": "out", "step": 0, "abs_mean": 0.49, ...}
    detach_activation_trace(manager)
"""

from __future__ import annotations

import functools
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from otel_torch import session
from otel_torch.process.console import say, say_once
from otel_torch.process.job import this_job
from otel_torch.recording.run_file import resolve_path
from otel_torch.records import json_safe
from otel_torch.settings import NumberSet, Settings, UnusableSelection
from otel_torch.sources.models.selection import ModuleSelection
from otel_torch.sources.modules.hooks import ForwardHook, ModuleHookManager
from otel_torch.sources.modules.module_names import named_modules
from otel_torch.sources.steps.trace_step import current_step_idx
from otel_torch.sources.tensors.values import walk
from otel_torch.statistics.measure import measure
from otel_torch.statistics.read_rows import read_rows
from otel_torch.statistics.table import columns_for, derive

StatFunction = Callable[[torch.Tensor], Any]


class JsonlSink:
    """Appends objects to a file as lines of strict JSON, from any thread.

    Creates the folder of the file. May be closed twice.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 -- open until close()
        self._lock = threading.Lock()

    def write(self, record: dict[str, Any]) -> None:
        """Append one object. After `close` it is dropped, which is logged once."""
        spelled = {key: json_safe(value) for key, value in record.items()}
        line = json.dumps(spelled, default=str, allow_nan=False) + "\n"
        with self._lock:
            if self._file.closed:
                say_once(
                    f"{self.path} is closed: records of hooks that are still attached are dropped"
                )
            else:
                self._file.write(line)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()


class ActivationStatHook(ForwardHook):
    """Writes statistics of every output tensor of one module to a sink.

    stats: (name, function of the tensor) pairs. step_filter: the steps to record, None for all.
    """

    def __init__(
        self,
        module_name: str,
        stats: list[tuple[str, StatFunction]],
        sink: JsonlSink,
        step_filter: set[int] | NumberSet | None = None,
    ) -> None:
        self.module_name = module_name
        self.stats = stats
        self.sink = sink
        self.step_filter = step_filter

    @classmethod
    def name(cls) -> str:
        return "activation_stats"

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        step = current_step_idx()
        if self.step_filter is None or (step is not None and step in self.step_filter):
            try:
                for label, tensor in walk(output, "out"):
                    values = ((name, function(tensor)) for name, function in self.stats)
                    record = {"module": self.module_name, "tensor": label, "step": step}
                    self.sink.write(
                        record | {name: value for name, value in values if value is not None}
                    )
            except Exception as error:
                say_once(
                    f"{self.module_name}: an activation was not recorded: "
                    f"{type(error).__name__}: {error}"
                )
        return output


class ActivationTraceManager:
    """The hooks that `attach_activation_trace` attached, and their sink."""

    def __init__(self, managers: list[ModuleHookManager], sink: JsonlSink | None) -> None:
        self.managers = managers
        self.sink = sink

    def remove_from_manager(self) -> None:
        """Remove the hooks and close the sink. A second call does nothing."""
        for manager in self.managers:
            if manager.get_forward_hook(ActivationStatHook.name()) is not None:
                manager.remove_forward_hook(ActivationStatHook.name())
                manager.remove_if_empty()
        self.managers = []
        if self.sink is not None:
            self.sink.close()


def attach_activation_trace(model: nn.Module | None) -> ActivationTraceManager | None:
    """Attach statistics hooks to a model's selected modules.

    The root has no name and is left out. The environment is read at the call.

    Returns:
        None if `model` is None or the trace is off: neither OTEL_TORCH_ENABLED nor
        FASTVIDEO_TRACE_ACTIVATIONS is on.

    Raises:
        ValueError: the model is traced already. Nothing is attached then.
    """
    try:
        settings = Settings.from_env(report=say_once)
    except UnusableSelection as error:
        say(f"{error}. Nothing is attached")
        return None
    requested = settings.enabled or "FASTVIDEO_TRACE_ACTIVATIONS" in os.environ
    if model is None or not (requested and settings.activations) or settings.jsonl is None:
        return None
    if session.current() is not None:
        return ActivationTraceManager([], None)
    selection = ModuleSelection(settings)
    selected = {
        module: name
        for name, module in reversed(named_modules(model))
        if name and selection.has_module(name)
    }
    if not selected:
        names = [name for name, _ in named_modules(model)]
        say(
            f"no module of {type(model).__name__} is selected; "
            f"see OTEL_TORCH_MODULES and OTEL_TORCH_EXCLUDE{selection.near_name(names)}"
        )
    hook_name = ActivationStatHook.name()
    for module in selected:
        existing = ModuleHookManager.get_from(module)
        if existing is not None and existing.get_forward_hook(hook_name):
            raise ValueError(
                f"{type(model).__name__} has an activation trace attached already; "
                "detach that first"
            )
    sink = JsonlSink(resolve_path(settings.jsonl, this_job()))
    stats: list[tuple[str, StatFunction]] = [
        (name, functools.partial(_statistic, name)) for name in settings.stats
    ]
    steps = None if settings.steps.all else settings.steps
    managers = []
    for module, name in reversed(selected.items()):
        manager = ModuleHookManager.get_from_or_default(module)
        manager.append_forward_hook(ActivationStatHook(name, stats, sink, steps))
        managers.append(manager)
    return ActivationTraceManager(managers, sink)


def detach_activation_trace(manager: ActivationTraceManager | None) -> None:
    """Undo `attach_activation_trace`. Does nothing for None and at a second call."""
    if manager is not None:
        manager.remove_from_manager()


def _statistic(name: str, tensor: torch.Tensor) -> Any:
    measurement = measure(tensor, columns_for((name,)))
    return derive((name,), read_rows([measurement])[0], measurement).get(name)
