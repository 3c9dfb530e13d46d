"""When the outputs of modules were there: events of spans, or log records where these have none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from otel_torch.exporting.exported_recording import Report
from otel_torch.recording.input_file import open_once
from otel_torch.recording.json_documents import iterate_documents
from otel_torch.records import FORWARD_PHASES
from otel_torch.show.traces import ACTIVATION, iterate_spans


class _LogAttribute(msgspec.Struct, gc=False):
    key: str = ""
    value: dict[str, Any] = {}


class _LogRecord(msgspec.Struct, gc=False):
    timeUnixNano: str | int = 0
    spanId: str = ""
    attributes: list[_LogAttribute] = []


class _ScopeLogs(msgspec.Struct, gc=False):
    logRecords: list[_LogRecord] = []


class _ResourceLogs(msgspec.Struct, gc=False):
    scopeLogs: list[_ScopeLogs] = []


class _LogMessage(msgspec.Struct, gc=False):
    resourceLogs: list[_ResourceLogs] = []


_decode_logs = msgspec.json.Decoder(_LogMessage).decode


class ModuleEnd(NamedTuple):
    """A module's output was there. span: the id of the span around it."""

    span: str
    time_ns: int
    model: str
    module: str


def module_ends(files: Sequence[Path], progress: Report) -> Iterator[ModuleEnd]:
    """Yield the outputs of modules.

    Args:
        files: Those of spans; the log records stand beside them.

    Raises:
        RecordingError: A file of spans holds something else.
    """
    has_events = False
    for file in files:
        for span in iterate_spans(file, progress=progress):
            for event in span.events:
                if event.name == ACTIVATION:
                    has_events = True
                    yield from _end_of(span.id, event.time_ns, event.attributes)
    for file in () if has_events else files:
        logs = file.with_name(file.name.replace("traces", "logs"))
        if logs.is_file():
            progress(f"reading {logs}")
            yield from _ends_in_logs(logs)


def _ends_in_logs(path: Path) -> Iterator[ModuleEnd]:
    with open_once(path) as file:
        for document in iterate_documents(file):
            try:
                message = _decode_logs(document.text)
            except msgspec.MsgspecError:
                continue  # a line that was cut off; `send` says what is wrong with files
            scopes = (scope for resource in message.resourceLogs for scope in resource.scopeLogs)
            for record in (record for scope in scopes for record in scope.logRecords):
                attributes = {
                    pair.key: next(iter(pair.value.values()), None) for pair in record.attributes
                }
                yield from _end_of(record.spanId, int(record.timeUnixNano), attributes)


def _end_of(span: str, time_ns: int, attributes: dict[str, Any]) -> Iterator[ModuleEnd]:
    """Yield the end of a module's call, if an event is that of an output."""
    module, tensor = attributes.get("torch.module"), str(attributes.get("torch.tensor"))
    if (
        attributes.get("torch.phase") in FORWARD_PHASES
        and module is not None
        and tensor[:3] == "out"
    ):
        yield ModuleEnd(span, time_ns, str(attributes.get("torch.model", "")), str(module))
