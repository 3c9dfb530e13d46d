"""Runs every model in double precision (OTEL_TORCH_UPCAST), to record what is right.

`model.double()` alone is not enough: programs cast to float32 inside of their normalizations, and
make masks and timesteps of a fixed dtype. So three things happen when a model is first called:

1. its parameters and buffers become fp64, exactly,
2. the floating-point inputs of its outermost call become fp64,
3. each operation inside that asks for a smaller type gets fp64 in its place.

Random operations still run in the type that they would have had, because other types draw other
numbers. Operations that have no fp64 version run in the largest type that they have; they are
reported.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from otel_torch import torch_private
from otel_torch.process.console import say_once
from otel_torch.sources.models.model import Model, ModuleSite
from otel_torch.sources.modules import call_stack
from otel_torch.sources.modules.hooks import (
    ModuleHookManager,
    SessionHook,
    TorchHook,
    has_hook,
    remove_hooks,
)
from otel_torch.sources.modules.module_dict import ModuleDict
from otel_torch.sources.operations.operation_kinds import draws_now, kind_of
from otel_torch.sources.source import Source

_HOOK = "otel_torch.upcast"

_DOUBLE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
_SINGLE = {torch.float64: torch.float32, torch.complex128: torch.complex64}


class _DoubleMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # as torch has it
    """Computes the operations of one outermost call in fp64.

    Args:
        lowered: the model's own type of each fp64 type, for operations that cannot run in fp64.
        depth: length of the thread's call stack when the call began.
    """

    def __init__(self, lowered: dict[torch.dtype, torch.dtype], depth: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.depth = depth
        self._lowered = lowered

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_operator = hasattr(func, "tags")  # as opposed to a function of torch's higher order
        if not is_operator or torch_private.returns_view(func):
            return func(*args, **kwargs)
        if draws_now(kind_of(func), func, args, kwargs):
            return self._run_lowered(func, args, kwargs)
        try:
            return _run_in(_DOUBLE, func, args, kwargs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            return self._run_smaller(func, args, kwargs)

    def _run_smaller(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation that fails in fp64. Raises what it raises in the program, if it does."""
        used = _SINGLE
        try:
            result = tree_map(_cast(_DOUBLE), _run_in(_SINGLE, func, args, kwargs))
        except RuntimeError:
            used = self._lowered
            result = self._run_lowered(func, args, kwargs)
        dtype = str(used[torch.float64]).removeprefix("torch.")
        say_once(f"OTEL_TORCH_UPCAST: {func} has no fp64 version and runs in {dtype}")
        return result

    def _run_lowered(self, func: Any, args: Any, kwargs: Any) -> Any:
        return tree_map(_cast(_DOUBLE), _run_in(self._lowered, func, args, kwargs))


def _run_in(
    dtypes: dict[torch.dtype, torch.dtype], func: Any, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Run an operation with its dtypes replaced; what it writes reaches the original tensors."""
    written = torch_private.written_arguments(func)
    originals: dict[int, torch.Tensor] = {}

    def cast_written(value: Any) -> Any:
        replaced = cast(value)
        if replaced is not value and isinstance(value, torch.Tensor):
            originals[id(replaced)] = value
            copies.append(replaced)
        return replaced

    def cast_argument(name: str | int, value: Any) -> Any:
        return tree_map(cast_written if name in written else cast, value)

    copies: list[torch.Tensor] = []
    cast = _cast(dtypes)
    result = func(
        *(cast_argument(index, value) for index, value in enumerate(args)),
        **{name: cast_argument(name, value) for name, value in kwargs.items()},
    )
    for copy in copies:
        originals[id(copy)].copy_(copy)
    return tree_map(lambda value: originals.get(id(value), value), result) if copies else result


def _cast(dtypes: dict[torch.dtype, torch.dtype]) -> Callable[[Any], Any]:
    """Return a function that replaces a dtype, and the dtype of a tensor."""

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            dtype = dtypes.get(value.dtype)
            return value if dtype is None else value.to(dtype)
        return dtypes.get(value, value) if isinstance(value, torch.dtype) else value

    return cast


class _ActiveMode(threading.local):
    """The mode of this thread's outermost call."""

    def __init__(self) -> None:
        self.mode: _DoubleMode | None = None

    def exit_ended(self) -> None:
        """Exit the mode if its call has ended, or ends now."""
        if self.mode is not None and self.mode.depth >= len(call_stack.current()):
            mode, self.mode = self.mode, None
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


_active = _ActiveMode()


class _DoubleHook(SessionHook):
    """Enters the mode in an outermost call, and casts the inputs of that call."""

    hook_name = _HOOK

    def __init__(self, lowered: dict[torch.dtype, torch.dtype]) -> None:
        self._lowered = lowered

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if torch.compiler.is_compiling():
            return args, kwargs
        _active.exit_ended()
        if _active.mode is not None:
            return args, kwargs
        args, kwargs = tree_map(_cast(_DOUBLE), (args, kwargs))
        _active.mode = _DoubleMode(self._lowered, len(call_stack.current()))
        _active.mode.__enter__()  # type: ignore[no-untyped-call]
        return args, kwargs


def _exit_mode(*hook_arguments: Any) -> None:
    """Exit the current call's mode. Torch calls this even if forward raised."""
    if not torch.compiler.is_compiling():
        _active.exit_ended()


class Upcast(Source):
    """Converts every model at its first call, recorded or not: one may compute another's inputs."""

    def __init__(self) -> None:
        self._attached: ModuleDict[Any] = ModuleDict()

    def attach(self, model: Model, sites: list[ModuleSite]) -> None:
        """Convert the modules of `sites`, after observers have recorded their parameters."""
        say_once("OTEL_TORCH_UPCAST=float64: models run in double precision")
        lowered = _own_types(sites)
        for site in sites:
            module = site.module()
            if module is None or has_hook(module, _HOOK):
                continue
            try:
                module.double()
                ModuleHookManager.get_from_or_default(module).append_forward_hook(
                    _DoubleHook(lowered)
                )
                self._attached[module] = module.register_forward_hook(
                    TorchHook(_exit_mode), always_call=True
                )
            except Exception as error:
                say_once(
                    f"{model.name}: {type(module).__name__} is not converted to fp64 "
                    f"({type(error).__name__}: {error})"
                )

    def uninstall(self) -> None:
        """Remove all hooks. The parameters stay fp64."""
        for handle in self._attached.values():
            handle.remove()
        remove_hooks(self._attached, _HOOK)
        self._attached.clear()


def _own_types(sites: list[ModuleSite]) -> dict[torch.dtype, torch.dtype]:
    """Return the types of which the first parameter has one, by the fp64 types in their place."""
    for site in sites:
        module = site.module()
        for parameter in () if module is None else module.parameters():
            if parameter.dtype in _DOUBLE and parameter.is_floating_point():
                return {torch.float64: parameter.dtype, torch.complex128: torch.complex64}
    return {torch.float64: torch.get_default_dtype(), torch.complex128: torch.complex64}
