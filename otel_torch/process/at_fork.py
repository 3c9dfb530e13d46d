"""Callbacks that run around a fork, in an order that does not depend on the order of imports.

A forked child inherits locks that a thread of the parent may hold, threads that do not run, and
spans, queues and devices that the parent still uses. The owner of such state registers a callback
that resets it, and `ForkOrder` defines when that callback runs:

    at_fork.register(ForkOrder.REGION_CLOSERS, in_child=self.reset_in_child)

A bound method is held weakly: it is dropped with its object.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import MethodType
from typing import Any

from otel_torch.process.console import say_once

_Callback = Callable[[], None]
_CallbackReference = Callable[[], _Callback | None]


class ForkOrder(IntEnum):
    """Order of the callbacks: ascending in child and parent, descending before the fork."""

    DEVICE_TIME = 1
    REGION_CLOSERS = 2
    OPEN_REGIONS = 3
    PROFILER = 4
    SESSION = 5
    EXPORT_QUEUES = 6
    SPAN_IDS = 7


_Callbacks = dict[ForkOrder, list[_CallbackReference]]
_before: _Callbacks = {order: [] for order in ForkOrder}
_in_parent: _Callbacks = {order: [] for order in ForkOrder}
_in_child: _Callbacks = {order: [] for order in ForkOrder}


def register(
    order: ForkOrder,
    *,
    in_child: _Callback,
    before: _Callback | None = None,
    in_parent: _Callback | None = None,
) -> None:
    """Call `in_child` in every forked child, `before` and `in_parent` in the process that forks."""
    for callbacks, callback in ((_before, before), (_in_parent, in_parent), (_in_child, in_child)):
        if callback is not None:
            _add(callbacks[order], callback)


def child_callbacks() -> Iterator[_Callback]:
    """Return the callbacks of a child in the order in which they run."""
    return _live(_in_child)


def _add(references: list[_CallbackReference], callback: _Callback) -> None:
    references[:] = [reference for reference in references if reference() is not None]
    references.append(
        weakref.WeakMethod(callback) if isinstance(callback, MethodType) else lambda: callback
    )


def _live(callbacks: _Callbacks) -> Iterator[_Callback]:
    for references in callbacks.values():
        for reference in references.copy():
            callback = reference()
            if callback is not None:
                yield callback


def _call_all(callbacks: Iterator[_Callback] | list[_Callback]) -> None:
    for callback in callbacks:
        try:
            callback()
        except Exception as error:
            name: Any = getattr(callback, "__qualname__", callback)
            say_once(f"{name} failed around a fork: {type(error).__name__}: {error}")


# held while a thread imports: a fork would leave the child with an import that never ends
_import_lock = threading.RLock()
_is_held_for_fork = False
# how long a fork waits for it
_FORK_WAIT_S = 5.0


@contextmanager
def no_fork() -> Iterator[None]:
    """Let forks and other threads wait while this one imports modules in a block."""
    with _import_lock:
        yield


def _before_fork() -> None:
    global _is_held_for_fork
    _call_all(list(_live(_before))[::-1])
    _is_held_for_fork = _import_lock.acquire(timeout=_FORK_WAIT_S)


def _after_in_parent() -> None:
    if _is_held_for_fork:
        _import_lock.release()
    _call_all(_live(_in_parent))


def _after_in_child() -> None:
    global _import_lock
    _import_lock = threading.RLock()
    _call_all(child_callbacks())


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child
    )
