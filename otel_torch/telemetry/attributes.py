"""The contract's names: what a record and a scope are called in OpenTelemetry, and values that
every backend can carry.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from otel_torch.records import FINGERPRINTS, Record, spell

ACTIVATION = "torch.module.activation"
# statistics that are no gauges: counted elsewhere, or not a quantity that changes
NO_GAUGE = frozenset({"nonfinite", "numel"})


def plain(value: Any) -> Any:
    """A value as an attribute may hold it: no numpy or torch scalar, no non-finite double, no
    integer beyond 64 bits.

    >>> plain([1, float("nan")]), plain(2**70), plain(None)
    (['1', 'NaN'], '1180591620717411303424', 'None')
    """
    kind = type(value)
    if kind is str or kind is bool:
        return value
    if kind is float:
        return spell(value)
    if kind is int:
        return value if -(2**63) <= value < 2**63 else str(value)
    if isinstance(value, (list, tuple)):
        items = [plain(item) for item in value]
        return items if len({type(item) for item in items}) < 2 else [str(item) for item in items]
    for base in (bool, int, float, str):
        if isinstance(value, base):
            return plain(base(value))
    if hasattr(value, "item") and getattr(value, "size", 1) in (0, 1):
        return plain(value.item())
    return str(value)


def plain_all(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """`plain` for every value of a mapping; None is left out."""
    return {key: plain(value) for key, value in attributes.items() if value is not None}


def identify(record: Record) -> dict[str, str]:
    """The attributes of a record that make a metric series, without the step."""
    found = {
        "torch.model": record.model,
        "torch.module": record.module,
        "torch.tensor": record.tensor,
        "torch.phase": record.phase,
    }
    if record.branch is not None:
        found["torch.branch"] = record.branch
    return found


def describe_activation(record: Record) -> dict[str, Any]:
    """The attributes of a record's event: who, when, and `torch.stat.<statistic>`."""
    found: dict[str, Any] = identify(record)
    found |= {"torch.step": record.step, "torch.call": record.call, "torch.loop": record.loop}
    for name, value in record.stats.items():
        if name not in FINGERPRINTS:
            found[f"torch.stat.{name}"] = plain(value)
    return found


def gauges(record: Record) -> list[tuple[str, float]]:
    """(statistic, value) of a record's numeric statistics; non-finite ones are left out, the
    counter has them.
    """
    return [
        (name, float(value))
        for name, value in record.stats.items()
        if isinstance(value, (int, float)) and name not in NO_GAUGE and math.isfinite(value)
    ]


def count_nonfinite(record: Record) -> int:
    """How many elements were not finite; 1 where only another statistic tells that there are some."""
    counted = record.stats.get("nonfinite")
    if isinstance(counted, (int, float)):
        return int(counted)
    return int(
        any(
            isinstance(value, float) and not math.isfinite(value) for value in record.stats.values()
        )
    )


@lru_cache(1024)
def _estimate_numbers(names: tuple[str, ...]) -> int:
    return sum(33 + len(name) for name in names)


def estimate(record: Record) -> int:
    """Bytes that a record takes as an event, no fewer than it really does."""
    names = record.module + record.model + record.tensor
    size = (
        310
        + (len(names) if names.isascii() else 4 * len(names))
        + _estimate_numbers(tuple(record.stats))
    )
    for value in record.stats.values():
        kind = type(value)
        if kind is not float and kind is not int:
            size += (
                14 * len(value)
                if isinstance(value, list)
                else len(value)
                if isinstance(value, str)
                else 0
            )
    return size


def estimate_all(records: Sequence[Record]) -> int:
    """Bytes that records take as events, more or less: as many times the largest of a few as there
    are.
    """
    return len(records) * max(map(estimate, records[:: len(records) // 8 + 1]), default=0)
