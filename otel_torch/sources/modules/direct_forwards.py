"""Sees forwards that the program calls itself, past `nn.Module.__call__`, where no hook runs.

    logits = model.forward(tokens)

The code of a watched function is exchanged for code that hands the call over:

    def forward(self, tokens, mask=None):
        def own(...): ...  # the code that the program wrote
        choose = getattr(type(self), "_otel_torch_choose", None)
        return (own if choose is None else choose(own, self))(self, tokens, mask=mask)

The function itself stays, and so do its bound methods, signature, copies and pickles; methods that
were bound before are seen. Because the code contains the program's own, it does the same wherever
it comes to: in a pickle by value that another process loads, with a `self` that is no module, after
the session. Only what may be called so is watched: the forwards of modules that contain others or
that nothing contains, and those that a method of a containing module names. What the program has
put in the place of a forward, in a class or in one module, is watched from the next call on.
"""

from __future__ import annotations

import dis
import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from otel_torch import torch_private
from otel_torch.sources.modules.module_names import class_forward
from otel_torch.sources.modules.uncalled_roots import method_codes, with_inner
from otel_torch.sources.program_lines import STUB

Forward = Callable[..., Any]

_CHOOSE = "_otel_torch_choose"  # the attribute of nn.Module that is there during a session
_SUSPENDED = (
    inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
)  # flags of code that does not run when it is called


class _Exchange(NamedTuple):
    """The code that the program wrote for a function, and what takes its place."""

    own: CodeType
    replacement: CodeType

    def apply(self, function: FunctionType) -> None:
        """Exchange the code, unless the program has exchanged it, too."""
        if function.__code__ is self.own:
            function.__code__ = self.replacement

    def revert(self, function: FunctionType) -> None:
        """Give the function its own code back, unless the program has exchanged it meanwhile."""
        if function.__code__ is self.replacement:
            function.__code__ = self.own


class OwnForward(NamedTuple):
    """A function that does what a watched function of a class does in a call of its module.

    It does as long as the watched function has this code, and these defaults.
    """

    function: FunctionType
    code: CodeType
    defaults: tuple[Any, ...] | None
    keyword_defaults: dict[str, Any] | None


# of watched functions of classes: `module_call.c` calls these, which takes five Python calls less
own_forwards: dict[FunctionType, OwnForward] = {}


class DirectForwards:
    """The forwards that are watched, and the code that they have meanwhile.

    Args:
        is_in_call: returns whether the innermost call that this thread is in is a module's.
        handle: called instead of a forward that is not part of a call of its module, with the
            forward as the program wrote it, the module, and the arguments.
        trace: likewise, in a graph that is compiled.
        discover: called with a module before `trace` is.
    """

    def __init__(
        self,
        is_in_call: Callable[[nn.Module], bool],
        handle: Forward,
        trace: Forward,
        discover: Callable[[nn.Module], object],
    ) -> None:
        self._is_in_call, self._handle, self._trace = is_in_call, handle, trace
        self._discover = discover
        self._is_traced_directly = False
        self._is_watching = False
        # weakly: a forward that is put into a module may hold the module
        self._exchanges: WeakKeyDictionary[FunctionType, _Exchange] = WeakKeyDictionary()
        # classes that are watched, or left alone, with the forward that they had then
        self._settled: dict[type[nn.Module], object] = {}
        # of these the ones that stay watched: for calls inside of a model, and from outside
        self._called: set[type] = set()
        self._containers: set[type] = set()
        self._lock = threading.RLock()

    def start(self) -> None:
        self._is_watching = True
        setattr(nn.Module, _CHOOSE, self._choice())

    def expect(self, module: nn.Module) -> None:
        """Watch the forward of a module that nothing contains as yet, or has another one now."""
        cls = type(module)
        forward = class_forward(cls)
        if self._settled.get(cls) is not forward:
            self._settled[cls] = forward
            self._watch_class(cls)
        if "forward" in vars(module):
            self._watch(_own_entries(module))

    def settle(self, root: nn.Module, modules: list[nn.Module]) -> None:
        """Watch a model's root, what contains others, and what its methods may call directly.

        The classes of all other `modules`, which only `nn.Module.__call__` calls, are left alone.
        """
        own_codes = {each.replacement: each.own for each in list(self._exchanges.values())}
        self._called.add(type(root))
        self._containers.update(type(module) for module in modules if module._modules)
        names: dict[type[nn.Module], frozenset[str]]
        names = {cls: _names_beside_forward(cls, own_codes) for cls in set(map(type, modules))}
        for module in modules:
            if names[type(module)]:
                self._called.update(map(type, _reached_by(names[type(module)], module)))
        kept = self._called | self._containers
        watched = {function for cls in kept for function in _entries(cls)}
        for cls in names:
            self._settled[cls] = class_forward(cls)
            if cls in kept:
                self._watch_class(cls)
            else:
                for function in _entries(cls):
                    if function in self._exchanges and function not in watched:
                        self._exchanges[function].revert(function)
        for module in modules:
            self._watch(_own_entries(module))

    def keep(self, module: nn.Module) -> None:
        self._containers.add(type(module))

    def is_part(self, module: nn.Module) -> bool:
        """Return whether a call of a module's forward inside its model is a call of the module.

        If the model's own code calls the part by name, or the class has a call of its own. A module
        that runs the forward of another one in its place makes its own output by it.
        """
        cls = type(module)
        return cls in self._called or cls.__call__ is not nn.Module.__call__

    def own_forward(self, module: nn.Module) -> Forward:
        """Return the forward of a module, with the code that the program wrote."""
        forward: Any = module.forward
        function = getattr(forward, "__func__", forward)
        exchange = self._exchanges.get(function) if isinstance(function, FunctionType) else None
        if exchange is None:
            return forward  # type: ignore[no-any-return]
        return MethodType(_copy_of(function, exchange.own), module)

    @contextmanager
    def with_own_code(self, own: Forward) -> Iterator[None]:
        """Give a forward its own code back meanwhile: calls of itself take one frame each then."""
        code = getattr(own, "__code__", None)
        exchanges = [item for item in list(self._exchanges.items()) if item[1].own is code]
        for function, exchange in exchanges:
            exchange.revert(function)
        try:
            yield
        finally:
            for function, exchange in exchanges if self._is_watching else ():
                exchange.apply(function)

    def restore(self) -> None:
        """Give every function its own code back."""
        self._is_watching = False  # a method of torch that was wrapped meanwhile may still call us
        for function, exchange in list(self._exchanges.items()):
            exchange.revert(function)
        if hasattr(nn.Module, _CHOOSE):
            delattr(nn.Module, _CHOOSE)
        self._exchanges.clear()
        own_forwards.clear()
        self._settled.clear()
        self._called.clear()
        self._containers.clear()

    def _watch_class(self, cls: type) -> None:
        self._watch(_entries(cls))
        for function in _entries(cls):
            if (exchange := self._exchanges.get(function)) is not None:
                own_forwards[function] = OwnForward(
                    _copy_of(function, exchange.own),
                    exchange.replacement,
                    function.__defaults__,
                    function.__kwdefaults__,
                )

    def _watch(self, functions: Iterator[FunctionType]) -> None:
        with self._lock:
            for function in functions if self._is_watching else ():
                if function not in self._exchanges:
                    try:
                        replacement = _handing_over(function)
                    except (SyntaxError, ValueError):  # a name that no source can spell
                        continue
                    self._exchanges[function] = _Exchange(function.__code__, replacement)
                self._exchanges[function].apply(function)

    def _choice(self) -> Callable[[Forward, nn.Module], Forward]:
        """Return a function that returns what a call of a module's forward has to call."""
        is_in_call, handle, trace = self._is_in_call, self._handle, self._trace

        def run_with_own_code(own: Forward, *args: Any, **kwargs: Any) -> Any:
            with self.with_own_code(own):
                return own(*args, **kwargs)

        @torch_private.constant_while_tracing
        def is_traced_directly() -> bool:
            return self._is_traced_directly

        def note_enclosing_call(context: Any) -> None:
            self._note_enclosing_call(context)

        def choose(own: Forward, module: nn.Module) -> Forward:
            if torch.compiler.is_compiling():
                if torch.compiler.is_dynamo_compiling():
                    torch._dynamo.comptime.comptime(note_enclosing_call)
                    if is_traced_directly():
                        return partial(trace, own)
                return own
            if not is_in_call(module):
                return partial(handle, own)
            calls_itself = sys._getframe(2).f_code is own.__code__
            return partial(run_with_own_code, own) if calls_itself else own

        return torch_private.keep_out_of_frames(choose)

    def _note_enclosing_call(self, context: Any) -> None:
        """Note, while an entry is traced, whether it is called outside of its module's call."""
        frames = torch_private.frames_while_tracing(context)
        module: Any = next(frames, (None, {}))[1].get("module")
        next(frames, None)  # the code that hands the call over
        calls = {exchange.own for exchange in list(self._exchanges.values())}
        calls |= {nn.Module._wrapped_call_impl.__code__, nn.Module._call_impl.__code__}
        enclosing = _innermost_call(module, frames, calls)
        if enclosing is None:  # the compiled code may be called by a forward that is not compiled
            self._is_traced_directly = module is not None and not self._is_in_call(module)
        else:
            self._is_traced_directly = enclosing is not module and self.is_part(module)
        if self._is_traced_directly:
            self._discover(module)


def _innermost_call(
    module: nn.Module,
    frames: Iterator[tuple[CodeType, dict[str, Any]]],
    calls: set[CodeType],
) -> object:
    """Return the module of the innermost call that is traced, or None."""
    for code, values in frames:
        if code.co_name.startswith("torch_dynamo_resume_in_"):  # the rest of a broken graph
            return module if any(value is module for value in values.values()) else code
        first = code.co_varnames[0] if code in calls else ""
        if (running := values.get(first)) is not None:
            return running
    return None


def _entries(cls: type) -> Iterator[FunctionType]:
    """Yield the functions of a class that run its forward: `forward`, and a `__call__` of its own
    that calls forward and not that of `nn.Module`. None of a graph that a compiler makes.
    """
    if any(base.__name__ == "GraphModule" for base in cls.__mro__):
        return
    for name in ("forward", "__call__"):
        base = next((base for base in cls.__mro__ if name in vars(base)), nn.Module)
        function = vars(base).get(name)
        if (
            base is not nn.Module
            and issubclass(base, nn.Module)  # `self` of a mixin may be something else
            and isinstance(function, FunctionType)
            and not function.__code__.co_flags & _SUSPENDED
            and (name == "forward" or _runs_forward_itself(function.__code__))
        ):
            yield function


def _own_entries(module: nn.Module) -> Iterator[FunctionType]:
    """Yield the function that the program has put into a module as its forward.

    It must get the module as its first argument, by a method or `functools.partial`.
    """
    forward = vars(module).get("forward")
    first: object = None
    function: object = None
    if isinstance(forward, MethodType):
        first, function = forward.__self__, forward.__func__
    elif isinstance(forward, partial) and forward.args:
        first, function = forward.args[0], forward.func
    if (
        first is module
        and isinstance(function, FunctionType)
        and not function.__code__.co_flags & _SUSPENDED
    ):
        yield function


def _runs_forward_itself(code: CodeType) -> bool:
    return "forward" in code.co_names and "super" not in code.co_names


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


def _names_beside_forward(cls: type, own_codes: dict[CodeType, CodeType]) -> frozenset[str]:
    """Return the names in those methods of a class that call a forward of others."""
    names: set[str] = set()
    for method in method_codes(cls):
        codes = list(with_inner(own_codes.get(method, method)))
        if any(map(_gets_forward, codes)):
            names.update(*(code.co_names for code in codes))
    return frozenset(names)


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


def _copy_of(function: FunctionType, code: CodeType) -> FunctionType:
    """Return a function with other code and what `function` has besides."""
    copy = FunctionType(
        code,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__qualname__, copy.__module__ = function.__qualname__, function.__module__
    return copy


def _handing_over(function: FunctionType) -> CodeType:
    """Return code with the signature and closure of a function that calls what a session chooses.

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
    named = positional[first_named:] + keyword_only
    arguments = positional[:first_named] + rest + [f"{name}={name}" for name in named] + options
    module = positional[0] if positional else f"{rest[0][1:]}[0]"
    closure = "".join(f"{name}, " for name in code.co_freevars)
    lines = [
        "def outer():",
        *(f"    {name} = None" for name in code.co_freevars),
        f"    def forward({', '.join(parameters)}):",
        f"        def {STUB}(): ({closure})",
        f"        {_CHOOSE} = getattr(type({module}), {_CHOOSE!r}, None)",
        f"        return ({STUB} if {_CHOOSE} is None else"
        f" {_CHOOSE}({STUB}, {module}))({', '.join(arguments)})",
    ]
    replacement = _inner(_inner(compile("\n".join(lines), code.co_filename, "exec")))
    stub = _inner(replacement)
    if not replacement.co_freevars == stub.co_freevars == code.co_freevars:
        raise ValueError("another closure")
    replacement = replacement.replace(
        co_name=code.co_name,
        co_qualname=code.co_qualname,
        co_firstlineno=code.co_firstlineno,
        co_consts=tuple(
            code if constant is stub else constant for constant in replacement.co_consts
        ),
    )
    return torch_private.keep_code_out_of_frames(replacement, with_callees=False)


def _inner(code: CodeType) -> CodeType:
    return next(constant for constant in code.co_consts if isinstance(constant, CodeType))
