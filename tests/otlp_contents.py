"""Reads OTLP messages item by item, with protobuf's own JSON instead of this package's, so that
received data can be compared with written files.
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
    """Count the spans, log records or data points, each as JSON with its resource and scope."""
    counts: Counter[str] = Counter()
    resources, scopes, entries = _LISTS[signal]
    for request in requests:
        for resource in json_format.MessageToDict(request).get(resources, []):
            for scope in resource.get(scopes, []):
                origin = [resource.get("resource"), scope.get("scope")]
                for entry in scope.get(entries, []):
                    counts.update(
                        json.dumps([*origin, item], sort_keys=True)
                        for item in _items(signal, entry)
                    )
    return counts


def _items(signal: str, entry: Any) -> Iterable[Any]:
    if signal != "metrics":
        return [entry]
    kind = next(
        (key for key, value in entry.items() if isinstance(value, dict) and "dataPoints" in value),
        "",
    )
    data = entry.get(kind, {})
    rest = {key: value for key, value in data.items() if key != "dataPoints"}
    metric = {key: value for key, value in entry.items() if key != kind}
    return [[metric, kind, rest, point] for point in data.get("dataPoints", [])]


def parse(signal: str, line: str | bytes) -> Any:
    """Parse a line of an OTLP file with protobuf's own JSON.

    Its ids are hexadecimal, and base64 in protobuf's JSON. A bare NaN or an unknown field is an
    error.
    """

    def refuse(token: str) -> Any:
        raise ValueError(f"{token} is not strict JSON")

    message: Any = CLASSES[signal]()
    return json_format.ParseDict(_with_base64_ids(json.loads(line, parse_constant=refuse)), message)


def _with_base64_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_base64_ids(item) for item in value]
    if not isinstance(value, dict):
        return value
    ids = ("traceId", "spanId", "parentSpanId")
    return {
        key: base64.b64encode(bytes.fromhex(item)).decode()
        if key in ids
        else _with_base64_ids(item)
        for key, item in value.items()
    }


def read(folder: Path, name: str = "{}.jsonl") -> dict[str, list[Any]]:
    """Return the requests in a folder's files, by signal."""
    paths = {signal: folder / name.format(signal) for signal in CLASSES}
    return {
        signal: [parse(signal, line) for line in path.read_bytes().splitlines()]
        if path.exists()
        else []
        for signal, path in paths.items()
    }
