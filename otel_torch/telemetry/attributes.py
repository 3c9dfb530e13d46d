"""OpenTelemetry attributes of records and scopes, with values that every backend can store."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

from otel_torch.records import FINGERPRINTS, Record, json_safe
from otel_torch.training_quantities import (
    NONFINITE,
    PARAM_GROUP,
    PHASE,
    ROWS,
    SCOPE_ATTRIBUTES,
    Quantity,
    split_label,
)

ACTIVATION = "torch.module.activation"
TRAINING = "torch.training"
# the metrics of a training by name
QUANTITIES: dict[str, Quantity] = {
    quantity.metric: quantity
    for quantity in (*ROWS.values(), *SCOPE_ATTRIBUTES.values(), NONFINITE)
}
# by metric: unit and description
COUNTERS = {f"{ACTIVATION}.nonfinite": ("{element}", "Elements that are NaN or infinite")} | {
    name: (quantity.unit, quantity.text)
    for name, quantity in QUANTITIES.items()
    if quantity.kind == "counter"
}
# statistics that are not gauges: counted, or constant
NOT_GAUGES = frozenset({"numel", *(name.rpartition(".")[2] for name in COUNTERS)})
# what identifies a record's metric series, without the step
series_key = attrgetter("model", "module", "tensor", "phase", "branch")


def to_attribute(value: Any) -> Any:
    """Return a value as an attribute may hold it: no numpy or torch scalar, no NaN or Inf, no
    integer beyond 64 bits, no list of mixed types.

    >>> to_attribute([1, float("nan")]), to_attribute(2**70), to_attribute(None)
    (['1', 'NaN'], '1180591620717411303424', 'None')
    """
    kind = type(value)
    if kind is str or kind is bool:
        return value
    if kind is float:
        return json_safe(value)
    if kind is int:
        return value if -(2**63) <= value < 2**63 else str(value)
    if isinstance(value, (list, tuple)):
        items = [to_attribute(item) for item in value]
        has_one_type = len({type(item) for item in items}) < 2
        return items if has_one_type else [str(item) for item in items]
    for base in (bool, int, float, str):
        if isinstance(value, base):
            return to_attribute(base(value))
    if hasattr(value, "item") and getattr(value, "size", 1) in (0, 1):
        return to_attribute(value.item())
    return str(value)


def to_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `to_attribute` of every value; None values are dropped."""
    return {key: to_attribute(value) for key, value in attributes.items() if value is not None}


def metric_name(phase: str, statistic: str) -> str:
    return f"{TRAINING if phase == PHASE else ACTIVATION}.{statistic}"


def metric_text(metric: str) -> tuple[str, str]:
    """Return description and unit of a metric; both are empty for those of activations."""
    quantity = QUANTITIES.get(metric)
    return (quantity.text, quantity.unit) if quantity is not None else ("", "")


def series_attributes(
    model: str, module: str, tensor: str, phase: str, branch: str | None
) -> dict[str, str]:
    """Return the attributes that identify a metric series, without the step.

    >>> series_attributes("Net", "", "lr[decay]", "train", None)
    {'torch.model': 'Net', 'torch.param_group': 'decay'}
    """
    attributes = {"torch.model": model}
    if phase == PHASE:
        quantity, group = split_label(tensor)
        more = {"torch.module": module or None, _group_attribute(quantity): group}
    else:
        more = {
            "torch.module": module,
            "torch.tensor": tensor,
            "torch.phase": phase,
            "torch.branch": branch,
        }
    return attributes | {name: value for name, value in more.items() if value is not None}


def _group_attribute(quantity: str) -> str:
    return ROWS[quantity].group if quantity in ROWS else PARAM_GROUP


def event_attributes(record: Record) -> dict[str, Any]:
    """Return the attributes of a record's event: module, step, and `torch.stat.<statistic>`."""
    attributes: dict[str, Any] = series_attributes(*series_key(record))
    attributes |= {"torch.step": record.step, "torch.call": record.call, "torch.loop": record.loop}
    for name, value in record.stats.items():
        if name not in FINGERPRINTS:
            attributes[f"torch.stat.{name}"] = to_attribute(value)
    return attributes


def gauge_values(record: Record) -> list[tuple[str, float]]:
    """Return (metric, value) of a record's gauges. NaN and Inf are left to the counter."""
    return [
        (metric_name(record.phase, name), float(value))
        for name, value in record.stats.items()
        if isinstance(value, (int, float)) and name not in NOT_GAUGES and math.isfinite(value)
    ]


def counter_values(record: Record) -> list[tuple[str, int, dict[str, str]]]:
    """Return (metric, number, attributes besides those of the series) of a record's counters."""
    nonfinite = count_nonfinite(record)
    if record.phase != PHASE:
        return [(f"{ACTIVATION}.nonfinite", nonfinite, {})] if nonfinite else []
    if nonfinite:
        return [(NONFINITE.metric, nonfinite, {"torch.tensor": record.tensor})]
    return [
        (metric, int(value), {})
        for name, value in record.stats.items()
        if isinstance(value, (int, float)) and (metric := metric_name(PHASE, name)) in COUNTERS
    ]


def count_nonfinite(record: Record) -> int:
    """Return how many elements are NaN or Inf; 1 if that is only known from another statistic."""
    count = record.stats.get("nonfinite")
    if isinstance(count, (int, float)):
        return int(count)
    for value in record.stats.values():
        if isinstance(value, float) and not math.isfinite(value):
            return 1
    return 0


@lru_cache(1024)
def _estimate_number_bytes(names: tuple[str, ...]) -> int:
    return sum(33 + len(name) for name in names)


def estimate_event_bytes(record: Record) -> int:
    """Return an upper bound of a record's size as an event, in bytes."""
    names = record.module + record.model + record.tensor
    name_size = len(names) if names.isascii() else 4 * len(names)
    size = 310 + name_size + _estimate_number_bytes(tuple(record.stats))
    for value in record.stats.values():
        kind = type(value)
        if kind is float or kind is int:
            continue
        if isinstance(value, list):
            size += 14 * len(value)
        elif isinstance(value, str):
            size += len(value)
    return size


def estimate_total_bytes(records: Sequence[Record]) -> int:
    """Return about the size of records as events, in bytes: the largest of a sample, times their
    number.
    """
    sample = records[:: len(records) // 8 + 1]
    return len(records) * max(map(estimate_event_bytes, sample), default=0)
