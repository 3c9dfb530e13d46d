"""A model's twin, of tensors that have a shape and no memory: it runs in the model's place.

Running the model itself on fake tensors changes it: a batch norm in training really counts its
batches, a cache is filled, hooks fire. The twin has the structure and nothing else; whatever its
forward writes goes away with it.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from contextlib import ExitStack
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch as python_dispatch
from torch.utils._pytree import tree_map_only

from otel_torch.sources.module_names import class_name, core
from otel_torch.sources.values import walk

# every table of hooks that a module has; what hangs in them may write anywhere, so a twin has none
_HOOKS = tuple(name for name in vars(nn.Module()) if "_hooks" in name)
# methods that change their tensor, beside those whose name ends in an underscore
_OPERATORS = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
)
_WRITES = frozenset({"__setitem__", *(f"__i{name}__" for name in _OPERATORS)})


class Twins:
    """Twins of modules and tensors: one for each, however many names and holders it has."""

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        self._mode = mode
        self._device = device
        self._twins: dict[int, Any] = {}
        self._kept: list[Any] = []  # an id is only an id while its object lives

    def of_model(self, root: nn.Module) -> nn.Module:
        """A model like this one, of fake tensors, without hooks, wrappers or compiled code."""
        originals = {}
        for module in root.modules():
            inner = core(module)
            if id(inner) not in self._twins:
                scripted = isinstance(inner, torch.jit.ScriptModule)  # its insides are not Python's
                self._twins[id(inner)] = inner if scripted else object.__new__(_plain_class(inner))
                originals[id(inner)] = inner
            self._twins[id(module)] = self._twins[id(inner)]
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    self.of_tensor(tensor)
        for key, original in originals.items():
            twin = self._twins[key]
            if twin is not original:
                values = {
                    name: self._copy(value)
                    for name, value in vars(original).items()
                    if name not in _HOOKS
                }
                values.pop("_compiled_call_impl", None)
                vars(twin).update(values | {name: OrderedDict() for name in _HOOKS})
        found: nn.Module = self._twins[id(root)]
        return found

    def of_inputs(self, value: Any) -> Any:
        """The same arguments with fake tensors; a single number keeps its value, so that `if t >
        500` can be answered.
        """
        return self._copy(value, keep_numbers=True)

    def of_tensor(self, tensor: torch.Tensor, *, keep_number: bool = False) -> torch.Tensor:
        """The fake version of a tensor, the same one each time; nothing of the tensor is read."""
        twin = self._twins.get(id(tensor))
        if twin is None:
            with self._mode:
                twin = self._fake(tensor, keep_number)
            if isinstance(tensor, nn.Parameter):
                twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
            elif tensor.requires_grad:
                twin.requires_grad_(True)
            self._twins[id(tensor)] = twin
            self._kept.append(tensor)
        return twin

    def of_module(self, module: nn.Module) -> nn.Module:
        """The twin of a module of the model."""
        found: nn.Module = self._twins[id(module)]
        return found

    def of_the_moment(self, tensor: torch.Tensor) -> torch.Tensor:
        """What stands in for an operator's argument: a real tensor from a global or a closure has a
        twin too.
        """
        return (
            tensor if isinstance(tensor, FakeTensor) else self.of_tensor(tensor, keep_number=True)
        )

    def _fake(self, tensor: torch.Tensor, keep_number: bool) -> torch.Tensor:
        if is_lazy(tensor):
            raise ValueError(
                "the model has lazy modules, which have no shapes before their first run; run it once, then scan it"
            )
        device = self._device if tensor.is_meta else tensor.device
        if keep_number and tensor.numel() == 1 and tensor.is_cpu and type(tensor) is torch.Tensor:
            with no_modes():
                number = tensor.detach().tolist()
            return torch.tensor(number, dtype=tensor.dtype, device=device)
        if tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
            )
        with no_modes():
            return self._mode.from_tensor(tensor, static_shapes=True)

    def _copy(self, value: Any, *, keep_numbers: bool = False) -> Any:
        if type(value) is FunctionType and value.__closure__:
            return self._rebind(value)
        try:
            with _CopiesAreFake(self, keep_numbers):
                return copy.deepcopy(value, self._twins)
        except Exception:  # a lock, a stream, a process group: shared with the original, but not what lies beside it
            if type(value) in (list, tuple):
                return type(value)(self._copy(item, keep_numbers=keep_numbers) for item in value)
            if type(value) is dict:
                return {
                    key: self._copy(item, keep_numbers=keep_numbers) for key, item in value.items()
                }
            return value

    def _rebind(self, function: FunctionType) -> Any:
        """A function that somebody put on a module in place of its `forward`, with twins of what it
        closes over.
        """
        if id(function) not in self._twins:
            closure = function.__closure__ or ()
            cells = tuple(CellType() for _ in closure)
            twin = FunctionType(
                function.__code__,
                function.__globals__,
                function.__name__,
                function.__defaults__,
                cells,
            )
            twin.__kwdefaults__ = function.__kwdefaults__
            self._twins[id(function)] = twin
            for cell, original in zip(cells, closure, strict=True):
                if original != CellType():  # an empty one has no contents
                    cell.cell_contents = self._copy(original.cell_contents)
        return self._twins[id(function)]


class _CopiesAreFake(TorchFunctionMode):
    """While something is copied deeply, the copy of every tensor in it is a fake one."""

    def __init__(self, twins: Twins, keep_numbers: bool) -> None:
        super().__init__()
        self._twins, self._keep_numbers = twins, keep_numbers

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in (torch.Tensor.__deepcopy__, torch.Tensor.clone):
            return self._twins.of_tensor(args[0], keep_number=self._keep_numbers)
        return func(*args, **(kwargs or {}))


class WritesAreFake(TorchFunctionMode):
    """What writes into a real tensor (one of a global, of a closure) writes into its twin: further
    down, where operators are watched, its version has been counted up already.
    """

    def __init__(self, twins: Twins) -> None:
        super().__init__()
        self._twins = twins

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _WRITES or (name.endswith("_") and not name.endswith("__")):
            args, kwargs = tree_map_only(
                torch.Tensor, self._twins.of_the_moment, (args, kwargs or {})
            )
        return func(*args, **(kwargs or {}))


def _plain_class(module: nn.Module) -> type:
    """The class that a module was written as: without the one that FSDP2 puts in front."""
    name = class_name(module)
    return next((cls for cls in type(module).__mro__ if cls.__name__ == name), type(module))


def usual_device(root: nn.Module, *inputs: Any) -> torch.device:
    """Where a tensor without a place is taken to be: where the other tensors are, else on the CPU."""
    found = [tensor for value in inputs for _, tensor in walk(value, "")]
    for tensor in (*found, *root.parameters(), *root.buffers()):
        if not tensor.is_meta:
            device: torch.device = tensor.device
            return device
    return torch.device("cpu")


def no_modes() -> Any:
    """A FLOP counter or another fake mode of the caller sees nothing of the scan."""
    disable = getattr(python_dispatch, "_disable_current_modes", None)
    return ExitStack() if disable is None else disable()
