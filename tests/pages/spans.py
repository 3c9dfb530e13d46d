"""Files of spans as OpenTelemetry's file format has them, written by hand, so that every number in
them is known.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

START = 1_795_289_012_476_248_317  # Unix nanoseconds


def span(
    name: str,
    start: float,
    end: float,
    *,
    id: str = "",
    parent: str = "",
    events: Any = (),
    **attributes: Any,
) -> dict[str, Any]:
    """A span from and to so many seconds after START. events: (name, seconds, attributes) each. `_`
    in a name stands for `.`.
    """
    return {
        "traceId": "ab" * 16,
        "spanId": id,
        "parentSpanId": parent,
        "name": name,
        "startTimeUnixNano": _time(start),
        "endTimeUnixNano": _time(end),
        "attributes": _pairs(attributes),
        "events": [
            {"name": event, "timeUnixNano": _time(moment), "attributes": _pairs(details)} for event, moment, details in events
        ],
    }  # fmt: skip


def step(
    number: int, start: float, end: float, *, loop: int = 0, model: str = "M", **more: Any
) -> dict[str, Any]:
    """The span of a step."""
    return span(
        "torch.step", start, end, torch_step=number, torch_loop=loop, torch_model=model, **more
    )


def line(*spans: dict[str, Any], run: str = "r7", rank: int = 0, pid: int = 71) -> str:
    """A line of a file: spans of one process."""
    resource = {"otel_torch.run.id": run, "dl.rank": rank, "process.pid": pid, "host.name": "node"}
    group = {
        "resource": {"attributes": _pairs(resource)},
        "scopeSpans": [{"scope": {"name": "otel_torch"}, "spans": list(spans)}],
    }
    return json.dumps({"resourceSpans": [group]}) + "\n"


def write(path: Path, *lines: str) -> Path:
    """A file of such lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))
    return path


def _time(seconds: float) -> str:
    return str(START + round(seconds * 1e9))


def _pairs(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"key": name if "." in name else name.replace("_", "."), "value": _value(value)}
        for name, value in values.items()
    ]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return (
        {"arrayValue": {"values": [_value(item) for item in value]}}
        if isinstance(value, list)
        else {"stringValue": value}
    )
