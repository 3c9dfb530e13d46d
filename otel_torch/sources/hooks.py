"""The one way to attach to a module: forward hooks in FastVideo's contract, on torch's own hooks underneath.

FastVideo replaces `module.forward`, which a compiler specialises per instance and a deep copy drags along. Torch's own hooks
are traced once for all layers; a copy or a pickle of the module carries in their place a callable that does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any
from weakref import ref

from torch import nn

from otel_torch import torch_private


class ForwardHook:
    """Something that runs around a module's forward:

        args, kwargs = hook.pre_forward(module, *args, **kwargs)
        output = hook.post_forward(module, module.forward(*args, **kwargs))

    Several hooks of a module nest: A then B appended means A.pre, B.pre, forward, B.post, A.post. What a hook raises
    reaches the caller of the module; when forward raises, no post_forward runs.
    """

    # whether all others are to see what this one makes of a value: it runs before them, in front of forward and behind it
    intervenes = False

    @classmethod
    def name(cls) -> str:
        """The hook's name, unique on a module. Subclasses override it."""
        raise NotImplementedError

    def on_attach(self, module: nn.Module) -> None:
        """Called once when the hook is attached."""

    def on_detach(self, module: nn.Module) -> None:
        """Called once when the hook is removed; not when the module is deleted while the hook is on it."""

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Called before forward; returns the arguments that forward gets."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Called after forward; returns the output that the caller gets."""
        return output

    def post_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Called once all is done, with what forward got and what the caller gets."""


class TorchHook:
    """What torch calls. A copied or pickled module gets a callable that takes anything and returns None instead, and
    needs none of our code to be loaded."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    @torch_private.keep_out_of_frames
    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


# by identity, for modules may be equal; each goes with its module. A `WeakIdKeyDictionary` asks a module for an attribute that it
# has not whenever it looks one up: 12 us
_managers: dict[int, ModuleHookManager] = {}


class ModuleHookManager:
    """The forward hooks of one module, by name, in the order in which they were appended.

    Use `get_from_or_default`; a manager made by hand is not attached and refuses hooks.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module_hooks: dict[str, ForwardHook] = {}
        self._handles: list[Any] = []
        identity = id(module)
        self._reference = ref(module, lambda _: _managers.pop(identity, None))

    @classmethod
    def get_from(cls, module: nn.Module) -> ModuleHookManager | None:
        """The module's manager, or None."""
        return _managers.get(id(module))

    @classmethod
    def get_from_or_default(cls, module: nn.Module) -> ModuleHookManager:
        """The module's manager, attached now if there was none."""
        manager = cls.get_from(module)
        if manager is None:
            manager = _managers[id(module)] = cls(module)
        return manager

    @staticmethod
    def remove_from_manager(module: nn.Module) -> None:
        """Detach the module's manager and every hook in it. Raises ValueError where there is none."""
        manager = _managers.get(id(module))
        if manager is None:
            raise ValueError(f"{type(module).__name__} has no hook manager")
        for name in list(manager.module_hooks):
            manager.remove_forward_hook(name)
        _managers.pop(id(module), None)

    def remove_if_empty(self) -> None:
        """Detach this manager from its module if no hook is left in it."""
        module = self._reference()
        if module is not None and not self.module_hooks and _managers.get(id(module)) is self:
            del _managers[id(module)]

    def get_forward_hook(self, name: str) -> ForwardHook | None:
        """The hook of that name, or None."""
        return self.module_hooks.get(name)

    def append_forward_hook(self, hook: ForwardHook) -> None:
        """Attach a hook after those that are there. Raises ValueError when its name is taken."""
        module = self._module()
        name = hook.name()
        if name in self.module_hooks:
            raise ValueError(f"{type(module).__name__} already has a forward hook named {name!r}")
        self.module_hooks[name] = hook
        self._arrange(module)
        hook.on_attach(module)

    def replace_forward_hook(self, name: str, hook: ForwardHook, run_on_attach: bool = True) -> None:
        """Put a hook in another's place. `run_on_attach` decides whether the old one's `on_detach` runs, as in
        FastVideo. Raises ValueError when there is no hook of that name."""
        module = self._module()
        old = self.module_hooks.get(name)
        if old is None:
            raise ValueError(f"{type(module).__name__} has no forward hook named {name!r}")
        if hook.name() != name and hook.name() in self.module_hooks:
            raise ValueError(f"{type(module).__name__} already has a forward hook named {hook.name()!r}")
        if run_on_attach:
            old.on_detach(module)
        self.module_hooks = {
            (hook.name() if key == name else key): (hook if key == name else value) for key, value in self.module_hooks.items()
        }
        self._arrange(module)
        hook.on_attach(module)

    def remove_forward_hook(self, name: str, run_detach: bool = True) -> None:
        """Remove a hook. Raises ValueError when there is none of that name."""
        module = self._module()
        hook = self.module_hooks.pop(name, None)
        if hook is None:
            raise ValueError(f"{type(module).__name__} has no forward hook named {name!r}")
        self._arrange(module)
        if run_detach:
            hook.on_detach(module)

    def _module(self) -> nn.Module:
        module = self._reference()
        if module is not None and _managers.get(id(module)) is self:
            return module
        raise ValueError("this hook manager is not attached to a module; use ModuleHookManager.get_from_or_default(module)")

    def _arrange(self, module: nn.Module) -> None:
        """Register with torch just what is overridden: a module whose inputs nobody wants pays for no pre-hook."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        hooks = tuple(self.module_hooks.values())
        if not hooks:
            return
        first, last = (sorted(order, key=lambda hook: not hook.intervenes) for order in (hooks, reversed(hooks)))
        before = tuple(hook for hook in first if type(hook).pre_forward is not ForwardHook.pre_forward)
        after = tuple(hook for hook in last if type(hook).post_forward is not ForwardHook.post_forward)
        if before:
            self._handles.append(module.register_forward_pre_hook(_Before(before), with_kwargs=True))
        if after:
            self._handles.append(module.register_forward_hook(_After(after)))
        if called := tuple(hook for hook in hooks if type(hook).post_call is not ForwardHook.post_call):
            self._handles.append(module.register_forward_hook(_AfterCall(called), with_kwargs=True))


def remove_hooks(modules: Iterable[nn.Module], *names: str) -> None:
    """Remove the forward hooks of these names from all modules that have them, and managers with their last hook."""
    for module in list(modules):
        manager = ModuleHookManager.get_from(module)
        if manager is not None:
            for name in names:
                if manager.get_forward_hook(name) is not None:
                    manager.remove_forward_hook(name)
            manager.remove_if_empty()


class _Hooks(TorchHook):
    """A compiled program looks at every attribute on the way to a hook before each call: so there are few."""

    __slots__ = ("hooks",)

    def __init__(self, hooks: tuple[ForwardHook, ...]) -> None:
        self.hooks = hooks


class _Before(_Hooks):
    __slots__ = ()

    @torch_private.keep_out_of_frames
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs


class _After(_Hooks):
    __slots__ = ()

    @torch_private.keep_out_of_frames
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output


class _AfterCall(_Hooks):
    __slots__ = ()

    @torch_private.keep_out_of_frames
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        for hook in self.hooks:
            hook.post_call(module, args, kwargs, output)
