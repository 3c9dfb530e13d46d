"""Undoes what functions change while they run: models, optimizers, schedules, random generators."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FunctionType, MethodType
from typing import Any

# from a thing to what puts its state back
Keep = Callable[[Any], Callable[[], object]]
# a longer list holds data, and no models
_MOST_ITEMS = 1000
# packages whose functions and objects are not searched
_WITHOUT_STATE = {"builtins", "torch"}


@contextmanager
def kept_as_it_is(*functions: Any) -> Iterator[None]:
    """Undo what happens in the block to all that functions, or models, reach and that has a state:
    by their closure, arguments and global names, and by the object whose method they are.
    """
    restore = [keep(thing) for thing, keep in _states(functions)]
    try:
        yield
    finally:
        for each in restore:
            each()


def _states(functions: Iterable[Any]) -> Iterator[tuple[Any, Keep]]:
    """Yield each thing that has a state, and what keeps it."""
    open_things, seen = list(functions), dict[int, Any]()
    packages = set(map(_package, filter(callable, open_things))) - _WITHOUT_STATE
    while open_things:
        thing = open_things.pop()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing
        keep = _keeper(thing)
        if keep is not None:
            yield thing, keep
        else:
            open_things += _parts(thing, packages)


def _keeper(thing: Any) -> Keep | None:
    import torch

    if isinstance(thing, torch.nn.Module):
        return _keep_module
    if isinstance(thing, torch.Generator):
        return lambda own: functools.partial(own.set_state, own.get_state())
    if hasattr(type(thing), "load_state_dict"):  # an optimizer, a schedule, a scaler of gradients
        return lambda own: functools.partial(own.load_state_dict, copy.deepcopy(own.state_dict()))
    return None


def _keep_module(module: Any) -> Callable[[], None]:
    import torch

    tensors = [*module.parameters(), *module.buffers()]
    contents = [tensor.detach().clone() for tensor in tensors]
    # a gradient is added to in place
    gradients = [None if own.grad is None else (own.grad, own.grad.clone()) for own in tensors]

    def restore() -> None:
        with torch.no_grad():
            for tensor, content, gradient in zip(tensors, contents, gradients, strict=True):
                tensor.copy_(content)
                tensor.grad = None if gradient is None else gradient[0].copy_(gradient[1])

    return restore


def _parts(thing: Any, packages: set[str]) -> Iterable[Any]:
    """Return what a thing holds; of functions and objects, if one of the packages defines them."""
    if isinstance(thing, Mapping | list | tuple):
        held = thing.values() if isinstance(thing, Mapping) else thing
        return held if len(thing) <= _MOST_ITEMS else ()
    if isinstance(thing, functools.partial):
        return thing.func, thing.args, thing.keywords
    if isinstance(thing, MethodType):
        return thing.__self__, thing.__func__
    if _package(thing) not in packages:
        return ()
    if isinstance(thing, FunctionType):
        return _read_by(thing)
    return getattr(thing, "__dict__", {}).values()


def _package(thing: Any) -> str:
    """Return the package or single module that defines a function, or the class of an object."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    named = thing if isinstance(thing, FunctionType | MethodType) else type(thing)
    return str(named.__module__).partition(".")[0]


def _read_by(function: FunctionType) -> Iterator[Any]:
    """Yield what a function and those in it read without being given it."""
    yield from function.__defaults__ or ()
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    names = _names(function.__code__) & function.__globals__.keys()
    yield from map(function.__globals__.__getitem__, names)


def _names(code: CodeType) -> set[str]:
    within = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*map(_names, within))
