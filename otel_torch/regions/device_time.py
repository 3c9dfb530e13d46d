"""How long the device was busy between two points of a program, without ever waiting for it.

A host that times a forward times its launch: on an accelerator a step looks as fast as Python. Two
events on the current stream say how long it really was. They are taken from a pool, so that a
forward allocates none, and asked later, by a thread that has nothing better to do. While a CUDA
graph is captured nothing is recorded: an event in a graph has no time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

from otel_torch import at_fork, torch_private
from otel_torch.at_fork import ForkOrder
from otel_torch.console import say_once
from otel_torch.statistics.graph_capture import thread_local_capture_mode

# events that are kept for the next regions; more are made and thrown away
POOL = 1024


class Event(Protocol):
    """An event with a time, such as `torch.cuda.Event(enable_timing=True)`."""

    def record(self) -> None:
        """Put it onto the current stream."""

    def query(self) -> bool:
        """Whether the device has reached it. Does not wait."""

    def elapsed_time(self, other: Any) -> float:
        """Milliseconds from this to `other`, both reached."""


class Device(Protocol):
    """What measuring needs of a kind of accelerator."""

    def is_ready(self) -> bool:
        """Whether events may be recorded: no graph is being captured."""

    def current(self) -> int:
        """The number of the current device."""

    def make_event(self) -> Event:
        """A new event, with a time."""


class Accelerator:
    """CUDA, ROCm or XPU: `module` is what torch calls it."""

    def __init__(self, module: Any) -> None:
        self._capturing: Callable[[], bool] = getattr(
            module, "is_current_stream_capturing", lambda: False
        )
        self.current: Callable[[], int] = module.current_device
        self._event: Any = module.Event

    def is_ready(self) -> bool:
        return not self._capturing()

    def make_event(self) -> Event:
        event: Event = self._event(enable_timing=True)
        return event


class Pool:
    """Events of one kind of accelerator that are used again and again."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.asking = threading.Lock()  # the span and the tables may both want to know
        self._free: dict[
            int, list[Event]
        ] = {}  # an event belongs to the device that it was first recorded on

    def begin(self) -> DeviceTime | None:
        """Begin to measure on the current stream; None while a graph is captured."""
        if not self.device.is_ready():
            return None
        measured = DeviceTime(self)
        measured.begin()
        return measured

    def where(self) -> int | None:
        """The current device; None where nothing may be recorded on it now."""
        return self.device.current() if self.device.is_ready() else None

    def take(self, device: int) -> Event:
        """An event of a device."""
        try:
            return self._free[device].pop()
        except (KeyError, IndexError):
            return self.device.make_event()

    def give_back(self, device: int, *events: Event | None) -> None:
        """Events that nobody asks any more. One that the device has not reached yet may be recorded
        anew all the same.
        """
        free = self._free.setdefault(device, [])
        for event in events:
            if event is not None and len(free) < POOL:
                free.append(event)


class DeviceTime:
    """Device time of one stretch of code: `begin()`, `end()`, and later, from any thread,
    `seconds()`.

    `begin` and `end` put an event onto the current stream and return at once. Where the two are on
    different devices, or the second would be captured into a graph, nothing is measured, and
    `seconds()` stays None.
    """

    __slots__ = ("_device", "_events", "_pool", "_seconds", "pending")

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._device: int | None = None
        self._events: tuple[Event, Event | None] | None = None
        self._seconds: float | None = None
        self.pending = False

    def begin(self) -> None:
        """The stretch begins here."""
        device = self._device = self._pool.where()
        if device is not None:
            first = self._pool.take(device)
            first.record()
            self._events = first, None

    def end(self) -> None:
        """The stretch ends here."""
        if self._events is None or self._device is None:
            return
        first, _ = self._events
        if self._pool.where() == self._device:
            last = self._pool.take(self._device)
            last.record()
            self._events = first, last
            self.pending = True
        else:
            self._events = None
            self._pool.give_back(self._device, first)

    def seconds(self) -> float | None:
        """What was measured, in seconds. None while the device is not that far; ask again as long
        as `pending` is true.
        """
        with self._pool.asking:
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
                say_once(
                    f"the device time of regions is not known: {type(error).__name__}: {error}"
                )
            self.pending, self._events = False, None
            self._pool.give_back(self._device, first, last)
            return self._seconds


# the kinds whose streams torch can time, and what of `torch.version` says that this torch knows
# them
_KINDS = {"cuda": ("cuda", "hip"), "xpu": ("xpu",)}
_pools: list[Pool] | None = None
# False while there is nothing to measure: then not even a function is called
is_active = True


def begin() -> DeviceTime | None:
    """Begin to measure on the current stream of this process's accelerator. None where there is
    none, where the program has not used it yet, and while a graph is captured. Never raises.
    """
    global _pools, is_active
    try:
        if _pools is None:
            _pools, is_active = [], False
            for name, versions in _KINDS.items():
                if any(getattr(torch.version, version, None) for version in versions):
                    _when_in_use(getattr(torch, name))
        for pool in _pools:
            measured = pool.begin()
            if measured is not None:
                return measured
    except Exception as error:
        _pools, is_active = [], False
        say_once(f"the device time of regions is not measured: {type(error).__name__}: {error}")
    return None


def use(device: Device | None) -> None:
    """Measure on `device` from now on; None: on what there is."""
    global _pools, is_active
    _pools, is_active = None if device is None else [Pool(device)], True


def _when_in_use(module: Any) -> None:
    """Measure on an accelerator as soon as the program uses it. Nothing may ask whether there is
    one: that starts the driver, and a forked child could not use it any more.
    """

    def begin_to_measure() -> None:
        global is_active
        if _pools is not None:
            _pools.append(Pool(Accelerator(module)))
            is_active = True

    torch_private.once_in_use(module, begin_to_measure)


def _after_fork() -> None:
    """The parent's events are not the child's, and a device that the parent uses is none that the
    child can.
    """
    global _pools, is_active
    if _pools:
        _pools, is_active = [], False


at_fork.register(ForkOrder.DEVICE_TIME, in_child=_after_fork)
