"""Copy a model with fake tensors, which have a shape and no memory, to run in the model's place.

Running the model itself on fake tensors would change it: a batch norm in training counts its
batches, caches are filled, hooks fire. The copy has the same structure, and whatever its forward
writes is discarded with it.
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

from otel_torch.sources.modules.module_names import class_name, core
from otel_torch.sources.tensors.values import walk

# all hook tables of a module; hooks may write anywhere, so the copy has none
_HOOK_TABLES = tuple(name for name in vars(nn.Module()) if "_hooks" in name)
# methods that change their tensor, besides those whose name ends in an underscore
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
_IN_PLACE_METHODS = frozenset({"__setitem__", *(f"__i{name}__" for name in _OPERATORS)})


class FakeCopies:
    """Fake copies of modules, tensors and other values, one for each original."""

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        self._mode = mode
        self._device = device
        self._copies: dict[int, Any] = {}  # by the original's identity
        self._originals: list[Any] = []  # keeps them alive, so that no identity is reused

    def copy_model(self, root: nn.Module) -> nn.Module:
        """Return a copy of the model with fake tensors and without hooks, wrappers and compiled
        code.
        """
        originals: list[nn.Module] = []
        for module in root.modules():
            inner = core(module)
            if id(inner) not in self._copies:
                self._copies[id(inner)] = _make_empty(inner)
                originals.append(inner)
            self._copies[id(module)] = self._copies[id(inner)]
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    self.copy_tensor(tensor)
        for original in originals:
            copied = self._copies[id(original)]
            if copied is not original:
                self._copy_attributes(original, copied)
        return self.copied_module(root)

    def _copy_attributes(self, original: nn.Module, copied: nn.Module) -> None:
        attributes: dict[str, Any] = {}
        for name, value in vars(original).items():
            if name not in _HOOK_TABLES:
                attributes[name] = self._copy(value)
        attributes.pop("_compiled_call_impl", None)
        attributes |= {name: OrderedDict() for name in _HOOK_TABLES}
        vars(copied).update(attributes)

    def copy_inputs(self, value: Any) -> Any:
        """Return the arguments with fake tensors. A tensor of one element keeps its value, so that
        `if t > 500` has an answer.
        """
        return self._copy(value, keep_scalars=True)

    def copy_tensor(self, tensor: torch.Tensor, *, keep_scalar: bool = False) -> torch.Tensor:
        """Return the fake copy of a tensor, without reading the tensor's values."""
        copied = self._copies.get(id(tensor))
        if copied is None:
            with self._mode:
                copied = self._make_fake(tensor, keep_scalar)
            if isinstance(tensor, nn.Parameter):
                copied = nn.Parameter(copied, requires_grad=tensor.requires_grad)
            elif tensor.requires_grad:
                copied.requires_grad_(True)
            self._copies[id(tensor)] = copied
            self._originals.append(tensor)
        return copied

    def copied_module(self, module: nn.Module) -> nn.Module:
        """Return the copy of a module of the copied model."""
        copied: nn.Module = self._copies[id(module)]
        return copied

    def ensure_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor as it is, and the copy of a real one from a global or a closure."""
        if isinstance(tensor, FakeTensor):
            return tensor
        return self.copy_tensor(tensor, keep_scalar=True)

    def _make_fake(self, tensor: torch.Tensor, keep_scalar: bool) -> torch.Tensor:
        if is_lazy(tensor):
            raise ValueError(
                "the model has lazy modules, which have no shapes before their first run; "
                "run it once, then scan it"
            )
        device = self._device if tensor.is_meta else tensor.device
        is_plain_scalar = tensor.numel() == 1 and tensor.is_cpu and type(tensor) is torch.Tensor
        if keep_scalar and is_plain_scalar:
            with disable_modes():
                number = tensor.detach().tolist()
            return torch.tensor(number, dtype=tensor.dtype, device=device)
        if tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
            )
        with disable_modes():
            return self._mode.from_tensor(tensor, static_shapes=True)

    def _copy(self, value: Any, *, keep_scalars: bool = False) -> Any:
        if type(value) is FunctionType and value.__closure__:
            return self._copy_function(value)
        try:
            with _FakeDeepcopy(self, keep_scalars):
                return copy.deepcopy(value, self._copies)
        except Exception:
            # a lock, a stream or a process group is shared with the original; values next to it in
            # a container are still copied
            if type(value) in (list, tuple):
                return type(value)(self._copy(item, keep_scalars=keep_scalars) for item in value)
            if type(value) is dict:
                return {
                    key: self._copy(item, keep_scalars=keep_scalars) for key, item in value.items()
                }
            return value

    def _copy_function(self, function: FunctionType) -> Any:
        """Return a copy of a function with fake copies in its closure: a program may have replaced
        a module's `forward` by such a function.
        """
        if id(function) not in self._copies:
            closure = function.__closure__ or ()
            cells = tuple(CellType() for _ in closure)
            copied = FunctionType(
                function.__code__,
                function.__globals__,
                function.__name__,
                function.__defaults__,
                cells,
            )
            copied.__kwdefaults__ = function.__kwdefaults__
            self._copies[id(function)] = copied
            for cell, original in zip(cells, closure, strict=True):
                if original != CellType():  # an empty cell has no contents
                    cell.cell_contents = self._copy(original.cell_contents)
        return self._copies[id(function)]


def _make_empty(module: nn.Module) -> nn.Module:
    """Return a module of the same class without attributes; a scripted module itself, whose
    attributes are not Python's.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return module
    empty: nn.Module = object.__new__(_original_class(module))
    return empty


def _original_class(module: nn.Module) -> type:
    """Return the class that a module was written as, without the subclass that FSDP2 makes."""
    name = class_name(module)
    return next((cls for cls in type(module).__mro__ if cls.__name__ == name), type(module))


class _FakeDeepcopy(TorchFunctionMode):
    """Make `copy.deepcopy` use the fake copies of tensors."""

    def __init__(self, copies: FakeCopies, keep_scalars: bool) -> None:
        super().__init__()
        self._copies, self._keep_scalars = copies, keep_scalars

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in (torch.Tensor.__deepcopy__, torch.Tensor.clone):
            return self._copies.copy_tensor(args[0], keep_scalar=self._keep_scalars)
        return func(*args, **(kwargs or {}))


class FakeInPlaceWrites(TorchFunctionMode):
    """Redirect in-place methods on real tensors, of globals and closures, to their fake copies.

    A dispatch mode is too late for this: by then the real tensor's version has been increased.
    """

    def __init__(self, copies: FakeCopies) -> None:
        super().__init__()
        self._copies = copies

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _IN_PLACE_METHODS or (name.endswith("_") and not name.endswith("__")):
            args, kwargs = tree_map_only(
                torch.Tensor, self._copies.ensure_fake, (args, kwargs or {})
            )
        return func(*args, **(kwargs or {}))


def default_device(root: nn.Module, *inputs: Any) -> torch.device:
    """Return the device to assume for tensors on `meta`: that of another input, parameter or
    buffer, else the CPU.
    """
    input_tensors = [tensor for value in inputs for _, tensor in walk(value, "")]
    for tensor in (*input_tensors, *root.parameters(), *root.buffers()):
        if not tensor.is_meta:
            device: torch.device = tensor.device
            return device
    return torch.device("cpu")


def disable_modes() -> Any:
    """Return a context in which the caller's dispatch modes, such as a FLOP counter, are off."""
    disable = getattr(python_dispatch, "_disable_current_modes", None)
    return ExitStack() if disable is None else disable()
