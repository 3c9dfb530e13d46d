"""Canonical names: what a module and a model are called, whatever wraps them."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

# The attribute under which each of torch's own wrappers holds the module that it wraps.
_WRAPPED_ATTRIBUTES = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",  # torch.compile
    "FullyShardedDataParallel": "_fsdp_wrapped_module",  # FSDP1
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
}

# Each returns the parts of a module by name where a framework keeps them elsewhere, None otherwise.
part_finders: list[Callable[[nn.Module], Mapping[str, nn.Module] | None]] = []

_VARIADIC = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that torch knows to be directly in a module, by name."""
    return {name: child for name, child in module._modules.items() if child is not None}


def parts(module: nn.Module) -> Mapping[str, nn.Module]:
    """Return the modules that a module directly contains, by name."""
    for find in part_finders:
        named = find(module)
        if named is not None:
            return named
    return children_of(module)


def wrapped(module: nn.Module) -> nn.Module | None:
    """Return the module that `module` does nothing but wrap, or None.

    Wrappers of other libraries are recognized by what they are: they have no parameters, all their
    children are one module or wrappers of it, and their class is written for any child.
    """
    cls: Any = type(module)
    for base in cls.__mro__:
        attribute = _WRAPPED_ATTRIBUTES.get(base.__name__)
        if attribute is not None and base.__module__.startswith("torch."):
            return module._modules.get(attribute)
    children = children_of(module)
    if not children or any(parameter is not None for parameter in module._parameters.values()):
        return None
    name = next(iter(children))
    if not wraps_any_module(cls, name):
        return None
    is_one = len({id(core(child)) for child in children.values()}) == 1
    return children[name] if is_one else None


@functools.cache
def wraps_any_module(cls: type, child: str) -> bool:
    """Return whether a class is written to wrap any module, which it holds as `child`.

    A model knows its arguments. A wrapper takes `*args, **kwargs`, and returns what the child
    returns for them, or looks up in the child whatever attributes it does not have. One that runs
    the child's forward on itself takes its place: the child is never called.
    """
    bases = [base for base in cls.__mro__ if base.__module__ != nn.Module.__module__]
    forwards = [vars(base)["forward"] for base in bases if "forward" in vars(base)]
    if not any(map(_takes_anything, forwards)) or _runs_on_itself(forwards[0], child):
        return False
    lookups = [vars(base)["__getattr__"] for base in bases if "__getattr__" in vars(base)]
    if any(child in _names_in(lookup) for lookup in lookups):
        return True
    return _takes_anything(forwards[0]) and _returns_what_it_calls(forwards[0], child)


def _takes_anything(forward: Callable[..., Any]) -> bool:
    """Return whether a method takes `*args` and `**kwargs`, and needs nothing else."""
    try:
        parameters = list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):
        return False
    needed = [
        parameter
        for parameter in parameters
        if parameter.kind not in _VARIADIC and parameter.default is parameter.empty
    ]
    # a decorated method may take `self` as one of its `*args`
    return {parameter.kind for parameter in parameters} >= _VARIADIC and len(needed) <= 1


def _names_in(function: Any) -> Iterator[str]:
    """Yield the names and texts that a function mentions."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is not None:
        yield from code.co_names
        yield from (constant for constant in code.co_consts if isinstance(constant, str))


def _returns_what_it_calls(forward: Callable[..., Any], child: str) -> bool:
    """Return whether every `return` of forward gives the result of `self.child(*args, **kwargs)`,
    as it is or converted by a function. False without the source.
    """
    tree = _syntax_tree(forward)
    if tree is None:
        return False
    results = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _calls(node.value, child)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    returned = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    return bool(returned) and all(
        value.id in results if isinstance(value, ast.Name) else _calls(value, child)
        for value in returned
    )


def _runs_on_itself(forward: Callable[..., Any], child: str) -> bool:
    """Return whether forward calls `type(self.child).forward(self, ...)`."""
    tree = _syntax_tree(forward)
    return tree is not None and any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "forward"
        and any(isinstance(argument, ast.Name) for argument in node.args[:1])
        and _mentions(node.func, child)
        for node in ast.walk(tree)
    )


def _mentions(value: ast.expr, attribute: str) -> bool:
    attributes = (node for node in ast.walk(value) if isinstance(node, ast.Attribute))
    return any(node.attr == attribute for node in attributes)


def _syntax_tree(function: Callable[..., Any]) -> ast.Module | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return None


def _calls(value: ast.expr | None, child: str) -> bool:
    """Return whether an expression is `self.child(*args, **kwargs)`."""
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and value.func.attr == child
        and any(isinstance(argument, ast.Starred) for argument in value.args)
        and any(keyword.arg is None for keyword in value.keywords)
    )


def core(module: nn.Module) -> nn.Module:
    """Return the module inside all wrappers, `module` itself if there are none."""
    inner = wrapped(module)
    while inner is not None:
        module, inner = inner, wrapped(inner)
    return module


def class_name(module: nn.Module) -> str:
    """Return the name of the class that a module was written as.

    FSDP2 gives a module a subclass named `FSDP...`, TorchScript an unrelated class.
    """
    cls = type(module)
    if cls.__name__.startswith("FSDP") and any(
        base.__name__ == "FSDPModule" for base in cls.__mro__
    ):
        cls = next((base for base in cls.__mro__[1:] if base.__name__ != "FSDPModule"), cls)
    if isinstance(module, torch.jit.ScriptModule):
        return str(getattr(module, "original_name", "") or cls.__name__)
    return cls.__name__


def class_forward(cls: type) -> Any:
    """Return the forward of a class of modules as it is kept there; None without one.

    Asks no descriptor: that of TorchScript's classes raises.
    """
    return inspect.getattr_static(cls, "forward", None)


def named_modules(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return every (canonical name, module) under `root`, without wrappers, in order.

    `root` is included as `""`. A shared module appears once for each of its names. A module that
    contains itself is walked once.

    >>> [name for name, _ in named_modules(nn.DataParallel(nn.Sequential(nn.ReLU())))]
    ['', '0']
    """
    named: list[tuple[str, nn.Module]] = []
    _add_named_modules(named, root, "", frozenset())
    return named


# not inside of the above: a function that refers to itself would keep the modules until the garbage
# collector runs
def _add_named_modules(
    named: list[tuple[str, nn.Module]], module: nn.Module, name: str, enclosing: frozenset[int]
) -> None:
    inner = wrapped(module)
    if inner is not None:
        if id(inner) not in enclosing:
            _add_named_modules(named, inner, name, enclosing | {id(module)})
        return
    named.append((name, module))
    enclosing |= {id(module)}
    for key, child in parts(module).items():
        if id(child) not in enclosing:
            _add_named_modules(named, child, f"{name}.{key}" if name else key, enclosing)


def all_modules(root: nn.Module) -> Iterator[nn.Module]:
    """Yield every module under `root` once, wrappers and `root` included.

    As `root.modules()`, but no code of the program runs, which may have its own.
    """
    seen: set[int] = set()
    pending = [root]
    while pending:
        module = pending.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            pending += reversed(list(parts(module).values()))


def all_parameters(root: nn.Module) -> Iterator[nn.Parameter]:
    """Yield every parameter under `root` once, as `root.parameters()` does."""
    seen: set[int] = set()
    for module in all_modules(root):
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


def first_names(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return what `named_modules` does, but every module once, by its first name."""
    by_id = {id(module): (name, module) for name, module in reversed(named_modules(root))}
    return list(reversed(by_id.values()))
