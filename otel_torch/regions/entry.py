"""`region(name)`: names a stretch of code, which becomes a span where a session runs.

The first time a name is entered in a session it is looked up in the registry and the settings, and
opened as a scope. Further entries use the cached `RegionLabel` and skip the scope (see
`otel_torch.regions.closer`). Errors in here never reach the block: it runs, and its exceptions
propagate unchanged.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from threading import get_ident
from time import time_ns
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch.compiler import is_compiling

from otel_torch import session
from otel_torch.process import at_fork
from otel_torch.process.at_fork import ForkOrder
from otel_torch.process.console import say_once
from otel_torch.records import Scope
from otel_torch.regions import device_time
from otel_torch.regions.closer import RegionEntry, RegionLabel
from otel_torch.regions.device_time import EventTimer
from otel_torch.regions.nvtx import nvtx_range, wants_nvtx
from otel_torch.regions.registry import (
    RegionChoice,
    bounded_span_name,
    choose,
    explain_unknown,
    plain_name,
    resolve_profiler_region,
)
from otel_torch.session import Session
from otel_torch.settings import RegionSelection

if TYPE_CHECKING:
    from otel_torch.recorder import Recorder

_F = TypeVar("_F", bound=Callable[..., Any])

# cached labels of a session; a program may make names as it runs
_MAX_LABELS = 4096


class Collector(Protocol):
    """Collects inside regions only, as the torch profiler does. No method raises."""

    def prepare(self, region: str) -> None:
        """Do what takes long before `region` is entered and its clock starts."""

    def enter(self, region: str, scope: Scope | None) -> object | None:
        """Start to collect in `region`; the result, unless None, is passed to `leave`."""

    def leave(self, entered: Any, scope: Scope | None) -> None:
        """Stop to collect; called before the region's scope is closed."""


_collector: Any = None


def get_collector() -> Any:
    return _collector


def set_collector(collector: Any) -> None:
    """Use `collector` in every region from now on; None for no collector."""
    global _collector
    _collector = collector


class _OpenRegion:
    """A region that was entered with a scope, a collector or an NVTX range.

    recorder: None if the scope is another region's, or only carries the collector's events.
    """

    __slots__ = ("collected", "collector", "device_timer", "nvtx", "recorder", "region", "scope")

    def __init__(self, region: str, scope: Scope | None, recorder: Recorder | None) -> None:
        self.region = region
        self.scope = scope
        self.recorder = recorder
        self.collector: Collector | None = None
        self.collected: object | None = None
        self.nvtx: nvtx_range | None = None
        self.device_timer: EventTimer | None = None

    def open(self, collector: Collector | None, nvtx: bool) -> bool:
        """Open scope, collector and NVTX range; return whether there was anything to open."""
        if collector is not None:
            collector.prepare(self.region)
        if self.recorder is not None and self.scope is not None:
            self.recorder.open(self.scope)
            self.device_timer = device_time.start_timer()
        if collector is not None:
            self.collector, self.collected = collector, collector.enter(self.region, self.scope)
        if nvtx:
            self.nvtx = nvtx_range(self.scope.name if self.scope is not None else self.region)
            self.nvtx.__enter__()
        return self.recorder is not None or self.collected is not None or self.nvtx is not None

    def close(self, error: BaseException | None) -> None:
        if self.collected is not None and self.collector is not None:
            self.collector.leave(self.collected, self.scope)
        if self.nvtx is not None:
            self.nvtx.__exit__(None, None, None)
        if self.recorder is None or self.scope is None:
            return
        closer = self.recorder.region_closer
        if self.device_timer is not None and closer.can_defer:
            self.device_timer.end()
            closer.defer_scope(self.scope, error, self.device_timer)
        else:
            self.recorder.close(self.scope, error)


_NO_REGIONS = RegionSelection(registered=False)
# regions that a call site has entered in this process
_explicit: set[str] = set()
# open natural regions by region name, innermost last
_open_natural: dict[str, list[_OpenRegion]] = {}
_lock = threading.Lock()


def _reset_in_child() -> None:
    """In a forked child, replace a lock that a thread may hold, and forget the open regions."""
    global _lock
    _lock = threading.Lock()
    _open_natural.clear()


at_fork.register(ForkOrder.OPEN_REGIONS, in_child=_reset_in_child)


# -- entering


def _enter(name: str, collector: Collector | None) -> _OpenRegion | RegionEntry | None:
    """Enter a region at a call site. Hot path: a cached label and a span without a scope."""
    current = session.current()
    if collector is None:
        if current is None:
            return None
        try:
            label = current.region_labels.get(name)
            if label is not None:
                if not label.span_name:
                    return None
                closer = current.recorder.region_closer
                if closer.can_defer and not _open_natural.get(label.region):
                    entry = closer.start_region(closer, label, time_ns())
                    if entry is not None:
                        if device_time.is_active:
                            entry.device_timer = device_time.start_timer()
                        return entry
        except Exception as error:
            _report_failure(name, "opened", error)
            return None
    return _open(name, "region", True, collector)


def _open(
    name: str,
    kind: str,
    lexical: bool,
    collector: Collector | None,
    around: Scope | None = None,
) -> _OpenRegion | None:
    current = session.current()
    if current is None and collector is None:
        return None
    try:
        choice = _choose(name, current)
        if choice.span_name is None and not choice.is_registered:
            say_once(explain_unknown(name))
            if kind == "region" and current is not None and collector is None:
                _cache_label(current, name, RegionLabel(name, "", False))
            return None
        if kind == "region":
            _explicit.add(choice.region)
        opened = _with_scope(name, choice, kind, lexical, collector)
        if around is not None and opened.scope is not None and opened.scope.name == around.name:
            opened.scope.has_span, opened.scope.events = False, around.events
        return opened if opened.open(collector, lexical and wants_nvtx()) else None
    except Exception as error:
        _report_failure(name, "opened", error)
        return None


def _choose(name: str, current: Session | None) -> RegionChoice:
    if current is None:
        return choose(name, _NO_REGIONS, "")
    return choose(name, current.settings.regions, current.settings.region_prefix)


def _with_scope(
    name: str,
    choice: RegionChoice,
    kind: str,
    lexical: bool,
    collector: Collector | None,
) -> _OpenRegion:
    """Return the region, not opened yet, with the scope that it gets under this session."""
    is_explicit = kind == "region"
    plain = None if is_explicit else plain_name(choice.region)
    attributes = {"torch.region": plain or choice.region}
    current = session.current()
    if current is None or choice.span_name is None:
        # a natural region's scope has no span, but tells its caller when it started
        unrecorded = (
            None if is_explicit else Scope(kind, plain or choice.region, lexical, attributes)
        )
        return _OpenRegion(choice.region, unrecorded, None)
    natural = _open_natural.get(choice.region) if is_explicit else None
    if natural and natural[-1].recorder is current.recorder and not plain_name(choice.region):
        return _OpenRegion(choice.region, natural[-1].scope, None)  # it has its span already
    span_name = plain or choice.span_name
    if not choice.is_registered:
        span_name = bounded_span_name(span_name)
    if is_explicit and collector is None and not wants_nvtx():
        label = RegionLabel(choice.region, span_name, choice.is_registered)
        _cache_label(current, name, label)
    scope = Scope(kind, span_name, lexical, attributes)
    return _OpenRegion(choice.region, scope, current.recorder)


def _cache_label(current: Session, name: str, label: RegionLabel) -> None:
    if len(current.region_labels) >= _MAX_LABELS:
        current.region_labels.clear()
    current.region_labels[name] = label


def _report_failure(name: str, action: str, error: Exception) -> None:
    current = session.current()
    if current is not None:
        current.losses.count("span", "region_failed")
    say_once(f"region {name!r} could not be {action}: {type(error).__name__}: {error}")


# -- call sites

# (thread, what it opened) for each entry of an object that several threads may enter
OpenedByThread = list[tuple[int, Any]]


def pop_last_of_thread(opened: OpenedByThread) -> Any:
    """Remove and return what this thread opened last; None if it has nothing open."""
    thread = get_ident()
    for item in reversed(opened):
        if item[0] == thread:
            opened.remove(item)
            return item[1]
    return None


class region:
    """A named stretch of code, as a context manager or decorator; a span if a session runs.

    An exception marks the span and propagates unchanged. A region may be entered again while it is
    open, and by several threads. In compiled code it does nothing, because a part of a compiled
    graph cannot be timed.

    Args:
        name: a registered region by its long or short name, in any case. Other names are reported
            once and open nothing, unless OTEL_TORCH_REGIONS selects them as span names.

    Examples:
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
        self._opened: OpenedByThread = []

    def __enter__(self) -> region:
        if not is_compiling():
            self._opened.append((get_ident(), _enter(self.name, self._collector or _collector)))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if is_compiling():
            return
        opened = self._opened
        try:
            last = opened[-1]
            if last[0] == get_ident():  # nearly always
                opened.remove(last)
                entry = last[1]
            else:
                entry = pop_last_of_thread(opened)
        except (IndexError, ValueError):  # another thread has changed the list
            entry = pop_last_of_thread(opened)
        if entry is not None:
            try:
                entry.close(error)
            except Exception as problem:
                _report_failure(self.name, "closed", problem)

    def __call__(self, function: _F) -> _F:
        """Run every call of `function` in the region; of a coroutine function, until it returns."""
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


# FastVideo's name
profiler_region = region


def profile_region(name: str) -> Callable[[_F], _F]:
    """Decorate a method so that it runs in the region `name`, as FastVideo does.

    If the object has a `profiler_controller`, that one collects, otherwise the global one.
    """

    def decorate(method: _F) -> _F:
        @functools.wraps(method)
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            controller = getattr(self, "profiler_controller", None)
            with region(name) if controller is None else controller.region(name):
                return method(self, *args, **kwargs)

        return wrapped  # type: ignore[return-value]

    return decorate


# -- natural regions


def is_entered_explicitly(name: str) -> bool:
    """Return whether a call site has entered the region in this process.

    A natural region of the same name is then not opened any more.
    """
    registered = resolve_profiler_region(name)
    return (registered.name if registered is not None else name) in _explicit


def open_region(name: str, *, lexical: bool = True, around: Scope | None = None) -> Scope | None:
    """Open a natural region, which has no call site, and return its scope. Never raises.

    Args:
        around: an open scope whose span also stands for the region, if both have the same name.

    Returns:
        None if the settings do not select the region, or if call sites enter it themselves.
    """
    if is_compiling() or is_entered_explicitly(name):
        return None
    opened = _open(name, "natural", lexical, _collector, around)
    if opened is None:
        return None
    with _lock:
        _open_natural.setdefault(opened.region, []).append(opened)
    return opened.scope


def close_region(scope: Scope | None, error: BaseException | None = None) -> None:
    """Close what `open_region` returned, now or at the scope's `end_ns` if that is set.

    Does nothing for None or a closed scope.
    """
    if scope is None:
        return
    opened = None
    with _lock:
        for candidates in _open_natural.values():
            for candidate in candidates:
                if candidate.scope is scope:
                    opened = candidate
            if opened is not None:
                candidates.remove(opened)
                break
    if opened is not None:
        try:
            opened.close(error)
        except Exception as problem:
            _report_failure(opened.region, "closed", problem)
