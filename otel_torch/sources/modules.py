"""Finds every model that runs, without being told: which root owns a module, and by what name it
goes.

Torch tells when a module is registered in another, which gives the way up to the owner; and every
call of a module passes `nn.Module.__call__`, where the first call of an unknown one is seen. A
global forward hook would see it too, but breaks every compiled graph.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from otel_torch import torch_private
from otel_torch.console import say_once
from otel_torch.recorder import Recorder
from otel_torch.records import Scope
from otel_torch.sources.calls import Calls
from otel_torch.sources.hooks import TorchHook
from otel_torch.sources.model_attributes import held_as
from otel_torch.sources.module_names import class_name, core, named_modules
from otel_torch.sources.steps import Clock, Moment
from otel_torch.sources.uncalled_roots import Entry


class Model:
    """An outermost owner and what is known of it. `name` is its class, `Name#2` for the second
    instance that is used.
    """

    def __init__(self, root: nn.Module, name: str, met_in_graph: Callable[[Site], None]) -> None:
        self.root = weakref.ref(root)
        self.name = name
        self.met_in_graph = met_in_graph
        self.stateless, self.leaf = _stateless(root), _leaf(root)
        self.completed = 0
        self.size = 0  # how many modules records can name
        self.held_as: list[str] = []  # the attributes by which the program holds the root
        self.started = False
        self.sites: dict[int, Site] = {}
        self.entry = Entry(root)
        self.calls = Calls()
        self._moments = threading.local()
        self._newest: Moment | None = None
        self._parameter_ids: tuple[int, frozenset[int]] = (-1, frozenset())

    @property
    def moment(self) -> Moment | None:
        """The newest outermost forward of this thread; of any, for a thread (autograd's) that began
        none.
        """
        return getattr(self._moments, "own", None) or self._newest

    @moment.setter
    def moment(self, moment: Moment) -> None:
        self._moments.own = self._newest = moment

    def parameter_ids(self) -> frozenset[int]:
        """The identities of the root's parameters, as optimizers hold them."""
        root = self.root()
        if root is not None and self._parameter_ids[0] != len(self.sites):
            self._parameter_ids = (len(self.sites), frozenset(map(id, root.parameters())))
        return self._parameter_ids[1]


class Site:
    """One module of one model: the place that records name.

    names: (canonical name, key of the module that holds it), several where the module is shared;
    none on a wrapper.
    """

    __slots__ = ("__weakref__", "key", "model", "module", "names")

    def __init__(self, model: Model, module: nn.Module, forget: Callable[[int], None]) -> None:
        key = id(module)
        self.key = key
        self.model = model
        self.module = weakref.ref(module, lambda _: forget(key))
        self.names: list[tuple[str, int]] = []

    @property
    def name(self) -> str:
        """The name by which this call goes: of a shared module's names, the one whose holder is
        running.
        """
        if len(self.names) > 1:
            for above in reversed(_thread.stack):
                for name, holder in self.names:
                    if above.key == holder:
                        return name
        return self.names[0][0]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.unwatched = False
        self.stack: list[Site] = []
        self.unsettled: tuple[Model, Moment] | None = (
            None  # a forward of which nobody tells the end
        )
        self.first_in_graph: Site | None = None


_thread = _Thread()


def running() -> list[Site]:
    """The calls that this thread is in, outermost first."""
    return _thread.stack


@contextmanager
def unwatched() -> Iterator[None]:
    """Models that this thread meets for the first time in here stay unknown: the twins that `scan`
    runs.
    """
    before, _thread.unwatched = _thread.unwatched, True
    try:
        yield
    finally:
        _thread.unwatched = before


class Registry:
    """The models of a process, found as they run.

    attach(model, sites): gets each new site once; starting(model): each model right before its
    first forward; ended(): after every outermost forward.
    """

    def __init__(
        self,
        clock: Clock,
        recorder: Recorder,
        attach: Callable[[Model, list[Site]], None],
        starting: Callable[[Model], None],
        ended: Callable[[], None],
    ) -> None:
        self.models: list[Model] = []
        self.sites: dict[int, Site] = {}
        self._clock = clock
        self._recorder = recorder
        self._attach = attach
        self._starting = starting
        self._ended = ended
        self._holders: Any = (
            WeakIdKeyDictionary()
        )  # by identity: equal modules are two; -> list of weak references
        self._lock = threading.RLock()
        self._restore: list[Callable[[], None]] = []

    # -- watching
    # ----------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Watch registrations and calls from here on, and take in the modules that exist already."""
        original_call, original_state = nn.Module.__call__, nn.Module.__setstate__
        sites, thread, watching = self.sites, _thread, [True]

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                if watching and torch.compiler.is_dynamo_compiling():
                    torch._dynamo.comptime.comptime(meet)
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
            if stack and (stack[-1].model is model or any(above.model is model for above in stack)):
                stack.append(site)
                try:
                    return original_call(module, *args, **kwargs)
                finally:
                    stack.pop()
            return self._outermost(original_call, module, site, args, kwargs)

        def meet(context: Any) -> None:
            """Run by the compiler when it comes to a call: a new module has its hooks before the
            compiler looks for them.
            """
            module = torch_private.local_while_tracing(context, "module")
            if isinstance(module, nn.Module) and id(module) not in sites:
                self._discover(module, [])

        def set_state(module: nn.Module, state: Any) -> None:
            original_state(module, state)  # type: ignore[no-untyped-call]
            self._take_in(module)

        def restore() -> None:
            watching.clear()  # somebody may have wrapped ours meanwhile: then it stays and only passes on
            if nn.Module.__call__ is call:
                nn.Module.__call__ = original_call  # type: ignore[method-assign]
            if nn.Module.__setstate__ is set_state:
                nn.Module.__setstate__ = original_state  # type: ignore[method-assign]

        torch_private.keep_out_of_frames(call, with_callees=False)
        nn.Module.__call__ = call  # type: ignore[method-assign]
        nn.Module.__setstate__ = set_state  # type: ignore[method-assign]
        self._restore += [
            restore,
            register_module_module_registration_hook(self._registered).remove,
            torch_private.hide_from_torchscript(TorchHook),
        ]
        for module in [found for found in gc.get_objects() if issubclass(type(found), nn.Module)]:
            self._take_in(module)

    def uninstall(self) -> None:
        """Stop watching; nothing stays behind on torch."""
        self.settle()
        while self._restore:
            self._restore.pop()()

    def forked(self) -> None:
        """In a forked child another thread of the parent may hold a lock for ever, and what was
        open is the parent's.
        """
        self._lock = threading.RLock()
        for model in self.models:
            model.calls.forked()
        _thread.unsettled = None

    def _take_in(self, holder: nn.Module) -> None:
        """Learn which modules `holder` holds: one that was built before us, copied or unpickled
        registered nothing.
        """
        for name, child in (holder.__dict__.get("_modules") or {}).items():
            self._registered(holder, name, child)

    def _registered(self, holder: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None:
            try:
                known = self._holders.setdefault(child, [])
                known[:] = [reference for reference in known if reference() is not None]
                if all(reference() is not holder for reference in known):
                    known.append(weakref.ref(holder))
            except (
                TypeError
            ):  # a module that cannot be hashed or referenced weakly has no owner that we know
                pass

    # -- calls
    # ----------------------------------------------------------------------------------------------

    @partial(torch_private.keep_out_of_frames, with_callees=False)
    def _outermost(
        self,
        original: Callable[..., Any],
        module: nn.Module,
        site: Site,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        stack = _thread.stack
        # a checkpoint's recomputation is called by autograd, not by the program: no forward of its
        # own begins
        moment = (
            None
            if not stack and torch_private.graph_task_id() != -1
            else self._begin(site.model, module)
        )
        scope = self._open_scope(site.model, moment) if moment is not None else None
        error: BaseException | None = None
        stack.append(site)
        try:
            return original(module, *args, **kwargs)
        except BaseException as raised:
            error = raised
            raise
        finally:
            stack.pop()
            if moment is not None:
                self._end(site.model, moment, error, scope)

    @torch_private.keep_out_of_frames
    def _begin(self, model: Model, module: nn.Module | None) -> Moment | None:
        try:
            if _thread.unsettled is not None:
                if _thread.unsettled[0] is model and model.entry.running():
                    return _thread.unsettled[1]
                self.settle()
            if not model.started:
                model.started = True
                model.held_as = [] if model.stateless else held_as(model.root())
                self._starting(model)
            model.moment = moment = self._clock.begin_forward(model)
            root = model.root()
            if (
                module is not None
                and root is not None
                and core(module) is not root
                and model.entry.enter()
            ):
                _thread.unsettled = model, moment
            return moment
        except Exception as error:
            say_once(f"a forward of {model.name} is not recorded: {type(error).__name__}: {error}")
            return None

    @torch_private.keep_out_of_frames
    def _open_scope(self, model: Model, moment: Moment) -> Scope:
        scope = Scope(
            "forward",
            "torch.forward",
            attributes={"torch.model": model.name, "torch.phase": moment.phase},
        )
        self._recorder.open(scope)
        return scope

    @torch_private.keep_out_of_frames
    def _end(
        self, model: Model, moment: Moment, error: BaseException | None, scope: Scope | None
    ) -> None:
        try:
            if scope is not None:
                self._recorder.close(scope, error)
            if _thread.unsettled is None or _thread.unsettled[1] is not moment:
                self._clock.end_forward(model, moment, error)
            self._ended()
        except Exception as raised:
            say_once(
                f"the end of a forward of {model.name} is not recorded: {type(raised).__name__}: {raised}"
            )

    def _met_in_graph(self, site: Site) -> None:
        """A compiled program is in a call of `site`. Where the graph is a function's that calls the
        model, no call of the model was seen: its forward begins with the first of its modules and
        ends before that comes again.
        """
        model = site.model
        if any(above.model is model for above in _thread.stack):
            return
        if (
            _thread.unsettled is not None
            and _thread.unsettled[0] is model
            and _thread.first_in_graph is not site
        ):
            return
        self.settle()
        _thread.first_in_graph = None
        moment = self._begin(model, None)
        if moment is not None:
            _thread.unsettled, _thread.first_in_graph = (model, moment), site

    def settle(self) -> None:
        """End the forward of a model whose method has returned: nobody tells when `vae.decode`
        does.
        """
        unsettled, _thread.unsettled = _thread.unsettled, None
        if unsettled is not None:
            unsettled[0].entry.leave()
            self._clock.end_forward(*unsettled)

    # -- owners
    # ----------------------------------------------------------------------------------------------

    @torch_private.keep_out_of_frames
    def _discover(self, module: nn.Module, stack: list[Site]) -> Site | None:
        """The site of a module that is called for the first time, with its whole model attached;
        None for glue: a stateless module that nobody holds, made and called inside another's
        forward (`nn.Softmax(-1)(x)`).
        """
        if _thread.unwatched:
            return None
        try:
            with self._lock:
                root = self._owner(module)
                if root is module and _stateless(module) and (stack or _made_by_a_compiler(module)):
                    return None
                if root is module and (viewed := self._viewed(module)) is not None:
                    self._take_model(viewed)
                    if (model := self._model_of(core(viewed))) is not None:
                        site = self.sites[id(module)] = self._make_site(model, module)
                        return site
                self._take_model(root)
                return self.sites.get(id(module))
        except Exception as error:
            say_once(f"{type(module).__name__} is not recorded: {type(error).__name__}: {error}")
            return None

    def _viewed(self, container: nn.Module) -> nn.Module | None:
        """The model that a slice of a Sequential (`vgg.features[:16](x)`, made anew for every call)
        shows a part of: all that it holds belongs elsewhere. Calls pass through it; no record names
        it.
        """
        if type(container) is not nn.Sequential or not container._modules:
            return None
        owners = {
            self._owner(child, besides=container)
            for child in container._modules.values()
            if child is not None
        }
        owner = owners.pop()
        return (
            owner
            if not owners and all(owner is not child for child in container._modules.values())
            else None
        )

    def _owner(self, module: nn.Module, besides: nn.Module | None = None) -> nn.Module:
        seen = {id(module), id(besides)}
        while True:
            for reference in self._holders.get(module, ()):
                holder = reference()
                if (
                    holder is not None
                    and id(holder) not in seen
                    and any(c is module for c in holder._modules.values())
                ):
                    break
            else:
                return module
            seen.add(id(holder))
            module = holder

    def _take_model(self, outermost: nn.Module) -> None:
        root = core(outermost)
        model = self._model_of(root)
        if model is None:
            model = Model(root, self._name(root), self._met_in_graph)
            self.models.append(model)
        named = named_modules(outermost)
        keys = {name: id(module) for name, module in named}
        new: list[Site] = []
        for name, module in named:
            site = self.sites.get(id(module)) or model.sites.get(id(module))
            if site is None:
                site = self._make_site(model, module)
                new.append(site)
            # a module that ran before it came into this container stays with the model that it was
            if site.model is model and all(name != known for known, _ in site.names):
                site.names.append((name, keys.get(name.rpartition(".")[0], 0)))
        for (
            module
        ) in outermost.modules():  # the wrappers: calls pass through them, but no record names them
            if id(module) not in self.sites and id(module) not in model.sites:
                self._make_site(model, module)
        if new:
            model.size += len(new)
            self._attach(model, new)
        # only now: another thread that calls the model meanwhile waits for its hooks
        self.sites.update(
            (key, site) for key, site in list(model.sites.items()) if key not in self.sites
        )

    def _model_of(self, root: nn.Module) -> Model | None:
        """The model of a root that is known; stateless loose modules of one class (losses made
        anew) are one model.
        """
        for model in self.models:
            known = model.root()
            if known is root or (
                model.stateless and _stateless(root) and model.name == class_name(root)
            ):
                return model
            if (
                known is None
                and model.leaf
                and _leaf(root)
                and model.name.partition("#")[0] == class_name(root)
            ):
                model.root = weakref.ref(
                    root
                )  # a loss with class weights, made anew for every step
                return model
        return None

    def _make_site(self, model: Model, module: nn.Module) -> Site:
        site = model.sites[id(module)] = Site(model, module, partial(self._forget, model))
        return site

    def _forget(self, model: Model, key: int) -> None:
        self.sites.pop(key, None)
        model.sites.pop(key, None)

    def _name(self, root: nn.Module) -> str:
        name = class_name(root)
        used = [
            int(model.name.partition("#")[2] or 1)
            for model in self.models
            if model.name.partition("#")[0] == name
        ]
        return f"{name}#{max(used) + 1}" if used else name


def _stateless(module: nn.Module) -> bool:
    return not (module._modules or module._parameters or module._buffers)


def _leaf(module: nn.Module) -> bool:
    return not (module._modules or module._parameters)


def _made_by_a_compiler(module: nn.Module) -> bool:
    """A graph whose parameters are its inputs; what a program traces itself keeps its own."""
    graphs = sys.modules.get("torch.fx.graph_module")
    return graphs is not None and isinstance(module, graphs.GraphModule)
