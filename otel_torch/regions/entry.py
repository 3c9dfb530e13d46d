"""Named stretches of code: what a program, a framework or its natural shape calls a region becomes
a scope.

Entering looks up what was concluded the first time, reads the clock and makes a light span current;
all else is done later, by another thread (`otel_torch.late`). Whatever goes wrong here, the block
runs and its exception is its own.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from threading import get_ident
from time import time_ns
from types import TracebackType
from typing import Any, Protocol, TypeVar

from torch.compiler import is_compiling

from otel_torch import at_fork, session
from otel_torch.at_fork import ForkOrder
from otel_torch.console import say_once
from otel_torch.recorder import Recorder
from otel_torch.records import Scope
from otel_torch.regions import device_time
from otel_torch.regions.deferred import Label, Late, Stay
from otel_torch.regions.device_time import DeviceTime
from otel_torch.regions.nvtx import nvtx_range, wants_nvtx
from otel_torch.regions.registry import (
    MAX_DERIVED,
    bounded,
    choose,
    derived,
    explain_unknown,
    resolve_profiler_region,
)
from otel_torch.settings import Names

_F = TypeVar("_F", bound=Callable[..., Any])


class Collector(Protocol):
    """What works only inside of regions, such as the torch profiler. No method raises."""

    def prepare(self, region: str) -> None:
        """`region` is about to be entered: do what takes long, before its clock starts."""

    def enter(self, region: str, scope: Scope | None) -> object | None:
        """`region` is entered; what is returned is given to `leave`, unless it is None."""

    def leave(self, entered: Any, scope: Scope | None) -> None:
        """The region is left; called before its scope is closed."""


_collector: Any = None


def get_collector() -> Any:
    """The collector of all regions, None where there is none."""
    return _collector


def set_collector(collector: Any) -> None:
    """Let `collector` know of every region from now on; None ends that."""
    global _collector
    _collector = collector


class _Visit:
    """One stay in a region that takes a scope: what was opened for it and has to be closed again."""

    __slots__ = ("collector", "device", "entered", "nvtx", "recorder", "region", "scope")

    def __init__(self, region: str, scope: Scope | None, recorder: Recorder | None) -> None:
        self.region = region
        self.scope = scope
        self.recorder = (
            recorder  # None: the scope is another visit's, or only carries the collector's events
        )
        self.collector: Collector | None = None
        self.entered: object | None = None
        self.nvtx: nvtx_range | None = None
        self.device: DeviceTime | None = None

    def open(self, collector: Collector | None, nvtx: bool) -> bool:
        """Open everything; False where there was nothing to open."""
        if collector is not None:
            collector.prepare(self.region)
        if self.recorder is not None and self.scope is not None:
            self.recorder.open(self.scope)
            self.device = device_time.begin()
        if collector is not None:
            self.collector, self.entered = collector, collector.enter(self.region, self.scope)
        if nvtx:
            self.nvtx = nvtx_range(self.scope.name if self.scope is not None else self.region)
            self.nvtx.__enter__()
        return self.recorder is not None or self.entered is not None or self.nvtx is not None

    def close(self, error: BaseException | None) -> None:
        if self.entered is not None and self.collector is not None:
            self.collector.leave(self.entered, self.scope)
        if self.nvtx is not None:
            self.nvtx.__exit__(None, None, None)
        if self.recorder is None or self.scope is None:
            return
        late = Late.of(self.recorder) if self.device is not None else None
        if self.device is None or late is None or not late.usable:
            self.recorder.close(self.scope, error)
        else:
            self.device.end()
            late.keep_scope(self.scope, error, self.device)


class _Plan:
    """What entering a name means, concluded once: nothing, where there is no `late`."""

    __slots__ = ("label", "late", "running")

    def __init__(self, running: session.Session, label: Label) -> None:
        self.running, self.label = running, label
        self.late = Late.of(running.recorder) if label.span else None


_NOTHING = Names(registered=False)
_by_hand: set[str] = set()
# natural regions that are open now, by registered name
_natural: dict[str, list[_Visit]] = {}
_lock = threading.Lock()


def _after_fork() -> None:
    """In a forked child another thread of the parent may hold the lock for ever, and what was open
    is the parent's.
    """
    global _lock
    _lock = threading.Lock()
    _natural.clear()


at_fork.register(ForkOrder.OPEN_REGIONS, in_child=_after_fork)


def _visit(
    name: str, kind: str, lexical: bool, start_ns: int, collector: Collector | None
) -> _Visit | None:
    running = session.current()
    wanted, prefix = (
        (running.settings.regions, running.settings.region_prefix)
        if running is not None
        else (_NOTHING, "")
    )
    choice = choose(name, wanted, prefix)
    by_hand = kind == "region"
    if choice.span is None and not choice.registered:
        say_once(explain_unknown(name))
        if by_hand and running is not None and collector is None:
            _conclude(name, running, Label(name, "", False))
        return None
    if by_hand:
        _by_hand.add(choice.region)
    scope, recorder = None, None
    if running is not None and choice.span is not None:
        standing = _natural.get(choice.region) if by_hand else None
        if standing and standing[-1].recorder is running.recorder:
            scope = standing[
                -1
            ].scope  # this region already has its span, since before its call site was reached
        else:
            span = choice.span if choice.registered else bounded(choice.span)
            if by_hand and collector is None and not wants_nvtx():
                _conclude(name, running, Label(choice.region, span, choice.registered))
            scope = Scope(kind, span, lexical, {"torch.region": choice.region}, start_ns)
            recorder = running.recorder
    elif not by_hand:
        scope = Scope(kind, choice.region, lexical, {"torch.region": choice.region}, start_ns)
    visit = _Visit(choice.region, scope, recorder)
    return visit if visit.open(collector, lexical and wants_nvtx()) else None


def _conclude(name: str, running: session.Session, label: Label) -> None:
    """Keep what a name means while this session runs."""
    if len(derived) >= MAX_DERIVED:  # names that are made as the program runs
        derived.clear()
    derived[name] = _Plan(running, label)


def _enter(name: str, collector: Collector | None) -> _Visit | Stay | None:
    """Enter a region at its call site: by what was concluded before, where that still holds."""
    running = session.current()
    if collector is None:
        if running is None:
            return None
        try:
            plan: _Plan | None = derived.get(name)
            if plan is not None and plan.running is running:
                label, late = plan.label, plan.late
                if late is None:
                    return None
                if (
                    late.sinks != late.recorder.sinks or late.installed is not late.watch()
                ):  # it is not `fresh`
                    derived.pop(name, None)
                elif late.usable and not _natural.get(label.region):
                    stay = late.enter(late, label, time_ns())
                    if stay is not None:
                        if device_time.ready:
                            stay.device = device_time.begin()
                        return stay
        except Exception as error:
            _say_failure(name, "opened", error)
            return None
    return _open(name, "region", True, 0, collector)


def _open(
    name: str, kind: str, lexical: bool, start_ns: int, collector: Collector | None
) -> _Visit | None:
    if session.current() is None and collector is None:
        return None
    try:
        return _visit(name, kind, lexical, start_ns, collector)
    except Exception as error:
        _say_failure(name, "opened", error)
        return None


def _say_failure(name: str, what: str, error: Exception) -> None:
    _count_failure()
    say_once(f"region {name!r} could not be {what}: {type(error).__name__}: {error}")


def _count_failure() -> None:
    running = session.current()
    if running is not None:
        running.losses.count("span", "region_failed")


# what an object opened and did not close yet, with the thread that did: it may be entered by
# several at once
Opened = list[tuple[int, Any]]


def take(opened: Opened) -> Any:
    """Take out what this thread opened last, None where it opened nothing."""
    thread = get_ident()
    for entry in reversed(opened):
        if entry[0] == thread:
            opened.remove(entry)
            return entry[1]
    return None


class region:
    """A named stretch of code, as a context manager or a decorator; a span where a session runs.

    name: a registered region, long or short, in any case. Any other name is said once and opens
    nothing, unless OTEL_TORCH_REGIONS asks for it: then its span has that name. An exception marks
    the span and is raised unchanged. May be entered again while open, and by several threads.
    Inside compiled code it does nothing: a stretch of a compiled graph has no time of its own.

    >>> with region("inference_denoising"):
    ...     pass
    >>> @region("distillation_loss")
    ... def loss() -> int:
    ...     return 1
    >>> loss()
    1
    """

    __slots__ = ("_collector", "_opened", "name")

    def __init__(self, name: str, *, collector: Collector | None = None) -> None:
        self.name = name
        self._collector = collector
        self._opened: Opened = []

    def __enter__(self) -> region:
        if not is_compiling():
            self._opened.append((get_ident(), _enter(self.name, self._collector or _collector)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if is_compiling():
            return
        opened = self._opened
        try:
            last = opened[-1]
            if last[0] == get_ident():  # as nearly always
                opened.remove(last)
                visit = last[1]
            else:
                visit = take(opened)
        except (IndexError, ValueError):  # another thread was here
            visit = take(opened)
        if visit is not None:
            try:
                visit.close(error)
            except Exception as problem:
                _say_failure(self.name, "closed", problem)

    def __call__(self, function: _F) -> _F:
        """Run every call of `function` inside the region; of a coroutine function, until it is
        done.
        """
        name, collector = self.name, self._collector

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def wrapped(*args: Any, **kwargs: Any) -> Any:
                with region(name, collector=collector):
                    return await function(*args, **kwargs)

        else:

            @functools.wraps(function)
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                with region(name, collector=collector):
                    return function(*args, **kwargs)

        return wrapped  # type: ignore[return-value]


# FastVideo's name for it
profiler_region = region


def profile_region(name: str) -> Callable[[_F], _F]:
    """Decorate a method so that it runs inside the region `name`, as FastVideo does.

    An object that has a `profiler_controller` lets that one collect, any other the global one.
    """

    def decorate(method: _F) -> _F:
        @functools.wraps(method)
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            controller = getattr(self, "profiler_controller", None)
            with region(name) if controller is None else controller.region(name):
                return method(self, *args, **kwargs)

        return wrapped  # type: ignore[return-value]

    return decorate


def entered_by_hand(name: str) -> bool:
    """Whether a call site has entered the region, long or short name, in this process: a natural
    one then steps back.
    """
    known = resolve_profiler_region(name)
    return (known.name if known is not None else name) in _by_hand


def open_region(name: str, *, start_ns: int = 0, lexical: bool = True) -> Scope | None:
    """Open a region that has a natural place and no call site, at `start_ns` (Unix nanoseconds; 0
    is now).

    None where nothing asked for it, or where call sites enter it themselves. Never raises.
    """
    if is_compiling() or entered_by_hand(name):
        return None
    visit = _open(name, "natural", lexical, start_ns, _collector)
    if visit is None:
        return None
    with _lock:
        _natural.setdefault(visit.region, []).append(visit)
    return visit.scope


def close_region(scope: Scope | None, error: BaseException | None = None) -> None:
    """Close what `open_region` returned, now or at the scope's `end_ns`; None and a closed scope
    are no error.
    """
    if scope is None:
        return
    with _lock:
        visits = _natural.get(scope.attributes["torch.region"], [])
        visit = next((visit for visit in visits if visit.scope is scope), None)
        if visit is not None:
            visits.remove(visit)
    if visit is not None:
        try:
            visit.close(error)
        except Exception as problem:
            _say_failure(visit.region, "closed", problem)
