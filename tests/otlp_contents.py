"""What OTLP messages hold, item by item, read with protobuf's own JSON and nothing of ours, so that
what arrives can be compared with what was written.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

CLASSES = {
    "traces": ExportTraceServiceRequest,
    "metrics": ExportMetricsServiceRequest,
    "logs": ExportLogsServiceRequest,
}
_LISTS = {
    "traces": ("resourceSpans", "scopeSpans", "spans"),
    "metrics": ("resourceMetrics", "scopeMetrics", "metrics"),
    "logs": ("resourceLogs", "scopeLogs", "logRecords"),
}


def items(signal: str, requests: Iterable[Any]) -> Counter[str]:
    """Every span, log record or data point, with all that it says, its resource and its scope."""
    found: Counter[str] = Counter()
    resources, scopes, things = _LISTS[signal]
    for request in requests:
        for resource in json_format.MessageToDict(request).get(resources, []):
            for scope in resource.get(scopes, []):
                who = [resource.get("resource"), scope.get("scope")]
                for thing in scope.get(things, []):
                    found.update(
                        json.dumps([*who, part], sort_keys=True) for part in _parts(signal, thing)
                    )
    return found


def _parts(signal: str, thing: Any) -> Iterable[Any]:
    if signal != "metrics":
        return [thing]
    kind = next(
        (key for key, value in thing.items() if isinstance(value, dict) and "dataPoints" in value),
        "",
    )
    data = thing.get(kind, {})
    rest = {key: value for key, value in data.items() if key != "dataPoints"}
    about = {key: value for key, value in thing.items() if key != kind}
    return [[about, kind, rest, point] for point in data.get("dataPoints", [])]


def parse(signal: str, line: str | bytes) -> Any:
    """A line as protobuf's own JSON reads it, ids aside, which are hexadecimal in OTLP. Strict: no
    bare NaN, no unknown field.
    """

    def refuse(token: str) -> Any:
        raise ValueError(f"{token} is not strict JSON")

    message: Any = CLASSES[signal]()
    return json_format.ParseDict(_with_base64_ids(json.loads(line, parse_constant=refuse)), message)


def _with_base64_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_base64_ids(one) for one in value]
    if not isinstance(value, dict):
        return value
    ids = ("traceId", "spanId", "parentSpanId")
    return {
        key: base64.b64encode(bytes.fromhex(one)).decode() if key in ids else _with_base64_ids(one)
        for key, one in value.items()
    }


def read(folder: Path, name: str = "{}.jsonl") -> dict[str, list[Any]]:
    """The requests in a folder's files, by signal."""
    paths = {signal: folder / name.format(signal) for signal in CLASSES}
    return {
        signal: [parse(signal, line) for line in path.read_bytes().splitlines()]
        if path.exists()
        else []
        for signal, path in paths.items()
    }
