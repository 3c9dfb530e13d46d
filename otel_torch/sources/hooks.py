"""The one way to attach to a module: forward hooks in FastVideo's contract, on torch's own hooks
underneath.

FastVideo replaces `module.forward`, which a compiler specialises per instance and a deep copy drags
along. Torch's own hooks are traced once for all layers; a copy or a pickle of the module carries in
their place a callable that does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import ref

from torch import nn

from otel_torch import torch_private


class ForwardHook:
    """Something that runs around a module's forward:

        args, kwargs = hook.pre_forward(module, *args, **kwargs)
        output = hook.post_forward(module, module.forward(*args, **kwargs))

    Several hooks of a module nest: A then B appended means A.pre, B.pre, forward, B.post, A.post.
    What a hook raises reaches the caller of the module; when forward raises, no post_forward runs.
    """

    __slots__ = ()
    # whether all others are to see what this one makes of a value: it runs before them, in front of
    # forward and behind it
    intervenes = False

    @classmethod
    def name(cls) -> str:
        """The hook's name, unique on a module. Subclasses override it."""
        raise NotImplementedError

    def on_attach(self, module: nn.Module) -> None:
        """Called once when the hook is attached."""

    def on_detach(self, module: nn.Module) -> None:
        """Called once when the hook is removed; not when the module is deleted while the hook is on
        it.
        """

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Called before forward; returns the arguments that forward gets."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Called after forward; returns the output that the caller gets."""
        return output

    def post_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Called once all is done, with what forward got and what the caller gets."""


class TorchHook:
    """What torch calls. A copied or pickled module gets a callable that takes anything and returns
    None instead, and needs none of our code to be loaded.
    """

    __slots__ = ("call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    @torch_private.keep_out_of_frames
    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


# by identity, for modules may be equal; each goes with its module. A `WeakIdKeyDictionary` asks a
# module for an attribute that it has not whenever it looks one up: 12 us
_managers: dict[int, ModuleHookManager] = {}


class _Module(ref[nn.Module]):
    """A module that may go, and where its manager is found. What stays for each module is kept to
    few objects: the more there are, the more often the garbage collector walks the whole program.
    """

    __slots__ = ("identity",)

    identity: int


def _forget(module: _Module) -> None:
    _managers.pop(module.identity, None)


class ModuleHookManager:
    """The forward hooks of one module, by name, in the order in which they were appended.

    Use `get_from_or_default`; a manager made by hand is not attached and refuses hooks.
    """

    __slots__ = ("__weakref__", "_after", "_before", "_reference", "module_hooks")

    def __init__(self, module: nn.Module) -> None:
        self.module_hooks: dict[str, ForwardHook] = {}
        self._before: _Hooks | None = None
        self._after: _Hooks | None = None
        self._reference = _Module(module, _forget)
        self._reference.identity = id(module)

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

    def replace_forward_hook(
        self, name: str, hook: ForwardHook, run_on_attach: bool = True
    ) -> None:
        """Put a hook in another's place. `run_on_attach` decides whether the old one's `on_detach`
        runs, as in FastVideo. Raises ValueError when there is no hook of that name.
        """
        module = self._module()
        old = self.module_hooks.get(name)
        if old is None:
            raise ValueError(f"{type(module).__name__} has no forward hook named {name!r}")
        if hook.name() != name and hook.name() in self.module_hooks:
            raise ValueError(
                f"{type(module).__name__} already has a forward hook named {hook.name()!r}"
            )
        if run_on_attach:
            old.on_detach(module)
        self.module_hooks = {
            (hook.name() if key == name else key): (hook if key == name else value)
            for key, value in self.module_hooks.items()
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
        raise ValueError(
            "this hook manager is not attached to a module; use ModuleHookManager.get_from_or_default(module)"
        )

    def _arrange(self, module: nn.Module) -> None:
        """Have torch call just what is overridden: a module whose inputs nobody wants pays for no
        pre-hook.
        """
        before: list[ForwardHook] = []
        after: list[ForwardHook] = []
        called: list[ForwardHook] = []
        for hook in self.module_hooks.values():
            kind = type(hook)
            if kind.pre_forward is not ForwardHook.pre_forward:
                before.append(hook)
            if kind.post_forward is not ForwardHook.post_forward:
                after.insert(0, hook)
            if kind.post_call is not ForwardHook.post_call:
                called.append(hook)
        before.sort(key=_comes_second)
        after.sort(key=_comes_second)
        self._before = _arranged(self._before, _Before, module, before)
        self._after = _arranged(self._after, _After, module, after, called)


def _comes_second(hook: ForwardHook) -> bool:
    return not hook.intervenes


def remove_hook(module: nn.Module, name: str) -> None:
    """Remove the forward hook of that name if the module has it, and its manager with the last of
    its hooks.
    """
    manager = _managers.get(id(module))
    if manager is not None:
        if name in manager.module_hooks:
            manager.remove_forward_hook(name)
        manager.remove_if_empty()


def remove_hooks(modules: Iterable[nn.Module], *names: str) -> None:
    """Remove the forward hooks of these names from all modules that have them, and managers with
    their last hook.
    """
    for module in list(modules):
        for name in names:
            remove_hook(module, name)


class _Hooks(TorchHook):
    """What torch calls for all hooks of a module, once registered until none is left: a forward
    under way has taken up what is registered, so a hook that comes or goes changes what is called
    here. A compiled program looks at every attribute on the way to a hook before each call: so
    there are few.
    """

    __slots__ = ("called", "handle", "hooks")

    handle: Any

    def __init__(self, hooks: Sequence[ForwardHook], called: Sequence[ForwardHook] = ()) -> None:
        self.arrange(hooks, called)

    def arrange(self, hooks: Sequence[ForwardHook], called: Sequence[ForwardHook] = ()) -> None:
        """Call these from now on."""
        self.hooks, self.called = tuple(hooks), tuple(called)

    def register(self, module: nn.Module) -> Any:
        """Have torch call this; returns what takes it off."""
        raise NotImplementedError


class _Before(_Hooks):
    __slots__ = ()

    def register(self, module: nn.Module) -> Any:
        return module.register_forward_pre_hook(self, with_kwargs=True)

    @torch_private.keep_out_of_frames
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (
            kwargs is None
        ):  # torch gives none to a hook that was taken off by one before it, and calls it all the same
            return None
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs


class _After(_Hooks):
    __slots__ = ()

    def register(self, module: nn.Module) -> Any:
        return module.register_forward_hook(self, with_kwargs=True)

    @torch_private.keep_out_of_frames
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *outputs: Any
    ) -> Any:
        if not outputs:  # the same
            return None
        (output,) = outputs
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        for hook in self.called:
            hook.post_call(module, args, kwargs, output)
        return output


def _arranged(
    known: _Hooks | None, kind: type[_Hooks], module: nn.Module, *hooks: Sequence[ForwardHook]
) -> _Hooks | None:
    """What is registered once these are all that are to be called."""
    if not any(hooks):
        if known is not None:
            known.arrange(())
            known.handle.remove()
        return None
    if known is None:
        known = kind(*hooks)
        known.handle = known.register(module)
    else:
        known.arrange(*hooks)
    return known
