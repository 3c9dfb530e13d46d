"""What the backends say through their own APIs, and what a Collector wrote into files, as plain
Python.
"""

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
    """The JSON at an address.

    Raises:
        urllib.error.HTTPError: any status but 200, such as the 500 that one non-finite double in an
        event makes of Jaeger.
    """
    query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
    with urllib.request.urlopen(url + query, timeout=60) as answer:
        return json.loads(answer.read())


def spans(jaeger: Running, service: str) -> list[dict[str, Any]]:
    """All spans of a service as Jaeger shows them: name, trace_id, span_id, parent_id ("" of a
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
    """(labels, values in order of time) of what an instant query finds; with a range, `name[1h]`,
    every single sample; of a native histogram its sum.
    """
    found = ask(prometheus.url("PROMETHEUS_PORT", "/api/v1/query"), query=query)["data"]["result"]
    values = [_values(one) for one in found]
    return [(one["metric"], number) for one, number in zip(found, values, strict=True)]


def _values(one: dict[str, Any]) -> list[float]:
    if "values" in one:
        return [float(value) for _, value in one["values"]]
    return [float(one["value"][1] if "value" in one else one["histogram"][1]["sum"])]


def log_events(loki: Running, query: str) -> list[tuple[str, dict[str, str]]]:
    """(line, labels and structured metadata) of what a LogQL query finds in the last hours, oldest
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
    """The one number that a LogQL query of numbers finds; 0 where it finds none."""
    found = ask(loki.url("LOKI_PORT", "/loki/api/v1/query"), query=query)["data"]["result"]
    return int(found[0]["value"][1]) if found else 0


# the signal's file of collector-laptop.yaml -> the way down to single items
_WAYS = {
    "traces": ("resourceSpans", "scopeSpans", "spans"),
    "logs": ("resourceLogs", "scopeLogs", "logRecords"),
    "metrics": ("resourceMetrics", "scopeMetrics", "metrics"),
}


def whole_lines(path: Path) -> list[str]:
    """The lines of a file but for one that is being written; none where there is no file yet."""
    return path.read_text().split("\n")[:-1] if path.exists() else []


def items(folder: Path, signal: str) -> Iterator[dict[str, Any]]:
    """The spans, log records or metrics in a Collector's files."""
    for line in whole_lines(folder / f"{signal}.jsonl"):
        resources, scopes, last = _WAYS[signal]
        for resource in json.loads(line).get(resources, []):
            for scope in resource[scopes]:
                yield from scope[last]


def arrived(folder: Path) -> Counter[str]:
    """How many there are in a Collector's files, by the words that losses are counted in; of
    metrics, the points of statistics: how many there are of others depends on how often they were
    asked for.
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
