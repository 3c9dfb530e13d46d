"""A run's spans as a trace that Perfetto and chrome://tracing open, with statistics as counters
below them where asked.

These viewers know nothing of OpenTelemetry, and are where people look at torch's own profiles:
there the two can be laid side by side.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from otel_torch.recording.metadata import read_metadata
from otel_torch.recording.reader import RecordingError
from otel_torch.recording.rows import Row
from otel_torch.records import json_safe
from otel_torch.rendering.table import escape
from otel_torch.show.selection import Selection
from otel_torch.show.traces import Process, Span, find_traces, is_of_run, iterate_spans, lanes

HINT = "a recording holds no times: record with OTEL_TORCH_OTLP_FILE=FOLDER too, and give --traces FOLDER"
_Event = dict[str, Any]
_encode = msgspec.json.Encoder().encode


def write_chrome_trace(
    selection: Selection,
    path: Path,
    given: Sequence[Path],
    counters: Sequence[str],
    progress: Callable[[str], None],
) -> str:
    """Write the trace, and return what to say of it: a line, and one for what could not be drawn.

    given: files with the run's spans; [] to look for them. All processes in them are written.
    counters: statistics of the recording, each of every tensor at the end of its step. Raises
    RecordingError where there are no spans or no such statistic, and OSError where it cannot be
    written.
    """
    problems: list[str] = []
    files = find_traces(selection.path, given)
    # the files are read twice, so that never more than a line's activations are in memory
    spans = [
        span
        for file in files
        for span in iterate_spans(file, problems.append, progress, activations=False)
    ]
    if not spans:
        raise RecordingError(
            f"{', '.join(map(str, files)) or selection.path}: no spans to draw; {HINT}"
        )
    start = min(span.start_ns for span in spans)
    processes = sorted({span.process for span in spans}, key=_order)
    numbers = {process: number for number, process in enumerate(processes, 1)}
    threads = [lane + 1 for lane, _ in lanes(spans)]
    again = (span for file in files for span in iterate_spans(file, progress=progress))
    counted = _Counted(selection, read_metadata(selection.path), spans, numbers, start, counters)
    events = 0
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            about = {
                "displayTimeUnit": "ms",
                "otherData": {"recording": escape(selection.path), "start_unix_ns": str(start)},
            }
            file.write(_encode(about)[:-1] + b',"traceEvents":[\n')
            for source in (
                _names(spans, threads, numbers),
                _span_events(again, threads, numbers, start),
                counted.events(problems.append, progress),
            ):
                for event in source:
                    file.write((b",\n" if events else b"") + _encode(event))
                    events += 1
            file.write(b"\n]}\n")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    said = [
        f"{path}: {len(spans):,} spans of {len(processes):,} process{'es' * (len(processes) != 1)}, {events:,} trace events"
    ]
    if counted.unplaced:
        said.append(
            f"{counted.unplaced:,} records have no counter: no span in the traces is of their step"
        )
    return "\n".join(map(escape, [*said, *(f"! {problem}" for problem in problems)]))


def _order(process: Process) -> tuple[Any, ...]:
    return (
        process.rank is None,
        process.rank or 0,
        process.host or "",
        process.pid or 0,
        process.run_id or "",
    )


def _micros(time_ns: int, start: int) -> float:
    return (time_ns - start) / 1000


def _names(
    spans: Sequence[Span], threads: Sequence[int], numbers: dict[Process, int]
) -> Iterator[_Event]:
    """What processes and threads are called."""
    for process, number in numbers.items():
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": process.label()}}
        yield {
            "ph": "M",
            "name": "process_sort_index",
            "pid": number,
            "args": {"sort_index": number},
        }
    used = {
        (numbers[span.process], thread): span.process
        for span, thread in zip(spans, threads, strict=True)
    }
    for (number, thread), process in sorted(used.items(), key=lambda item: item[0]):
        rank = "" if process.rank is None else f"rank {process.rank}: "
        name = "regions and steps" if thread == 1 else f"regions and steps that overlap ({thread})"
        yield {
            "ph": "M",
            "name": "thread_name",
            "pid": number,
            "tid": thread,
            "args": {"name": rank + name},
        }


def _span_events(
    spans: Iterable[Span], threads: Sequence[int], numbers: dict[Process, int], start: int
) -> Iterator[_Event]:
    """Spans as complete events, and what happened in them as instants. Times are microseconds from
    the first span on.
    """
    for span, thread in zip(spans, threads, strict=False):  # a file may have grown meanwhile
        where = {"pid": numbers[span.process], "tid": thread}
        arguments = {
            **_plain(span.attributes),
            "trace_id": span.trace,
            "span_id": span.id,
            "parent_span_id": span.parent,
        }
        if span.failed:
            arguments["status"] = "ERROR"
        duration = _micros(span.end_ns, span.start_ns)
        yield {"ph": "X", "name": span.title(), "cat": span.kind(), "ts": _micros(span.start_ns, start), "dur": duration, **where,
               "args": arguments}  # fmt: skip
        for event in span.events:
            module = event.attributes.get("torch.module")
            name = (
                event.name
                if module is None
                else f"{module or '(root)'} {event.attributes.get('torch.tensor', '')}"
            )
            yield {"ph": "i", "s": "t", "name": name, "cat": event.name, "ts": _micros(event.time_ns, start), **where,
                   "args": _plain(event.attributes)}  # fmt: skip


def _plain(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: json_safe(value) for name, value in attributes.items()}


class _Counted:
    """Statistics of the recording as counters at the ends of the steps that its records are of.

    unplaced: how many records are of a step that no span is of. What is not finite is no number for
    a counter: one instant a step names those tensors, the first of them first.
    """

    def __init__(
        self,
        selection: Selection,
        meta: dict[str, Any],
        spans: Sequence[Span],
        numbers: dict[Process, int],
        start: int,
        counters: Sequence[str],
    ) -> None:
        self._selection, self._numbers, self._start, self._counters = (
            selection,
            numbers,
            start,
            counters,
        )
        self.unplaced = 0
        self._ends: dict[tuple[Any, ...], tuple[int, Process]] = {}
        for span in spans:
            if is_of_run(span, meta) and span.name == "torch.step":
                loop, step, model = (
                    span.attributes.get(name)
                    for name in ("torch.loop", "torch.step", "torch.model")
                )
                for key in ((model, loop or 0, step), (loop or 0, step)):
                    self._ends.setdefault(key, (span.end_ns, span.process))

    def events(
        self, problem: Callable[[str], None], progress: Callable[[str], None]
    ) -> Iterator[_Event]:
        """The counters, in the order of the recording; of several calls in a step the last."""
        if not self._counters:
            return
        held: dict[tuple[str, str], float] = {}
        at: tuple[int, Process] | None = None
        recorded: dict[str, None] = {}
        for row in self._selection.rows(problem, progress):
            recorded.update(dict.fromkeys(name for name, value in row.items() if _is_number(value)))
            end = self._end(row)
            if end is None:
                self.unplaced += 1
                continue
            if end != at:
                yield from self._events_at(at, held)
                at, held = end, {}
            for name in self._counters:
                if _is_number(row.get(name)):
                    held[_title(row), name] = row[name]
        yield from self._events_at(at, held)
        missing = [name for name in self._counters if name not in recorded]
        if missing:
            known = ", ".join(name for name in recorded if name not in ("step", "call", "loop"))
            raise RecordingError(
                f"{self._selection.path}: --counters {missing[0]}: no such statistic; recorded are: {known}"
            )

    def _end(self, row: Row) -> tuple[int, Process] | None:
        loop, step = row.get("loop") or 0, row["step"]
        return self._ends.get((row.get("model"), loop, step)) or self._ends.get((loop, step))

    def _events_at(
        self, at: tuple[int, Process] | None, values: dict[tuple[str, str], float]
    ) -> Iterator[_Event]:
        if at is None:
            return
        where = {"ts": _micros(at[0], self._start), "pid": self._numbers[at[1]]}
        bad: dict[str, dict[str, Any]] = {}
        for (title, name), value in values.items():
            if math.isfinite(value):
                yield {"ph": "C", "name": f"{title} {name}", **where, "args": {name: value}}
            else:
                bad.setdefault(name, {})[title] = json_safe(value)
        for name, tensors in bad.items():
            first, more = (
                next(iter(tensors)),
                f" and {len(tensors) - 1:,} more" if len(tensors) > 1 else "",
            )
            title = f"{name} is not finite: {first}{more}"
            yield {
                "ph": "i",
                "s": "p",
                "name": title,
                "cat": "nonfinite",
                "tid": 1,
                **where,
                "args": tensors,
            }


def _title(row: Row) -> str:
    """What a tensor is called beside its curve.

    >>> _title({"model": "M", "module": "", "tensor": "out", "phase": "forward"}), _title({"module": "a", "tensor": "grad"})
    ('M (root) out', 'a grad')
    """
    words = (
        row.get("model"),
        row["module"] or "(root)",
        row["tensor"],
        row.get("phase"),
        row.get("branch"),
    )
    return escape(" ".join(str(word) for word in words if word and word != "forward"))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
