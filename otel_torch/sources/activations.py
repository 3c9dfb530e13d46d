"""What the numbers did: outputs, inputs, gradients and parameters of the selected modules become
records.

Statistics are taken the moment a tensor exists, because what comes next may change it in place;
they stay on its device and are read once a step.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from otel_torch import torch_private
from otel_torch.console import say, say_once
from otel_torch.records import FINGERPRINTS, Place, Record, Statistic
from otel_torch.session import Session
from otel_torch.settings import PARITY_STATISTICS, Settings
from otel_torch.sources import compiled, modules
from otel_torch.sources.calls import StepCalls
from otel_torch.sources.copies import can_write_tensors, copy_of
from otel_torch.sources.events import RunEvents
from otel_torch.sources.hooks import ForwardHook, ModuleHookManager, remove_hooks
from otel_torch.sources.identity import Identity, IdentityRegistry
from otel_torch.sources.module_names import class_name
from otel_torch.sources.modules import Model, ModuleSite
from otel_torch.sources.source import Source
from otel_torch.sources.steps import ForwardContext
from otel_torch.sources.values import argument_name, argument_names, walk, walk_inputs
from otel_torch.statistics import cpu_kernel
from otel_torch.statistics.measure import Measurement, measure, prepare_devices
from otel_torch.statistics.read_rows import RowTransfer
from otel_torch.statistics.table import columns_for, derive

_HOOK = "otel_torch.activations"
# elements up to which measuring a tensor of a CPU takes less than knowing it again
_SMALL = 2**15


@dataclass(slots=True)
class _Call:
    """One call of a module: what the records of its tensors have in common.

    entered, left: when, in the order of all calls; None where nobody told. parent: when the call
    was entered in which this one was made. taken: what entered. recording: whether its tensors are
    recorded.
    """

    model: str
    module: str
    step: int
    call: int
    loop: int
    phase: str
    branch: str | None
    recording: bool = True
    cls: str = ""
    entered: int | None = None
    left: int | None = None
    parent: int | None = None
    depth: int = 0
    taken: frozenset[Identity] = frozenset()


class _Open(threading.local):
    """The calls that this thread is in, outermost first; only where inputs are recorded."""

    def __init__(self) -> None:
        self.calls: list[tuple[ModuleSite, _Call]] = []


@dataclass(slots=True)
class _Seen:
    """A measured tensor whose numbers are still on its device."""

    call: _Call
    tensor: str
    measured: Measurement
    time_ns: int
    copy: torch.Tensor | None = None
    identity: Identity | None = None
    argument: str | None = None

    def place(self) -> Place | None:
        """Where the tensor stands among all others, which only a recording for comparison says."""
        identity, call = self.identity, self.call
        if identity is None or identity.number is None:
            return None
        storage = None if identity.storage is None else identity.storage.number
        shard = None if self.measured.shard is None else self.measured.shard._asdict()
        return Place(
            call.cls,
            self.argument,
            identity.number,
            storage,
            (call.entered, call.left),
            call.parent,
            shard,
        )

    def as_record(self, stats: dict[str, Statistic]) -> Record:
        call = self.call
        return Record(
            call.module,
            self.tensor,
            call.step,
            call.call,
            call.loop,
            call.model,
            call.phase,
            call.branch,
            stats,
            self.time_ns,
            None if self.copy is None else [self.copy.cpu()],
            None if self.identity is None else self.place(),
        )


class _Observer(ForwardHook):
    """Sees the outputs of one module."""

    __slots__ = ("_activations", "_number", "_site")

    def __init__(self, activations: Activations, site: ModuleSite) -> None:
        self._activations = activations
        self._site = site
        self._number = compiled.site_tensor(site, activations)

    @classmethod
    def name(cls) -> str:
        return _HOOK

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        if torch.compiler.is_compiling():
            compiled.observe_outputs(self._number, output)
        else:
            self._activations.left(self._site, output)
        return output


class _InputObserver(_Observer):
    """Sees the inputs of one module too."""

    __slots__ = ()

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if torch.compiler.is_compiling():
            compiled.observe_inputs(self._number, args, kwargs)
        else:
            self._activations.entered(self._site, args, kwargs)
        return args, kwargs


class TensorReader:
    """Reads measured tensors back to the host and makes records of them.

    Made before the recorder, which calls `read`, and shared with `Activations`, which measures.
    """

    def __init__(self, settings: Settings) -> None:
        self.parity = "parity" in settings.capture
        required = PARITY_STATISTICS if self.parity else ()
        self.stats = tuple(dict.fromkeys((*settings.stats, *required)))
        self.identities = IdentityRegistry()

    def read(self, pending: list[_Seen]) -> _Reading:
        """Start copying the measurements to the host, all tensors of a device at once."""
        reading = _Reading(self, pending)
        self.identities.end_step()
        return reading

    def as_record(self, seen: _Seen, row: Sequence[float] | None) -> Record:
        """Return the record of a tensor from its row of numbers."""
        identity = seen.identity
        if identity is not None and not self.identities.assign_number(identity, seen.measured, row):
            # only the first record of a tensor has its sketches
            names = tuple(name for name in self.stats if name not in FINGERPRINTS)
        elif seen.call.phase == "attach" and self.parity:
            names = (*self.stats, "row_sketch")
        else:
            names = self.stats
        return seen.as_record(derive(names, row, seen.measured))


class Activations(Source):
    """Attaches to the selected modules and measures what passes. Nothing in here raises into a
    forward.
    """

    def __init__(self, session: Session, reader: TensorReader, events: RunEvents) -> None:
        settings = session.settings
        cpu_kernel.choose(settings.kernel)
        self._settings = settings
        self._recorder = session.recorder
        self._parity = reader.parity
        self._primitives = columns_for(reader.stats)
        self._identities = reader.identities
        self._order = itertools.count()
        self._open = _Open()
        self._arguments: Any = (
            WeakIdKeyDictionary()
        )  # the parameters of a module's forward, by module
        self._in_graphs: dict[
            tuple[str, str], _Call
        ] = {}  # by model and module: the call that a compiled program is in
        self.keeps_tensors = settings.tensors is not None and can_write_tensors()
        self._inputs = "inputs" in settings.capture
        self._outputs = "outputs" in settings.capture
        self._gradients = "gradients" in settings.capture
        self._parameters = "parameters" in settings.capture
        self._attached: Any = WeakIdKeyDictionary()
        self._on_leaves: dict[
            tuple[str, str], tuple[tuple[int, int], dict[tuple[int, str], _GradientHook]]
        ] = {}
        self._unguard: Callable[[], None] | None = None
        self._unproven: list[Model] = []
        self._matched = 0
        self._compiled_call = events.compiled_call
        events.model_starting.append(self.record_parameters)
        events.gradients_ready.append(self.record_parameter_gradients)
        events.forward_ended.append(self.report_silent_parts)

    def install(self) -> None:
        """Have the compiler recompile modules that get hooks."""
        if self._settings.activations:
            self._unguard = compiled.guard_hooks()

    # -- attaching
    # ----------------------------------------------------------------------------------------------

    def attach(self, model: Model, sites: list[ModuleSite]) -> None:
        """Put a hook on every selected module of `sites`; a selection that matches nothing says
        so.
        """
        settings = self._settings
        if settings.models is not None and not settings.models.search(model.name):
            return
        chosen = self.chosen(model, sites)
        hook = _InputObserver if self._inputs else _Observer
        hooked = 0
        for site in chosen:
            module = site.module()
            if module is None or not (self._outputs or self._inputs or self._gradients):
                continue
            try:
                ModuleHookManager.get_from_or_default(module).append_forward_hook(hook(self, site))
                self._attached[module] = True
                hooked += 1
            except Exception as error:
                say_once(
                    f"{model.name}: {type(module).__name__} takes no hook and is not recorded ({type(error).__name__}: {error})"
                )
        self._matched += len(chosen)
        if hooked:
            self._unproven.append(model)
            root = model.root()
            prepare_devices(() if root is None else root.parameters(), self._primitives)
        if not chosen and not any(
            self.selects(name) for site in model.sites.values() for name, _ in site.names
        ):
            example = next((name for site in reversed(sites) for name, _ in site.names if name), "")
            say(
                f"no module of {model.name} is selected ({len(sites)} modules, for example {example!r}); "
                "see OTEL_TORCH_MODULES and OTEL_TORCH_EXCLUDE"
            )
        if hooked and any(isinstance(site.module(), nn.TransformerEncoderLayer) for site in chosen):
            say_once(
                f"{model.name}: torch leaves the fused path of TransformerEncoderLayer where a hook is present; "
                "results can differ by rounding"
            )

    def chosen(self, model: Model, sites: list[ModuleSite]) -> list[ModuleSite]:
        """Those of a model's sites that OTEL_TORCH_MODELS, OTEL_TORCH_MODULES and
        OTEL_TORCH_EXCLUDE select.
        """
        if self._settings.models is not None and not self._settings.models.search(model.name):
            return []
        return [site for site in sites if any(self.selects(name) for name, _ in site.names)]

    def selects(self, name: str) -> bool:
        """Whether a canonical module name is selected by OTEL_TORCH_MODULES and
        OTEL_TORCH_EXCLUDE.
        """
        return selects(self._settings, name)

    def observes(self, module: nn.Module) -> bool:
        """Whether the calls of a module are seen."""
        return module in self._attached

    def uninstall(self) -> None:
        """Remove every hook."""
        remove_hooks(self._attached, _HOOK)
        self._attached.clear()
        for _, hooks in self._on_leaves.values():
            for gradient_hook in hooks.values():
                gradient_hook.remove()
        self._on_leaves.clear()
        if self._unguard is not None:
            self._unguard()

    def finish(self) -> None:
        """At the end: a run of models that recorded nothing has probably a typing mistake in its
        selection.
        """
        self.report_silent_parts()
        if not self._matched and self._settings.models is not None:
            say(
                f"OTEL_TORCH_MODELS={self._settings.models.pattern!r} selects none of the models that ran"
            )

    def report_silent_parts(self) -> None:
        """After a model's first forward: modules in a graph that was compiled before they had hooks
        never call them.
        """
        for model in [model for model in self._unproven if model.completed]:
            self._unproven.remove(model)
            parts = compiled.silent_parts(
                model, lambda site: bool(site.names) and site.module() in self._attached
            )
            if parts:
                (name, inside), modules = parts[0], sum(len(inside) for _, inside in parts)
                say_once(
                    f"{model.name}: nothing came from {modules} modules (for example {inside[-1]!r}) inside compiled "
                    f"{name or model.name!r}: it was compiled before recording began. "
                    "Begin before its first call, or call torch._dynamo.reset()"
                )

    # -- calls
    # ----------------------------------------------------------------------------------------------

    def entered(self, site: ModuleSite, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module is about to run on these arguments."""
        try:
            call = self._begin(site)
            if call is None:
                return
            self._enter(site, call)
            if call.recording:
                tensors = walk_inputs(args, kwargs)
                self._add(call, tensors, self._names_of_arguments(site) if self._parity else ())
        except Exception as error:
            self._failed(site.model.name, error)

    def left(self, site: ModuleSite, output: Any) -> None:
        """A module has returned this output."""
        try:
            if not self._inputs:
                call = self._begin(site)
            elif (moment := site.model.forward_context) is not None and moment.recording:
                call = self._leave(site)
            else:
                return  # it was counted when it was entered
            if call is None or not call.recording:
                return
            tensors = walk(output, "out")
            if self._outputs:
                self._add(call, tensors)
            if self._gradients and torch.is_grad_enabled():
                self._watch_gradients(call, tensors)
        except Exception as error:
            self._failed(site.model.name, error)

    def current_call(self, site: ModuleSite) -> _Call | None:
        """The call of a site that this thread is in; None where it is not recorded."""
        if self._inputs:
            innermost, call = self._open.calls[-1] if self._open.calls else (None, None)
            return call if innermost is site and call is not None and call.recording else None
        moment = site.model.forward_context
        if moment is None or site.module() not in self._attached:
            return None
        so_far = self._calls_of(site.model, moment)[1].next_number(site.name)
        call = self._begin(site, so_far)  # its observer counts it when it ends
        return call if call is not None and call.recording else None

    def recorder_for(self, site: ModuleSite) -> Callable[[str, torch.Tensor], None] | None:
        """What records a tensor, with its label, that is made inside the call of a site that is
        going on; None where that is not recorded. Modules tell which tensors are one: such a tensor
        is one by itself.
        """
        call = self.current_call(site)
        return (
            None
            if call is None
            else lambda label, tensor: self._add(call, [(label, tensor)], known=False)
        )

    def _enter(self, site: ModuleSite, call: _Call) -> None:
        calls, call.depth = self._open.calls, len(modules.call_stack())
        while calls and calls[-1][1].depth >= call.depth:
            calls.pop()  # that one's forward raised
        if self._parity:
            call.entered, call.cls = next(self._order), self._class_of(site)
            # of another model's forward too: a pipeline's tower may be called inside
            call.parent = calls[-1][1].entered if calls else None
        calls.append((site, call))

    def _leave(self, site: ModuleSite) -> _Call | None:
        calls = self._open.calls
        for depth in reversed(range(len(calls))):
            if calls[depth][0] is site:
                call = calls[depth][1]
                del calls[depth:]  # what is above it has raised
                if self._parity:
                    call.left = next(self._order)
                return call
        return self._begin(site)  # it was hooked while it ran

    @staticmethod
    def _class_of(site: ModuleSite) -> str:
        module = site.module()
        return "" if module is None else class_name(module)

    def _names_of_arguments(self, site: ModuleSite) -> list[str]:
        module = site.module()
        if module is None:
            return []
        names: list[str] | None = self._arguments.get(module)
        if names is None:
            names = self._arguments[module] = argument_names(module)
        return names

    def on_compiled_tensors(
        self,
        site: ModuleSite,
        tensors: list[tuple[str, torch.Tensor]],
        *,
        entering: bool,
        differentiable: bool,
    ) -> None:
        """A compiled program hands over the tensors of a call: those that enter it, or those that
        leave.
        """
        try:
            model, place = site.model, (site.model.name, site.name)
            if differentiable and self._gradients:
                say_once(
                    f"{model.name}: gradients inside compiled code are not recorded; TORCHDYNAMO_DISABLE=1 runs it eagerly"
                )
            begins = entering or not self._inputs
            call = None if begins else self._in_graphs.get(place)
            if begins:
                for notify in self._compiled_call:
                    notify(site)
            elif call is not None and self._parity:
                call.left = next(self._order)
            if call is None:
                call = self._begin(site, None if begins else self._latest(site))
                if call is None:
                    self._in_graphs.pop(place, None)
                    return
                if self._inputs:
                    self._in_graphs[place] = call
                if self._parity:
                    call.cls, call.entered, call.parent = (
                        self._class_of(site),
                        next(self._order),
                        self._holder_in_graph(call),
                    )
            if call.recording and tensors and (self._outputs or entering):
                # a compiled program uses memory again as it likes: there no tensor is known by it
                self._add(
                    call, tensors, self._names_of_arguments(site) if entering else None, known=False
                )
        except Exception as error:
            self._failed(site.model.name, error)

    def _holder_in_graph(self, call: _Call) -> int | None:
        """The enclosing call, by names: a compiler may change the order in which a graph tells of
        its calls.
        """
        name = call.module
        while name:
            name = name.rpartition(".")[0]
            holder = self._in_graphs.get((call.model, name))
            if holder is not None and holder.left is None:
                return holder.entered
        return self._open.calls[-1][1].entered if self._open.calls else None

    def _latest(self, site: ModuleSite) -> int:
        moment = site.model.forward_context
        if moment is None:
            return 0
        return self._calls_of(site.model, moment)[1].next_number(site.name) - 1

    def record_parameters(self, model: Model) -> None:
        """Record the parameters of a model, once: right before its first forward, when its weights
        are loaded.
        """
        if not self._parameters or (
            self._settings.models is not None and not self._settings.models.search(model.name)
        ):
            return
        for name, module in self._selected(model):
            call = _Call(model.name, name, 0, 0, 0, "attach", None, cls=class_name(module))
            self._add(
                call,
                [
                    (f"param.{key}", tensor)
                    for key, tensor in module._parameters.items()
                    if tensor is not None
                ],
            )
            if self._parity:  # a port may keep as a parameter what its original keeps as a buffer
                self._add(
                    call,
                    [
                        (f"buffer.{key}", tensor)
                        for key, tensor in module._buffers.items()
                        if tensor is not None
                    ],
                )

    def record_parameter_gradients(
        self, model: Model, held: frozenset[int], step: int, loop: int
    ) -> None:
        """Record the gradients with which an optimizer is about to step, of the parameters that it
        holds.
        """
        if not (self._parameters and self._gradients) or step not in self._settings.steps:
            return
        calls = model.calls.of("parameters", loop, step)
        for name, module in self._selected(model):
            for key, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in held and parameter.grad is not None:
                    number = model.calls.count(calls, f"{name}.{key}")  # two optimizers may hold it
                    call = _Call(model.name, name, step, number, loop, "backward", None)
                    self._add(call, [(f"param_grad.{key}", parameter.grad)])

    def _selected(self, model: Model) -> Iterator[tuple[str, nn.Module]]:
        for site in list(model.sites.values()):
            module = site.module()
            if module is not None and site.names and self.selects(site.names[0][0]):
                yield site.names[0][0], module

    # -- records
    # ----------------------------------------------------------------------------------------------

    @staticmethod
    def _calls_of(model: Model, moment: ForwardContext) -> tuple[str, StepCalls]:
        """The phase of a call that is made now, and what is counted in it."""
        if torch_private.graph_task_id() == -1:
            return moment.phase, moment.calls
        return "recompute", model.calls.of("recompute", moment.loop, moment.step)

    def _begin(self, site: ModuleSite, number: int | None = None) -> _Call | None:
        """The call of a site that is beginning (or, with `number`, going on); None where the step
        is not recorded.
        """
        model = site.model
        moment = model.forward_context
        if moment is None:
            return None
        phase, calls = self._calls_of(model, moment)
        name = site.name
        if number is None:
            number = model.calls.count(calls, name)
        if not moment.recording:
            return None
        recording = len(site.names) == 1 or self.selects(name)
        return _Call(
            model.name, name, moment.step, number, moment.loop, phase, moment.branch, recording
        )

    def _add(
        self,
        call: _Call,
        tensors: Iterable[tuple[str, torch.Tensor]],
        arguments: Sequence[str] | None = None,
        known: bool = True,
    ) -> None:
        """Measure the tensors of a call. arguments: of tensors that enter, what forward's signature
        calls its parameters.
        """
        now = time.time_ns()
        primitives = (
            (*self._primitives, "row_sketch")
            if call.phase == "attach" and self._parity
            else self._primitives
        )
        for label, tensor in tensors:
            try:
                identity, argument = None, None
                if self._parity or (self._inputs and _is_worth_knowing(tensor)):
                    identity = self._identities.of(tensor) if known else Identity(None, True)
                    if arguments is not None:
                        argument = argument_name(label, arguments)
                        call.taken |= {identity}
                    elif identity in call.taken:
                        identity.measurement = (
                            None  # the module may have changed it with a kernel of its own
                        )
                measured = self._measure(tensor, primitives, identity)
                copy = self._copy(tensor) if self.keeps_tensors else None
                self._recorder.add(
                    _Seen(
                        call,
                        label,
                        measured,
                        now,
                        copy,
                        identity if self._parity else None,
                        argument,
                    )
                )
            except Exception as error:
                self._failed(call.model, error)

    @staticmethod
    def _measure(
        tensor: torch.Tensor, primitives: tuple[str, ...], identity: Identity | None
    ) -> Measurement:
        """The tensor's numbers, taken once where it is known to be the same."""
        if identity is None or not identity.counts_changes:
            return measure(tensor, primitives)
        if identity.measurement is None:
            identity.measurement = measure(tensor, primitives)
        return identity.measurement

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor | None:
        copy = copy_of(tensor)
        if copy is None:
            self._recorder.losses.count("tensor", "unreadable")
        return copy

    @torch_private.unseen_by_function_modes
    def _watch_gradients(self, call: _Call, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Tensor-level hooks: they work for dicts and dataclasses, and where the next module
        changes its input in place.
        """
        backward = _Call(
            call.model,
            call.module,
            call.step,
            call.call,
            call.loop,
            "backward",
            call.branch,
            cls=call.cls,
        )
        for label, tensor in tensors:
            if tensor.requires_grad:
                hook = _GradientHook(self, backward, "grad" + label.removeprefix("out"))
                if not tensor.is_leaf:
                    tensor.register_hook(hook)  # type: ignore[no-untyped-call]
                elif hook.key not in self._on_leaves_of(
                    call
                ):  # a recomputation hands the leaf out once more
                    hook.remove = tensor.register_hook(hook).remove  # type: ignore[no-untyped-call]
                    self._on_leaves_of(call)[hook.key] = hook

    def _on_leaves_of(self, call: _Call) -> dict[tuple[int, str], _GradientHook]:
        """The hooks on leaves (a parameter that its module returns), which outlive the graph: those
        of this step.
        """
        step, hooks = self._on_leaves.get((call.model, call.module), (None, {}))
        if step != (call.loop, call.step):
            for hook in hooks.values():
                hook.remove()
            hooks = {}
            self._on_leaves[call.model, call.module] = (call.loop, call.step), hooks
        return hooks

    def _failed(self, model: str, error: Exception) -> None:
        self._recorder.losses.count("record", "error")
        say_once(f"{model}: a tensor was not recorded: {type(error).__name__}: {error}")


def _is_worth_knowing(tensor: torch.Tensor) -> bool:
    """Whether to measure a tensor again would take longer than to find out that it has been
    measured.
    """
    return not (torch_private.is_plain_memory(tensor) and tensor.numel() < _SMALL)


class _GradientHook:
    """Records a tensor's gradient. A further backward pass through the same call gives `grad#2`,
    `grad#3`.
    """

    def __init__(self, activations: Activations, call: _Call, label: str) -> None:
        self.call = call
        self.key = call.call, label
        self.fired = 0
        self.remove: Callable[[], None] = lambda: None
        self._activations, self._label = activations, label

    @torch_private.keep_out_of_frames
    def __call__(self, gradient: torch.Tensor) -> None:
        if torch.compiler.is_compiling():  # compiled autograd
            compiled.report_compiled_gradient()
            return
        self.fired += 1
        self.remove()
        label = self._label if self.fired == 1 else f"{self._label}#{self.fired}"
        self._activations._add(self.call, [(label, gradient)])


class _Reading:
    """The numbers of tensors on their way to the host; their records are made in the order in which
    they were seen.
    """

    def __init__(self, reader: TensorReader, pending: list[_Seen]) -> None:
        self._reader, self._pending = reader, pending
        self._rows = RowTransfer([seen.measured for seen in pending])
        self.ready = self._rows.is_ready

    def records(self) -> list[Record]:
        as_record = self._reader.as_record
        return [
            as_record(seen, row)
            for seen, row in zip(self._pending, self._rows.fetch(), strict=True)
        ]


def selects(settings: Settings, name: str) -> bool:
    """Whether the settings select a module of that canonical name."""
    return (settings.modules is None or bool(settings.modules.search(name))) and not (
        settings.exclude is not None and settings.exclude.search(name)
    )
