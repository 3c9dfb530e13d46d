"""Spans of a run as a trace for Perfetto and chrome://tracing, optionally with statistics as
counters.

These viewers show the traces of torch.profiler too, so the two can be compared side by side.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from otel_torch.recording.file_kinds import RECORDING, refusal
from otel_torch.recording.metadata import read_metadata
from otel_torch.recording.reader import RecordingError
from otel_torch.recording.rows import Row, spell_numbers
from otel_torch.records import json_safe
from otel_torch.rendering.table import as_given, escape
from otel_torch.show.combined import is_number
from otel_torch.show.selection import Selection
from otel_torch.show.traces import (
    Process,
    Span,
    assign_lanes,
    find_traces,
    is_of_run,
    iterate_spans,
)

_NO_SPANS = (
    "no spans to draw; a recording has no timestamps: also set OTEL_TORCH_OTLP_FILE=FOLDER when "
    "you record, then pass --traces FOLDER"
)
TraceEvent = dict[str, Any]  # an object of the Trace Event Format
_encode = msgspec.json.Encoder().encode


def write_chrome_trace(
    selection: Selection,
    path: Path,
    given: Sequence[Path],
    counters: Sequence[str],
    progress: Callable[[str], None],
) -> str:
    """Write the trace, and return a line about it, with further lines for what is missing.

    Args:
        selection: The recording.
        path: The file to write.
        given: Files with spans, of any number of processes; empty to search for them.
        counters: Statistics of the recording to draw, for each tensor at the end of its step.
        progress: Called now and then with a short text.

    Raises:
        RecordingError: If there are no spans, or a statistic was not recorded.
        OSError: If the trace cannot be written.
    """
    warnings: list[str] = []
    files = find_traces(selection.path, given)
    # The files are read twice, so that only one line of activations is in memory at a time.
    spans = [
        span
        for file in files
        for span in iterate_spans(file, warnings.append, progress, activations=False)
    ]
    if not spans:
        names = ", ".join(map(str, files)) or selection.path
        raise RecordingError(refusal(selection.path, RECORDING) or f"{names}: {_NO_SPANS}")
    spans_with_activations = (
        span for file in files for span in iterate_spans(file, progress=progress)
    )
    layout = _TraceLayout.of(spans)
    counter_events = _Counters(selection, spans, layout, counters)
    written = _write_events(
        path,
        {"recording": escape(as_given(selection.path)), "start_unix_ns": str(layout.start_ns)},
        (
            _name_events(spans, layout),
            _span_events(spans_with_activations, layout),
            counter_events.events(warnings.append, progress),
        ),
    )
    processes = len(layout.process_ids)
    messages = [
        f"{path}: {len(spans):,} spans of {processes:,} process{'es' if processes != 1 else ''}, "
        f"{written:,} trace events"
    ]
    if counter_events.unplaced:
        messages.append(
            f"{counter_events.unplaced:,} records have no counter: the traces have no span of "
            "their step"
        )
    messages += [f"! {warning}" for warning in warnings]
    return "\n".join(map(escape, messages))


def _write_events(
    path: Path, metadata: dict[str, str], sources: Iterable[Iterator[TraceEvent]]
) -> int:
    """Write the trace to a temporary file, then move it; return the number of events."""
    count = 0
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            header = {"displayTimeUnit": "ms", "otherData": metadata}
            file.write(_encode(header)[:-1] + b',"traceEvents":[\n')
            for source in sources:
                for event in source:
                    file.write((b",\n" if count else b"") + _encode(event))
                    count += 1
            file.write(b"\n]}\n")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return count


@dataclass(frozen=True, slots=True)
class _TraceLayout:
    """Where spans are drawn.

    Attributes:
        process_ids: The number of each process in the trace, in the order of ranks.
        threads: The thread of each span: one for spans that nest, more for those that overlap.
        start_ns: The beginning of the first span.
    """

    process_ids: dict[Process, int]
    threads: list[int]
    start_ns: int

    @classmethod
    def of(cls, spans: Sequence[Span]) -> _TraceLayout:
        processes = sorted({span.process for span in spans}, key=_process_order)
        return cls(
            {process: number for number, process in enumerate(processes, 1)},
            [lane + 1 for lane, _ in assign_lanes(spans)],
            min(span.start_ns for span in spans),
        )

    def timestamp(self, time_ns: int) -> float:
        """Return microseconds since the first span."""
        return (time_ns - self.start_ns) / 1000


def _process_order(process: Process) -> tuple[Any, ...]:
    return (
        process.rank is None,
        process.rank or 0,
        process.host or "",
        process.pid or 0,
        process.run_id or "",
    )


def _name_events(spans: Sequence[Span], layout: _TraceLayout) -> Iterator[TraceEvent]:
    for process, number in layout.process_ids.items():
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": process.label()}}
        order = {"sort_index": number}
        yield {"ph": "M", "name": "process_sort_index", "pid": number, "args": order}
    threads = {
        (layout.process_ids[span.process], thread): span.process
        for span, thread in zip(spans, layout.threads, strict=True)
    }
    for (number, thread), process in sorted(threads.items(), key=lambda item: item[0]):
        rank = "" if process.rank is None else f"rank {process.rank}: "
        name = "regions and steps" if thread == 1 else f"regions and steps that overlap ({thread})"
        yield {
            "ph": "M",
            "name": "thread_name",
            "pid": number,
            "tid": thread,
            "args": {"name": rank + name},
        }


def _span_events(spans: Iterable[Span], layout: _TraceLayout) -> Iterator[TraceEvent]:
    """Yield spans as complete events (`X`), and their events as instants (`i`)."""
    # Not strict: a file may have grown since the layout was made.
    for span, thread in zip(spans, layout.threads, strict=False):
        position = {"pid": layout.process_ids[span.process], "tid": thread}
        arguments = {
            **spell_numbers(span.attributes),
            "trace_id": span.trace,
            "span_id": span.id,
            "parent_span_id": span.parent,
        }
        if span.failed:
            arguments["status"] = "ERROR"
        yield {
            "ph": "X",
            "name": span.title(),
            "cat": span.kind(),
            "ts": layout.timestamp(span.start_ns),
            "dur": (span.end_ns - span.start_ns) / 1000,
            **position,
            "args": arguments,
        }
        for event in span.events:
            yield {
                "ph": "i",
                "s": "t",
                "name": _event_name(event.name, event.attributes),
                "cat": event.name,
                "ts": layout.timestamp(event.time_ns),
                **position,
                "args": spell_numbers(event.attributes),
            }


def _event_name(name: str, attributes: dict[str, Any]) -> str:
    module = attributes.get("torch.module")
    if module is None:
        return name
    return f"{module or '(root)'} {attributes.get('torch.tensor', '')}"


_StepKey = tuple[Any, ...]  # (model, loop, step) or (loop, step)
_StepEnd = tuple[int, Process]  # Unix time in nanoseconds, and the process


class _Counters:
    """Statistics of a recording as counters at the end of each step.

    A counter cannot be NaN or Inf: instead, one instant a step names the tensors that are.

    Attributes:
        unplaced: How many records belong to a step without a span.
    """

    def __init__(
        self,
        selection: Selection,
        spans: Sequence[Span],
        layout: _TraceLayout,
        counters: Sequence[str],
    ) -> None:
        self._selection = selection
        self._layout = layout
        self._counters = counters
        self.unplaced = 0
        self._ends: dict[_StepKey, _StepEnd] = {}
        metadata = read_metadata(selection.path)
        for span in spans:
            if span.name == "torch.step" and is_of_run(span, metadata):
                loop = span.attributes.get("torch.loop") or 0
                step = span.attributes.get("torch.step")
                model = span.attributes.get("torch.model")
                for key in ((model, loop, step), (loop, step)):
                    self._ends.setdefault(key, (span.end_ns, span.process))

    def events(
        self, warn: Callable[[str], None], progress: Callable[[str], None]
    ) -> Iterator[TraceEvent]:
        """Yield the counters in the order of the recording; the last call of a step counts."""
        if not self._counters:
            return
        values: dict[tuple[str, str], float] = {}  # (tensor, statistic) -> value
        current: _StepEnd | None = None
        recorded: dict[str, None] = {}
        for row in self._selection.rows(warn, progress):
            recorded.update(dict.fromkeys(name for name, value in row.items() if is_number(value)))
            end = self._step_end(row)
            if end is None:
                self.unplaced += 1
                continue
            if end != current:
                yield from self._step_events(current, values)
                current, values = end, {}
            for name in self._counters:
                if is_number(row.get(name)):
                    values[_tensor_title(row), name] = row[name]
        yield from self._step_events(current, values)
        self._check_recorded(recorded)

    def _check_recorded(self, recorded: dict[str, None]) -> None:
        names = [name for name in recorded if name not in ("step", "call", "loop")]
        for counter in self._counters:
            if counter not in recorded:
                raise RecordingError(
                    f"{self._selection.path}: --counters {counter}: no such statistic; recorded "
                    f"are: {', '.join(names)}"
                )

    def _step_end(self, row: Row) -> _StepEnd | None:
        loop, step = row.get("loop") or 0, row["step"]
        return self._ends.get((row.get("model"), loop, step)) or self._ends.get((loop, step))

    def _step_events(
        self, end: _StepEnd | None, values: dict[tuple[str, str], float]
    ) -> Iterator[TraceEvent]:
        if end is None:
            return
        time_ns, process = end
        position = {
            "ts": self._layout.timestamp(time_ns),
            "pid": self._layout.process_ids[process],
        }
        nonfinite: dict[str, dict[str, Any]] = {}
        for (tensor, name), value in values.items():
            if math.isfinite(value):
                yield {"ph": "C", "name": f"{tensor} {name}", **position, "args": {name: value}}
            else:
                nonfinite.setdefault(name, {})[tensor] = json_safe(value)
        for name, tensors in nonfinite.items():
            first = next(iter(tensors))
            more = f" and {len(tensors) - 1:,} more" if len(tensors) > 1 else ""
            yield {
                "ph": "i",
                "s": "p",
                "name": f"{name} is NaN or Inf: {first}{more}",
                "cat": "nonfinite",
                "tid": 1,
                **position,
                "args": tensors,
            }


def _tensor_title(row: Row) -> str:
    """Return the name of a tensor for its counter.

    >>> _tensor_title({"model": "M", "module": "", "tensor": "out", "phase": "forward"})
    'M (root) out'
    """
    parts = (
        row.get("model"),
        row["module"] or "(root)",
        row["tensor"],
        row.get("phase"),
        row.get("branch"),
    )
    return escape(" ".join(str(part) for part in parts if part and part != "forward"))
