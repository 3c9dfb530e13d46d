"""Measures how long the device worked between two points of a program, without waiting for it.

A host clock around a forward measures its launch, so on an accelerator a step looks as fast as
Python. Two events on the current stream give the real time:

    timer = start_timer()    an event is recorded; returns at once
    ...                      kernels are launched
    timer.end()              a second event is recorded; returns at once
    timer.seconds()          later, from any thread: None while `timer.pending`, then e.g. 0.25

Events come from a pool, so that a forward allocates none. While a CUDA graph is captured nothing is
recorded, because an event in a graph has no time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

from otel_torch import torch_private
from otel_torch.process import at_fork
from otel_torch.process.at_fork import ForkOrder
from otel_torch.process.console import say_once
from otel_torch.statistics.graph_capture import thread_local_capture_mode

# free events of a device that are kept for later timers
MAX_FREE_EVENTS = 1024


class DeviceEvent(Protocol):
    """An event that has a time, such as `torch.cuda.Event(enable_timing=True)`."""

    def record(self) -> None:
        """Record the event on the current stream."""

    def query(self) -> bool:
        """Return whether the device has reached the event, without waiting."""

    def elapsed_time(self, other: Any) -> float:
        """Return the milliseconds from this event to `other`; the device has reached both."""


class Accelerator(Protocol):
    """The functions of a kind of accelerator that timers use."""

    def is_ready(self) -> bool:
        """Return whether events may be recorded: no graph is being captured."""

    def current(self) -> int:
        """Return the index of the current device."""

    def make_event(self) -> DeviceEvent:
        """Return a new event."""


class TorchAccelerator:
    """CUDA, ROCm or XPU through torch.

    Args:
        module: `torch.cuda` or `torch.xpu`.
    """

    def __init__(self, module: Any) -> None:
        self._is_capturing: Callable[[], bool] = getattr(
            module, "is_current_stream_capturing", lambda: False
        )
        self.current: Callable[[], int] = module.current_device
        self._event_class: Any = module.Event

    def is_ready(self) -> bool:
        return not self._is_capturing()

    def make_event(self) -> DeviceEvent:
        event: DeviceEvent = self._event_class(enable_timing=True)
        return event


class EventPool:
    """Reusable events of one kind of accelerator."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        # the export thread and the region closer may read a timer at once
        self.read_lock = threading.Lock()
        # by device: an event belongs to the device that it was first recorded on
        self._free: dict[int, list[DeviceEvent]] = {}

    def start_timer(self) -> EventTimer | None:
        """Start to measure on the current stream; None while a graph is captured."""
        if not self.accelerator.is_ready():
            return None
        timer = EventTimer(self)
        timer.begin()
        return timer

    def recordable_device(self) -> int | None:
        """Return the index of the current device; None if nothing may be recorded on it now."""
        return self.accelerator.current() if self.accelerator.is_ready() else None

    def take(self, device: int) -> DeviceEvent:
        """Return a free event of `device`, or a new one."""
        try:
            return self._free[device].pop()
        except (KeyError, IndexError):
            return self.accelerator.make_event()

    def give_back(self, device: int, *events: DeviceEvent | None) -> None:
        """Make events free again, even if the device has not reached them yet."""
        free = self._free.setdefault(device, [])
        for event in events:
            if event is not None and len(free) < MAX_FREE_EVENTS:
                free.append(event)


class EventTimer:
    """Device time between `begin()` and `end()`, to be read later by `seconds()`.

    If the two are on different devices, or the second would become part of a captured graph,
    nothing is measured and `seconds()` stays None.

    pending: whether `seconds()` may still become known.
    """

    __slots__ = ("_device", "_events", "_pool", "_seconds", "pending")

    def __init__(self, pool: EventPool) -> None:
        self._pool = pool
        self._device: int | None = None
        self._events: tuple[DeviceEvent, DeviceEvent | None] | None = None
        self._seconds: float | None = None
        self.pending = False

    def begin(self) -> None:
        device = self._device = self._pool.recordable_device()
        if device is not None:
            first = self._pool.take(device)
            first.record()
            self._events = first, None

    def end(self) -> None:
        if self._events is None or self._device is None:
            return
        first, _ = self._events
        if self._pool.recordable_device() == self._device:
            last = self._pool.take(self._device)
            last.record()
            self._events = first, last
            self.pending = True
        else:
            self._events = None
            self._pool.give_back(self._device, first)

    def seconds(self) -> float | None:
        """Return the measured seconds; None while the device has not reached the second event."""
        with self._pool.read_lock:
            if not self.pending or self._events is None or self._device is None:
                return self._seconds
            first, last = self._events
            assert last is not None
            try:
                with thread_local_capture_mode():
                    if not (last.query() and first.query()):
                        return None
                    self._seconds = first.elapsed_time(last) / 1000
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                say_once(f"the device time of regions is not known: {reason}")
            self.pending, self._events = False, None
            self._pool.give_back(self._device, first, last)
            return self._seconds


# modules of torch whose streams can be timed, and the versions in `torch.version` that mean that
# this build of torch supports them
_KINDS = {"cuda": ("cuda", "hip"), "xpu": ("xpu",)}
# None before the first timer
_pools: list[EventPool] | None = None
# False if there is nothing to measure on; callers then skip even the call of `start_timer`
is_active = True


def start_timer() -> EventTimer | None:
    """Start to measure on the current stream of this process's accelerator. Never raises.

    Returns None without an accelerator, before the program has used it, and while a graph is
    captured.
    """
    global _pools, is_active
    try:
        if _pools is None:
            _pools, is_active = [], False
            for name, versions in _KINDS.items():
                if any(getattr(torch.version, version, None) for version in versions):
                    _add_pool_when_used(getattr(torch, name))
        for pool in _pools:
            timer = pool.start_timer()
            if timer is not None:
                return timer
    except Exception as error:
        _pools, is_active = [], False
        say_once(f"the device time of regions is not measured: {type(error).__name__}: {error}")
    return None


def use_accelerator(accelerator: Accelerator | None) -> None:
    """Measure on `accelerator` from now on; None for those that torch has."""
    global _pools, is_active
    _pools = None if accelerator is None else [EventPool(accelerator)]
    is_active = True


def _add_pool_when_used(module: Any) -> None:
    """Measure on an accelerator as soon as the program uses it.

    Asking torch whether there is one would start its driver, which a forked child cannot use.
    """

    def add_pool() -> None:
        global is_active
        if _pools is not None:
            _pools.append(EventPool(TorchAccelerator(module)))
            is_active = True

    torch_private.call_on_first_use(module, add_pool)


def _reset_in_child() -> None:
    """Measure nothing in a forked child, which cannot use its parent's device and events."""
    global _pools, is_active
    if _pools:
        _pools, is_active = [], False


at_fork.register(ForkOrder.DEVICE_TIME, in_child=_reset_in_child)
