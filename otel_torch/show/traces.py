"""When regions and steps began and ended: the spans in files of OpenTelemetry's file format, which
a recording does not hold.

A line is one message, as OTEL_TORCH_OTLP_FILE and the Collector's file exporter write it. A last
line that a kill cut off is left out. Nothing here needs the SDK.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from otel_torch.recording.metadata import metadata_path, read_metadata
from otel_torch.recording.reader import RecordingError

ACTIVATION = "torch.module.activation"
_TOLD_EVERY = 256  # lines


class Process(msgspec.Struct, frozen=True):
    """The process that a span is of, by its resource; None for what that does not say."""

    run_id: str | None
    rank: int | None
    pid: int | None
    host: str | None

    def label(self) -> str:
        """What a person calls it.

        >>> Process("r1", 3, 71, "node-4").label(), Process(None, None, None, None).label()
        ('rank 3 (process 71 on node-4)', 'a process')
        """
        where = " ".join(
            word
            for word in (
                f"process {self.pid}" if self.pid else "",
                f"on {self.host}" if self.host else "",
            )
            if word
        )
        name = "a process" if self.rank is None else f"rank {self.rank}"
        return f"{name} ({where})" if where else name


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened within a span. time_ns: Unix nanoseconds."""

    name: str
    time_ns: int
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time: a region, a step, a forward. start_ns, end_ns: Unix nanoseconds. trace,
    id, parent: as hex.
    """

    name: str
    start_ns: int
    end_ns: int
    process: Process
    trace: str = ""
    id: str = ""
    parent: str = ""
    failed: bool = False
    attributes: dict[str, Any] = field(default_factory=dict)
    events: Sequence[Event] = ()

    def title(self) -> str:
        """Its name, and which step of which loop it is, where it is one.

        >>> Span("torch.step", 0, 1, Process(None, 0, 1, "h"), attributes={"torch.step": 4, "torch.loop": 1}).title()
        'torch.step 4 (loop 1)'
        """
        step, loop = self.attributes.get("torch.step"), self.attributes.get("torch.loop")
        if self.name != "torch.step" or step is None:
            return self.name
        return f"{self.name} {step}" + (f" (loop {loop})" if loop else "")

    def kind(self) -> str:
        """`step`, `forward`, `region`, or `other`."""
        if self.name in ("torch.step", "torch.forward"):
            return self.name.removeprefix("torch.")
        return (
            "region"
            if "torch.region" in self.attributes or self.name.startswith("fastvideo.")
            else "other"
        )


class _KeyValue(msgspec.Struct, gc=False):
    key: str = ""
    value: Any = None


class _Event(msgspec.Struct, gc=False):
    name: str = ""
    timeUnixNano: str | int = 0
    attributes: msgspec.Raw = msgspec.Raw(
        b"[]"
    )  # most are of activations, which are not always wanted


class _Status(msgspec.Struct, gc=False):
    code: int | str = 0


class _Span(msgspec.Struct, gc=False):
    name: str = ""
    traceId: str = ""
    spanId: str = ""
    parentSpanId: str = ""
    startTimeUnixNano: str | int = 0
    endTimeUnixNano: str | int = 0
    attributes: list[_KeyValue] = []
    events: list[_Event] = []
    status: _Status | None = None


class _ScopeSpans(msgspec.Struct, gc=False):
    spans: list[_Span] = []


class _Resource(msgspec.Struct, gc=False):
    attributes: list[_KeyValue] = []


class _ResourceSpans(msgspec.Struct, gc=False):
    resource: _Resource | None = None
    scopeSpans: list[_ScopeSpans] = []


class _TracesData(msgspec.Struct, gc=False):
    resourceSpans: list[_ResourceSpans]


_decode = msgspec.json.Decoder(_TracesData).decode
_decode_pairs = msgspec.json.Decoder(list[_KeyValue]).decode


def iterate_spans(
    path: Path,
    problem: Callable[[str], None] = lambda message: None,
    progress: Callable[[str], None] = lambda text: None,
    *,
    activations: bool = True,
) -> Iterator[Span]:
    """The spans of a file in its order, a line in memory at a time. activations: with the events of
    activations.

    Raises RecordingError, of one line, for a file that is missing or holds something else.
    """
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not number % _TOLD_EVERY:
                    progress(f"{number:,} lines read of {path}")
                if not line.strip():
                    continue
                try:
                    data = _decode(line)
                    spans = list(_spans(data, activations))
                except (
                    msgspec.MsgspecError,
                    ValueError,
                    TypeError,
                    AttributeError,
                    RecursionError,
                ):
                    if not line.endswith(b"\n") and number > 1:
                        problem(
                            f"{path}: line {number} was cut off and is left out; the traces end early"
                        )
                        continue
                    raise RecordingError(
                        f"{path}: line {number} holds no spans: --traces takes a traces.jsonl as OTEL_TORCH_OTLP_FILE writes it"
                    ) from None
                yield from spans
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror or error}") from None


def find_traces(recording: str | Path, given: Iterable[Path]) -> list[Path]:
    """The files with the spans of a recording's run: those given (of a folder all in it), else
    those beside the recording and where its run wrote them, as long as their first line is of that
    run. Raises RecordingError for a folder without any.
    """
    found: list[Path] = []
    for path in given:
        inside = sorted(path.glob("*traces*.jsonl")) if path.is_dir() else [path]
        if not inside:
            raise RecordingError(f"{path}: this folder holds no traces.jsonl")
        found += inside
    if found:
        return found
    meta = read_metadata(recording)
    settings = meta.get("settings")
    named = settings.get("OTEL_TORCH_OTLP_FILE") if isinstance(settings, dict) else None
    folders = [metadata_path(recording).parent]
    if isinstance(named, str) and named:
        for placeholder in ("run_id", "rank", "pid"):
            named = named.replace(
                f"<{placeholder.removesuffix('_id')}>", str(meta.get(placeholder))
            )
        folders.append(Path(named).expanduser())
    beside = {
        path.resolve(): path for folder in folders for path in sorted(folder.glob("*traces*.jsonl"))
    }
    return [path for path in beside.values() if _is_of(path, meta)]


def is_of_run(span: Span, meta: dict[str, Any]) -> bool:
    """Whether a span is of a recording's process, by its metadata, as far as that tells."""
    said = ((getattr(span.process, name), meta.get(name)) for name in ("run_id", "rank", "pid"))
    return all(None in pair or pair[0] == pair[1] for pair in said)


def lanes(spans: Sequence[Span]) -> list[tuple[int, int]]:
    """A place for each span, (lane, depth): within a lane spans of one process stand below what
    they lie in, and never overlap otherwise. A training step begins in one region and ends in
    another, so that one lane is not always enough.

    >>> here = Process(None, 0, 1, "h")
    >>> lanes([Span("a", 0, 9, here), Span("b", 1, 3, here), Span("c", 2, 12, here)])
    [(0, 0), (0, 1), (1, 0)]
    """
    placed = [(0, 0)] * len(spans)
    open_lanes: dict[Process, list[list[int]]] = {}
    for at in sorted(range(len(spans)), key=lambda at: (spans[at].start_ns, -spans[at].end_ns, at)):
        span = spans[at]
        stacks = open_lanes.setdefault(span.process, [])
        for lane, stack in enumerate(stacks):  # noqa: B007  # the lane that it ends with is the one
            while stack and stack[-1] <= span.start_ns:
                stack.pop()
            if not stack or stack[-1] >= span.end_ns:
                break
        else:
            lane = len(stacks)
            stacks.append(stack := [])
        placed[at] = (lane, len(stack))
        stack.append(span.end_ns)
    return placed


def _is_of(path: Path, meta: dict[str, Any]) -> bool:
    """Whether the first line of a file is of a recording's process."""
    try:
        for span in iterate_spans(path, activations=False):
            return is_of_run(span, meta)
    except RecordingError:
        pass
    return False


def _spans(data: _TracesData, activations: bool) -> Iterator[Span]:
    for group in data.resourceSpans:
        who = _attributes(group.resource.attributes if group.resource else [])
        process = Process(
            _of_type(who.get("otel_torch.run.id"), str),
            _of_type(who.get("dl.rank"), int),
            _of_type(who.get("process.pid"), int),
            _of_type(who.get("host.name"), str),
        )
        for scope in group.scopeSpans:
            for span in scope.spans:
                start = int(span.startTimeUnixNano)
                yield Span(
                    span.name,
                    start,
                    max(int(span.endTimeUnixNano), start),
                    process,
                    span.traceId,
                    span.spanId,
                    span.parentSpanId,
                    span.status is not None and span.status.code in (2, "STATUS_CODE_ERROR"),
                    _attributes(span.attributes),
                    [
                        Event(
                            event.name,
                            int(event.timeUnixNano),
                            _attributes(_decode_pairs(event.attributes)),
                        )
                        for event in span.events
                        if activations or event.name != ACTIVATION
                    ],
                )


def _of_type(value: Any, kind: type) -> Any:
    return value if isinstance(value, kind) and not isinstance(value, bool) else None


def _attributes(pairs: Iterable[_KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    """An attribute's value, which stands in an object that names its type; 64-bit integers stand
    there as text.
    """
    if not isinstance(value, dict) or not value:
        return None
    kind, content = next(iter(value.items()))
    if kind == "intValue":
        return int(content)
    if kind == "arrayValue":
        return [_value(item) for item in content.get("values", ())]
    if kind == "kvlistValue":
        return {pair.get("key"): _value(pair.get("value")) for pair in content.get("values", ())}
    return content
