"""A forward without its numbers: a twin of the model, made of tensors that have a shape and no memory, runs in its place.

Running the model itself on fake tensors changes it: a batch norm in training really counts its batches, a cache is filled,
hooks fire. The twin has the structure and nothing else; whatever its forward writes goes away with it.
"""

from __future__ import annotations

import copy
import linecache
import logging
import os
import random
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import CellType, FunctionType, MethodType, TracebackType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch as python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from otel_torch.capture.scan import Call, Module, Scan, Value
from otel_torch.sources import modules
from otel_torch.sources.names import class_name, core, named_modules
from otel_torch.sources.values import walk, walk_inputs

# every table of hooks that a module has; what hangs in them may write anywhere, so a twin has none
_HOOKS = tuple(name for name in vars(nn.Module()) if "_hooks" in name)
# operators that make a fake tensor of a constant whose value stays known: `torch.tensor(3)` in a forward
_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift.default)

# methods that change their tensor, beside those whose name ends in an underscore
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_WRITES = frozenset({"__setitem__", *(f"__i{name}__" for name in _OPERATORS)})

# what torch raises where a fake tensor cannot go on, by class name (most are private), and what it says where it has no class
_WANTS_DATA = {
    "GuardOnDataDependentSymNode": "what comes next depends on the data",
    "UserError": "what comes next depends on the data",
    "DataDependentOutputException": "a value of a tensor is asked for",
    "DynamicOutputShapeException": "the size of a result depends on the data",
    "UnsupportedOperatorException": "an operator has no version for fake tensors",
    "UnsupportedFakeTensorException": "a tensor of this kind has no fake version",
}
_WANTS_MEMORY = (".numpy() is not supported", "Cannot access data pointer", "on a meta tensor", "fake tensor", "FakeTensor")


def run_fake(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scan:
    """Run a module, or a bound method of one, without its numbers. Raises TypeError for any other target and ValueError
    for a model that has no shapes yet (lazy modules)."""
    owner = target if isinstance(target, nn.Module) else getattr(target, "__self__", None)
    if not isinstance(owner, nn.Module):
        raise TypeError(f"scan() takes a module or a bound method of one (model, vae.decode), not {type(target).__name__}")
    root = core(owner)
    with ExitStack() as stack:
        stack.enter_context(modules.unwatched())
        stack.enter_context(_no_modes())
        stack.enter_context(_random_states_kept())
        stack.enter_context(_quiet())
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        twins = _Twins(mode, _usual_device(root, args, kwargs))
        twin = twins.of_model(root)
        forward: Any = twin if target is owner else MethodType(getattr(target, "__func__", target), twin)
        args, kwargs = twins.of_inputs(args), twins.of_inputs(kwargs)
        watch = _Watch(root, twins)
        ended = None
        failed = False
        with mode, watch, _WritesAreFake(twins):
            try:
                forward(*args, **kwargs)
            except Exception as error:
                failed = not _wants_data(error)
                ended = _describe(error, watch.place())
    return Scan(class_name(root), watch.modules, watch.rows(), *_bytes_of(root), *watch.work(), ended, failed)


# -- the twin ----------------------------------------------------------------------------------------------------------


class _Twins:
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
                values = {name: self._copy(value) for name, value in vars(original).items() if name not in _HOOKS}
                values.pop("_compiled_call_impl", None)
                vars(twin).update(values | {name: OrderedDict() for name in _HOOKS})
        found: nn.Module = self._twins[id(root)]
        return found

    def of_inputs(self, value: Any) -> Any:
        """The same arguments with fake tensors; a single number keeps its value, so that `if t > 500` can be answered."""
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
        """What stands in for an operator's argument: a real tensor from a global or a closure has a twin too."""
        return tensor if isinstance(tensor, FakeTensor) else self.of_tensor(tensor, keep_number=True)

    def _fake(self, tensor: torch.Tensor, keep_number: bool) -> torch.Tensor:
        if is_lazy(tensor):
            raise ValueError("the model has lazy modules, which have no shapes before their first run; run it once, then scan it")
        device = self._device if tensor.is_meta else tensor.device
        if keep_number and tensor.numel() == 1 and tensor.is_cpu and type(tensor) is torch.Tensor:
            with _no_modes():
                number = tensor.detach().tolist()
            return torch.tensor(number, dtype=tensor.dtype, device=device)
        if tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        with _no_modes():
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
                return {key: self._copy(item, keep_numbers=keep_numbers) for key, item in value.items()}
            return value

    def _rebind(self, function: FunctionType) -> Any:
        """A function that somebody put on a module in place of its `forward`, with twins of what it closes over."""
        if id(function) not in self._twins:
            closure = function.__closure__ or ()
            cells = tuple(CellType() for _ in closure)
            twin = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
            twin.__kwdefaults__ = function.__kwdefaults__
            self._twins[id(function)] = twin
            for cell, original in zip(cells, closure, strict=True):
                if original != CellType():  # an empty one has no contents
                    cell.cell_contents = self._copy(original.cell_contents)
        return self._twins[id(function)]


class _CopiesAreFake(TorchFunctionMode):
    """While something is copied deeply, the copy of every tensor in it is a fake one."""

    def __init__(self, twins: _Twins, keep_numbers: bool) -> None:
        super().__init__()
        self._twins, self._keep_numbers = twins, keep_numbers

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in (torch.Tensor.__deepcopy__, torch.Tensor.clone):
            return self._twins.of_tensor(args[0], keep_number=self._keep_numbers)
        return func(*args, **(kwargs or {}))


class _WritesAreFake(TorchFunctionMode):
    """What writes into a real tensor (one of a global, of a closure) writes into its twin: further down, where operators
    are watched, its version has been counted up already."""

    def __init__(self, twins: _Twins) -> None:
        super().__init__()
        self._twins = twins

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _WRITES or (name.endswith("_") and not name.endswith("__")):
            args, kwargs = tree_map_only(torch.Tensor, self._twins.of_the_moment, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _plain_class(module: nn.Module) -> type:
    """The class that a module was written as: without the one that FSDP2 puts in front."""
    name = class_name(module)
    return next((cls for cls in type(module).__mro__ if cls.__name__ == name), type(module))


def _usual_device(root: nn.Module, *inputs: Any) -> torch.device:
    """Where a tensor without a place is taken to be: where the other tensors are, else on the CPU."""
    found = [tensor for value in inputs for _, tensor in walk(value, "")]
    for tensor in (*found, *root.parameters(), *root.buffers()):
        if not tensor.is_meta:
            device: torch.device = tensor.device
            return device
    return torch.device("cpu")


# -- watching ----------------------------------------------------------------------------------------------------------


def _grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offs: Any = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, Any]:
    """The experts of a mixture, multiplied at once: the result, and the operations."""
    shapes: dict[tuple[int, int], Callable[[], tuple[Any, Any]]] = {
        (2, 2): lambda: ((offs.shape[0], a.shape[0], b.shape[1]), 2 * a.numel() * b.shape[1]),
        (2, 3): lambda: ((a.shape[0], b.shape[2]), 2 * a.numel() * b.shape[2]),
        (3, 2): lambda: ((a.shape[1], b.shape[1]), 2 * a.shape[1] * b.numel()),
        (3, 3): lambda: ((*a.shape[:2], b.shape[2]), 2 * a.numel() * b.shape[2]),
    }
    shape, flops = shapes[a.dim(), b.dim()]()
    return a.new_empty(shape, dtype=out_dtype or a.dtype), flops


# operators whose version for fake tensors refuses what the real one takes: this one all but bfloat16
_STAND_INS: dict[Any, Callable[..., tuple[Any, Any]]] = {
    getattr(getattr(torch.ops.aten, "_grouped_mm", None), "default", None): _grouped_mm
}


class _Open:
    """A call that goes on."""

    def __init__(self, module: nn.Module, name: str, row: Call, work: tuple[int, bool]) -> None:
        self.module, self.name, self.row, self.work = module, name, row, work


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator and every call of a module, and keeps real tensors out."""

    def __init__(self, root: nn.Module, twins: _Twins) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._twins = twins
        self._rows: list[Call] = []
        self._open: list[_Open] = []
        self._counts: dict[str, int] = {}
        self._flops, self._dynamic = 0, False
        self._names: dict[int, list[tuple[str, int]]] = {}
        self.modules: list[Module] = []
        named = named_modules(root)
        keys = {name: id(twins.of_module(module)) for name, module in named}
        self._sizes = {}
        for name, module in named:
            twin = twins.of_module(module)
            sizes = _bytes_of(module)
            self._sizes[name] = sizes
            known = id(twin) in self._names
            self.modules.append(Module(name, class_name(module), *sizes, () if known else _own_parameters(module)))
            if not known and twin is not module:
                twin.register_forward_pre_hook(self._entered, with_kwargs=True)
                twin.register_forward_hook(self._left)
            self._names.setdefault(id(twin), []).append((name, keys.get(name.rpartition(".")[0], 0)))

    def rows(self) -> list[Call]:
        """The calls in order of entering; what had not returned at the end has the operations so far."""
        for one in self._open:
            one.row.flops, one.row.dynamic = self._flops - one.work[0], self._dynamic
        return self._rows

    def work(self) -> tuple[int, bool]:
        """Operations so far, and whether there were more whose number depends on the data."""
        return self._flops, self._dynamic

    def place(self) -> str:
        """The module that is running."""
        if not self._open:
            return ""
        row = self._open[-1].row
        return f"{row.module or 'the root'} ({row.class_name})"

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func not in _LIFTS:
            args, kwargs = tree_map_only(torch.Tensor, self._twins.of_the_moment, (args, kwargs))
        formula = None
        if isinstance(func, torch._ops.OpOverload):
            formula = flop_registry.get(func.overloadpacket)
            if formula is None and func is not torch.ops.prim.device.default:
                with self:  # under inference mode whole compounds (`linear`) arrive here
                    result = func.decompose(*args, **kwargs)
                if result is not NotImplemented:
                    return result
        stand_in = _STAND_INS.get(func)
        if stand_in is not None:
            result, flops = stand_in(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
            flops = formula(*args, **kwargs, out_val=result) if formula is not None else 0
        if type(flops) is int:
            self._flops += flops
        else:
            self._dynamic = True
        return result

    def _entered(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = self._name(module)
        number = self._counts.get(name, 0)
        self._counts[name] = number + 1
        inputs = tuple(_value(label, tensor) for label, tensor in walk_inputs(args, kwargs))
        row = Call(name, class_name(module), number, len(self._rows), len(self._open), inputs, (), *self._sizes[name])
        self._open.append(_Open(module, name, row, (self._flops, self._dynamic)))
        self._dynamic = False
        self._rows.append(row)

    def _left(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        while self._open:  # calls above this one have raised, and somebody went on
            one = self._open.pop()
            flops, dynamic = one.work
            one.row.flops = self._flops - flops
            one.row.dynamic, self._dynamic = self._dynamic, self._dynamic or dynamic
            if one.module is module:
                one.row.outputs = tuple(_value(label, tensor) for label, tensor in walk(output, "out"))
                one.row.finished = True
                break

    def _name(self, module: nn.Module) -> str:
        """Of a shared module's names, the one whose holder is running."""
        names = self._names[id(module)]
        if len(names) > 1:
            for above in reversed(self._open):
                for name, holder in names:
                    if id(above.module) == holder:
                        return name
        return names[0][0]


def _value(label: str, tensor: torch.Tensor) -> Value:
    shape = tuple(size if type(size) is int else -1 for size in tensor.shape)
    size = tensor.numel() * tensor.element_size() if -1 not in shape else None
    return Value(label, shape, str(tensor.dtype).removeprefix("torch."), size, tensor.requires_grad)


def _own_parameters(module: nn.Module) -> tuple[Value, ...]:
    return tuple(_value(f"param.{name}", tensor) for name, tensor in module._parameters.items() if tensor is not None)


def _bytes_of(module: nn.Module) -> tuple[int, int]:
    """Bytes of the parameters and of the buffers of a module and all in it, each tensor once."""
    return (
        sum(tensor.numel() * tensor.element_size() for tensor in module.parameters()),
        sum(tensor.numel() * tensor.element_size() for tensor in module.buffers()),
    )


# -- around it ---------------------------------------------------------------------------------------------------------


def _no_modes() -> Any:
    """A FLOP counter or another fake mode of the caller sees nothing of the scan."""
    disable = getattr(python_dispatch, "_disable_current_modes", None)
    return ExitStack() if disable is None else disable()


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """A forward may seed or draw: afterwards torch, Python and NumPy stand where they stood; the default dtype too."""
    numpy: Any = sys.modules.get("numpy")
    of_python, of_numpy = random.getstate(), numpy.random.get_state() if numpy is not None else None
    dtype = torch.get_default_dtype()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    try:
        with torch.random.fork_rng(devices=devices), torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        random.setstate(of_python)
        if of_numpy is not None:
            numpy.random.set_state(of_numpy)
        torch.set_default_dtype(dtype)


class _NotInThisThread(logging.Filter):
    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread != self._thread


@contextmanager
def _quiet() -> Iterator[None]:
    """Torch logs a traceback where a fake tensor cannot go on, which `Scan.ended` says in a line."""
    silence = _NotInThisThread()
    loggers = [logging.getLogger(module.__module__) for module in (FakeTensorMode, ShapeEnv)]
    for logger in loggers:
        logger.addFilter(silence)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(silence)


# -- how it ended ------------------------------------------------------------------------------------------------------


def _wants_data(error: BaseException) -> bool:
    return type(error).__name__ in _WANTS_DATA or any(sign in str(error) for sign in _WANTS_MEMORY)


def _describe(error: Exception, place: str) -> str:
    """One line: in which module, at which line of the program, and why."""
    reason = _WANTS_DATA.get(type(error).__name__, "a value of a tensor is asked for" if _wants_data(error) else "")
    if type(error).__name__.startswith("Unsupported") or not reason:
        message = (str(error).strip() or "no message").splitlines()[0]
        reason = f"{reason} ({message})" if reason else f"{type(error).__name__}: {message}"
    return ", ".join(part for part in (place and f"in {place}", _line(error.__traceback__), reason) if part)


def _line(traceback: TracebackType | None) -> str:
    """The innermost line that is neither torch's nor ours."""
    ours = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
    found = ""
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not file.startswith(ours):
            text = linecache.getline(file, traceback.tb_lineno).strip()
            found = f"at {os.path.basename(file)}:{traceback.tb_lineno}" + (f" `{text}`" if text else "")
        traceback = traceback.tb_next
    return found
