"""The standard limits of spans, events and log records: what they drop is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk._logs import LogRecordLimits
from opentelemetry.sdk.trace import SpanLimits

from otel_torch.telemetry.limits import (
    may_drop_from_events,
    may_drop_from_logs,
    read_log_limits,
    read_span_limits,
)
from tests.otlp_receiver import Receiver
from tests.telemetry.otlp.test_delivery import lost
from tests.telemetry_support import drive

# three training steps of four records: each links the run's span to its trace
STEPS = """
for step in range(3):
    run_step(step, [record(f"layer.{n}", step) for n in range(4)], training=True)
finish()
"""
ALL = {"OTEL_TORCH_SIGNALS": "spans,span_events,log_events"}


def steps_of(receiver: Receiver) -> list[dict[str, Any]]:
    return receiver.spans("torch.step")


def longest(rows: list[dict[str, Any]]) -> int:
    return max(len(str(value)) for row in rows for value in row.values() if isinstance(value, str))


def run(tmp_path: Path, receiver: Receiver, **limits: str) -> dict[tuple[str, str], int]:
    return lost(drive(tmp_path, STEPS, **ALL, **receiver.environment(), **limits))


def test_events_beyond_their_limit_are_counted_on_the_span_and_in_all(tmp_path: Path) -> None:
    with Receiver() as receiver:
        losses = run(tmp_path, receiver, OTEL_SPAN_EVENT_COUNT_LIMIT="3")
    assert [(len(span["events"]), span["dropped_events"]) for span in steps_of(receiver)] == [
        (3, 1)
    ] * 3
    assert losses == {("span_event", "event_limit"): 3}
    assert len(receiver.log_records()) == 12


def test_links_beyond_their_limit_are_counted(tmp_path: Path) -> None:
    with Receiver() as receiver:
        losses = run(tmp_path, receiver, OTEL_SPAN_LINK_COUNT_LIMIT="1")
    (span,) = receiver.spans("torch.run")
    assert len(span["links"]) == 1 and losses == {("link", "link_limit"): 2}


@pytest.mark.parametrize(
    ("variable", "limited"),
    [
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", {"spans"}),
        ("OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT", {"events"}),
        ("OTEL_LOGRECORD_ATTRIBUTE_COUNT_LIMIT", {"logs"}),
        ("OTEL_ATTRIBUTE_COUNT_LIMIT", {"spans", "events", "logs"}),
    ],
)
def test_attributes_beyond_their_limit_are_counted(
    tmp_path: Path, variable: str, limited: set[str]
) -> None:
    with Receiver() as receiver:
        losses = run(tmp_path, receiver, **{variable: "2"})
    counts = {
        "spans": {len(span["attributes"]) for span in steps_of(receiver)},
        "events": {len(event) for event in receiver.events()},
        "logs": {len(log["attributes"]) for log in receiver.log_records()},
    }
    assert {name for name, lengths in counts.items() if lengths == {2}} == limited
    assert (len(receiver.events()), len(receiver.log_records())) == (12, 12)
    # three steps and the run have an attribute too many; twelve records have nine
    expected = 4 * ("spans" in limited) + 12 * 9 * len(limited - {"spans"})
    assert losses[("attribute", "attribute_limit")] == expected


@pytest.mark.parametrize(
    ("variable", "cut"),
    [
        ("OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT", {"spans"}),
        ("OTEL_LOGRECORD_ATTRIBUTE_VALUE_LENGTH_LIMIT", {"logs"}),
        ("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", {"spans", "events", "logs"}),
    ],
)
def test_long_values_are_cut(tmp_path: Path, variable: str, cut: set[str]) -> None:
    with Receiver() as receiver:
        assert run(tmp_path, receiver, **{variable: "2"}) == {}
    lengths = {
        "spans": longest([span["attributes"] for span in steps_of(receiver)]),
        "events": longest(receiver.events()),
        "logs": longest([log["attributes"] for log in receiver.log_records()]),
    }
    assert {name for name, length in lengths.items() if length == 2} == cut


def test_a_limit_that_is_no_number_is_named_and_nothing_is_lost(tmp_path: Path) -> None:
    variables = {"OTEL_ATTRIBUTE_COUNT_LIMIT": "many"}
    with Receiver() as receiver:
        done = drive(tmp_path, STEPS, **ALL, **receiver.environment(), **variables)
    assert lost(done) == {}
    assert (len(receiver.events()), len(receiver.log_records())) == (12, 12)
    assert "OTEL_ATTRIBUTE_COUNT_LIMIT must be" in done.stderr and "failed" not in done.stderr


def test_by_default_no_limit_drops_anything_of_ours() -> None:
    limits = read_span_limits({})
    assert limits.max_events is None and not may_drop_from_events(limits)
    assert not may_drop_from_logs(read_log_limits())
    assert may_drop_from_events(SpanLimits(max_attribute_length=9))
    assert may_drop_from_logs(LogRecordLimits(max_log_record_attributes=9))
