"""A model that runs: its root, its modules with their names, and its forwards."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from otel_torch.sources.models.forward_state import ForwardState
from otel_torch.sources.models.model_table import is_leaf, is_stateless
from otel_torch.sources.modules.call_stack import thread_state
from otel_torch.sources.modules.module_dict import ModuleRef
from otel_torch.sources.modules.module_names import all_modules, all_parameters, core
from otel_torch.sources.modules.uncalled_roots import RootMethodRun
from otel_torch.sources.steps.calls import CallCounter
from otel_torch.sources.steps.forwards import ForwardContext
from otel_torch.sources.steps.training_clock import TrainingClock


class Model:
    """A root module, which no other module holds, with its modules and forwards.

    Attributes:
        name: the root's class; `Name#2` for the second instance that runs.
        size: how many modules records can name.
        completed: how many outermost forwards have returned.
        order: how many models were found before it.
        held_as: the attributes by which the program holds the root.
        asking_for_hooks: the modules that compute in another way if modules inside have hooks.
        sites: the modules by their id, wrappers included.
        forget_site: called when a module of it is deleted.
    """

    def __init__(self, root: nn.Module, name: str, forget: Callable[[Model, int], None]) -> None:
        self.root = weakref.ref(root)
        self.name = name
        self.stateless = is_stateless(root)
        self.leaf = is_leaf(root)
        self.order = 0
        self.completed = 0
        self.size = 0
        self.held_as: list[str] = []
        self.asking_for_hooks: list[ModuleSite] = []
        self.started = False
        self.sites: dict[int, ModuleSite] = {}
        self.forget_site: Callable[[ModuleRef], None] = lambda module: forget(self, module.key)
        self.method_run = RootMethodRun(root)
        self.calls = CallCounter()
        self.forward_state = ForwardState()
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
        self.forward_state.begin(context)
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
        if core(module) is self.root():
            return self.parameter_ids()
        return frozenset(map(id, all_parameters(module)))


class _Parameters:
    """The parameters that a root had at a given number of modules."""

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
    registered, and is empty for a wrapper. `call`, if there is one, calls the module without
    torch's way for hooks (`module_call.py`).
    """

    __slots__ = ("__weakref__", "call", "key", "model", "module", "names", "owners")

    def __init__(self, model: Model, module: nn.Module) -> None:
        self.key = id(module)
        self.model = model
        self.module = ModuleRef(module, model.forget_site)
        self.names: list[tuple[str, int]] = []
        self.call: Callable[..., Any] | None = None

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
            for enclosing in reversed(thread_state.stack):
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
        for enclosing in reversed(thread_state.stack):
            if enclosing.key == self.key:
                return enclosing
        return self.in_forward(thread_state.stack) or next(reversed(self.owners.values()))

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
        return self.running.names

    @property
    def name(self) -> str:
        """The name of the current call in that model."""
        return self.running.name
