"""Torch's private names, once and each with a fallback: what recording needs so that the program
cannot tell it runs.

A user's FLOP counter, default device, autocast, autograd, vmap or tracer must not see the
arithmetic of a statistic.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")
_F = TypeVar("_F", bound=Callable[..., Any])

# below the layers that `ADInplaceOrView` tops (autograd, autocast, tracer, functorch, modes) these
# too change or watch
_WATCHERS = ("Python", "Fake", "Functionalize", "FuncTorchDynamicLayerBackMode", "PythonDispatcher")


def _layers_above_arithmetic() -> Any:
    """The dispatch keys of everything that watches or changes an operation, None where this torch
    has other names.
    """
    try:
        private = torch._C
        keys = private._dispatch_keyset_full() - private._dispatch_keyset_full_after(
            private.DispatchKey.ADInplaceOrView
        )
        for name in _WATCHERS:
            if (key := getattr(private.DispatchKey, name, None)) is not None:
                keys = keys | private.DispatchKeySet(key)
        with private.DisableTorchFunction(), private._ExcludeDispatchKeyGuard(keys):
            torch.zeros(1).sum()
        return keys
    except Exception:
        return None


_keys = _layers_above_arithmetic()


def unobserved(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run `function` below autograd, autocast, functorch, tracers and every function or dispatch
    mode of the user.

    Where torch's private guards are gone it runs under `no_grad` only: right, though a mode may see
    it.
    """
    if _keys is None:
        return torch.no_grad()(function)
    function_modes_off, layers_off, keys = (
        torch._C.DisableTorchFunction,
        torch._C._ExcludeDispatchKeyGuard,
        _keys,
    )
    tracing: Callable[[], Any] = getattr(torch._C, "_get_tracing_state", lambda: None)
    resume: Callable[[Any], None] = getattr(torch._C, "_set_tracing_state", lambda state: None)

    @functools.wraps(function)
    def below(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if (
            trace := tracing()
        ) is not None:  # while `torch.jit` traces, sizes are tensors and every use of one a warning
            resume(None)
        try:
            with function_modes_off(), layers_off(keys):
                return function(*args, **kwargs)
        finally:
            if trace is not None:
                resume(trace)

    return below


def _plain_layers() -> frozenset[int]:
    """The sets of dispatch keys that tensors of ordinary CPU memory have: of any program, and of
    inference mode.
    """
    try:
        with torch.inference_mode():
            inside = torch._C._dispatch_keys(torch.empty(0, device="cpu")).raw_repr()
        with torch.inference_mode(False):
            outside = torch._C._dispatch_keys(torch.empty(0, device="cpu")).raw_repr()
        return frozenset({inside, outside})
    except Exception:
        return frozenset()


_ordinary = frozenset({torch.Tensor, torch.nn.Parameter})
_plain = _plain_layers()


# how many function modes of the program are active in this thread, which would see what is asked of
# a tensor
count_function_modes: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", lambda: 1)


def _is_plain_memory() -> Callable[[torch.Tensor], bool]:
    try:
        modes, tracing, keys = (
            count_function_modes,
            torch._C._get_tracing_state,
            torch._C._dispatch_keys,
        )
        modes(), tracing()
    except Exception:
        return lambda tensor: False

    def is_plain_memory(tensor: torch.Tensor) -> bool:
        return (
            type(tensor) in _ordinary
            and keys(tensor).raw_repr() in _plain
            and not modes()
            and tracing() is None
        )

    return is_plain_memory


# whether a tensor is strided CPU memory that holds its numbers as they are (no view with another
# sign, nothing sparse, nested, quantized or wrapped), and may be asked for its size and type
# without a mode or tracer seeing it
is_plain_memory = _is_plain_memory()


def unseen_by_function_modes(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run `function` so that no function mode of the user sees what it asks of a tensor; autograd
    and the rest stay.
    """
    modes_off = getattr(torch._C, "DisableTorchFunction", nullcontext)

    @functools.wraps(function)
    def below(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with modes_off():
            return function(*args, **kwargs)

    return below


def hide_from_torchscript(hidden: type) -> Callable[[], None]:
    """Have TorchScript, which compiles a module's hooks too, leave out those of the class `hidden`;
    returns what ends that. Where TorchScript has no such place any more this does nothing.
    """
    recursive: Any = sys.modules.get("torch.jit._recursive")
    create = getattr(recursive, "create_script_module", None)
    if create is None:
        return lambda: None

    def create_without(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        tables = [
            table
            for part in module.modules()
            for table in (part._forward_hooks, part._forward_pre_hooks)
        ]
        whole = [(table, dict(table)) for table in tables]
        for table, hooks in whole:
            for key in [key for key, hook in hooks.items() if isinstance(hook, hidden)]:
                del table[key]
        try:
            return create(module, *args, **kwargs)
        finally:
            for table, hooks in whole:
                table.clear()
                table.update(hooks)

    def restore() -> None:
        if recursive.create_script_module is create_without:
            recursive.create_script_module = create

    recursive.create_script_module = create_without
    return restore


# torch from which on a compiled program can be told from an exported one, and hooks kept from being
# graphs of their own. Older torch has the names too, but with other meanings: in 2.9 `is_exporting`
# is true in every graph
COMPILER_TELLS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


def keep_out_of_frames(function: _F, *, with_callees: bool = True) -> _F:
    """Have the compiler leave `function` alone where it meets it as a frame of its own: it runs
    eagerly there, and with `with_callees` all that it calls too. Inlined into a graph it is traced
    as ever. Older torch compiles both: the records are the same, the hooks of a regionally compiled
    module are graphs of their own.
    """
    if not COMPILER_TELLS:
        return function
    try:
        frames = torch._C._dynamo.eval_frame
        skip, default = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
        strategy = frames._FrameExecStrategy(skip, skip if with_callees else default)
        frames.set_code_exec_strategy(function.__code__, strategy)
    except Exception:
        pass
    return function


def compiled_graphs() -> int:
    """How many graphs torch.compile has made in this process; 0 where torch does not say."""
    utils = sys.modules.get("torch._dynamo.utils")
    try:
        return int(utils.counters["stats"]["unique_graphs"]) if utils is not None else 0
    except Exception:
        return 0


def local_while_tracing(context: Any, name: str) -> Any:
    """The value of a local variable at the place that the compiler is tracing, None where it does
    not say.

    context: what `torch._dynamo.comptime` hands to a function.
    """
    try:
        return context.get_local(name)._ComptimeVar__variable.value
    except Exception:
        return None


# whether `torch.export` is at work
is_exporting: Callable[[], bool] = (
    getattr(torch.compiler, "is_exporting", bool) if COMPILER_TELLS else bool
)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether `tensor` only pretends to have memory, as those do with which a compiler tries a
    model.
    """
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    return fakes is not None and isinstance(tensor, fakes.FakeTensor)


# the number of the backward pass that runs in this thread, -1 outside of one (or where torch does
# not say)
graph_task_id: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def once_in_use(accelerator: Any, call: Callable[[], None]) -> None:
    """Call when the program first uses an accelerator (`torch.cuda`), or now if it has; nothing
    here starts its driver.

    Raises AttributeError where torch has no such list.
    """
    accelerator._lazy_call(call)


def shard_offset(tensor: Any) -> list[int] | None:
    """Where the local part of a DTensor begins in it, one number a dimension; None where torch does
    not say.
    """
    try:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        _, offset = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        return [int(start) for start in offset]
    except Exception:
        return None


class StorageLife:
    """Tells whether a tensor's memory still is the one that was seen: addresses come again, this
    does not.

    Raises what torch raises for a tensor without a storage.
    """

    __slots__ = ("_reference", "key")

    def __init__(self, tensor: torch.Tensor) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        self._reference: Any = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # no memory
        self.key: int = self._reference.cdata

    @property
    def over(self) -> bool:
        """Whether the memory has been given back."""
        return bool(self._reference.expired())


def several_ranks() -> bool:
    """Whether other ranks work with this one: a collective changes tensors in place, and torch does
    not count that.
    """
    distributed = sys.modules.get("torch.distributed")
    try:
        return (
            distributed is not None
            and distributed.is_initialized()
            and distributed.get_world_size() > 1
        )
    except Exception:  # torch built without it
        return False


def version_of(tensor: torch.Tensor) -> int | None:
    """How often the tensor's memory was changed in place, None where torch does not count
    (inference mode).
    """
    return None if tensor.is_inference() else int(tensor._version)
