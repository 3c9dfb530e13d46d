"""Watch a forward on fake tensors: every operator, and every call of a module."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from otel_torch.scanning.fake_model import FakeCopies
from otel_torch.scanning.flops import count_flops, has_formula
from otel_torch.scanning.scanned_forward import ScannedCall, ScannedModule, ScannedTensor
from otel_torch.sources.modules.module_names import class_name, named_modules
from otel_torch.sources.tensors.identity import IdentityRegistry
from otel_torch.sources.tensors.values import walk, walk_inputs

# operators that turn a constant into a fake tensor and keep its value: `torch.tensor(3)` in a
# forward
_LIFTS = (
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten.lift_fresh_copy.default,
    torch.ops.aten.lift.default,
)


def _grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: Any = None,
    bias: Any = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, Any]:
    """Return the result and the FLOP of a grouped matrix product (a mixture of experts).

    Either operand has its groups in a dimension of its own (3-D) or concatenated along one, with
    their ends in `offs` (2-D).
    """
    shape: tuple[int, ...]
    match a.dim(), b.dim():
        case 2, 2:
            shape, flops = (offs.shape[0], a.shape[0], b.shape[1]), 2 * a.numel() * b.shape[1]
        case 2, 3:
            shape, flops = (a.shape[0], b.shape[2]), 2 * a.numel() * b.shape[2]
        case 3, 2:
            shape, flops = (a.shape[1], b.shape[1]), 2 * a.shape[1] * b.numel()
        case _:
            shape, flops = (*a.shape[:2], b.shape[2]), 2 * a.numel() * b.shape[2]
    return a.new_empty(shape, dtype=out_dtype or a.dtype), flops


# operators whose fake version rejects arguments that the real one accepts; `_grouped_mm` rejects
# every dtype but bfloat16
_REPLACEMENTS: dict[Any, Callable[..., tuple[Any, Any]]] = {
    getattr(getattr(torch.ops.aten, "_grouped_mm", None), "default", None): _grouped_mm
}


@dataclasses.dataclass(slots=True)
class _ActiveCall:
    """A call that has started and not returned, with the counts before it."""

    module: nn.Module
    row: ScannedCall
    flops_before: int
    was_dynamic: bool


class ForwardWatcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the calls and counts the FLOP of a forward, and replaces real tensors by fake ones.

    Args:
        root: The original model; its copy is what runs.
    """

    def __init__(self, root: nn.Module, copies: FakeCopies) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._copies = copies
        self._calls: list[ScannedCall] = []
        self._active: list[_ActiveCall] = []  # outermost first
        self._call_counts: dict[str, int] = {}
        self._identities = IdentityRegistry()
        self._numbers = itertools.count()
        self._flops, self._dynamic = 0, False
        # copy -> its names, each with the identity of the module that holds it under that name
        self._names: dict[int, list[tuple[str, int]]] = {}
        self._sizes: dict[str, tuple[int, int]] = {}
        self.modules: list[ScannedModule] = []
        self._add_modules(root)

    def _add_modules(self, root: nn.Module) -> None:
        named = named_modules(root)
        identities = {name: id(self._copies.copied_module(module)) for name, module in named}
        for name, module in named:
            copied = self._copies.copied_module(module)
            sizes = self._sizes[name] = bytes_of(module)
            is_first_name = id(copied) not in self._names
            row = ScannedModule(name, class_name(module), *sizes, ())
            if is_first_name:
                row.parameters = _scan_direct("param", module._parameters)
                row.buffers = _scan_direct("buffer", module._buffers)
                if copied is not module:
                    copied.register_forward_pre_hook(self._start_call, with_kwargs=True)
                    copied.register_forward_hook(self._end_call)
            self.modules.append(row)
            parent = identities.get(name.rpartition(".")[0], 0)
            self._names.setdefault(id(copied), []).append((name, parent))

    def calls(self) -> list[ScannedCall]:
        """Return the calls in the order in which they started. Calls that have not returned have
        the FLOP up to now.
        """
        for active in self._active:
            active.row.flops = self._flops - active.flops_before
            active.row.dynamic = self._dynamic
        return self._calls

    def flops(self) -> tuple[int, bool]:
        """Return the FLOP up to now, and whether there are more that depend on the data."""
        return self._flops, self._dynamic

    def current_module(self) -> str:
        """Return the name and class of the module that is running, or an empty text."""
        if not self._active:
            return ""
        row = self._active[-1].row
        return f"{row.module or 'the root'} ({row.class_name})"

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _LIFTS:
            args, kwargs = tree_map_only(torch.Tensor, self._copies.ensure_fake, (args, kwargs))
        if (
            isinstance(func, torch._ops.OpOverload)
            and not has_formula(func)
            and func is not torch.ops.prim.device.default
        ):
            with self:  # in inference mode, compound operators such as `linear` arrive here
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        flops: int | None
        replacement = _REPLACEMENTS.get(func)
        if replacement is not None:
            result, flops = replacement(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
            flops = count_flops(func, args, kwargs, result)
        if type(flops) is int:
            self._flops += flops
        else:
            self._dynamic = True
        return result

    def _start_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = self._name_of(module)
        call = self._call_counts.get(name, 0)
        self._call_counts[name] = call + 1
        inputs = tuple(self._scan(label, tensor) for label, tensor in walk_inputs(args, kwargs))
        parameter_bytes, buffer_bytes = self._sizes[name]
        row = ScannedCall(
            module=name,
            class_name=class_name(module),
            call=call,
            order=len(self._calls),
            depth=len(self._active),
            inputs=inputs,
            outputs=(),
            parameter_bytes=parameter_bytes,
            buffer_bytes=buffer_bytes,
        )
        self._active.append(_ActiveCall(module, row, self._flops, self._dynamic))
        self._dynamic = False
        self._calls.append(row)

    def _end_call(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        # calls above this one have raised an exception that the model has caught
        while self._active:
            active = self._active.pop()
            row = active.row
            row.flops = self._flops - active.flops_before
            row.dynamic, self._dynamic = self._dynamic, self._dynamic or active.was_dynamic
            if active.module is module:
                row.outputs = tuple(
                    self._scan(label, tensor) for label, tensor in walk(output, "out")
                )
                row.finished = True
                break

    def _scan(self, label: str, tensor: torch.Tensor) -> ScannedTensor:
        scanned = _scan_tensor(label, tensor)
        if scanned.bytes is None:  # without a size, a tensor cannot be looked up by its memory
            return dataclasses.replace(scanned, number=next(self._numbers))
        identity = self._identities.of(tensor)
        if identity.number is None:
            identity.number = next(self._numbers)
        return dataclasses.replace(scanned, number=identity.number)

    def _name_of(self, module: nn.Module) -> str:
        """Return the module's name; of a shared module's names, the one below a running module."""
        names = self._names[id(module)]
        if len(names) > 1:
            for active in reversed(self._active):
                for name, parent in names:
                    if id(active.module) == parent:
                        return name
        return names[0][0]


def bytes_of(module: nn.Module) -> tuple[int, int]:
    """Return the bytes of a module's parameters and of its buffers, submodules included, each
    tensor once.
    """
    return (
        sum(tensor.numel() * tensor.element_size() for tensor in module.parameters()),
        sum(tensor.numel() * tensor.element_size() for tensor in module.buffers()),
    )


def _scan_tensor(label: str, tensor: torch.Tensor) -> ScannedTensor:
    shape = tuple(size if type(size) is int else -1 for size in tensor.shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    size = tensor.numel() * tensor.element_size() if -1 not in shape else None
    return ScannedTensor(label, shape, dtype, size, tensor.requires_grad)


def _scan_direct(
    kind: str, tensors: Mapping[str, torch.Tensor | None]
) -> tuple[ScannedTensor, ...]:
    return tuple(
        _scan_tensor(f"{kind}.{name}", tensor)
        for name, tensor in tensors.items()
        if tensor is not None
    )
