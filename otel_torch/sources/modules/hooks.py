"""Forward hooks with FastVideo's interface, built on torch's own hooks.

FastVideo replaces `module.forward`. The compiler specializes that for each instance, and a deep
copy takes it along. Torch's hooks are traced once for all layers, and a copied or pickled module
gets a callable that does nothing in place of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from otel_torch import torch_private
from otel_torch.sources.modules.module_dict import ModuleRef


class ForwardHook:
    """A hook around a module's forward pass:

        args, kwargs = hook.pre_forward(module, *args, **kwargs)
        output = hook.post_forward(module, module.forward(*args, **kwargs))

    The hooks of a module nest: after A and B were appended, a call runs A.pre, B.pre, forward,
    B.post, A.post. An exception in a hook reaches the caller of the module. If forward raises, no
    post_forward runs.

    intervenes: whether the hook changes values and the other hooks must see the changed ones. It
    then runs first, both before and after forward.
    """

    __slots__ = ()
    intervenes = False

    @classmethod
    def name(cls) -> str:
        """Return the hook's name, which is unique on a module. Subclasses override it."""
        raise NotImplementedError

    def on_attach(self, module: nn.Module) -> None:
        """Called once when the hook is attached."""

    def on_detach(self, module: nn.Module) -> None:
        """Called once when the hook is removed, but not if the module is deleted with it."""

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Called before forward. Returns the arguments for forward."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Called after forward. Returns the output for the caller."""
        return output

    def post_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Called after all `post_forward`, with forward's arguments and the caller's output."""


class SessionHook(ForwardHook):
    """A hook of the session, which also runs around forwards that the program calls directly."""

    __slots__ = ()

    hook_name: ClassVar[str]

    @classmethod
    def name(cls) -> str:
        return cls.hook_name


class TorchHook:
    """A callable to register with torch.

    Copies and pickles of a module are made without it (`keep_out_of_copies`). Where a class makes
    them itself, it becomes a standard-library callable that does nothing, so that the module can
    be loaded without this package.
    """

    __slots__ = ("call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    @torch_private.keep_out_of_frames
    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


HOOK_TABLES = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


def keep_out_of_copies() -> Callable[[], None]:
    """Have modules be copied and pickled without our hooks; return a function that ends this."""
    original: Callable[[nn.Module], Any] = nn.Module.__getstate__

    def get_state(module: nn.Module) -> Any:
        state = original(module)
        if isinstance(state, tuple):  # of a class with slots: attributes, slots
            return _without_hooks(state[0]), state[1]
        return _without_hooks(state)

    def restore() -> None:
        if vars(nn.Module).get("__getstate__") is get_state:
            nn.Module.__getstate__ = original  # type: ignore[method-assign]

    nn.Module.__getstate__ = get_state  # type: ignore[method-assign]
    return restore


def _without_hooks(attributes: Any) -> Any:
    """Return a module's attributes, in which its tables of hooks have none of ours."""
    tables = {name: attributes[name] for name in HOOK_TABLES if name in attributes}
    ours = {
        key
        for table in tables.values()
        for key, hook in table.items()
        if isinstance(hook, TorchHook)
    }
    if not ours:
        return attributes
    for name, table in tables.items():
        tables[name] = type(table)((key, hook) for key, hook in table.items() if key not in ours)
    return {**attributes, **tables}


# by id(module), because modules may compare equal; an entry is removed with its module. A lookup in
# a `WeakIdKeyDictionary` takes 12 us: it asks the module for an attribute that it does not have
_managers: dict[int, ModuleHookManager] = {}


def _drop_manager(module: ModuleRef) -> None:
    _managers.pop(module.key, None)


class ModuleHookManager:
    """The forward hooks of one module, by name, in the order in which they were appended.

    Use `get_from_or_default`. A manager from the constructor is not attached and takes no hooks.
    """

    __slots__ = ("__weakref__", "_after", "_before", "_module_ref", "module_hooks")

    def __init__(self, module: nn.Module) -> None:
        self.module_hooks: dict[str, ForwardHook] = {}
        self._before: _HookList | None = None
        self._after: _HookList | None = None
        self._module_ref = ModuleRef(module, _drop_manager)

    @classmethod
    def get_from(cls, module: nn.Module) -> ModuleHookManager | None:
        """Return the module's manager, or None."""
        return _managers.get(id(module))

    @classmethod
    def get_from_or_default(cls, module: nn.Module) -> ModuleHookManager:
        """Return the module's manager; attach one if it has none."""
        manager = cls.get_from(module)
        if manager is None:
            manager = _managers[id(module)] = cls(module)
        return manager

    @staticmethod
    def remove_from_manager(module: nn.Module) -> None:
        """Detach the module's manager and all its hooks. Raises ValueError if it has none."""
        manager = _managers.get(id(module))
        if manager is None:
            raise ValueError(f"{type(module).__name__} has no hook manager")
        for name in list(manager.module_hooks):
            manager.remove_forward_hook(name)
        _managers.pop(id(module), None)

    def remove_if_empty(self) -> None:
        """Detach this manager from its module if it has no hooks."""
        module = self._module_ref()
        if module is not None and not self.module_hooks and _managers.get(id(module)) is self:
            del _managers[id(module)]

    def get_forward_hook(self, name: str) -> ForwardHook | None:
        """Return the hook of that name, or None."""
        return self.module_hooks.get(name)

    def append_forward_hook(self, hook: ForwardHook) -> None:
        """Attach a hook after the existing ones. Raises ValueError if its name is taken."""
        module = self._module()
        name = hook.name()
        if name in self.module_hooks:
            raise ValueError(f"{type(module).__name__} already has a forward hook named {name!r}")
        self.module_hooks[name] = hook
        self._register(module)
        hook.on_attach(module)

    def replace_forward_hook(
        self, name: str, hook: ForwardHook, run_on_attach: bool = True
    ) -> None:
        """Replace the hook called `name` by another one, in the same position.

        Raises ValueError if there is no hook of that name, or the new one's name is taken.

        Args:
            run_on_attach: whether the old hook's `on_detach` runs. (FastVideo calls it this.)
        """
        module = self._module()
        replaced = self.module_hooks.get(name)
        if replaced is None:
            raise ValueError(f"{type(module).__name__} has no forward hook named {name!r}")
        new_name = hook.name()
        if new_name != name and new_name in self.module_hooks:
            raise ValueError(
                f"{type(module).__name__} already has a forward hook named {new_name!r}"
            )
        if run_on_attach:
            replaced.on_detach(module)
        hooks = {}
        for key, existing in self.module_hooks.items():
            if key == name:
                hooks[new_name] = hook
            else:
                hooks[key] = existing
        self.module_hooks = hooks
        self._register(module)
        hook.on_attach(module)

    def remove_forward_hook(self, name: str, run_detach: bool = True) -> None:
        """Remove a hook. Raises ValueError if there is no hook of that name."""
        module = self._module()
        hook = self.module_hooks.pop(name, None)
        if hook is None:
            raise ValueError(f"{type(module).__name__} has no forward hook named {name!r}")
        self._register(module)
        if run_detach:
            hook.on_detach(module)

    def _module(self) -> nn.Module:
        module = self._module_ref()
        if module is not None and _managers.get(id(module)) is self:
            return module
        raise ValueError(
            "this hook manager is not attached to a module; "
            "use ModuleHookManager.get_from_or_default(module)"
        )

    def _register(self, module: nn.Module) -> None:
        """Register with torch the methods that hooks override, and no others.

        A module whose inputs no hook needs has no pre-hook to pay for.
        """
        before: list[ForwardHook] = []
        after: list[ForwardHook] = []
        post_calls: list[ForwardHook] = []
        for hook in self.module_hooks.values():
            kind = type(hook)
            if kind.pre_forward is not ForwardHook.pre_forward:
                before.append(hook)
            if kind.post_forward is not ForwardHook.post_forward:
                after.insert(0, hook)
            if kind.post_call is not ForwardHook.post_call:
                post_calls.append(hook)
        before.sort(key=_runs_later)
        after.sort(key=_runs_later)
        self._before = _update(self._before, _PreHooks, module, before)
        self._after = _update(self._after, _PostHooks, module, after, post_calls)


def _runs_later(hook: ForwardHook) -> bool:
    return not hook.intervenes


@partial(torch_private.keep_out_of_frames, with_callees=False)
def run_between_session_hooks(
    forward: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    """Call a forward for which torch calls no hooks, and the session's hooks around it."""
    args, kwargs = _enter_session_hooks(module, args, kwargs)
    try:
        return _leave_session_hooks(module, forward(module, *args, **kwargs))
    finally:
        _end_session_hooks(module)


@torch_private.keep_out_of_frames
def _enter_session_hooks(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call the session's hooks, and no others, before a forward that torch calls none for."""
    for registered in list(module._forward_pre_hooks.values()):
        if isinstance(registered, _PreHooks):
            for hook in registered.hooks:
                if isinstance(hook, SessionHook):
                    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    return args, kwargs


@torch_private.keep_out_of_frames
def _leave_session_hooks(module: nn.Module, output: Any) -> Any:
    """Call the session's hooks after such a forward; return the output for the caller."""
    for registered in list(module._forward_hooks.values()):
        if isinstance(registered, _PostHooks):
            for hook in registered.hooks:
                if isinstance(hook, SessionHook):
                    output = hook.post_forward(module, output)
    return output


@torch_private.keep_out_of_frames
def _end_session_hooks(module: nn.Module) -> None:
    """Call what the session has registered to be called whether or not such a forward raises."""
    for key in list(module._forward_hooks_always_called):
        registered = module._forward_hooks.get(key)
        if isinstance(registered, TorchHook):
            registered(module, (), None)


def has_hook(module: nn.Module, name: str) -> bool:
    manager = _managers.get(id(module))
    return manager is not None and name in manager.module_hooks


def remove_hook(module: nn.Module, name: str) -> None:
    """Remove the forward hook of that name, if any, and a manager that is then empty."""
    manager = _managers.get(id(module))
    if manager is not None:
        if name in manager.module_hooks:
            manager.remove_forward_hook(name)
        manager.remove_if_empty()


def remove_hooks(modules: Iterable[nn.Module], *names: str) -> None:
    """Remove the forward hooks of these names from modules, and managers that are then empty."""
    for module in list(modules):
        for name in names:
            remove_hook(module, name)


class _HookList(TorchHook):
    """The one callable that torch has for all our hooks of a module.

    It stays registered until no hook is left, and its contents change: a running forward pass has
    already copied torch's hooks, so that registering or removing one would not affect it. It has
    few attributes, because a compiled program checks each one before every call.

    key: in torch's tables of hooks. Torch's handle would be five objects more for each module.
    """

    __slots__ = ("hooks", "key", "post_calls")

    key: int

    def __init__(
        self, hooks: Sequence[ForwardHook], post_calls: Sequence[ForwardHook] = ()
    ) -> None:
        self.set(hooks, post_calls)

    def set(self, hooks: Sequence[ForwardHook], post_calls: Sequence[ForwardHook] = ()) -> None:
        self.hooks, self.post_calls = tuple(hooks), tuple(post_calls)

    def register(self, module: nn.Module) -> Any:
        raise NotImplementedError


class _PreHooks(_HookList):
    __slots__ = ()

    def register(self, module: nn.Module) -> Any:
        return module.register_forward_pre_hook(self, with_kwargs=True)

    @torch_private.keep_out_of_frames
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs is None:
            # removed by an earlier hook of this call: torch still calls it, but without kwargs
            return None
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs


class _PostHooks(_HookList):
    __slots__ = ()

    def register(self, module: nn.Module) -> Any:
        return module.register_forward_hook(self, with_kwargs=True)

    @torch_private.keep_out_of_frames
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *outputs: Any
    ) -> Any:
        if not outputs:  # removed by an earlier hook of this call, as above
            return None
        (output,) = outputs
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        for hook in self.post_calls:
            hook.post_call(module, args, kwargs, output)
        return output


# what torch has before and after a module's forward, if a module has any hook of ours
HOOK_LISTS = _PreHooks, _PostHooks


@partial(torch_private.keep_out_of_frames, with_callees=False)
def run_post_hooks(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    """Call the hooks that a module has after its forward, as torch does; return the output."""
    every = torch.nn.modules.module
    for key, hook in (*every._global_forward_hooks.items(), *module._forward_hooks.items()):
        with_kwargs = (
            key in module._forward_hooks_with_kwargs
            or key in every._global_forward_hooks_with_kwargs
        )
        changed = hook(module, args, kwargs, output) if with_kwargs else hook(module, args, output)
        if changed is not None:
            output = changed
    return output


def _update(
    registered: _HookList | None,
    kind: type[_HookList],
    module: nn.Module,
    *hooks: Sequence[ForwardHook],
) -> _HookList | None:
    """Make torch call these hooks; return what is registered then, or None."""
    if not any(hooks):
        if registered is not None:
            registered.set(())
            for table in HOOK_TABLES:
                vars(module).get(table, {}).pop(registered.key, None)
        return None
    if registered is None:
        registered = kind(*hooks)
        registered.key = registered.register(module).id
    else:
        registered.set(*hooks)
    return registered
