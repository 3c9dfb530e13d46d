"""Observes the inputs and outputs of the selected modules, eager and compiled.

Each tensor is measured as soon as it exists, because later code may change it in place. The
numbers stay on the tensor's device and are read once per step. For an eager call:

    torch -> _OutputObserver.post_forward(module, output)
          -> leave(place, output)                    all that follows, where nothing is unusual
          -> Activations.on_output(site, output)
          -> CurrentCalls.make(site)                 which call it is: step, number, phase
          -> walk(output)                            its tensors, labeled
          -> TensorMeasurer.add(call, tensors)       one row each, added to the recorder

`tensor_reader.py` has the way from there to a record, `gradients.py` and `parameters.py` the
other tensors that OTEL_TORCH_CAPTURE can ask for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling, is_dynamo_compiling

from otel_torch import torch_private
from otel_torch.process.console import say, say_once
from otel_torch.session import Session
from otel_torch.sources.events import RunEvents
from otel_torch.sources.models.fused_modules import FusedModules
from otel_torch.sources.models.model import Model, ModuleSite
from otel_torch.sources.models.selection import ModuleSelection
from otel_torch.sources.modules.call_stack import is_running
from otel_torch.sources.modules.hooks import ModuleHookManager, SessionHook, has_hook, remove_hooks
from otel_torch.sources.modules.module_call import direct_call
from otel_torch.sources.modules.module_dict import ModuleDict
from otel_torch.sources.modules.module_names import all_parameters
from otel_torch.sources.source import Source
from otel_torch.sources.steps import warm_ups
from otel_torch.sources.tensors import compiled
from otel_torch.sources.tensors.current_calls import CurrentCalls
from otel_torch.sources.tensors.gradients import GradientObserver
from otel_torch.sources.tensors.native_observer import NativeObserver
from otel_torch.sources.tensors.parameters import ParameterObserver
from otel_torch.sources.tensors.tensor_measurer import TensorMeasurer
from otel_torch.sources.tensors.tensor_reader import RecordedCall, TensorReader
from otel_torch.sources.tensors.values import argument_names, unwalked_class, walk, walk_inputs
from otel_torch.statistics import cpu_kernel
from otel_torch.statistics.measure import prepare_devices

_HOOK = "otel_torch.activations"
# the labels of an output that is a tensor
_ONE_OUTPUT = ["out"]


class _OutputObserver(SessionHook):
    """Observes the outputs of one module; `number` identifies it in compiled graphs."""

    __slots__ = ("__weakref__", "_activations", "_leave", "number", "place", "site")
    hook_name = _HOOK
    number: torch.Tensor

    def __init__(self, activations: Activations, site: ModuleSite) -> None:
        self._activations = activations
        self.site = site
        self._leave = activations.native.leave
        self.place = activations.native.place_of(site)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        # the cheapest question that the compiler answers with True
        if is_dynamo_compiling() or self._leave(self.place, output) is None:
            if is_compiling():
                compiled.observe_outputs(self.number, output)
            else:
                self.observe_output(output)
        return output

    @torch_private.keep_out_of_frames
    def observe_output(self, output: Any) -> None:
        self._activations.on_output(self.site, output)


class _InputObserver(_OutputObserver):
    """Observes the inputs and outputs of one module."""

    __slots__ = ("_enter",)

    def __init__(self, activations: Activations, site: ModuleSite) -> None:
        super().__init__(activations, site)
        self._enter = activations.native.enter

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if is_dynamo_compiling() or self._enter(self.place, args, kwargs) is None:
            if is_compiling():
                compiled.observe_inputs(self.number, args, kwargs)
            else:
                self.observe_inputs(args, kwargs)
        return args, kwargs

    @torch_private.keep_out_of_frames
    def observe_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._activations.on_inputs(self.site, args, kwargs)


class Activations(Source, compiled.Observer):
    """Attaches observers to the selected modules. Nothing in it raises into a forward pass."""

    def __init__(self, session: Session, reader: TensorReader, events: RunEvents) -> None:
        settings = session.settings
        cpu_kernel.choose(settings.kernel)
        self._settings = settings
        self._inputs = "inputs" in settings.capture
        self._outputs = "outputs" in settings.capture
        self._gradients = "gradients" in settings.capture
        self._parity = reader.parity
        self.selection = ModuleSelection(settings)
        self._calls = CurrentCalls(self.selection, self._inputs, self._parity)
        self._measurer = TensorMeasurer(session, reader)
        self._session, self._reader = session, reader
        self._gradient_observer = GradientObserver(self._measurer)
        self.keeps_tensors = self._measurer.keeps_tensors
        self._attached: ModuleDict[bool] = ModuleDict()
        self._parameter_names: ModuleDict[list[str]] = ModuleDict()  # of forward, by module
        self._stop_guarding: Callable[[], None] | None = None
        self._unverified: list[Model] = []  # models whose hooks have not been seen to run
        self._fused_modules = FusedModules()
        self._selected_count = 0
        self._compiled_call = events.compiled_call
        self._nonfinite_call = events.nonfinite_call
        self._output_recorded = events.output_recorded
        ParameterObserver(session, self.selection, self._measurer, events)
        events.forward_ended.extend((self._fused_modules.report, self.report_silent_parts))

    @functools.cached_property
    def native(self) -> NativeObserver:
        """The compiled observer, loaded for the first module that is observed."""
        measurer, clock = self._measurer, self._calls.clock
        return NativeObserver(self._session, measurer.columns, self._reader, clock.__next__)

    @functools.cached_property
    def _call(self) -> Callable[..., Any] | None:
        return direct_call(_OutputObserver, _InputObserver)

    def install(self) -> None:
        """Have the compiler recompile modules that get hooks."""
        if self._settings.activations:
            self._stop_guarding = compiled.guard_hooks()

    # -- attaching

    def attach(self, model: Model, sites: list[ModuleSite]) -> None:
        """Put an observer on every selected module of `sites`, which are new in `model`."""
        if not self.selection.has_model(model.name):
            return
        selected = self.selection.sites(model, sites)
        hooked = 0
        if self._outputs or self._inputs or self._gradients:
            new: list[_OutputObserver] = []
            hooked = sum(self._attach_to(model, site, new) for site in selected)
            for observer, number in zip(new, compiled.site_tensors(new, self), strict=True):
                observer.number = number
        self._selected_count += len(selected)
        if hooked:
            self._unverified.append(model)
            root = model.root()
            parameters = () if root is None else all_parameters(root)
            prepare_devices(parameters, self._measurer.columns)
        if not selected and not any(map(self.selection.has_site, model.sites.values())):
            names = [name for site in reversed(sites) for name, _ in site.names if name]
            example = names[0] if names else ""
            say(
                f"no module of {model.name} is selected "
                f"({len(sites)} modules, for example {example!r}); "
                f"see OTEL_TORCH_MODULES and OTEL_TORCH_EXCLUDE{self.selection.near_name(names)}"
            )
        if hooked:
            self._fused_modules.add(model, self.is_observed)

    def _attach_to(self, model: Model, site: ModuleSite, new: list[_OutputObserver]) -> bool:
        """Attach to one module; return whether it takes hooks. The observer is added to `new`."""
        module = site.module()
        if module is None:
            return False
        if has_hook(module, _HOOK):
            return True  # of another model
        kind = _InputObserver if self._inputs else _OutputObserver
        try:
            observer = kind(self, site)
            ModuleHookManager.get_from_or_default(module).append_forward_hook(observer)
            new.append(observer)
            self._attached[module] = True
            site.call = self._call
            return True
        except Exception as error:
            say_once(
                f"{model.name}: {type(module).__name__} takes no hook and is not recorded "
                f"({type(error).__name__}: {error})"
            )
            return False

    def is_observed(self, module: nn.Module) -> bool:
        return module in self._attached

    def uninstall(self) -> None:
        remove_hooks(self._attached, _HOOK)
        self._attached.clear()
        self._gradient_observer.remove_hooks()
        if self._stop_guarding is not None:
            self._stop_guarding()

    # -- calls

    def on_inputs(self, site: ModuleSite, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            call = self._calls.make(site)
            if call is None:
                return
            self._calls.enter(site, call)
            if call.is_recorded:
                tensors = walk_inputs(args, kwargs)
                names = self._parameter_names_of(site) if self._parity else ()
                if self._measurer.add(call, tensors, names):
                    self._report_nonfinite(call, tensors)
        except Exception as error:
            self._measurer.report_failure(site.model.name, error)

    def on_output(self, site: ModuleSite, output: Any) -> None:
        try:
            if not self._inputs:
                call = self._calls.make(site)
            elif (context := site.model.forward_context) is not None and context.recording:
                call = self._calls.leave(site)
            else:
                return  # the call was counted when it was entered
            if call is None or not call.is_recorded:
                return
            tensors = walk(output, "out")
            if not tensors and (kind := unwalked_class(output)) is not None:
                self._measurer.report_unwalked(site.model.name, kind)
            if self._outputs and self._measurer.add(call, tensors):
                self._report_nonfinite(call, tensors)
            for observe in self._output_recorded:
                observe(call, tensors)
            if self._gradients and torch.is_grad_enabled() and call.phase != warm_ups.PHASE:
                self._gradient_observer.watch(call, tensors)
        except Exception as error:
            self._measurer.report_failure(site.model.name, error)

    def observe_ordinary(
        self,
        observer: _OutputObserver,
        tensors: list[torch.Tensor],
        labels: list[str],
        entering: bool,
    ) -> bool:
        """Have the compiled observer observe a call in a compiled graph; return whether it has.

        Recorded inputs are never left to it: it would recognize them by their memory, which
        compiled code reuses.
        """
        model = observer.site.model
        if not is_running(model):
            return False
        if self._inputs:
            context = model.forward_context
            if context is None or context.recording:
                return False
            if entering:
                return self.native.enter(observer.place, (), {}) is not None
        # in a step that is recorded, a list is left to Python
        output = tensors[0] if labels == _ONE_OUTPUT else tensors
        return self.native.leave(observer.place, output) is not None

    def on_compiled_tensors(
        self,
        observer: _OutputObserver,
        tensors: list[tuple[str, torch.Tensor]],
        *,
        entering: bool,
        differentiable: bool,
    ) -> None:
        """Record the inputs (`entering`) or outputs of a call in a compiled graph."""
        site = observer.site
        try:
            if differentiable and self._gradients:
                say_once(
                    f"{site.model.name}: gradients inside compiled code are not recorded; "
                    "set TORCHDYNAMO_DISABLE=1 to run it eagerly"
                )
            if entering or not self._inputs:
                for notify in self._compiled_call:
                    notify(site)
                call = self._calls.enter_compiled(site)
            else:
                call = self._calls.leave_compiled(site)
            if call is None or not call.is_recorded:
                return
            if tensors and (self._outputs or entering):
                names = self._parameter_names_of(site) if entering else None
                # compiled code reuses memory freely, so that no tensor can be recognized by it
                self._measurer.add(call, tensors, names, recognize=False)
            for observe in () if entering else self._output_recorded:
                observe(call, tensors)
        except Exception as error:
            self._measurer.report_failure(site.model.name, error)

    def _report_nonfinite(
        self, call: RecordedCall, tensors: list[tuple[str, torch.Tensor]]
    ) -> None:
        for notify in self._nonfinite_call:
            notify(call, tensors)

    def _parameter_names_of(self, site: ModuleSite) -> list[str]:
        module = site.module()
        if module is None:
            return []
        names = self._parameter_names.get(module)
        if names is None:
            names = self._parameter_names[module] = argument_names(module)
        return names

    def current_call(self, site: ModuleSite) -> RecordedCall | None:
        """Return the call of a site that this thread is in, or None if it is not recorded."""
        if not self._inputs and site.module() not in self._attached:
            return None
        return self._calls.current(site)

    def recorder_for(self, site: ModuleSite) -> Callable[[str, torch.Tensor], None] | None:
        """Return a function that records a (label, tensor) in the current call of a site.

        None if that call is not recorded. Such tensors are not recognized elsewhere: only the
        inputs and outputs of modules are.
        """
        call = self.current_call(site)
        if call is None:
            return None

        def record_tensor(label: str, tensor: torch.Tensor) -> None:
            self._measurer.add(call, [(label, tensor)], recognize=False)

        return record_tensor

    # -- reporting

    def finish(self) -> None:
        """Report that models ran but none was selected, which is probably a typo."""
        self.report_silent_parts()
        if not self._selected_count and self._settings.models is not None:
            pattern = self._settings.models.pattern
            say(f"OTEL_TORCH_MODELS={pattern!r} selects none of the models that ran")

    def report_silent_parts(self) -> None:
        """Report, after a model's first forward, graphs that were compiled without our hooks."""
        for model in [model for model in self._unverified if model.completed]:
            self._unverified.remove(model)
            parts = compiled.silent_parts(
                model,
                lambda site: (
                    bool(site.names)
                    and site.module() in self._attached
                    and not self._fused_modules.is_inside(site)
                ),
            )
            if not parts:
                continue
            part, modules = parts[0]
            count = sum(len(modules) for _, modules in parts)
            say_once(
                f"{model.name}: no records from {count} modules (for example {modules[-1]!r}) "
                f"inside compiled {part or model.name!r}: it was compiled before recording began. "
                "Start recording before its first call, or call torch._dynamo.reset()"
            )
