"""The times of a run as stacks of frames: regions, steps and forwards, and the modules in these.

A recording has no time stamps. The spans of the run have them (OTEL_TORCH_OTLP_FILE), and so has
each output of a module, as a log record or as an event of a span. Of a forward that begins at 0:

    module      ended at    took of its own
    body.0           3      3    since the forward began
    body.1           5      2    since body.0 ended
    body             6      1    since body.1 ended
                     7      1    is left for the forward itself

Without spans there are the totals of the regions, in the metadata of the recording.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from otel_torch.exporting.exported_recording import ExportedRecording
from otel_torch.exporting.module_ends import module_ends
from otel_torch.show.traces import Span, find_traces, is_of_run, iterate_spans

Stack = tuple[str, ...]
_RUN = "torch.run"
_MORE_EVENTS = "torch.step.events"
_NS = 1_000_000_000


@dataclass(slots=True)
class StackTimes:
    """The time spent in a stack itself, excluding its callees."""

    calls: int = 0
    host_ns: int = 0
    device_ns: int = 0

    def add(self, host_ns: int, device_ns: int = 0, calls: int = 1) -> None:
        self.calls += calls
        self.host_ns += host_ns
        self.device_ns += device_ns


@dataclass(slots=True)
class RunTimes:
    """The times of a process. start_ns, end_ns: Unix time, 0 if not known."""

    stacks: dict[Stack, StackTimes] = field(default_factory=dict)
    start_ns: int = 0
    end_ns: int = 0

    def of(self, stack: Stack) -> StackTimes:
        """Return the times of a stack, to add to."""
        return self.stacks.setdefault(stack, StackTimes())


@dataclass(slots=True, eq=False)
class _TimedSpan:
    """A span and its children. ends, modules: when each output was ready, and of which module."""

    frame: str
    start_ns: int
    end_ns: int
    device_ns: int = 0
    parent: str = ""
    stack: Stack = ()
    ends: array[int] = field(default_factory=lambda: array("q"))
    modules: array[int] = field(default_factory=lambda: array("q"))
    children: list[_TimedSpan] = field(default_factory=list)

    def innermost(self, time_ns: int) -> _TimedSpan:
        node = self
        while (index := node._child_before(time_ns)) >= 0:
            child = node.children[index]
            if child.end_ns < time_ns:
                break
            node = child
        return node

    def own_ns(self, start_ns: int, end_ns: int) -> int:
        """Return the time between two times that is not in a span inside."""
        own, reached = 0, start_ns
        for index in range(max(0, self._child_before(start_ns)), len(self.children)):
            child = self.children[index]
            if child.start_ns >= end_ns:
                break
            own += max(0, child.start_ns - reached)
            reached = max(reached, min(child.end_ns, end_ns))
        return own + max(0, end_ns - reached)

    def _child_before(self, time_ns: int) -> int:
        """Return the index of the last span inside that begins until a time, -1 if none does."""
        return bisect_right(self.children, time_ns, key=lambda child: child.start_ns) - 1


def times_of(recording: ExportedRecording) -> RunTimes:
    """Return the times of a recording's process; of the regions alone where it wrote no spans.

    Raises:
        RecordingError: A file of spans holds something else.
    """
    files = find_traces(recording.path, ())
    nodes: dict[str, _TimedSpan] = {}
    for file in files:
        for span in iterate_spans(file, recording.warn, recording.progress, activations=False):
            if span.name != _MORE_EVENTS and is_of_run(span, recording.metadata):
                nodes[span.id] = _node_of(span)
    if not nodes:
        return _region_totals(recording.metadata)
    process = _nest(nodes)
    times = RunTimes(start_ns=process.start_ns, end_ns=process.end_ns)
    modules: dict[tuple[str, str], int] = {}
    for end in module_ends(files, recording.progress):
        around = nodes.get(end.span)
        # the parents of a span without a stack are a circle, in a damaged file
        node = (around if around and around.stack else process).innermost(end.time_ns)
        node.ends.append(end.time_ns)
        node.modules.append(modules.setdefault((end.model, end.module), len(modules)))
    frames = [tuple(_module_frames(*module)) for module in modules]
    for node in nodes.values():
        if node.stack:
            _add_span(times, node, frames)
    return times


def _node_of(span: Span) -> _TimedSpan:
    model, phase = span.attributes.get("torch.model"), span.attributes.get("torch.phase")
    details = [model, f"({phase})" if phase not in (None, "forward") else None]
    is_forward = span.kind() == "forward"
    frame = " ".join([span.name, *filter(None, details)]) if is_forward else span.name
    device_s = span.attributes.get("torch.device.duration") or 0
    device_ns = int(device_s * _NS) if isinstance(device_s, int | float) else 0
    return _TimedSpan(frame, span.start_ns, span.end_ns, device_ns, span.parent)


def _nest(nodes: dict[str, _TimedSpan]) -> _TimedSpan:
    """Put each span into its parent and give it its stack; return the process, around all.

    A training step is a trace of its own; it is put into the span of the run.
    """
    start_ns = min(node.start_ns for node in nodes.values())
    process = _TimedSpan("", start_ns, max(node.end_ns for node in nodes.values()))
    run = next((node for node in nodes.values() if node.frame == _RUN), process)
    for node in nodes.values():
        parent = nodes.get(node.parent, process if node is run else run)
        parent.children.append(node)
    waiting = [process]
    for node in (process, *nodes.values()):
        node.children.sort(key=lambda child: child.start_ns)
    while waiting:
        node = waiting.pop()
        for child in node.children:
            child.stack = (*node.stack, child.frame)
        waiting += node.children
    return process


def _add_span(times: RunTimes, node: _TimedSpan, frames: Sequence[Stack]) -> None:
    """Add the time of each module, since the one before, and what is left for the span itself."""
    left_ns, before_ns = node.own_ns(node.start_ns, node.end_ns), node.start_ns
    for time_ns, module in sorted(zip(node.ends, node.modules, strict=True)):
        end_ns = min(max(time_ns, before_ns), node.end_ns)
        own_ns = node.own_ns(before_ns, end_ns)
        times.of((*node.stack, *frames[module])).add(own_ns)
        left_ns, before_ns = left_ns - own_ns, end_ns
    device_ns = node.device_ns - sum(child.device_ns for child in node.children)
    times.of(node.stack).add(max(0, left_ns), max(0, device_ns))


def _module_frames(model: str, module: str) -> Iterator[str]:
    """Yield a module and all that contain it, the outermost first.

    >>> list(_module_frames("Net", "body.0"))
    ['Net', 'Net.body', 'Net.body.0']
    """
    frame = model
    yield frame
    for name in module.split(".") if module else ():
        frame = f"{frame}.{name}"
        yield frame


def _region_totals(metadata: dict[str, Any]) -> RunTimes:
    times = RunTimes()
    for name, region in metadata.get("regions", {}).items():
        host_ns, device_ns = (
            int((region.get(f"{kind}_total_s") or 0) * _NS) for kind in ("host", "device")
        )
        times.of((name,)).add(host_ns, device_ns, region.get("count", 0))
    return times
