"""Reads spans from OTLP JSON files, to show when regions and steps began and ended.

OTEL_TORCH_OTLP_FILE and the file exporter of the Collector write one message a line; others print
one over many lines. A last line that is incomplete because the process was killed is skipped. Does
not import the SDK.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from otel_torch.recording.file_kinds import OTLP, refusal
from otel_torch.recording.input_file import NotReadable, open_once
from otel_torch.recording.json_documents import iterate_documents
from otel_torch.recording.metadata import metadata_path, read_metadata
from otel_torch.recording.reader import RecordingError

ACTIVATION = "torch.module.activation"
_FILES = "*traces*.jsonl"
_PROGRESS_INTERVAL = 256  # lines


class Process(msgspec.Struct, frozen=True):
    """The process of a span, from its resource; None for attributes that the resource lacks."""

    run_id: str | None
    rank: int | None
    pid: int | None
    host: str | None

    def label(self) -> str:
        """Return the name of the process for display.

        >>> Process("r1", 3, 71, "node-4").label(), Process(None, None, None, None).label()
        ('rank 3 (process 71 on node-4)', 'a process')
        """
        details = []
        if self.pid:
            details.append(f"process {self.pid}")
        if self.host:
            details.append(f"on {self.host}")
        name = "a process" if self.rank is None else f"rank {self.rank}"
        return f"{name} ({' '.join(details)})" if details else name


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """An event of a span. time_ns: Unix time in nanoseconds."""

    name: str
    time_ns: int
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Span:
    """A span as recorded. start_ns, end_ns: Unix time in nanoseconds. trace, id, parent: in hex."""

    name: str
    start_ns: int
    end_ns: int
    process: Process
    trace: str = ""
    id: str = ""
    parent: str = ""
    failed: bool = False
    attributes: dict[str, Any] = field(default_factory=dict)
    events: Sequence[SpanEvent] = ()

    def title(self) -> str:
        """Return the name, with step and loop if the span is a step.

        >>> attributes = {"torch.step": 4, "torch.loop": 1}
        >>> process = Process(None, 0, 1, "h")
        >>> Span("torch.step", 0, 1, process, attributes=attributes).title()
        'torch.step 4 (loop 1)'
        """
        step, loop = self.attributes.get("torch.step"), self.attributes.get("torch.loop")
        if self.name != "torch.step" or step is None:
            return self.name
        return f"{self.name} {step} (loop {loop})" if loop else f"{self.name} {step}"

    def kind(self) -> str:
        """Return `step`, `forward`, `region` or `other`."""
        if self.name in ("torch.step", "torch.forward"):
            return self.name.removeprefix("torch.")
        if "torch.region" in self.attributes or self.name.startswith("fastvideo."):
            return "region"
        return "other"


def iterate_spans(
    path: Path,
    warn: Callable[[str], None] = lambda message: None,
    progress: Callable[[str], None] = lambda text: None,
    *,
    activations: bool = True,
) -> Iterator[Span]:
    """Yield the spans of a file in its order; one line is in memory at a time.

    Args:
        path: An OTLP JSON file.
        warn: Called with a line if the file ends early.
        progress: Called now and then with a short text.
        activations: Whether to include the events of activations.

    Raises:
        RecordingError: If the file is missing or holds something else; the message is one line.
    """
    try:
        with open_once(path) as file:
            for number, document in enumerate(iterate_documents(file), 1):
                if not number % _PROGRESS_INTERVAL:
                    progress(f"{number:,} lines read of {path}")
                if document.is_cut_off and number > 1:
                    warn(
                        f"{path}: line {document.line} was cut off and is left out; "
                        "the traces end early"
                    )
                    continue
                try:
                    spans = list(_spans_of(_decode(document.text), activations))
                except _DECODING_ERRORS:
                    raise RecordingError(
                        (refusal(path, OTLP) if number == 1 else None)
                        or f"{path}: line {document.line} holds no spans; --traces needs a "
                        "traces.jsonl as OTEL_TORCH_OTLP_FILE writes it"
                    ) from None
                yield from spans
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror or error}") from None
    except NotReadable as error:
        raise RecordingError(str(error)) from None


def find_traces(recording: str | Path, given: Iterable[Path]) -> list[Path]:
    """Return the files with the spans of a recording's run.

    Args:
        recording: The recording.
        given: Files and folders to use. If empty, search next to the recording and where its run
            wrote traces, for files whose first line is from that run.

    Raises:
        RecordingError: If a given folder has no traces.
    """
    files: list[Path] = []
    for path in given:
        inside = sorted(path.glob(_FILES)) if path.is_dir() else [path]
        if not inside:
            raise RecordingError(f"{path}: this folder holds no traces.jsonl")
        files += inside
    if files:
        return files
    metadata = read_metadata(recording)
    folder = metadata_path(recording).parent
    folders = [folder, *(folder / name for name in _otlp_folders(metadata))]
    by_real_path = {
        path.resolve(): path for folder in folders for path in sorted(folder.glob(_FILES))
    }
    return [path for path in by_real_path.values() if _starts_with_run(path, metadata)]


def _otlp_folders(metadata: dict[str, Any]) -> list[Path]:
    """Return where the run may have written OTLP files, seen from the recording's folder.

    A recording that was moved alone finds them where its setting says, if that is absolute.
    """
    settings = metadata.get("settings")
    setting = settings.get("OTEL_TORCH_OTLP_FILE") if isinstance(settings, dict) else None
    folders = [metadata.get("otlp_folder")]
    if isinstance(setting, str):
        for placeholder, field_name in (("run", "run_id"), ("rank", "rank"), ("pid", "pid")):
            setting = setting.replace(f"<{placeholder}>", str(metadata.get(field_name)))
        folders.append(os.path.abspath(os.path.expanduser(setting)))
    return [Path(folder) for folder in folders if isinstance(folder, str) and folder]


def _starts_with_run(path: Path, metadata: dict[str, Any]) -> bool:
    try:
        first = _first_span(path, path.stat().st_size)
    except (RecordingError, OSError):
        return False
    return first is not None and is_of_run(first, metadata)


@functools.lru_cache(maxsize=4096)
def _first_span(path: Path, size: int) -> Span | None:
    """Return the first span of a file of this size: each rank of a folder asks all files."""
    return next(iterate_spans(path, activations=False), None)


def is_of_run(span: Span, metadata: dict[str, Any]) -> bool:
    """Return whether a span is from a recording's process; unknown fields match."""
    for name in ("run_id", "rank", "pid"):
        of_span, of_run = getattr(span.process, name), metadata.get(name)
        if of_span is not None and of_run is not None and of_span != of_run:
            return False
    return True


def assign_lanes(spans: Sequence[Span]) -> list[tuple[int, int]]:
    """Return (lane, depth) of each span, so that spans in a lane nest or do not overlap.

    A training step begins in one region and ends in another: such spans need separate lanes.

    >>> process = Process(None, 0, 1, "h")
    >>> spans = [Span("a", 0, 9, process), Span("b", 1, 3, process), Span("c", 2, 12, process)]
    >>> assign_lanes(spans)  # b is inside a; c overlaps both
    [(0, 0), (0, 1), (1, 0)]
    """
    positions = [(0, 0)] * len(spans)
    lanes_of: dict[Process, list[list[int]]] = {}  # for each lane, the ends of its open spans
    order = sorted(
        range(len(spans)), key=lambda index: (spans[index].start_ns, -spans[index].end_ns, index)
    )
    for index in order:
        span = spans[index]
        lanes = lanes_of.setdefault(span.process, [])
        lane = _first_free_lane(lanes, span)
        open_ends = lanes[lane]
        positions[index] = (lane, len(open_ends))
        open_ends.append(span.end_ns)
    return positions


def _first_free_lane(lanes: list[list[int]], span: Span) -> int:
    """Return the first lane in which the span nests, after closing spans that have ended."""
    for lane, open_ends in enumerate(lanes):
        while open_ends and open_ends[-1] <= span.start_ns:
            open_ends.pop()
        if not open_ends or open_ends[-1] >= span.end_ns:
            return lane
    lanes.append([])
    return len(lanes) - 1


# -- OTLP JSON


class _OtlpKeyValue(msgspec.Struct, gc=False):
    key: str = ""
    value: Any = None


class _OtlpEvent(msgspec.Struct, gc=False):
    name: str = ""
    timeUnixNano: str | int = 0
    # Decoded only if wanted: most events are activations.
    attributes: msgspec.Raw = msgspec.Raw(b"[]")


class _OtlpStatus(msgspec.Struct, gc=False):
    code: int | str = 0


class _OtlpSpan(msgspec.Struct, gc=False):
    name: str = ""
    traceId: str = ""
    spanId: str = ""
    parentSpanId: str = ""
    startTimeUnixNano: str | int = 0
    endTimeUnixNano: str | int = 0
    attributes: list[_OtlpKeyValue] = []
    events: list[_OtlpEvent] = []
    status: _OtlpStatus | None = None


class _OtlpScopeSpans(msgspec.Struct, gc=False):
    spans: list[_OtlpSpan] = []


class _OtlpResource(msgspec.Struct, gc=False):
    attributes: list[_OtlpKeyValue] = []


class _OtlpResourceSpans(msgspec.Struct, gc=False):
    resource: _OtlpResource | None = None
    scopeSpans: list[_OtlpScopeSpans] = []
    instrumentationLibrarySpans: list[_OtlpScopeSpans] = []  # before OTLP 0.19


class _OtlpTraces(msgspec.Struct, gc=False):
    resourceSpans: list[_OtlpResourceSpans]


_decode = msgspec.json.Decoder(_OtlpTraces).decode
_decode_attributes = msgspec.json.Decoder(list[_OtlpKeyValue]).decode
_DECODING_ERRORS = (
    msgspec.MsgspecError,
    ValueError,
    TypeError,
    AttributeError,
    RecursionError,
)


def _spans_of(traces: _OtlpTraces, activations: bool) -> Iterator[Span]:
    for group in traces.resourceSpans:
        resource = _attributes(group.resource.attributes if group.resource else [])
        process = Process(
            _of_type(resource.get("otel_torch.run.id"), str),
            _of_type(resource.get("dl.rank"), int),
            _of_type(resource.get("process.pid"), int),
            _of_type(resource.get("host.name"), str),
        )
        for scope in (*group.scopeSpans, *group.instrumentationLibrarySpans):
            for span in scope.spans:
                yield _span_of(span, process, activations)


def _span_of(span: _OtlpSpan, process: Process, activations: bool) -> Span:
    start = int(span.startTimeUnixNano)
    events = [
        SpanEvent(
            event.name,
            int(event.timeUnixNano),
            _attributes(_decode_attributes(event.attributes)),
        )
        for event in span.events
        if activations or event.name != ACTIVATION
    ]
    return Span(
        span.name,
        start,
        max(int(span.endTimeUnixNano), start),
        process,
        span.traceId,
        span.spanId,
        span.parentSpanId,
        span.status is not None and span.status.code in (2, "STATUS_CODE_ERROR"),
        _attributes(span.attributes),
        events,
    )


def _of_type(value: Any, kind: type) -> Any:
    return value if isinstance(value, kind) and not isinstance(value, bool) else None


def _attributes(pairs: Iterable[_OtlpKeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    """Return the value of an attribute, which OTLP wraps in an object that names its type.

    >>> _value({"intValue": "3"}), _value({"arrayValue": {"values": [{"stringValue": "a"}]}})
    (3, ['a'])
    """
    if not isinstance(value, dict) or not value:
        return None
    kind, content = next(iter(value.items()))
    if kind == "intValue":  # 64-bit integers are strings
        return int(content)
    if kind == "arrayValue":
        return [_value(item) for item in content.get("values", ())]
    if kind == "kvlistValue":
        return {pair.get("key"): _value(pair.get("value")) for pair in content.get("values", ())}
    return content
