"""Answers code that asks a module for its hooks as if none of ours were there.

`nn.TransformerEncoderLayer` computes in one fused operation, with results of its own, unless a
module inside of it has a hook:

    elif any(len(getattr(m, "_forward_hooks", {})) for m in self.modules()):

Torch has to find our hooks in `_forward_hooks` to call them. Code that asks gets its other name:

    elif any(len(getattr(m, "_otel_torch_forward_hooks", {})) for m in self.modules()):

which is an attribute of `nn.Module` that shows the program's hooks. Asking are the functions of
torch that `torch_private` names, and the methods of a module's class, with the functions that they
call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from otel_torch import torch_private
from otel_torch.process.import_hooks import after_import
from otel_torch.sources.modules.hooks import HOOK_TABLES, TorchHook
from otel_torch.sources.modules.uncalled_roots import with_inner

_SHOWN = {table: f"_otel_torch{table}" for table in HOOK_TABLES}
# these call the hooks that they read
_CALLING_HOOKS = frozenset({"__call__", "_call_impl", "_wrapped_call_impl"})
_OF_HOOKS = (torch_private.__package__, nn.Module.__module__, "torch._dynamo")


class HiddenHooks:
    """The functions that ask for hooks, and the code that they have meanwhile."""

    def __init__(self) -> None:
        self._own: dict[FunctionType, tuple[CodeType, CodeType]] = {}
        # of each class that was searched: the forward that it had then, and whether it asks
        self._classes: dict[type, tuple[Any, bool]] = {}
        self._is_hiding = False
        self._stop_waiting: list[Callable[[], None]] = []

    def start(self) -> None:
        """Hide our hooks from torch's own functions, and from what `hide_from` gets later."""
        self._is_hiding = True
        for table, name in _SHOWN.items():
            setattr(nn.Module, name, _ShownHooks(table))
        for name in torch_private.MODULES_THAT_ASK_FOR_HOOKS:
            self._stop_waiting.append(after_import(name, self._hide_from_functions))

    def restore(self) -> None:
        """Give every function its own code back."""
        self._is_hiding = False  # a method of torch that was wrapped meanwhile may still call us
        while self._stop_waiting:
            self._stop_waiting.pop()()
        for function, (own, asking) in self._own.items():
            if function.__code__ is asking:  # and the program has not exchanged it meanwhile
                function.__code__ = own
        self._own.clear()
        self._classes.clear()
        for name in _SHOWN.values():
            if name in vars(nn.Module):
                delattr(nn.Module, name)

    def hide_from(self, module: nn.Module) -> bool:
        """Hide our hooks from the methods of a module; return whether any of them asks."""
        cls = type(module)
        bases = cls.__mro__[: cls.__mro__.index(nn.Module)]
        forward = next((vars(base)["forward"] for base in bases if "forward" in vars(base)), None)
        known = self._classes.get(cls)
        asks = known is not None and known[1]
        if known is None or known[0] is not forward:
            members = [item for base in bases for item in list(vars(base).items())]
            methods = [member for name, member in members if name not in _CALLING_HOOKS]
            asks = sum(map(self._hide_from_method, methods)) > 0
            self._classes[cls] = forward, asks
        own = vars(module).get("forward")
        return (own is not None and self._hide_from_method(own)) or asks

    def _hide_from_method(self, method: Any) -> bool:
        functions = (
            asking
            for function in _functions_of(method)
            for asking in (function, *_called_by(function))
            if not str(asking.__module__).startswith(_OF_HOOKS)
        )
        return sum(map(self._hide_from_function, functions)) > 0

    def _hide_from_functions(self, module: ModuleType) -> None:
        for value in list(vars(module).values()):
            members = vars(value).values() if isinstance(value, type) else (value,)
            for function in [each for member in members for each in _functions_of(member)]:
                if function.__module__ == module.__name__:
                    self._hide_from_function(function)

    def _hide_from_function(self, function: FunctionType) -> bool:
        code = function.__code__
        if not self._is_hiding:
            return False
        if function not in self._own and any(map(_asks, with_inner(code))):
            self._own[function] = code, _renamed(code)
            function.__code__ = self._own[function][1]
        return function in self._own


def _functions_of(value: Any) -> Iterator[FunctionType]:
    """Yield a function and the functions that it decorates or binds."""
    while value is not None:
        if isinstance(value, property):
            value = value.fget
        value = getattr(value, "__func__", getattr(value, "func", value))
        if isinstance(value, FunctionType):
            yield value
        value = getattr(value, "__wrapped__", None)


def _called_by(function: FunctionType) -> Iterator[FunctionType]:
    """Yield the functions that a function names, as a global or as an attribute of a module."""
    names = {name for code in with_inner(function.__code__) for name in code.co_names}
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        values = [value]
        if isinstance(value, ModuleType):
            values = [vars(value)[name] for name in names & vars(value).keys()]
        for value in values:
            if isinstance(value, FunctionType):
                yield from _functions_of(value)


def _asks(code: CodeType) -> bool:
    return _renamed(code.co_names) != code.co_names or any(
        _renamed(value) != value for value in code.co_consts if not isinstance(value, CodeType)
    )


def _renamed(value: Any) -> Any:
    """Return code, or a constant of code, with the other names of the tables of hooks."""
    if isinstance(value, str):
        return _SHOWN.get(value, value)
    if isinstance(value, tuple | frozenset):
        return type(value)(map(_renamed, value))
    if isinstance(value, CodeType):
        names, constants = _renamed(value.co_names), _renamed(value.co_consts)
        return value.replace(co_names=names, co_consts=constants)
    return value


class _ShownHooks:
    """An attribute of modules: one of torch's tables of hooks, in which there is none of ours.

    No property, because TorchScript compiles those.
    """

    def __init__(self, table: str) -> None:
        self._table = table

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is None:
            raise AttributeError(self._table)
        hooks = getattr(module, self._table)
        ours = [
            key
            for table in (module._forward_hooks, module._forward_pre_hooks)
            for key, hook in table.items()
            if isinstance(hook, TorchHook)
        ]
        if not ours:
            return hooks
        if torch.compiler.is_compiling():  # the compiler knows dictionaries
            return {key: hook for key, hook in hooks.items() if key not in ours}
        return _ProgramHooks(hooks, ours)

    def __set__(self, module: nn.Module, hooks: Any) -> None:
        setattr(module, self._table, hooks)

    def __delete__(self, module: nn.Module) -> None:
        delattr(module, self._table)


class _ProgramHooks(MutableMapping[Any, Any]):
    """One of torch's tables of hooks without ours; what is changed here is changed there."""

    def __init__(self, hooks: dict[Any, Any], ours: list[Any]) -> None:
        self._hooks, self._ours = hooks, ours

    def __iter__(self) -> Iterator[Any]:
        return iter([key for key in self._hooks if key not in self._ours])

    def __len__(self) -> int:
        return sum(key not in self._ours for key in self._hooks)

    def __getitem__(self, key: Any) -> Any:
        if key in self._ours:
            raise KeyError(key)
        return self._hooks[key]

    def __setitem__(self, key: Any, hook: Any) -> None:
        self._hooks[key] = hook

    def __delitem__(self, key: Any) -> None:
        del self._hooks[key]
