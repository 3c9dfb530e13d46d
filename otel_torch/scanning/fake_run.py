"""A forward without its numbers: the model's twin runs, and every call and every operator of it is
written down.

An operator that needs numbers ends it; then everything up to there is given, and where and why it
ended.
"""

from __future__ import annotations

import dataclasses
import itertools
import linecache
import logging
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MethodType, TracebackType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from otel_torch.scanning import flops
from otel_torch.scanning.fake_model import Twins, WritesAreFake, no_modes, usual_device
from otel_torch.scanning.rows import Call, Forward, Module, Value
from otel_torch.sources import modules
from otel_torch.sources.identity import Identities
from otel_torch.sources.module_names import class_name, core, named_modules
from otel_torch.sources.values import walk, walk_inputs

# operators that make a fake tensor of a constant whose value stays known: `torch.tensor(3)` in a
# forward
_LIFTS = (
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten.lift_fresh_copy.default,
    torch.ops.aten.lift.default,
)

# what torch raises where a fake tensor cannot go on, by class name (most are private), and what it
# says where it has no class
_WANTS_DATA = {
    "GuardOnDataDependentSymNode": "what comes next depends on the data",
    "UserError": "what comes next depends on the data",
    "DataDependentOutputException": "a value of a tensor is asked for",
    "DynamicOutputShapeException": "the size of a result depends on the data",
    "UnsupportedOperatorException": "an operator has no version for fake tensors",
    "UnsupportedFakeTensorException": "a tensor of this kind has no fake version",
}
_WANTS_MEMORY = (
    ".numpy() is not supported",
    "Cannot access data pointer",
    "on a meta tensor",
    "fake tensor",
    "FakeTensor",
)


def run_fake(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Forward:
    """Run a module, or a bound method of one, without its numbers. Raises TypeError for any other
    target and ValueError for a model that has no shapes yet (lazy modules).
    """
    owner = target if isinstance(target, nn.Module) else getattr(target, "__self__", None)
    if not isinstance(owner, nn.Module):
        raise TypeError(
            f"scan() takes a module or a bound method of one (model, vae.decode), not {type(target).__name__}"
        )
    root = core(owner)
    with ExitStack() as stack:
        stack.enter_context(modules.unwatched())
        stack.enter_context(no_modes())
        stack.enter_context(_random_states_kept())
        stack.enter_context(_quiet())
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        twins = Twins(mode, usual_device(root, args, kwargs))
        twin = twins.of_model(root)
        forward: Any = (
            twin if target is owner else MethodType(getattr(target, "__func__", target), twin)
        )
        args, kwargs = twins.of_inputs(args), twins.of_inputs(kwargs)
        watch = _Watch(root, twins)
        ended = None
        failed = False
        with mode, watch, WritesAreFake(twins):
            try:
                forward(*args, **kwargs)
            except Exception as error:
                failed = not _wants_data(error)
                ended = _describe(error, watch.place())
    return Forward(
        class_name(root),
        watch.modules,
        watch.rows(),
        *_bytes_of(root),
        *watch.work(),
        ended,
        failed,
    )


# -- watching
# --------------------------------------------------------------------------------------------------


def _grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: Any = None,
    bias: Any = None,
    out_dtype: torch.dtype | None = None,
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


# operators whose version for fake tensors refuses what the real one takes: this one all but
# bfloat16
_STAND_INS: dict[Any, Callable[..., tuple[Any, Any]]] = {
    getattr(getattr(torch.ops.aten, "_grouped_mm", None), "default", None): _grouped_mm
}


class _Open:
    """A call that goes on."""

    def __init__(self, module: nn.Module, name: str, row: Call, work: tuple[int, bool]) -> None:
        self.module, self.name, self.row, self.work = module, name, row, work


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator and every call of a module, and keeps real tensors out."""

    def __init__(self, root: nn.Module, twins: Twins) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._twins = twins
        self._rows: list[Call] = []
        self._open: list[_Open] = []
        self._counts: dict[str, int] = {}
        self._identities = Identities()
        self._numbers = itertools.count()
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
            parameters = () if known else _own("param", module._parameters)
            buffers = () if known else _own("buffer", module._buffers)
            self.modules.append(Module(name, class_name(module), *sizes, parameters, buffers))
            if not known and twin is not module:
                twin.register_forward_pre_hook(self._entered, with_kwargs=True)
                twin.register_forward_hook(self._left)
            self._names.setdefault(id(twin), []).append(
                (name, keys.get(name.rpartition(".")[0], 0))
            )

    def rows(self) -> list[Call]:
        """The calls in order of entering; what had not returned at the end has the operations so
        far.
        """
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

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _LIFTS:
            args, kwargs = tree_map_only(torch.Tensor, self._twins.of_the_moment, (args, kwargs))
        if (
            isinstance(func, torch._ops.OpOverload)
            and not flops.knows(func)
            and func is not torch.ops.prim.device.default
        ):
            with self:  # under inference mode whole compounds (`linear`) arrive here
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        counted: int | None
        stand_in = _STAND_INS.get(func)
        if stand_in is not None:
            result, counted = stand_in(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
            counted = flops.count(func, args, kwargs, result)
        if type(counted) is int:
            self._flops += counted
        else:
            self._dynamic = True
        return result

    def _entered(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = self._name(module)
        number = self._counts.get(name, 0)
        self._counts[name] = number + 1
        inputs = tuple(self._value(label, tensor) for label, tensor in walk_inputs(args, kwargs))
        row = Call(
            name,
            class_name(module),
            number,
            len(self._rows),
            len(self._open),
            inputs,
            (),
            *self._sizes[name],
        )
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
                one.row.outputs = tuple(
                    self._value(label, tensor) for label, tensor in walk(output, "out")
                )
                one.row.finished = True
                break

    def _value(self, label: str, tensor: torch.Tensor) -> Value:
        value = _value(label, tensor)
        if value.bytes is None:  # a size that depends on the data cannot be looked up
            return dataclasses.replace(value, number=next(self._numbers))
        identity = self._identities.of(tensor)
        if identity.number is None:
            identity.number = next(self._numbers)
        return dataclasses.replace(value, number=identity.number)

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


def _own(kind: str, tensors: Mapping[str, torch.Tensor | None]) -> tuple[Value, ...]:
    return tuple(
        _value(f"{kind}.{name}", tensor) for name, tensor in tensors.items() if tensor is not None
    )


def _bytes_of(module: nn.Module) -> tuple[int, int]:
    """Bytes of the parameters and of the buffers of a module and all in it, each tensor once."""
    return (
        sum(tensor.numel() * tensor.element_size() for tensor in module.parameters()),
        sum(tensor.numel() * tensor.element_size() for tensor in module.buffers()),
    )


# -- around it
# --------------------------------------------------------------------------------------------------


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """A forward may seed or draw: afterwards torch, Python and NumPy stand where they stood; the
    default dtype too.
    """
    numpy: Any = sys.modules.get("numpy")
    of_python, of_numpy = random.getstate(), numpy.random.get_state() if numpy is not None else None
    dtype = torch.get_default_dtype()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    try:
        with (
            torch.random.fork_rng(devices=devices),
            torch.set_grad_enabled(torch.is_grad_enabled()),
        ):
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


# -- how it ended
# --------------------------------------------------------------------------------------------------


def _wants_data(error: BaseException) -> bool:
    return type(error).__name__ in _WANTS_DATA or any(sign in str(error) for sign in _WANTS_MEMORY)


def _describe(error: Exception, place: str) -> str:
    """One line: in which module, at which line of the program, and why."""
    reason = _WANTS_DATA.get(
        type(error).__name__, "a value of a tensor is asked for" if _wants_data(error) else ""
    )
    if type(error).__name__.startswith("Unsupported") or not reason:
        message = (str(error).strip() or "no message").splitlines()[0]
        reason = f"{reason} ({message})" if reason else f"{type(error).__name__}: {message}"
    return ", ".join(
        part for part in (place and f"in {place}", _line(error.__traceback__), reason) if part
    )


def _line(traceback: TracebackType | None) -> str:
    """The innermost line that is neither torch's nor ours."""
    ours = (
        os.path.dirname(torch.__file__) + os.sep,
        os.path.dirname(os.path.dirname(__file__)) + os.sep,
    )
    found = ""
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not file.startswith(ours):
            text = _statement(file, traceback.tb_lineno)
            found = f"at {os.path.basename(file)}:{traceback.tb_lineno}" + (
                f" `{text}`" if text else ""
            )
        traceback = traceback.tb_next
    return found


def _statement(file: str, line: int) -> str:
    """The line, and those below it that it goes on in, as long as that is short."""
    text = linecache.getline(file, line).strip()
    while (
        text.count("(") > text.count(")")
        and len(text) < 100
        and (more := linecache.getline(file, line := line + 1).strip())
    ):
        text += more if text.endswith("(") else f" {more}"
    return text
