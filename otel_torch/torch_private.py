"""Every private name of torch that this package uses, each with a fallback.

Recording must not change what the program sees: a FLOP counter, default device, autocast, autograd,
vmap or tracer must not see the arithmetic of a statistic. Public torch has no way to hide it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from types import CodeType, SimpleNamespace
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")
_F = TypeVar("_F", bound=Callable[..., Any])

# Layers below `ADInplaceOrView` that also change or observe an operation. Those above it (autograd,
# autocast, tracer, functorch, modes) all do.
_OBSERVING_LAYERS = (
    "Python",
    "Fake",
    "Functionalize",
    "FuncTorchDynamicLayerBackMode",
    "PythonDispatcher",
)
# the methods by which a pipeline's stage learns shapes, the last one in torch 2.12; if a torch has
# others, these forwards are recorded as those of the program
PIPELINE_SHAPE_METHODS = (
    "_forward_metadata_inference",
    "_backward_metadata_inference",
    "_shape_inference",
)
# Modules of torch with functions that ask for a module's hooks: to take another way (the fused
# encoder layer), to refuse or to warn (CUDA graphs, saved compiled modules), or to move the hooks
# to another module (quantization). The compiler's own are left out: it has to find what it traces.
MODULES_THAT_ASK_FOR_HOOKS = (
    "torch.nn.modules.transformer",
    "torch.cuda.graphs",
    "torch.xpu.graphs",
    "torch._dynamo.aot_compile",
    "torch.ao.quantization.fuse_modules",
    "torch.ao.quantization.quantize",
    "torch.ao.pruning.sparsifier.utils",
)


def _layers_above_arithmetic() -> Any:
    """Return the dispatch keys of everything that observes or changes an operation.

    None if this torch has other names for them.
    """
    try:
        private = torch._C
        keys = private._dispatch_keyset_full() - private._dispatch_keyset_full_after(
            private.DispatchKey.ADInplaceOrView
        )
        for name in _OBSERVING_LAYERS:
            if (key := getattr(private.DispatchKey, name, None)) is not None:
                keys = keys | private.DispatchKeySet(key)
        with private.DisableTorchFunction(), private._ExcludeDispatchKeyGuard(keys):
            torch.zeros(1).sum()
        return keys
    except Exception:
        return None


_keys = _layers_above_arithmetic()


def unobserved(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Hide what `function` computes from autograd, autocast, functorch, tracers and all modes.

    If torch's private guards are gone, it runs under `no_grad` only. The result is the same, but a
    mode may see the operations.
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
        # While `torch.jit` traces, sizes are tensors, and every use of one is a warning.
        if (trace := tracing()) is not None:
            resume(None)
        try:
            with function_modes_off(), layers_off(keys):
                return function(*args, **kwargs)
        finally:
            if trace is not None:
                resume(trace)

    return below


@unobserved
def _plain_layers() -> frozenset[int]:
    """Return the dispatch keys of ordinary CPU tensors, with and without inference mode."""
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


# Returns how many function modes are active in this thread. They see every call on a tensor.
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


# Returns whether a tensor is strided CPU memory that holds its values as they are (not a conjugate
# or negative view, nor sparse, nested, quantized or wrapped), and its size and type can be read
# without a mode or tracer seeing it.
is_plain_memory = _is_plain_memory()


def unseen_by_function_modes(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Hide what `function` calls on tensors from function modes. Autograd and the rest see it."""
    modes_off = getattr(torch._C, "DisableTorchFunction", nullcontext)

    @functools.wraps(function)
    def below(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with modes_off():
            return function(*args, **kwargs)

    return below


def hide_from_torchscript(hidden: type) -> Callable[[], None]:
    """Have TorchScript skip the hooks of the class `hidden` when it compiles a module.

    Returns a function that ends this. Does nothing if this torch's TorchScript works otherwise.
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


def keep_out_of_frames(function: _F, *, with_callees: bool = True) -> _F:
    """Keep the compiler from compiling `function` as a frame of its own; it runs eagerly instead.

    With `with_callees`, so does everything that it calls. Inlined into a graph it is traced as
    usual. Where torch has other names for this, the function is compiled: the records are the same,
    but the hooks of a regionally compiled module become separate graphs.
    """
    keep_code_out_of_frames(function.__code__, with_callees=with_callees)
    return function


def keep_code_out_of_frames(code: CodeType, *, with_callees: bool = True) -> CodeType:
    """Do for code what `keep_out_of_frames` does for a function."""
    try:
        frames = torch._C._dynamo.eval_frame
        skip, default = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
        strategy = frames._FrameExecStrategy(skip, skip if with_callees else default)
        frames.set_code_exec_strategy(code, strategy)
    except Exception:
        pass
    return code


def count_compiled_graphs() -> int:
    """Return how many graphs torch.compile has made in this process; 0 if unknown."""
    utils = sys.modules.get("torch._dynamo.utils")
    try:
        return int(utils.counters["stats"]["unique_graphs"]) if utils is not None else 0
    except Exception:
        return 0


def trace_module_calls(compiler: Any, original: Callable[..., Any]) -> None:
    """Have the compiler trace a wrapped `nn.Module.__call__` instead of going on to forward.

    It skips what it takes for torch's own, which is what `nn.Module.__call__` was when it was
    imported.

    Args:
        compiler: the module `torch._dynamo.variables.nn_module`.
        original: what `nn.Module.__call__` was before it was wrapped.
    """
    if getattr(compiler, "unpatched_nn_module_call", original) is torch.nn.Module.__call__:
        compiler.unpatched_nn_module_call = original


def local_while_tracing(context: Any, name: str) -> Any:
    """Return the value of a local variable where the compiler is tracing, or None if unknown.

    `context` is what `torch._dynamo.comptime` passes to a function.
    """
    try:
        return context.get_local(name)._ComptimeVar__variable.value
    except Exception:
        return None


def constant_while_tracing(function: _F) -> _F:
    """Have the compiler call a function while it traces, and take the result for a constant.

    That is `torch.compiler.assume_constant_result`, which imports the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def frames_while_tracing(context: Any) -> Iterator[tuple[CodeType, dict[str, Any]]]:
    """Yield the code and local objects of each function that the compiler is in, innermost first.

    `context` is what `torch._dynamo.comptime` passes to a function. None stands for tensors and
    other objects that exist in the graph only. Yields nothing if all of that is unknown.
    """
    try:
        translator = context._ComptimeContext__tx
        while translator is not None:
            variables = dict(translator.symbolic_locals)
            values = {name: _traced_object(variable) for name, variable in variables.items()}
            yield translator.f_code, values
            translator = getattr(translator, "parent", None)
    except (AttributeError, TypeError):
        return


def _traced_object(variable: Any) -> Any:
    """Return the object that a variable of the compiler stands for, or None.

    One that is not used yet stays so, because the compiler guards on what is.
    """
    used = getattr(vars(variable).get("_cache"), "vt", None) or variable
    return vars(used).get("value")


# Returns whether `torch.export` is tracing.
is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", bool)


def has_global_hooks() -> bool:
    """Return whether hooks are registered for all modules; also if that is unknown."""
    try:
        return bool(torch.nn.modules.module._has_any_global_hook())  # type: ignore[no-untyped-call]
    except Exception:
        return True


class CallInternals(NamedTuple):
    """How `nn.Module.__call__` comes to forward.

    method: the function that calls hooks and forward. global_tables: the hooks of all modules.
    tracing_state: returns the graph that `torch.jit` traces, or None.
    """

    method: Any
    global_tables: tuple[dict[int, Any], ...]
    tracing_state: Callable[[], Any]


_TABLES = frozenset(
    f"_global_{kind}_hooks" for kind in ("forward_pre", "forward", "backward_pre", "backward")
)
# all that `_call_impl` reads to find out whether there is anything but forward to run
_CALL_NAMES = frozenset(
    {
        "torch", "_C", "_slow_forward", "forward", "_forward_hooks", *_TABLES,
        "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    }
)  # fmt: skip
# one of these tells whether `torch.jit` traces: the second one from torch 2.14 or 2.15 on
_TRACING_NAMES = frozenset({"_get_tracing_state", "_is_tracing"})
_FURTHER_NAMES = frozenset(
    {
        "set", "compiler", "is_compiling", "Exception", "items", "warnings", "warn", "str",
        "_global_forward_hooks_always_called", "_forward_hooks_always_called",
        "_forward_hooks_with_kwargs",
    }
)  # fmt: skip


def module_call() -> CallInternals | None:
    """Return what `nn.Module.__call__` runs; None if it is not what this module knows.

    The program may have replaced its methods, and another torch may ask for more.
    """
    try:
        call, wrapped = torch.nn.Module._call_impl, torch.nn.Module._wrapped_call_impl
        scope = vars(torch.nn.modules.module)
        is_own = call.__globals__ is scope and wrapped.__globals__ is scope
        names = set(call.__code__.co_names)
        wrapped_names = {"_compiled_call_impl", "_call_impl"}
        if not (is_own and set(wrapped.__code__.co_names) == wrapped_names):
            return None
        known = _CALL_NAMES | _TRACING_NAMES | _FURTHER_NAMES
        if not (_CALL_NAMES <= names <= known and names & _TRACING_NAMES):
            return None
        tables = tuple(scope[name] for name in sorted(_TABLES))
        return CallInternals(call, tables, torch._C._get_tracing_state)
    except Exception:
        return None


def is_symbolically_traced() -> bool:
    """Return whether `torch.fx` traces a module, by calling its forward with proxies."""
    tracing = sys.modules.get("torch.fx._symbolic_trace")
    # a function from torch 2.14 or 2.15 on, for the flag is one of each thread there
    flag = getattr(tracing, "_get_is_fx_tracing", None)
    return bool(flag() if flag is not None else getattr(tracing, "_is_fx_tracing_flag", False))


def is_traced() -> bool:
    """Return whether a tracer of the program makes a graph of what this thread computes."""
    if getattr(torch._C, "_get_tracing_state", lambda: None)() is not None:
        return True
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    try:
        return proxies is not None and proxies.get_proxy_mode() is not None
    except Exception:
        return False


def has_dispatch_modes() -> bool:
    """Return whether the program watches the operations of this thread; also if that is unknown."""
    try:
        return bool(torch._C._len_torch_dispatch_stack())
    except Exception:
        return True


def call_past_dispatcher(operator: Any, function: Callable[..., None]) -> None:
    """Have an operator of ours call `function` itself where the dispatcher would do nothing else.

    The dispatcher takes 6 us for the same, because it makes other objects of all arguments. It is
    asked where a mode, transform or tracer is active, or the second argument is no plain tensor.
    """
    try:
        dispatch, plain = operator._op, torch.Tensor
        modes, transforms = (
            torch._C._len_torch_dispatch_stack,
            torch._C._functorch.peek_interpreter_stack,
        )
        tracing = torch._C._get_tracing_state
        modes(), transforms(), tracing()
    except Exception:
        return

    def call(*arguments: Any, **named: Any) -> None:
        is_ordinary = not named and type(arguments[1]) is plain and transforms() is None
        if is_ordinary and tracing() is None and not modes() and not count_function_modes():
            function(*arguments)
        else:
            dispatch(*arguments, **named)

    operator._op = call


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` has no memory, like those with which a compiler traces a model."""
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    return fakes is not None and isinstance(tensor, fakes.FakeTensor)


# Returns the number of the backward pass that runs in this thread, or -1 outside of one (or if
# torch does not report it).
graph_task_id: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def call_on_first_use(accelerator: Any, call: Callable[[], None]) -> None:
    """Call `call` when the program first uses an accelerator (`torch.cuda`), or now if it has.

    This does not start the accelerator's driver.

    Raises:
        AttributeError: this torch keeps no such list of calls.
    """
    accelerator._lazy_call(call)


def shard_offset(tensor: Any) -> list[int] | None:
    """Return where the local part of a DTensor begins, one index per dimension; None if unknown."""
    try:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        _, offset = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        return [int(start) for start in offset]
    except Exception:
        return None


class StorageLife:
    """Shows whether a tensor's memory has been freed. Addresses are reused; this is not.

    Raises what torch raises for a tensor without a storage.
    """

    __slots__ = ("_reference", "key")

    def __init__(self, tensor: torch.Tensor) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        # Does not keep the memory alive.
        self._reference: Any = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self.key: int = self._reference.cdata

    @property
    def is_freed(self) -> bool:
        """True once the memory has been freed."""
        return bool(self._reference.expired())


def has_other_ranks() -> bool:
    """Return whether other ranks work with this one.

    If so, collectives change tensors in place, which torch does not count in their versions.
    """
    return place_among_ranks()[1] > 1


def place_among_ranks() -> tuple[int, int]:
    """Return this process's rank and the number of ranks that work together."""
    distributed = sys.modules.get("torch.distributed")
    try:
        if distributed is not None and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
    except Exception:  # torch built without it
        pass
    return 0, 1


def ranks_of_group(argument: object) -> list[int] | None:
    """Return the ranks of a process group, given it or its name as an argument of a collective has
    it; None of other arguments.
    """
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        if isinstance(argument, torch.ScriptObject):
            group = distributed.ProcessGroup.unbox(argument)
        elif isinstance(argument, str):
            group = distributed._resolve_process_group(argument)
        else:
            return None
        return list(distributed.get_process_group_ranks(group))
    except Exception:  # the name of a reduction, say
        return None


def version_of(tensor: torch.Tensor) -> int | None:
    """Return how often the tensor was changed in place, or None if torch does not count that.

    It does not in inference mode.
    """
    return None if tensor.is_inference() else int(tensor._version)


def norms_of_each(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the L2 norm of each tensor, in `dtype`: in few launches, where torch has that."""
    fused = getattr(torch, "_foreach_norm", None)
    if fused is not None:
        try:
            return list(fused(list(tensors), 2, dtype=dtype))
        except (TypeError, RuntimeError, NotImplementedError):
            pass  # a device or a dtype that it does not take
    return [torch.linalg.vector_norm(tensor, 2, dtype=dtype) for tensor in tensors]


def computes_norms_of_each(function: Any) -> bool:
    """Return whether a function of torch is the one that returns the norm of each of some tensors.

    Norms to clip by are computed from what it returns.
    """
    return function is getattr(torch, "_foreach_norm", None)


def scale_of(scaler: Any) -> torch.Tensor | None:
    """Return the scale of a gradient scaler, on its device; None before its first use."""
    scale = getattr(scaler, "_scale", None)
    return scale if isinstance(scale, torch.Tensor) else None


def clipping_functions() -> list[tuple[Any, str]]:
    """Return (owner, name) of the functions that scale gradients to a norm that they are given.

    `clip_grad_norm_` calls the first one, by whatever name a program has imported it.
    """
    functions = [
        (torch.nn.utils.clip_grad, "_clip_grads_with_norm_"),
        (torch.nn.utils, "clip_grads_with_norm_"),
    ]
    return [(owner, name) for owner, name in functions if hasattr(owner, name)]


def inside_step_of_scheduler() -> str:
    """Return the method of `LRScheduler` that its `step` calls; without it, `step` itself."""
    from torch.optim.lr_scheduler import LRScheduler

    return "_update_lr" if hasattr(LRScheduler, "_update_lr") else "step"


def is_sharded_by_fsdp1(module: torch.nn.Module) -> bool:
    """Return whether a wrapper's parameters are plain tensors that hold a part of the values."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    wrapper = getattr(fsdp, "FullyShardedDataParallel", None)
    if wrapper is None or not isinstance(module, wrapper):
        return False
    strategy = getattr(module, "sharding_strategy", None)
    return has_other_ranks() and getattr(strategy, "name", "") != "NO_SHARD"


def number_of_operation(node: Any) -> int | None:
    """Return the number that autograd has given a node of its graph; None if it has none."""
    number = getattr(node, "_sequence_nr", None)
    return None if number is None else int(number())


def next_number_of_operation() -> int:
    """Return the number that autograd gives this thread's next node; 0 if unknown.

    The node of an operation is made before the operation is dispatched.
    """
    try:
        return int(torch._C._autograd._get_sequence_nr())
    except AttributeError:
        return 0


def number_of_running_node() -> int | None:
    """Return the number of the node of autograd's graph that runs backward here, None if none does.

    A node that accumulates a gradient belongs to no operation.
    """
    try:
        node: Any = torch._C._current_autograd_node()
        return None if node is None else int(node._sequence_nr())
    except AttributeError:
        return None


def enter_below_all_modes(mode: Any) -> None:
    """Enter a dispatch mode below the modes of the program, so that these may leave in any order.

    `with` leaves whichever mode is on top. A mode below all others sees what they make of an
    operation.
    """
    others = _lift_modes()
    try:
        mode.__enter__()
    finally:
        _put_modes(others)


def leave_below_all_modes(mode: Any) -> bool:
    """Leave a mode that `enter_below_all_modes` has entered in this thread.

    Returns False if it is not the lowest mode any more: it then stays.
    """
    others = _lift_modes()
    try:
        if others and others[-1] is mode:
            others.pop()
            torch._C._push_on_torch_dispatch_stack(mode)
            mode.__exit__(None, None, None)
            return True
        return False
    finally:
        _put_modes(others)


def keep_modes_after(leave: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that leaves inference mode, and keeps the thread's dispatch modes.

    To leave it restores which dispatch keys were active when it began: a mode entered meanwhile
    would see nothing more, and after one that was left torch raises.
    """

    def leave_inference_mode(*args: Any) -> Any:
        result = leave(*args)
        _activate_modes()
        return result

    return leave_inference_mode


def _activate_modes() -> None:
    """Have operations go through this thread's dispatch modes, if it has any."""
    has_modes = torch._C._len_torch_dispatch_stack() > 0
    for key in (torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot):
        if torch._C._dispatch_tls_is_dispatch_key_included(key) != has_modes:
            torch._C._dispatch_tls_set_dispatch_key_included(key, has_modes)


def current_raw_stream(index: int) -> int:
    """Return the handle of a GPU's current stream. torch's public way makes an object of it."""
    try:
        return int(torch._C._cuda_getCurrentRawStream(index))
    except AttributeError:
        return torch.cuda.current_stream(index).cuda_stream


def lowest_dispatch_mode() -> Any:
    """Return this thread's outermost dispatch mode, below all others; None if no mode is active.

    While a mode handles an operation, it is not among them.
    """
    try:
        has_modes = torch._C._len_torch_dispatch_stack()
        return torch._C._get_dispatch_stack_at(0) if has_modes else None
    except AttributeError:
        return None


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a DTensor that this rank holds, and any other tensor as it is.

    The public `to_local` is an operation that autograd sees.
    """
    part = getattr(tensor, "_local_tensor", None)
    return part if isinstance(part, torch.Tensor) else tensor


def is_faking() -> bool:
    """Return whether this thread makes tensors without numbers, to learn shapes or a graph."""
    try:
        keys = torch._C._TorchDispatchModeKey
        kinds = keys.FAKE, keys.PROXY, keys.FUNCTIONAL
        return any(torch._C._get_dispatch_mode(kind) is not None for kind in kinds)
    except AttributeError:
        return False


def _lift_modes() -> list[Any]:
    """Take the program's modes off this thread's stack, the innermost first."""
    lifted = []
    while torch._C._len_torch_dispatch_stack() and not _is_of_infrastructure(
        torch._C._get_dispatch_stack_at(torch._C._len_torch_dispatch_stack() - 1)
    ):
        lifted.append(torch._C._pop_torch_dispatch_stack(None))
    return lifted


def _put_modes(modes: list[Any]) -> None:
    for mode in reversed(modes):
        torch._C._push_on_torch_dispatch_stack(mode)


def _is_of_infrastructure(mode: Any) -> bool:
    """Return whether a mode has a place of its own on the stack (fake tensors, tracing)."""
    return getattr(mode, "_mode_key", None) is not None


@functools.cache
def composite_kernel(operation: Any, device: str) -> Callable[..., Any] | None:
    """Return the kernel of an operation that consists of other operations on this kind of device.

    None if it computes by itself. Such operations are dispatched as a whole in inference mode.

    Args:
        device: as `torch.device.type` has it.
    """
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    backend = getattr(torch._C.DispatchKey, device.upper(), None)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    name = operation.name()
    if backend is None or not has_kernel(name, composite) or has_kernel(name, backend):
        return None
    return functools.partial(operation._op_dk, composite)


def decomposition_of(operation: Any) -> Callable[..., Any] | None:
    """Return how torch computes an operation by others, None if it has no such rule."""
    try:
        from torch._decomp import decomposition_table
    except ImportError:
        return None
    return decomposition_table.get(operation)


def returns_view(operation: Any) -> bool:
    """Return whether an ATen operation only looks at the memory of its input in another way."""
    return bool(getattr(operation, "is_view", False))


@functools.cache
def written_arguments(operation: Any) -> frozenset[str | int]:
    """Return the names and positions of the arguments that an ATen operation writes to."""
    written: set[str | int] = set()
    schema = getattr(operation, "_schema", None)
    for index, argument in enumerate(() if schema is None else schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {index, argument.name}
    return frozenset(written)


def argument(operation: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return an argument of an ATen operation, or its default; None if it has none."""
    schema = getattr(operation, "_schema", None)
    for index, declared in enumerate(() if schema is None else schema.arguments):
        if declared.name == name:
            return args[index] if index < len(args) else kwargs.get(name, declared.default_value)
    return None


class Way(NamedTuple):
    """What private names of torch serve, whether this torch has them, and what happens without."""

    purpose: str
    is_open: bool
    otherwise: str


def ways() -> list[Way]:
    """Try each use of private names on this torch: without this, one that has moved is silent."""
    return [Way(purpose, _holds(check), otherwise) for purpose, check, otherwise in _WAYS]


def _holds(check: Callable[[], object]) -> bool:
    try:
        return bool(check())
    except Exception:
        return False


def _recognizes_fx() -> bool:
    """Return whether a trace is recognized inside of it, and only there."""

    class Traced(torch.nn.Module):
        seen = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = is_symbolically_traced()
            return x

    module = Traced()
    torch.fx.symbolic_trace(module)
    return module.seen and not is_symbolically_traced()


def _recognizes_make_fx() -> bool:
    from torch.fx.experimental.proxy_tensor import make_fx

    seen = []
    make_fx(lambda x: (seen.append(is_traced()), x + 1)[1])(torch.zeros(1))  # type: ignore[func-returns-value]
    return seen == [True] and not is_traced()


def _skips_frames() -> bool:
    frames = torch._C._dynamo.eval_frame
    return bool(frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT))


def _reads_compiled_frames() -> bool:
    from torch._dynamo.comptime import ComptimeContext

    return callable(ComptimeContext.get_local)


def _traces_module_calls() -> bool:
    from torch._dynamo.variables import nn_module

    return hasattr(nn_module, "unpatched_nn_module_call")


def _knows_pipeline_shapes() -> bool:
    if not torch.distributed.is_available():
        return True
    from torch.distributed.pipelining import stage

    return any(hasattr(stage.PipelineStage, name) for name in PIPELINE_SHAPE_METHODS)


def _compiles_scripts() -> bool:
    return hasattr(sys.modules["torch.jit._recursive"], "create_script_module")


def _knows_shards() -> bool:
    if not torch.distributed.is_available():
        return True
    from torch.distributed.tensor import _utils

    return hasattr(_utils, "compute_local_shape_and_global_offset")


def _knows_groups() -> bool:
    if not torch.distributed.is_available():
        return True
    from torch.distributed import distributed_c10d

    has_names = hasattr(distributed_c10d, "_resolve_process_group")
    return has_names and hasattr(distributed_c10d.ProcessGroup, "unbox")


def _follows_storages() -> bool:
    tensor = torch.zeros(1)
    life = StorageLife(tensor)
    was_alive = not life.is_freed
    del tensor
    return was_alive and life.is_freed


def _numbers_operations() -> bool:
    node = torch.zeros(1, requires_grad=True).exp().grad_fn
    return number_of_operation(node) is not None


def _updates_rates() -> bool:
    return inside_step_of_scheduler() != "step"


def _counts_backward_passes() -> bool:
    """Return whether this torch tells a backward pass from none."""
    seen = []
    leaf = torch.zeros(1, requires_grad=True)
    leaf.register_hook(lambda gradient: seen.append(graph_task_id()))  # type: ignore[no-untyped-call]
    leaf.exp().sum().backward()  # type: ignore[no-untyped-call]
    return seen != [-1] and graph_task_id() == -1


def _calls_past_dispatcher() -> bool:
    called: list[Any] = []
    operator = SimpleNamespace(_op=lambda *arguments: None)
    call_past_dispatcher(operator, lambda *arguments: called.append(arguments))
    operator._op([], torch.zeros(1))
    return bool(called) and hasattr(torch.ops.aten.relu.default, "_op")


def _knows_schemas() -> bool:
    aten = torch.ops.aten
    return returns_view(aten.view.default) and 0 in written_arguments(aten.add_.Tensor)


def _enters_below() -> bool:
    """Return whether a mode can be entered below another one, and left before it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    upper: Any = TorchDispatchMode()  # type: ignore[no-untyped-call]
    lower: Any = TorchDispatchMode()  # type: ignore[no-untyped-call]
    with upper:
        enter_below_all_modes(lower)
        is_below = bool(torch._C._get_dispatch_stack_at(0) is lower)
        return leave_below_all_modes(lower) and is_below


def _keeps_modes() -> bool:
    """Return whether a mode that was entered in inference mode is active after it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    mode: Any = TorchDispatchMode()  # type: ignore[no-untyped-call]
    inference: Any = torch.inference_mode()
    inference.__enter__()
    mode.__enter__()
    try:
        keep_modes_after(type(inference).__exit__)(inference, None, None, None)
        key = torch._C.DispatchKey.Python
        return bool(torch._C._dispatch_tls_is_dispatch_key_included(key))
    finally:
        mode.__exit__(None, None, None)


def _notices_fakes() -> bool:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        inside = is_faking()
    return inside and not is_faking()


def _numbers_nodes() -> bool:
    """Return whether a node has the number that was announced for it, also while it runs."""
    announced = next_number_of_operation()
    leaf = torch.zeros(1, requires_grad=True)
    result = leaf.exp()
    seen: list[int | None] = []
    node: Any = result.grad_fn
    node.register_prehook(lambda gradients: seen.append(number_of_running_node()))
    result.sum().backward()  # type: ignore[no-untyped-call]
    return seen == [announced]


def _decomposes() -> bool:
    return composite_kernel(torch.ops.aten.reshape.default, "cpu") is not None


def _breaks_up() -> bool:
    return decomposition_of(torch.ops.aten.native_layer_norm.default) is not None


# purpose, whether this torch has the names for it, what happens without
_WAYS: tuple[tuple[str, Callable[[], object], str], ...] = (
    ("calls of modules", module_call, "left to torch, 4 µs a call slower"),
    ("operators in compiled code", _calls_past_dispatcher, "called by torch, 6 µs slower"),
    ("hooks in compiled code", _skips_frames, "they become graphs of their own"),
    ("compiled models", _traces_module_calls, "those of compiled functions are not recorded"),
    ("direct calls in compiled code", _reads_compiled_frames, "not recorded"),
    ("traces by torch.fx", _recognizes_fx, "counted as forwards"),
    ("traces by make_fx", _recognizes_make_fx, "counted as forwards"),
    ("arithmetic of statistics", lambda: _keys is not None, "modes of the program see it"),
    ("plain tensors", lambda: is_plain_memory(torch.zeros(1)), "measured by torch, 10 µs slower"),
    ("memory of tensors", _follows_storages, "parity recordings have no `value`"),
    ("operations of autograd", _numbers_operations, "losses may be mistaken"),
    ("schemas of operations", _knows_schemas, "no double precision of operations in place"),
    ("backward passes", _counts_backward_passes, "recomputation counts as forward"),
    ("gradient clipping", clipping_functions, "not recorded"),
    ("steps of schedulers", _updates_rates, "torch's warnings of them point to this package"),
    ("TorchScript", _compiles_scripts, "it cannot compile a recorded module"),
    ("parts of a DTensor", _knows_shards, "recorded without their place"),
    (
        "groups of ranks",
        _knows_groups,
        "what ranks give each other is found by its numbers",
    ),
    ("modes below others", _enters_below, "no graph of operations"),
    ("modes after inference mode", _keeps_modes, "its graph ends with it"),
    ("tensors without numbers", _notices_fakes, "recorded as operations of the program"),
    ("lines of backward operations", _numbers_nodes, "only that of the backward pass"),
    ("decompositions of operations", _breaks_up, "fused norms and losses stay whole"),
    ("composite operations", _decomposes, "one operation of a graph in inference mode"),
    ("shapes of pipeline stages", _knows_pipeline_shapes, "counted as forwards"),
)
