"""Finds every model that runs, with its root and the name of each of its modules.

Torch reports every registration of a module in another, which leads from a module up to its root.
Every call goes through `nn.Module.__call__`, where the first call of an unknown module is seen. A
global forward hook would see that call too, but it breaks every compiled graph.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from otel_torch import torch_private
from otel_torch.process.console import say_once
from otel_torch.process.import_hooks import after_import, catch_up
from otel_torch.recorder import Recorder
from otel_torch.records import Scope
from otel_torch.sources.calls import CallCounter
from otel_torch.sources.containers import Containers
from otel_torch.sources.direct_forwards import DirectForwards
from otel_torch.sources.events import RunEvents
from otel_torch.sources.forwards import ForwardContext, Inputs
from otel_torch.sources.hooks import (
    TorchHook,
    abandon_session_hooks,
    enter_session_hooks,
    keep_out_of_copies,
    leave_session_hooks,
)
from otel_torch.sources.model_attributes import attributes_holding
from otel_torch.sources.model_table import ModelTable, is_leaf, is_stateless
from otel_torch.sources.module_names import all_modules, all_parameters, core, named_modules
from otel_torch.sources.recursion import (
    DEEP,
    has_only_our_hooks,
    is_limit_near,
    is_limit_reached_soon,
)
from otel_torch.sources.source import Source
from otel_torch.sources.steps import StepTracker
from otel_torch.sources.training_clock import TrainingClock
from otel_torch.sources.uncalled_roots import RootMethodRun

# of so many models of a class the attributes that hold them are looked up, which walks the heap
_LOOKED_UP_MAX = 8


class Model:
    """A root module, which no other module holds, with its modules and forwards.

    Attributes:
        name: the root's class; `Name#2` for the second instance that runs.
        size: how many modules records can name.
        completed: how many outermost forwards have returned.
        order: how many models were found before it.
        held_as: the attributes by which the program holds the root.
        sites: the modules by their id, wrappers included.
    """

    def __init__(self, root: nn.Module, name: str) -> None:
        self.root = weakref.ref(root)
        self.name = name
        self.stateless = is_stateless(root)
        self.leaf = is_leaf(root)
        self.order = 0
        self.completed = 0
        self.size = 0
        self.held_as: list[str] = []
        self.started = False
        self.sites: dict[int, ModuleSite] = {}
        self.method_run = RootMethodRun(root)
        self.calls = CallCounter()
        self.clock = TrainingClock()
        self._contexts = threading.local()
        self._newest: ForwardContext | None = None
        self._parameters = _Parameters(frozenset(), 0)

    @property
    def forward_context(self) -> ForwardContext | None:
        """The newest outermost forward of this thread.

        A thread that began none, such as autograd's, gets the newest of any thread.
        """
        return getattr(self._contexts, "newest", None) or self._newest

    @forward_context.setter
    def forward_context(self, context: ForwardContext) -> None:
        self._contexts.newest = self._newest = context

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Return the root's parameters that take gradients."""
        root = self.root()
        parameters = () if root is None else all_parameters(root)
        return [parameter for parameter in parameters if parameter.requires_grad]

    def is_in_training_mode(self) -> bool:
        """Return whether `train()`, and not `eval()`, was called last on the root."""
        root = self.root()
        return root is None or root.training

    def parameter_ids(self) -> frozenset[int]:
        """Return the ids of the root's parameters, by which optimizers are matched with models.

        `functional_call` puts other tensors in their place while the model runs.
        """
        root = self.root()
        if root is not None and not self._parameters.are_current(len(self.sites)):
            parameters = list(all_parameters(root))
            ids = frozenset(map(id, parameters))
            if not all(isinstance(parameter, nn.Parameter) for parameter in parameters):
                return ids
            self._parameters = _Parameters(ids, len(self.sites), root)
        return self._parameters.ids

    def parameter_ids_of(self, module: nn.Module) -> frozenset[int]:
        """Return the ids of the parameters of a module of this model."""
        if core(module) is self.root():
            return self.parameter_ids()
        return frozenset(map(id, all_parameters(module)))


class _Parameters:
    """The parameters of a root, as they were when it had so many modules."""

    def __init__(self, ids: frozenset[int], modules: int, root: nn.Module | None = None) -> None:
        self.ids = ids
        self._modules = modules
        places = (
            (weakref.ref(module), key)
            for module in (() if root is None else all_modules(root))
            for key, parameter in module._parameters.items()
            if parameter is not None
        )
        self._first = next(places, None)

    def are_current(self, modules: int) -> bool:
        """Return whether the root still has them: the first stands for all."""
        if self._first is None or self._modules != modules:
            return False
        holder, key = self._first[0](), self._first[1]
        return holder is not None and id(holder._parameters.get(key)) in self.ids


class ModuleSite:
    """One module of one model: the place that records name.

    `names` has one (canonical name, id of the containing module) per place at which the module is
    registered, and is empty for a wrapper. `forget(key)` is called when the module is deleted.
    """

    __slots__ = ("__weakref__", "key", "model", "module", "names", "owners")

    def __init__(self, model: Model, module: nn.Module, forget: Callable[[int], None]) -> None:
        key = id(module)
        self.key = key
        self.model = model
        self.module = weakref.ref(module, lambda _: forget(key))
        self.names: list[tuple[str, int]] = []

    def is_whole(self) -> bool:
        """Return whether the module is its model's root, or holds all of its parameters."""
        module, root = self.module(), self.model.root()
        if module is None or root is None:
            return False
        parameter_ids = self.model.parameter_ids()
        return core(module) is root or (
            bool(parameter_ids) and parameter_ids == frozenset(map(id, all_parameters(module)))
        )

    @property
    def name(self) -> str:
        """The name of the current call: for a shared module, that within the running container."""
        if len(self.names) > 1:
            for enclosing in reversed(_thread.stack):
                for name, container in self.names:
                    if enclosing.key == container:
                        return name
        return self.names[0][0]


class SharedSite(ModuleSite):
    """A module that several models hold: its place in the model whose forward is running.

    A site becomes one when a second model is found to hold the module, because the hooks of the
    module have the site.

    Attributes:
        owners: the place in each model, in the order in which the models were found.
    """

    __slots__ = ()
    owners: dict[Model, ModuleSite]

    @property
    def running(self) -> ModuleSite:
        """The place of the current call; outside of a call, that in the newest model."""
        for enclosing in reversed(_thread.stack):
            if enclosing.key == self.key:
                return enclosing
        return self.in_forward(_thread.stack) or next(reversed(self.owners.values()))

    def in_forward(self, stack: list[ModuleSite]) -> ModuleSite | None:
        """Return the place in the innermost model of `stack` that holds the module, or None."""
        for enclosing in reversed(stack):
            if (owner := self.owners.get(enclosing.model)) is not None:
                return owner
        return None

    @property
    def model(self) -> Model:  # type: ignore[override]
        """The model whose forward is running."""
        return self.running.model

    @property
    def names(self) -> list[tuple[str, int]]:  # type: ignore[override]
        """The names in that model."""
        return self.running.names

    @property
    def name(self) -> str:
        """The name of the current call in that model."""
        return self.running.name


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.ignores_new_models = False
        self.stack: list[ModuleSite] = []


_thread = _ThreadState()


def call_stack() -> list[ModuleSite]:
    """Return the module calls that this thread is in, outermost first. Not a copy."""
    return _thread.stack


# of the functions that take the place of `nn.Module.__call__`
_call_codes: set[CodeType] = set()


def running_calls() -> Iterator[tuple[ModuleSite, tuple[Any, ...], dict[str, Any]]]:
    """Yield the site, args and kwargs of each module call that this thread is in, innermost first.

    They are read from the frames of the calls, so that keeping them costs a call nothing.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _call_codes:
            variables = frame.f_locals
            if isinstance(site := variables.get("site"), ModuleSite) and site.names:
                yield site, variables["args"], variables["kwargs"]
        frame = frame.f_back


@contextmanager
def unwatched() -> Iterator[None]:
    """Ignore models that this thread calls for the first time in the block, such as `scan`'s."""
    before, _thread.ignores_new_models = _thread.ignores_new_models, True
    try:
        yield
    finally:
        _thread.ignores_new_models = before


class CallRefused(Exception):
    """A module of a model was called in a block of `refused_calls`."""


class _ClosedStack(list[ModuleSite]):
    """A call stack that nothing can be put on: every call of a known module asks for its length."""

    def __len__(self) -> int:
        raise CallRefused


@contextmanager
def refused_calls() -> Iterator[None]:
    """Raise `CallRefused` in calls of the modules of models, and ignore other modules.

    A replay may call what it has copied, but nothing that the program has.
    """
    before, _thread.stack = _thread.stack, _ClosedStack()
    try:
        with unwatched():
            yield
    finally:
        _thread.stack = before


class ModelRegistry(Source):
    """The models of a process, found as they run."""

    def __init__(self, step_tracker: StepTracker, recorder: Recorder, events: RunEvents) -> None:
        self.models = ModelTable()
        # All by id. `sites` leaves out the modules of which only a call shows whose they are: those
        # of several models, and those whose root has got a container since its last forward.
        self.sites: dict[int, ModuleSite] = {}
        self._all_sites: dict[int, ModuleSite] = {}
        self._step_tracker = step_tracker
        self._recorder = recorder
        self._events = events
        self._containers = Containers()
        self._direct_forwards = DirectForwards(_is_in_call, self._run_forward, _run_between_hooks)
        self._lock = threading.RLock()
        self._restore: list[Callable[[], None]] = []
        events.compiled_call.append(self._on_compiled_call)

    # -- watching
    # ----------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Watch registrations and calls, and register the modules that exist already."""
        original_call, original_state = nn.Module.__call__, nn.Module.__setstate__
        sites, thread, watching = self.sites, _thread, [True]
        direct_forwards = self._direct_forwards

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                if watching and torch.compiler.is_dynamo_compiling():
                    torch._dynamo.comptime.comptime(discover_while_compiling)
                return original_call(module, *args, **kwargs)
            if not watching:
                return original_call(module, *args, **kwargs)
            stack = thread.stack
            site = sites.get(id(module))
            if site is None:
                site = self._discover(module, stack)
                if site is None:
                    return original_call(module, *args, **kwargs)
            model = site.model
            if stack and (
                stack[-1].model is model or any(enclosing.model is model for enclosing in stack)
            ):
                if len(stack) >= DEEP and is_limit_near() and has_only_our_hooks(module):
                    self._count_unrecorded(model)
                    return direct_forwards.own_forward(module)(*args, **kwargs)
                stack.append(site)
                try:
                    return original_call(module, *args, **kwargs)
                finally:
                    stack.pop()
            return self._call_outermost(original_call, module, site, args, kwargs)

        def discover_while_compiling(context: Any) -> None:
            """Give a new module its hooks before the compiler looks for them.

            The compiler runs this when it traces the call.
            """
            module = torch_private.local_while_tracing(context, "module")
            if isinstance(module, nn.Module) and id(module) not in sites:
                self._discover(module, [])

        def set_state(module: nn.Module, state: Any) -> None:
            original_state(module, state)  # type: ignore[no-untyped-call]
            self._register_children(module)

        def restore() -> None:
            # If someone else has wrapped `call` meanwhile, it stays and only passes calls through.
            watching.clear()
            if nn.Module.__call__ is call:
                nn.Module.__call__ = original_call  # type: ignore[method-assign]
            if nn.Module.__setstate__ is set_state:
                nn.Module.__setstate__ = original_state  # type: ignore[method-assign]

        _call_codes.update((call.__code__, ModelRegistry._run_forward.__code__))
        torch_private.keep_out_of_frames(call, with_callees=False)
        nn.Module.__call__ = call  # type: ignore[method-assign]
        nn.Module.__setstate__ = set_state  # type: ignore[method-assign]
        self._restore += [
            restore,
            register_module_module_registration_hook(self._register).remove,
            register_module_parameter_registration_hook(self._expect_forwards).remove,
            torch_private.hide_from_torchscript(TorchHook),
            keep_out_of_copies(),
            self._direct_forwards.restore,
            after_import(
                "torch._dynamo.variables.nn_module",
                lambda compiler: torch_private.trace_module_calls(compiler, original_call),
            ),
        ]
        self._direct_forwards.start()
        existing = [item for item in gc.get_objects() if issubclass(type(item), nn.Module)]
        for module in existing:
            self._direct_forwards.expect(module)
            self._register_children(module)

    def uninstall(self) -> None:
        """Stop watching; nothing stays on torch."""
        self._step_tracker.end_pending_forward()
        while self._restore:
            self._restore.pop()()

    def forked(self) -> None:
        """Replace the locks, which another thread of the parent may hold."""
        self._lock = threading.RLock()
        for model in self.models:
            model.calls.forked()

    def _register_children(self, container: nn.Module) -> None:
        """Register what `container` holds already: built before this, copied or unpickled."""
        for name, child in (container.__dict__.get("_modules") or {}).items():
            self._register(container, name, child)

    def _register(self, container: nn.Module, name: str, child: nn.Module | None) -> None:
        # a slice of layers in compiled code makes a container, which nothing outside of it sees
        if child is None or torch.compiler.is_compiling():
            return
        try:
            if self._containers.add(container, child):
                self._contain(child)
                self._direct_forwards.expect(container)
        except TypeError:  # a module without weak references stays without a container
            pass

    def _expect_forwards(self, module: nn.Module, name: str, parameter: object) -> None:
        if not torch.compiler.is_compiling():
            self._direct_forwards.expect(module)

    def _contain(self, child: nn.Module) -> None:
        """Look up the model of each module of a model again, if `child` was its root until now."""
        site = self.sites.get(id(child))
        if site is not None and site.model.root() is core(child):
            with self._lock:
                for key in list(site.model.sites):
                    self.sites.pop(key, None)

    # -- calls
    # ----------------------------------------------------------------------------------------------

    @partial(torch_private.keep_out_of_frames, with_callees=False)
    def _call_outermost(
        self,
        original: Callable[..., Any],
        module: nn.Module,
        site: ModuleSite,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        stack = _thread.stack
        # Autograd, not the program, calls a checkpointed module again: that begins no forward.
        is_recomputation = not stack and torch_private.graph_task_id() != -1
        inputs = Inputs(module, args, kwargs)
        context = None if is_recomputation else self._begin_forward(site, inputs)
        scope = self._open_scope(site.model, context) if context is not None else None
        error: BaseException | None = None
        stack.append(site)
        try:
            return original(module, *args, **kwargs)
        except BaseException as raised:
            error = raised
            raise
        finally:
            stack.pop()
            if context is not None:
                self._end_forward(site.model, context, error, scope)
                self._events.resume_program(error)

    @torch_private.keep_out_of_frames
    def _begin_forward(self, site: ModuleSite, inputs: Inputs) -> ForwardContext | None:
        """Begin a forward of the site's model, or continue a pending one."""
        model, module = site.model, inputs.module
        try:
            catch_up()
            tracker = self._step_tracker
            pending = tracker.pending_forward
            if pending.model is not None and pending.context is not None:
                if self._continues_pending(site, inputs):
                    return pending.context
                tracker.end_pending_forward()
            for notify in self._events.forward_starting:
                notify()
            if not model.started:
                self._start(model)
            model.forward_context = context = tracker.begin_forward(model, inputs)
            for observe in self._events.forward_began:
                observe(model, context, inputs)
            root = model.root()
            if (
                module is not None
                and root is not None
                and core(module) is not root
                and model.method_run.mark()
            ):
                pending.model, pending.context = model, context
                pending.whole_ran = site.is_whole()
            return context
        except Exception as error:
            say_once(f"a forward of {model.name} is not recorded: {type(error).__name__}: {error}")
            return None

    def _continues_pending(self, site: ModuleSite, inputs: Inputs) -> bool:
        """Return whether a call is part of the pending forward of this thread.

        It is if it comes from the same run of a method, unless that run is a loop: a second call of
        the whole model is its next turn, and so is a call after an optimizer has stepped.
        """
        pending = self._step_tracker.pending_forward
        model = pending.model
        if model is not site.model or not model.method_run.is_running():
            return False
        is_whole = site.is_whole()
        if is_whole and pending.whole_ran:
            return False
        pending.whole_ran |= is_whole
        context = pending.context
        return context is not None and self._step_tracker.training.continues(context, model, inputs)

    def _count_unrecorded(self, model: Model) -> None:
        self._recorder.losses.count("record", "recursion")
        say_once(
            f"{model.name}: forwards that nest near Python's recursion limit are not recorded; "
            "sys.setrecursionlimit() raises it"
        )

    def _start(self, model: Model) -> None:
        model.started = True
        number = int(model.name.partition("#")[2] or 1)
        if not model.stateless and number <= _LOOKED_UP_MAX:
            model.held_as = attributes_holding(model.root())
        for notify in self._events.model_starting:
            notify(model)

    @torch_private.keep_out_of_frames
    def _open_scope(self, model: Model, context: ForwardContext) -> Scope | None:
        attributes: dict[str, Any] = {"torch.model": model.name, "torch.phase": context.phase}
        try:
            scope = Scope("forward", "torch.forward", attributes=attributes)
            self._recorder.open(scope)
            return scope
        except Exception as error:
            self._recorder.losses.count("span", "not_opened")
            say_once(f"a forward of {model.name} has no span: {type(error).__name__}: {error}")
            return None

    @torch_private.keep_out_of_frames
    def _end_forward(
        self,
        model: Model,
        context: ForwardContext,
        error: BaseException | None,
        scope: Scope | None,
    ) -> None:
        try:
            if scope is not None:
                self._recorder.close(scope, error)
            if self._step_tracker.pending_forward.context is not context:
                self._step_tracker.end_forward(model, context, error)
            for notify in self._events.forward_ended:
                notify()
        except Exception as raised:
            say_once(
                f"the end of a forward of {model.name} is not recorded: "
                f"{type(raised).__name__}: {raised}"
            )

    def _on_compiled_call(self, site: ModuleSite) -> None:
        """Begin a forward if a compiled graph runs a model whose own call was not observed.

        Such a graph is compiled from a function that calls the model. The forward begins with the
        first module of the graph, and ends before that module runs again.
        """
        model = site.model
        if any(enclosing.model is model for enclosing in _thread.stack):
            return
        pending = self._step_tracker.pending_forward
        if pending.model is model and pending.first_compiled is not site:
            return
        self._step_tracker.end_pending_forward()
        pending.first_compiled = None
        context = self._begin_forward(site, Inputs())
        if context is not None:
            pending.model, pending.context, pending.first_compiled = model, context, site

    @partial(torch_private.keep_out_of_frames, with_callees=False)
    def _run_forward(
        self,
        forward: Callable[..., Any],
        module: nn.Module,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run a forward that was called past `nn.Module.__call__` as a call of its module."""
        stack = _thread.stack
        if torch_private.is_symbolically_traced():
            return forward(module, *args, **kwargs)
        site = self.sites.get(id(module)) or self._discover(module, stack)
        if site is None:
            return forward(module, *args, **kwargs)
        if is_limit_reached_soon(len(stack)):
            self._count_unrecorded(site.model)
            with self._direct_forwards.unwatched(forward):
                return forward(module, *args, **kwargs)
        if not _is_running(site.model):
            between_hooks = partial(_run_between_hooks, forward)
            return self._call_outermost(between_hooks, module, site, args, kwargs)
        stack.append(site)
        try:
            return _run_between_hooks(forward, module, *args, **kwargs)
        finally:
            stack.pop()

    # -- roots
    # ----------------------------------------------------------------------------------------------

    @torch_private.keep_out_of_frames
    def _discover(self, module: nn.Module, stack: list[ModuleSite]) -> ModuleSite | None:
        """Return the site of a module that is called for the first time, and hook its whole model.

        Returns None for glue: a stateless module in no container, created and called inside
        another module's forward (`nn.Softmax(-1)(x)`).
        """
        existing = self._all_sites.get(id(module))
        if isinstance(existing, SharedSite) and (site := existing.in_forward(stack)) is not None:
            return site
        if _thread.ignores_new_models:
            return None
        try:
            with self._lock:
                root = self._containers.choose_root(module)
                if root is module and is_stateless(module) and (stack or _is_fx_graph(module)):
                    return None
                if root is module and (sliced := self._containers.sliced_root(module)) is not None:
                    self._add_model(sliced)
                    if (model := self.models.find(core(sliced))) is not None:
                        site = self.sites[id(module)] = self._make_site(model, module)
                        return site
                if isinstance(existing, SharedSite):
                    for model, site in existing.owners.items():
                        if model.root() is core(root):
                            return site
                return self._add_model(root).sites.get(id(module))
        except Exception as error:
            say_once(f"{type(module).__name__} is not recorded: {type(error).__name__}: {error}")
            return None

    def _add_model(self, outermost: nn.Module) -> Model:
        """Add the modules below `outermost` to its model, which is made if it is new."""
        root = core(outermost)
        model = self.models.find(root)
        if model is None:
            model = Model(root, self.models.unused_name(root))
            self.models.add(model, root)
        new = self._name_modules(model, outermost)
        # The wrappers, which `_name_modules` leaves out: calls pass through them.
        for module in all_modules(outermost):
            if id(module) not in model.sites:
                self._make_site(model, module)
        settled = self._settle(model)
        self._direct_forwards.settle(root, list(all_modules(outermost)))
        if new:
            model.size += len(new)
            for attach in self._events.modules_found:
                attach(model, [self._all_sites[site.key] for site in new])
        # Only now: until the hooks are there, another thread that calls the model waits for the
        # lock.
        self.sites.update(settled)
        for key in settled.keys() - model.sites.keys():  # collected meanwhile; ids are used again
            self.sites.pop(key, None)
            self._all_sites.pop(key, None)
        return model

    def _settle(self, model: Model) -> dict[int, ModuleSite]:
        """Add the sites of a model to all sites; return those that no other model has.

        A model that was deleted, or that has become a part of another one, has none any more.
        """
        settled = {}
        is_over: dict[Model, bool] = {model: False}
        # `list(items())` makes tuples, at which modules may be collected, and change what it lists
        for site in list(model.sites.values()):
            key = site.key
            existing = self._all_sites.setdefault(key, site)
            if existing.__class__ is ModuleSite and existing.model is not model:
                existing = self._make_shared(existing.model, existing)
            if isinstance(existing, SharedSite):
                existing.owners[model] = site
                for owner in list(existing.owners):
                    if owner not in is_over:
                        is_over[owner] = self._is_over(owner)
                    if is_over[owner]:
                        del existing.owners[owner]
                if len(existing.owners) > 1:
                    self.sites.pop(key, None)
                    continue
            settled[key] = site
        return settled

    def _is_over(self, model: Model) -> bool:
        root = model.root()
        return root is None or core(self._containers.root_of(root)) is not root

    def _make_shared(self, model: Model, site: ModuleSite) -> SharedSite:
        """Turn a site into a shared one, and give its model another site in its place."""
        module = site.module()
        assert module is not None
        owner = self._make_site(model, module)
        owner.names = site.names
        site.__class__ = SharedSite
        assert isinstance(site, SharedSite)
        site.owners = {model: owner}
        return site

    def _name_modules(self, model: Model, outermost: nn.Module) -> list[ModuleSite]:
        """Add the canonical names of all modules, and return the sites that are new."""
        named = named_modules(outermost)
        keys = {name: id(module) for name, module in named}
        new: list[ModuleSite] = []
        for name, module in named:
            site = model.sites.get(id(module))
            if site is None:
                site = self._make_site(model, module)
                new.append(site)
            if all(name != existing for existing, _ in site.names):
                site.names.append((name, keys.get(name.rpartition(".")[0], 0)))
        return new

    def _make_site(self, model: Model, module: nn.Module) -> ModuleSite:
        site = ModuleSite(model, module, partial(self._forget, model))
        model.sites[id(module)] = site
        return site

    def _forget(self, model: Model, key: int) -> None:
        if not self._restore:
            return  # uninstalled: the interpreter may be ending, and globals are None already
        self.sites.pop(key, None)
        self._all_sites.pop(key, None)
        model.sites.pop(key, None)
        if self.models.module_gone(model, key):  # what is left of it may be part of another model
            for left in list(model.sites):
                self.sites.pop(left, None)


def _is_in_call(module: nn.Module) -> bool:
    """Return whether the innermost call that this thread is in is that of a module.

    It has come to forward then, or forward to that of a base class.
    """
    stack = _thread.stack
    return bool(stack) and stack[-1].key == id(module)


torch_private.keep_out_of_frames(_is_in_call)


@torch_private.keep_out_of_frames
def _is_running(model: Model) -> bool:
    return any(enclosing.model is model for enclosing in _thread.stack)


@partial(torch_private.keep_out_of_frames, with_callees=False)
def _run_between_hooks(
    forward: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    args, kwargs = enter_session_hooks(module, args, kwargs)
    try:
        output = forward(module, *args, **kwargs)
    except BaseException:
        abandon_session_hooks(module)
        raise
    return leave_session_hooks(module, output)


def _is_fx_graph(module: nn.Module) -> bool:
    """Return whether a compiler made this module: a graph that gets its parameters as inputs.

    Only stateless modules are asked. A graph that the program traces itself keeps its parameters.
    """
    fx = sys.modules.get("torch.fx.graph_module")
    return fx is not None and isinstance(module, fx.GraphModule)
