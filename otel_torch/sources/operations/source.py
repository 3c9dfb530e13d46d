"""Selects the steps whose operations are recorded, and enters and leaves the mode around them.

The mode is entered with the first forward of the first model, or at once if that is asked for.
It stays: schedulers, losses, the backward pass and the optimizer run outside of all modules. It is
left when a forward begins in a step that is not selected, and entered again with the next that is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch import nn

from otel_torch import torch_private
from otel_torch.process.console import say_once
from otel_torch.session import Session
from otel_torch.sources.events import RunEvents
from otel_torch.sources.models.model import Model, ModuleSite
from otel_torch.sources.models.selection import ModuleSelection
from otel_torch.sources.modules.hooks import ModuleHookManager, SessionHook, has_hook, remove_hooks
from otel_torch.sources.modules.module_dict import ModuleDict
from otel_torch.sources.modules.module_names import all_parameters
from otel_torch.sources.operations.dispatch_mode import GraphMode
from otel_torch.sources.operations.graph_rows import GraphRow
from otel_torch.sources.operations.kernel_launches import follow_kernels
from otel_torch.sources.operations.operation_recorder import OperationRecorder
from otel_torch.sources.operations.places import Places, named_sites
from otel_torch.sources.replacements import Replacements
from otel_torch.sources.source import Source
from otel_torch.sources.steps import warm_ups
from otel_torch.sources.steps.forwards import ForwardContext, Inputs
from otel_torch.sources.steps.training_steps import TrainingStep
from otel_torch.sources.steps.updates import OptimizerStep
from otel_torch.sources.tensors.tensor_reader import RecordedCall
from otel_torch.sources.tensors.values import walk
from otel_torch.statistics.measure import prepare_devices
from otel_torch.statistics.row_layout import SCALARS

_HOOK = "otel_torch.graph"

# name, tensor, and the module of a parameter; None for what the call returns
End = tuple[str, torch.Tensor, str | None]


class _CallHook(SessionHook):
    """Numbers the calls of a module, and takes what an outermost one returns."""

    hook_name = _HOOK

    def __init__(self, capture: GraphCapture, site: ModuleSite) -> None:
        self._capture, self._site = capture, site

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not torch.compiler.is_compiling():
            self._capture.enter_call(self._site)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        if not torch.compiler.is_compiling():
            self._capture.leave_call(output)
        return output


class GraphCapture(Source):
    """Records the graph of operations of the selected steps.

    Args:
        change: what is to happen to the results of operations that round, if anything.
        meet: as for `OperationRecorder`.
    """

    def __init__(
        self,
        session: Session,
        selection: ModuleSelection,
        events: RunEvents,
        change: Callable[[Any], None] | None = None,
        meet: Callable[[int, int, str, torch.Tensor], torch.Tensor | None] | None = None,
    ) -> None:
        settings = session.settings
        self._session, self._selection = session, selection
        self._steps = settings.steps
        self._breaks_up, self._change = settings.graph_inside, change
        self._places = Places()
        self.recorder = OperationRecorder(
            self._places,
            self._add,
            meet,
            settings.graph_parts,
            settings.graph_rows,
            settings.graph_axes,
        )
        self._modes: dict[int, GraphMode] = {}  # by thread
        # loop and step, by model and the module by which the program enters it: `vae.encode` and
        # `vae.decode` are two ways into one model
        self._first_steps: dict[tuple[str, int], tuple[int, int]] = {}
        self._attached: ModuleDict[bool] = ModuleDict()
        self._has_failed = False
        self.is_cut = False  # the program goes on with a step that is not selected
        self._restore_compiler: Callable[[], None] | None = None
        self._replacements = Replacements()
        follow_kernels(self._replacements)
        self._replacements.replace(torch.inference_mode, "__exit__", torch_private.keep_modes_after)
        events.modules_found.append(self._guarded(self._attach))
        events.forward_began.append(self._guarded(self._on_forward))
        events.optimizer_stepping.append(self._guarded(self._on_stepping))
        events.optimizer_stepped.append(self._guarded(self._on_stepped))
        events.optimizer_skipped.append(self._guarded(self._on_stepped))
        events.updated.append(self._guarded(self._on_updated))

    def install(self) -> None:
        if self._session.settings.graph_before and self._has_destination():
            prepare_devices((), self.recorder.columns)
            self._guarded(self._resume)()

    # -- steps

    def _on_forward(self, model: Model, context: ForwardContext, inputs: Inputs) -> None:
        if self._has_failed or not self._is_wanted(model, context, inputs):
            self.pause()
            return
        self._places.begin_forward(model, context, inputs, self.recorder.lines.current())
        self._resume(model)

    def _is_wanted(self, model: Model, context: ForwardContext, inputs: Inputs) -> bool:
        """Return whether the step of a forward is selected: by default the first of its model."""
        is_traced = torch_private.is_traced() or torch_private.is_symbolically_traced()
        if is_traced or context.phase == warm_ups.PHASE or not context.recording:
            return False
        if not self._selection.has_model(model.name) or not self._has_destination():
            return False
        if not self._steps.all:
            return context.step in self._steps
        position = context.loop, context.step
        entered = model.name, id(inputs.module)
        return self._first_steps.setdefault(entered, position) == position

    def _has_destination(self) -> bool:
        return any(sink.has_destination for sink in self._session.recorder.sinks)

    def _resume(self, model: Model | None = None) -> None:
        thread = get_ident()
        if thread in self._modes:
            return
        if not self._modes:
            self._restore_compiler = _run_compiled_eagerly(model)
        mode = GraphMode(self.recorder, self._fail, self._breaks_up, self._change)
        torch_private.enter_below_all_modes(mode)
        self.recorder.autograd.start()
        self._modes[thread], self.is_cut = mode, False

    def pause(self) -> None:
        """Leave the mode of this thread: what runs now is not recorded."""
        mode = self._modes.pop(get_ident(), None)
        if mode is None:
            return
        mode.is_on, self.is_cut = False, True
        torch_private.leave_below_all_modes(mode)
        if not self._modes:
            self.recorder.forget()
            self._places.forget_names()
            if self._restore_compiler is not None:
                self._restore_compiler()

    def _on_stepping(self, optimizer_step: OptimizerStep) -> None:
        self._places.is_stepping = True

    def _on_stepped(self, optimizer_step: OptimizerStep) -> None:
        self._places.is_stepping = False
        self._finish_pending()

    @torch_private.unobserved
    def _finish_pending(self) -> None:
        self.recorder.finish_pending()

    @property
    def _is_recording(self) -> bool:
        return get_ident() in self._modes and not self._has_failed

    # -- calls

    def _attach(self, model: Model, sites: list[ModuleSite]) -> None:
        if not self._selection.has_model(model.name) or not self._has_destination():
            return
        root = model.root()
        for columns in (self.recorder.columns, SCALARS):
            prepare_devices(() if root is None else all_parameters(root), columns)
        for site in sites:
            module = site.module()
            if module is not None and not has_hook(module, _HOOK):
                manager = ModuleHookManager.get_from_or_default(module)
                manager.append_forward_hook(_CallHook(self, site))
                self._attached[module] = True

    def enter_call(self, site: ModuleSite) -> None:
        """Number a call, while operations are recorded."""
        if self._is_recording:
            self._places.enter(site)

    @torch_private.unseen_by_function_modes
    def leave_call(self, output: Any) -> None:
        """Take what an outermost call returns as ends."""
        if not self._is_recording:
            return
        try:
            if self._places.is_outermost:
                ends: list[End] = [(name, tensor, None) for name, tensor in walk(output, "out")]
                self._add_ends(self._places.current_call(), ends)
            self._places.leave()
        except Exception as error:
            self._fail(error)

    def add_result(self, result: Any) -> None:
        """Take what a whole program returns as ends, if its operations are recorded to the last."""
        if self._is_recording:
            ends: list[End] = [(name, tensor, None) for name, tensor in walk(result, "returned")]
            self._guarded(self._add_ends)(self._places.current_call(), ends)

    def _on_updated(self, model: Model, parameter_ids: frozenset[int], step: TrainingStep) -> None:
        if not self._is_recording:
            return
        ends: list[End] = [
            (f"param.{name}", parameter, module_name)
            for module_name, module in named_sites(model)
            for name, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in parameter_ids
        ]
        self._add_ends(self._places.update_of(model), ends)

    @torch_private.unobserved
    def _add_ends(self, call: RecordedCall, ends: list[End]) -> None:
        self.recorder.add_ends(call, ends)

    # -- rows

    def _add(self, row: GraphRow) -> None:
        recorder = self._session.recorder
        recorder.add(row)
        if recorder.is_flush_due and not self.recorder.is_waiting:
            self._flush()

    @torch_private.unobserved
    def _flush(self) -> None:
        tracker = self._session.step_tracker
        self._session.recorder.flush(None if tracker is None else tracker.step_scope)

    def describe(self) -> list[list[Any]]:
        return self.recorder.lines.describe()

    # -- failures and the end

    def _fail(self, error: Exception) -> None:
        self._has_failed = True
        self._session.recorder.losses.count("record", "graph_ended")
        say_once(f"the graph of operations ends here: {type(error).__name__}: {error}")

    def _guarded(self, action: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            try:
                action(*args)
            except Exception as error:
                self._fail(error)

        return call

    def forked(self) -> None:
        """Record nothing of the parent's step in the child: a worker computes no part of it."""
        self._leave_all()
        self._first_steps.clear()

    def _leave_all(self) -> None:
        for mode in self._modes.values():
            mode.is_on = False
            torch_private.leave_below_all_modes(mode)
        if self._modes and self._restore_compiler is not None:
            self._restore_compiler()
        self._modes.clear()
        self.recorder.forget()
        self._places.forget_names()

    def uninstall(self) -> None:
        """Leave the mode and remove all hooks."""
        self._leave_all()
        remove_hooks(self._attached, _HOOK)
        self._attached.clear()
        self._replacements.restore()


def _run_compiled_eagerly(model: Model | None) -> Callable[[], None]:
    """Have what the program has compiled run eagerly; return a function that ends this.

    What it compiles while a mode is active, the compiler leaves alone by itself.
    """
    if "torch._dynamo" not in sys.modules:
        return lambda: None
    sites = [] if model is None else list(model.sites.values())
    modules = (site.module() for site in sites)
    if torch_private.count_compiled_graphs() or any(map(_is_compiled, modules)):
        say_once("OTEL_TORCH_CAPTURE=graph: compiled code runs eagerly in the recorded steps")
    stance = torch.compiler.set_stance("force_eager")
    return lambda: stance.__exit__(None, None, None)


def _is_compiled(module: nn.Module | None) -> bool:
    is_wrapper = type(module).__name__ == "OptimizedModule"
    return is_wrapper or getattr(module, "_compiled_call_impl", None) is not None
