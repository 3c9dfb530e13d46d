"""Reads the backends through their APIs, and the files that a Collector writes, as plain Python."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.e2e.stack import Running


def ask(url: str, **parameters: Any) -> Any:
    """Return the JSON at an address.

    Raises:
        urllib.error.HTTPError: any status but 200, such as the 500 of Jaeger for one NaN in an
        event.
    """
    query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
    with urllib.request.urlopen(url + query, timeout=60) as answer:
        return json.loads(answer.read())


def spans(jaeger: Running, service: str) -> list[dict[str, Any]]:
    """Return all spans of a service from Jaeger: name, trace_id, span_id, parent_id ("" for a
    root), attributes, resource, and events as (name, attributes).
    """
    found = []
    for trace in ask(
        jaeger.url("JAEGER_UI_PORT", "/api/traces"), service=service, limit=1500, lookback="24h"
    )["data"]:
        for span in trace["spans"]:
            parents = [one["spanID"] for one in span["references"] if one["refType"] == "CHILD_OF"]
            events = [
                {field["key"]: field["value"] for field in one["fields"]} for one in span["logs"]
            ]
            found.append({
                "name": span["operationName"],
                "trace_id": span["traceID"],
                "span_id": span["spanID"],
                "parent_id": parents[0] if parents else "",
                "attributes": {tag["key"]: tag["value"] for tag in span["tags"]},
                "resource": {tag["key"]: tag["value"] for tag in trace["processes"][span["processID"]]["tags"]},
                "events": [(event.pop("event"), event) for event in events],
            })  # fmt: skip
    return found


def series(prometheus: Running, query: str) -> list[tuple[dict[str, str], list[float]]]:
    """Return (labels, values in order of time) of an instant query; with a range, `name[1h]`, every
    sample; of a native histogram, its sum.
    """
    found = ask(prometheus.url("PROMETHEUS_PORT", "/api/v1/query"), query=query)["data"]["result"]
    values = [_values(one) for one in found]
    return [(one["metric"], number) for one, number in zip(found, values, strict=True)]


def _values(one: dict[str, Any]) -> list[float]:
    if "values" in one:
        return [float(value) for _, value in one["values"]]
    return [float(one["value"][1] if "value" in one else one["histogram"][1]["sum"])]


def log_events(loki: Running, query: str) -> list[tuple[str, dict[str, str]]]:
    """Return (line, labels and structured metadata) of a LogQL query over the last hours, oldest
    first.
    """
    answer = ask(
        loki.url("LOKI_PORT", "/loki/api/v1/query_range"),
        query=query,
        since="3h",
        limit=100_000,
        direction="forward",
    )
    return [
        (line, stream["stream"])
        for stream in answer["data"]["result"]
        for _, line, *_ in stream["values"]
    ]


def log_count(loki: Running, query: str) -> int:
    """Return the number that a LogQL query computes, 0 without a result."""
    found = ask(loki.url("LOKI_PORT", "/loki/api/v1/query"), query=query)["data"]["result"]
    return int(found[0]["value"][1]) if found else 0


# file of collector-laptop.yaml -> the keys down to single items
_WAYS = {
    "traces": ("resourceSpans", "scopeSpans", "spans"),
    "logs": ("resourceLogs", "scopeLogs", "logRecords"),
    "metrics": ("resourceMetrics", "scopeMetrics", "metrics"),
}


def whole_lines(path: Path) -> list[str]:
    """Return the complete lines of a file; nothing if it does not exist yet."""
    return path.read_text().split("\n")[:-1] if path.exists() else []


def items(folder: Path, signal: str) -> Iterator[dict[str, Any]]:
    """Return the spans, log records or metrics in a Collector's files."""
    for line in whole_lines(folder / f"{signal}.jsonl"):
        resources, scopes, last = _WAYS[signal]
        for resource in json.loads(line).get(resources, []):
            for scope in resource[scopes]:
                yield from scope[last]


def arrived(folder: Path) -> Counter[str]:
    """Return how many items are in a Collector's files, by the kinds of losses. Of metrics, only
    points of statistics: the number of others depends on how often they were collected.
    """
    counts: Counter[str] = Counter()
    for span in items(folder, "traces"):
        counts["span"] += 1
        counts["span_event"] += sum(
            event["name"] == "torch.module.activation" for event in span.get("events", [])
        )
    for _ in items(folder, "logs"):
        counts["log_event"] += 1
    for metric in items(folder, "metrics"):
        if "gauge" in metric and metric["name"].startswith("torch.module.activation."):
            counts["metric_point"] += len(metric["gauge"]["dataPoints"])
    return counts
