"""The standard limits of spans, span events and log records, such as OTEL_SPAN_EVENT_COUNT_LIMIT.

Records are encoded without them, because nearly always they drop nothing. Where they would, records
become events and log records of the SDK first, which applies the limits and counts what it drops.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from opentelemetry.sdk._logs import LogRecordLimits
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits

from otel_torch.process.console import say_once
from otel_torch.records import Losses

# the limits' default; no event or log record of ours has as many attributes
_ATTRIBUTES = 128
_UNLIMITED = SpanLimits.UNSET


def read_span_limits(environ: Mapping[str, str] = os.environ) -> SpanLimits:
    """Return the limits of the environment. Without one for events, a span holds all of a step."""
    has_event_limit = environ.get("OTEL_SPAN_EVENT_COUNT_LIMIT", "").strip()
    try:
        return SpanLimits() if has_event_limit else SpanLimits(max_events=_UNLIMITED)
    except ValueError as error:
        say_once(f"{error}. No limit of spans is followed")
        return SpanLimits(*[_UNLIMITED] * 8)


def read_log_limits() -> LogRecordLimits:
    try:
        return LogRecordLimits()
    except ValueError as error:
        say_once(f"{error}. No limit of log records is followed")
        return LogRecordLimits(*[_UNLIMITED] * 4)


def may_drop_from_events(limits: Any) -> bool:
    """Return whether limits of spans may drop or cut attributes of our span events."""
    return _is_below(limits.max_event_attributes) or limits.max_attribute_length is not None


def may_drop_from_logs(limits: Any) -> bool:
    """Return whether limits of log records may drop or cut attributes of ours."""
    length = limits.max_log_record_attribute_length
    return _is_below(limits.max_log_record_attributes) or length is not None


def _is_below(limit: int | None) -> bool:
    return limit is not None and limit < _ATTRIBUTES


def count_dropped(span: ReadableSpan, losses: Losses) -> None:
    losses.count("span_event", "event_limit", span.dropped_events)
    losses.count("link", "link_limit", span.dropped_links)
    parts: list[Any] = [*span.events, *span.links]
    from_parts = sum(part.dropped_attributes for part in parts)
    losses.count("attribute", "attribute_limit", span.dropped_attributes + from_parts)
