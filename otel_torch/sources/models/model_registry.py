"""Finds every model that runs, with its root and the name of each of its modules.

Torch reports every registration of a module in another, which leads from a module up to its root.
Every call goes through `nn.Module.__call__`, where the first call of an unknown module is seen. A
global forward hook would see that call too, but it breaks every compiled graph.
"""

from __future__ import annotations

import gc
import itertools
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
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
from otel_torch.sources.events import RunEvents
from otel_torch.sources.models.model import Model, ModuleSite, SharedSite
from otel_torch.sources.models.model_table import ModelTable, is_leaf, is_stateless
from otel_torch.sources.modules.call_stack import call_codes, is_in_call, is_running, thread_state
from otel_torch.sources.modules.containers import Containers
from otel_torch.sources.modules.direct_forwards import DirectForwards
from otel_torch.sources.modules.hidden_hooks import HiddenHooks
from otel_torch.sources.modules.hooks import (
    TorchHook,
    keep_out_of_copies,
    run_between_session_hooks,
)
from otel_torch.sources.modules.model_attributes import attributes_holding
from otel_torch.sources.modules.module_call import LEFT_TO_TORCH
from otel_torch.sources.modules.module_names import (
    all_modules,
    core,
    named_modules,
    part_finders,
    parts,
)
from otel_torch.sources.modules.plain_parts import PlainParts
from otel_torch.sources.modules.recursion import (
    DEEP,
    has_only_our_hooks,
    is_limit_near,
    nest_too_deeply,
)
from otel_torch.sources.source import Source
from otel_torch.sources.steps.forwards import ForwardContext, Inputs
from otel_torch.sources.steps.step_clocks import StepTracker

# of so many models of a class the attributes that hold them are looked up, which walks the heap
_LOOKED_UP_MAX = 8


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
        self._is_heap_hidden = False
        self._plain_parts = PlainParts()
        self._hidden_hooks = HiddenHooks()
        self._direct_forwards = DirectForwards(
            is_in_call, self._run_forward, run_between_session_hooks, self._discover_while_compiling
        )
        self._lock = threading.RLock()
        self._restore: list[Callable[[], None]] = []
        events.compiled_call.append(self._on_compiled_call)

    # -- watching

    def install(self) -> None:
        """Watch registrations and calls, and register the modules that exist already."""
        original_call, original_state = nn.Module.__call__, nn.Module.__setstate__
        original_set: Callable[..., None] = nn.Module.__setattr__
        sites, thread, watching = self.sites, thread_state, [True]
        direct_forwards = self._direct_forwards
        # a variable of the closure: a module's attribute takes a lookup more in every call
        is_compiling = torch.compiler.is_compiling

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
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
                    if (call_directly := site.call) is not None:
                        output = call_directly(module, args, kwargs)
                        if output is not LEFT_TO_TORCH:
                            return output
                    return original_call(module, *args, **kwargs)
                finally:
                    stack.pop()
            return self._call_outermost(original_call, module, site, args, kwargs)

        def discover_while_compiling(context: Any) -> None:
            """Is run by the compiler when it traces the call."""
            self._discover_while_compiling(torch_private.local_while_tracing(context, "module"))

        def set_state(module: nn.Module, state: Any) -> None:
            original_state(module, state)  # type: ignore[no-untyped-call]
            self._register_children(module)

        def set_attribute(module: nn.Module, name: str, value: Any) -> None:
            original_set(module, name, value)
            if name == "forward" and watching and not torch.compiler.is_compiling():
                self._expect_forward(module)

        def restore() -> None:
            # If someone else has wrapped `call` meanwhile, it stays and only passes calls through.
            watching.clear()
            if nn.Module.__call__ is call:
                nn.Module.__call__ = original_call  # type: ignore[method-assign]
            if nn.Module.__setstate__ is set_state:
                nn.Module.__setstate__ = original_state  # type: ignore[method-assign]
            if nn.Module.__setattr__ is set_attribute:
                nn.Module.__setattr__ = original_set  # type: ignore[method-assign]

        call_codes.update((call.__code__, ModelRegistry._run_forward.__code__))
        torch_private.keep_out_of_frames(call, with_callees=False)
        nn.Module.__call__ = call  # type: ignore[method-assign]
        nn.Module.__setstate__ = set_state  # type: ignore[method-assign]
        nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign, assignment]
        self._restore += [
            restore,
            register_module_module_registration_hook(self._register).remove,
            register_module_parameter_registration_hook(self._expect_forwards).remove,
            torch_private.hide_from_torchscript(TorchHook),
            keep_out_of_copies(),
            self._hidden_hooks.restore,
            self._direct_forwards.restore,
            after_import(
                "torch._dynamo.variables.nn_module",
                lambda compiler: torch_private.trace_module_calls(compiler, original_call),
            ),
        ]
        self._hidden_hooks.start()
        self._direct_forwards.start()
        objects = gc.get_objects()
        # `gc.get_freeze_count` would visit each frozen object: 0.1 s for a million
        self._is_heap_hidden = id(nn.Module) not in map(id, objects)
        existing = [item for item in objects if issubclass(type(item), nn.Module)]
        del objects
        for module in existing:
            self._expect_forward(module)
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
                self._expect_forward(container)
        except TypeError:  # a module without weak references stays without a container
            pass

    def _expect_forwards(self, module: nn.Module, name: str, parameter: object) -> None:
        if not torch.compiler.is_compiling():
            self._expect_forward(module)

    def _expect_forward(self, module: nn.Module) -> None:
        # in this order: what the code is that a forward keeps, the former decides
        self._hidden_hooks.hide_from(module)
        self._direct_forwards.expect(module)

    def _contain(self, child: nn.Module) -> None:
        """Look up the model of each module of a model again, if `child` was its root until now."""
        site = self.sites.get(id(child))
        if site is not None and site.model.root() is core(child):
            with self._lock:
                for key in list(site.model.sites):
                    self.sites.pop(key, None)

    # -- calls

    @partial(torch_private.keep_out_of_frames, with_callees=False)
    def _call_outermost(
        self,
        original: Callable[..., Any],
        module: nn.Module,
        site: ModuleSite,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        stack = thread_state.stack
        if stack and is_stateless(module):
            part = self._discover(module, stack)
            if part is not None and is_running(part.model):
                return self._call_inside(original, module, part, args, kwargs)
        # Autograd, not the program, calls a checkpointed module again: that begins no forward.
        is_recomputation = not stack and torch_private.graph_task_id() != -1
        inputs = Inputs(module, args, kwargs)
        context = None if is_recomputation else self._begin_forward(site, inputs)
        scope = self._open_scope(site.model, context) if context is not None else None
        output, error = None, None
        stack.append(site)
        try:
            output = original(module, *args, **kwargs)
            return output
        except BaseException as raised:
            error = raised
            raise
        finally:
            stack.pop()
            if context is not None:
                self._end_forward(site.model, context, output, error, scope)
                self._events.resume_program(error)

    @partial(torch_private.keep_out_of_frames, with_callees=False)
    def _call_inside(
        self,
        original: Callable[..., Any],
        module: nn.Module,
        site: ModuleSite,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a module inside a forward of a model that it is a part of, beside another model."""
        stack = thread_state.stack
        stack.append(site)
        try:
            return original(module, *args, **kwargs)
        finally:
            stack.pop()

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
            if module is not None and root is not None and core(module) is not root:
                if model.method_run.mark(root):
                    pending.model, pending.context = model, context
                    pending.whole_ran = site.is_whole()
                self._expect_forward(root)
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
        output: Any,
        error: BaseException | None,
        scope: Scope | None,
    ) -> None:
        try:
            for look_at in self._events.forward_returned if error is None else ():
                look_at(model, context, output)
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
        if is_running(model):
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
        stack = thread_state.stack
        if torch_private.is_symbolically_traced():
            return forward(module, *args, **kwargs)
        self._direct_forwards.keep(module)
        site = self.sites.get(id(module)) or self._discover(module, stack)
        if site is None:
            return forward(module, *args, **kwargs)
        if nest_too_deeply(len(stack)):
            self._count_unrecorded(site.model)
            with self._direct_forwards.with_own_code(forward):
                return forward(module, *args, **kwargs)
        if not is_running(site.model):
            between_hooks = partial(run_between_session_hooks, forward)
            return self._call_outermost(between_hooks, module, site, args, kwargs)
        if not self._direct_forwards.is_part(module):
            return forward(module, *args, **kwargs)
        stack.append(site)
        try:
            return run_between_session_hooks(forward, module, *args, **kwargs)
        finally:
            stack.pop()

    # -- roots

    def _discover_while_compiling(self, module: object) -> None:
        """Give a new module its hooks before the compiler looks for them."""
        if isinstance(module, nn.Module) and id(module) not in self.sites:
            self._discover(module, [])

    @torch_private.keep_out_of_frames
    def _discover(self, module: nn.Module, stack: list[ModuleSite]) -> ModuleSite | None:
        """Return the site of a module that is called for the first time, and hook its whole model.

        Returns None for glue: a stateless module that no other holds, created and called inside
        another module's forward (`nn.Softmax(-1)(x)`).
        """
        existing = self._all_sites.get(id(module))
        if isinstance(existing, SharedSite) and (site := existing.in_forward(stack)) is not None:
            return site
        if thread_state.ignores_new_models:
            return None
        try:
            with self._lock:
                root = self._containers.choose_root(module)
                if root is module and not stack and self._is_heap_hidden:
                    self._register_running()
                    root = self._containers.choose_root(module)
                if (
                    stack
                    and is_stateless(module)
                    and not any(site.model.root() is core(root) for site in stack)
                ):
                    holder = self._add_plain_part(module, stack)
                    if holder is not None:
                        root = self._containers.choose_root(holder)
                    elif root is module:
                        return None
                if root is module and _is_compilers_graph(module):
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

    def _register_running(self) -> None:
        """Register the modules whose methods are running: the heap does not show what the program
        has frozen (`gc.freeze`) before this watched registrations.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            names = frame.f_code.co_varnames[:1] if frame.f_code.co_argcount else ()
            owner = frame.f_locals.get(*names) if names == ("self",) else None
            for module in all_modules(owner) if isinstance(owner, nn.Module) else ():
                self._register_children(module)
            frame = frame.f_back

    def _add_plain_part(self, module: nn.Module, stack: list[ModuleSite]) -> nn.Module | None:
        """Make a module a part of the model that holds it, if any; return the module that does."""
        caller: FrameType | None = sys._getframe(1)
        while caller is not None and caller.f_globals is globals():
            caller = caller.f_back
        running = [part for site in reversed(stack) if (part := site.module()) is not None]
        root = stack[-1].model.root()
        others = all_modules(root) if root is not None else ()
        holders = itertools.chain(running, others)
        found = caller and self._plain_parts.holder_of(module, holders, caller)
        if not found:
            return None
        if self._plain_parts.find not in part_finders:
            part_finders.append(self._plain_parts.find)
            self._restore.append(partial(part_finders.remove, self._plain_parts.find))
        self._register(*found, module)
        return found[0]

    def _add_model(self, outermost: nn.Module) -> Model:
        """Add the modules below `outermost` to its model, which is made if it is new."""
        root = core(outermost)
        for module in all_modules(outermost) if part_finders else ():
            for name, part in parts(module).items():
                self._register(module, name, part)
        modules = list(all_modules(outermost))
        model = self.models.find(root)
        if model is None:
            model = Model(root, self.models.unused_name(root), self._forget)
            self.models.add(model, root)
        new = self._name_modules(model, outermost)
        # The wrappers, which `_name_modules` leaves out: calls pass through them.
        for module in modules:
            if id(module) not in model.sites:
                self._make_site(model, module)
        settled = self._settle(model)
        model.asking_for_hooks = [
            model.sites[id(module)] for module in modules if self._hidden_hooks.hide_from(module)
        ]
        self._direct_forwards.settle(root, modules)
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
        model.sites[id(module)] = site = ModuleSite(model, module)
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


def _is_compilers_graph(module: nn.Module) -> bool:
    """Return whether a compiler made this module: a graph that gets its parameters as inputs.

    It holds no more than constants, under the name that fx gives them. A graph that the program
    traces itself keeps its parameters.
    """
    fx = sys.modules.get("torch.fx.graph_module")
    return (
        fx is not None
        and isinstance(module, fx.GraphModule)
        and is_leaf(module)
        and all(name.startswith("_tensor_constant") for name in module._buffers)
    )
