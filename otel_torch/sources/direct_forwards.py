"""Sees forwards that the program calls itself, past `nn.Module.__call__`, where no hook runs.

    logits = model.forward(tokens)

The code of a watched function is exchanged for code that hands the call over:

    def forward(self, tokens, mask=None):
        return self._otel_torch_forward_7((tokens,), {"mask": mask})

The function itself stays, and so do its bound methods, signature, copies and pickles; methods that
were bound before are seen. Only what may be called so is watched: the forwards of
modules that nothing contains, and those that a method of a containing module names.
"""

from __future__ import annotations

import dis
import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from otel_torch import torch_private
from otel_torch.sources.uncalled_roots import method_codes

Forward = Callable[..., Any]
# handles a call: the forward as the program wrote it, the module, args, kwargs
Handler = Callable[[Forward, nn.Module, tuple[Any, ...], dict[str, Any]], Any]

_PREFIX = "_otel_torch_forward_"
_SUSPENDED = (
    inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
)  # flags of code that does not run when it is called
_numbers = itertools.count()


class _Exchange(NamedTuple):
    """A function with the code of another one, and what has replaced that."""

    own: FunctionType
    replacement: CodeType


class DirectForwards:
    """The functions whose code is exchanged.

    Args:
        is_in_call: returns whether the innermost call that this thread is in is a module's.
        handle: called instead of a forward that is not part of a call of its module.
        trace: likewise, in a graph that is compiled; takes args and kwargs unpacked.
    """

    def __init__(
        self, is_in_call: Callable[[nn.Module], bool], handle: Handler, trace: Forward
    ) -> None:
        self._is_in_call, self._handle, self._trace = is_in_call, handle, trace
        self._is_traced_directly = False
        self._exchanges: dict[FunctionType, _Exchange] = {}
        # by replacement: what it stands for, and the attribute of nn.Module that it calls
        self._own_codes: dict[CodeType, tuple[CodeType, str]] = {}
        self._names: dict[type, frozenset[str]] = {}
        self._settled: set[type] = set()  # classes that are watched, or left alone
        self._called: set[type] = set()  # of these the ones that stay watched
        self._lock = threading.RLock()

    def expect(self, module: nn.Module) -> None:
        """Watch the class of a module that nothing contains as yet."""
        cls = type(module)
        if cls not in self._settled:
            self._settled.add(cls)
            self._watch(cls)

    def settle(self, root: nn.Module, modules: list[nn.Module]) -> None:
        """Watch the classes of a model's root and of what its methods may call directly.

        All other classes of `modules`, which only `nn.Module.__call__` calls, are left alone.
        """
        self._called.add(type(root))
        for module in modules:
            if names := self._names_beside_forward(type(module)):
                self._called.update(map(type, _reached_by(names, module)))
        watched = {function for cls in self._called for function in _entries(cls)}
        for cls in {type(module) for module in modules}:
            self._settled.add(cls)
            if cls in self._called:
                self._watch(cls)
            else:
                for function in _entries(cls):
                    if function not in watched:
                        self._restore(function)

    def own_forward(self, module: nn.Module) -> Forward:
        """Return the forward of a module, with the code that the program wrote."""
        forward: Any = module.forward
        exchange = self._exchanges.get(getattr(forward, "__func__", forward))
        return forward if exchange is None else MethodType(exchange.own, module)

    def restore(self) -> None:
        """Give every function its own code back."""
        for function in list(self._exchanges):
            self._restore(function)
        running = set(_running_codes())
        for replacement, (_, attribute) in self._own_codes.items():
            if replacement not in running:
                delattr(nn.Module, attribute)
        self._own_codes.clear()
        self._settled.clear()
        self._called.clear()
        self._names.clear()

    def _watch(self, cls: type) -> None:
        for function in _entries(cls):
            with self._lock:
                if function not in self._exchanges:
                    self._exchange(function)

    def _exchange(self, function: FunctionType) -> None:
        own = function.__code__
        attribute = f"{_PREFIX}{next(_numbers)}"
        try:
            replacement, copy = _handing_over(function, attribute), _copy_of(function)
            setattr(nn.Module, attribute, self._entry(copy))
            function.__code__ = replacement
        except (SyntaxError, ValueError):  # a name or closure that no source can spell
            return
        torch_private.keep_out_of_frames(function, with_callees=False)
        self._exchanges[function] = _Exchange(copy, replacement)
        self._own_codes[replacement] = own, attribute

    def _restore(self, function: FunctionType) -> None:
        with self._lock:
            exchange = self._exchanges.pop(function, None)
            if exchange is not None and function.__code__ is exchange.replacement:
                function.__code__ = exchange.own.__code__

    def _names_beside_forward(self, cls: type) -> frozenset[str]:
        """Return the names in those methods of a class that call a forward of others."""
        if cls not in self._names:
            names: set[str] = set()
            for method in method_codes(cls):
                own, _ = self._own_codes.get(method, (method, ""))
                codes = list(_with_inner(own))
                if any(map(_gets_forward, codes)):
                    names.update(*(code.co_names for code in codes))
            self._names[cls] = frozenset(names)
        return self._names[cls]

    def _entry(self, own: FunctionType) -> Callable[..., Any]:
        is_in_call, handle, trace = self._is_in_call, self._handle, self._trace

        @torch_private.constant_while_tracing
        def is_traced_directly() -> bool:
            return self._is_traced_directly

        def note_enclosing_call(context: Any) -> None:
            self._note_enclosing_call(context)

        def entry(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if torch.compiler.is_compiling():
                if torch.compiler.is_dynamo_compiling():
                    torch._dynamo.comptime.comptime(note_enclosing_call)
                    if is_traced_directly():
                        return trace(own, module, *args, **kwargs)
                return own(module, *args, **kwargs)
            if is_in_call(module):
                return own(module, *args, **kwargs)
            return handle(own, module, args, kwargs)

        return torch_private.keep_out_of_frames(entry, with_callees=False)

    def _note_enclosing_call(self, context: Any) -> None:
        """Note, while an entry is traced, whether it is called outside of its module's call."""
        frames = torch_private.frames_while_tracing(context)
        module = next(frames, (None, {}))[1].get("module")
        next(frames, None)  # the code that hands over
        calls = {own for own, _ in self._own_codes.values()}
        calls |= {nn.Module._wrapped_call_impl.__code__, nn.Module._call_impl.__code__}
        self._is_traced_directly = module is not None
        for code, values in frames:
            if code.co_name.startswith("torch_dynamo_resume_in_"):  # the rest of a broken graph
                self._is_traced_directly = all(value is not module for value in values.values())
                return
            first = code.co_varnames[0] if code in calls else ""
            if (running := values.get(first)) is not None:
                self._is_traced_directly = running is not module
                return


def _entries(cls: type) -> Iterator[FunctionType]:
    """Yield the functions of a class that run its forward: `forward`, and a `__call__` of its own
    that calls forward and not that of `nn.Module`.
    """
    for name in ("forward", "__call__"):
        base = next((base for base in cls.__mro__ if name in vars(base)), nn.Module)
        function = vars(base).get(name)
        if (
            base is not nn.Module
            and isinstance(function, FunctionType)
            and not function.__code__.co_flags & _SUSPENDED
            and (name == "forward" or "forward" in function.__code__.co_names)
        ):
            yield function


def _reached_by(names: frozenset[str], module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules inside a module to which a path of these attributes and of items leads."""
    pending, seen = [module], {id(module)}
    while pending:
        container = pending.pop()
        for name, child in container._modules.items():
            is_item = name.isdigit() or isinstance(container, nn.ModuleDict)
            if child is not None and id(child) not in seen and (is_item or name in names):
                seen.add(id(child))
                pending.append(child)
                yield child


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def _running_codes() -> Iterator[CodeType]:
    """Yield the code of every frame of every thread."""
    for newest in sys._current_frames().values():
        frame: FrameType | None = newest
        while frame is not None:
            yield frame.f_code
            frame = frame.f_back


def _gets_forward(code: CodeType) -> bool:
    if "forward" not in code.co_names:
        return False
    instructions = list(dis.get_instructions(code))
    return any(
        instruction.argval == "forward"
        and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD")
        and not (previous.opname == "CALL" and "super" in code.co_names)
        for previous, instruction in itertools.pairwise(instructions)
    )


def _copy_of(function: FunctionType) -> FunctionType:
    """Return a function that does what `function` does now."""
    copy = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__qualname__, copy.__module__ = function.__qualname__, function.__module__
    return copy


def _handing_over(function: FunctionType, attribute: str) -> CodeType:
    """Return code with the signature and closure of a function that calls `attribute` of `self`.

    A parameter without a default is handed over as a positional argument, others by name: so are
    they called, as a rule.
    """
    code = function.__code__
    names = iter(code.co_varnames)
    positional = list(itertools.islice(names, code.co_argcount))
    keyword_only = list(itertools.islice(names, code.co_kwonlyargcount))
    rest = [f"*{next(names)}"] if code.co_flags & inspect.CO_VARARGS else []
    options = [f"**{next(names)}"] if code.co_flags & inspect.CO_VARKEYWORDS else []
    parameters = positional.copy()
    if code.co_posonlyargcount:
        parameters.insert(code.co_posonlyargcount, "/")
    parameters += rest or (["*"] if keyword_only else [])
    parameters += keyword_only + options
    first_named = len(positional)
    if not rest:
        first_named -= len(function.__defaults__ or ())
    first_named = max(first_named, code.co_posonlyargcount, 1)
    by_name = [f"{name!r}: {name}" for name in positional[first_named:] + keyword_only] + options
    module = positional[0] if positional else f"{rest[0][1:]}[0]"
    by_position = positional[1:first_named] + (rest if positional else [f"{rest[0]}[1:]"])
    closure = "".join(f"{name}, " for name in code.co_freevars)
    lines = [
        "def outer():",
        *(f"    {name} = None" for name in code.co_freevars),
        f"    def forward({', '.join(parameters)}):",
        f"        return {module}.{attribute}"
        f"(({''.join(f'{value}, ' for value in by_position)}), {{{', '.join(by_name)}}})",
        f"        ({closure})",  # never runs: only the names of the closure are needed
    ]
    outer = compile("\n".join(lines), code.co_filename, "exec")
    return _inner(_inner(outer)).replace(
        co_name=code.co_name, co_qualname=code.co_qualname, co_firstlineno=code.co_firstlineno
    )


def _inner(code: CodeType) -> CodeType:
    return next(constant for constant in code.co_consts if isinstance(constant, CodeType))
