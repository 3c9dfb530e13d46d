"""What is recorded of a training, as OpenTelemetry has it: metrics of their own and attributes of
the step's span, where activations are events and statistics.

A record of phase `train` is given its metric's name here, in place of the name of a statistic. From
there on it takes the way of all records: series, labels, limits and encoding are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from otel_torch.records import TOKENS, Batch, Record, Scope, Statistic
from otel_torch.telemetry.attributes import TRAINING, to_attribute
from otel_torch.training_quantities import LAW, PHASE, RATES, ROWS, SCOPE_ATTRIBUTES, split_label

# of one quantity on a span: a whole training may run in one step of the program
_MOST_VALUES = 100


def split_batch(batch: Batch) -> tuple[Batch, Batch]:
    """Return the records of activations, and those of a training under their metrics' names.

    Tokens stay in the recording: they tell what a user wrote. So do operations, of which there are
    thousands in a step.
    """
    activations = [
        record
        for record in batch.records
        if record.phase not in (PHASE, TOKENS) and not record.is_of_graph
    ]
    training = []
    if len(activations) < len(batch.records):
        training = [_rename(record) for record in batch.records if record.phase == PHASE]
    return Batch(activations, batch.step), Batch(training, batch.step)


def _rename(record: Record) -> Record:
    quantity = ROWS[split_label(record.tensor).quantity]
    return replace(record, stats=_named(quantity.metric, record.stats["mean"]))


def _named(metric: str, value: Statistic) -> dict[str, Statistic]:
    return {metric.removeprefix(f"{TRAINING}."): value}


def add_step_attributes(attributes: dict[str, Any], records: Sequence[Record]) -> None:
    """Add the values of whole models to the attributes of their step's scope.

    An attribute has the metric's name. Of several values, those of several backward passes for
    example, it has the last one, of several groups that of the first; `<name>.values` lists them.
    Of broken laws it has their names.

    Args:
        records: as `split_batch` returns them.
    """
    for record in records:
        if record.module:
            continue
        ((name, number),) = record.stats.items()
        key, value = f"{TRAINING}.{name}", to_attribute(number)
        quantity, group = split_label(record.tensor)
        if ROWS[quantity].group == LAW:
            attributes.setdefault(key, []).append(group)
            continue
        if key not in attributes:
            attributes[key] = value
            continue
        values = attributes.setdefault(f"{key}.values", [attributes[key]])
        values.append(value)
        del values[:-_MOST_VALUES]
        if group is None:
            attributes[key] = value


def is_training_step(scope: Scope) -> bool:
    """Return whether anything of a training was recorded in a step."""
    return any(name.startswith(TRAINING) for name in scope.attributes)


def rate_records(scope: Scope) -> list[Record]:
    """Return the throughput and the memory of an ended training step, as records under their
    metrics' names.
    """
    attributes, seconds = scope.attributes, (scope.end_ns - scope.start_ns) / 1e9
    records = []
    for name, quantity in SCOPE_ATTRIBUTES.items():
        value = attributes.get(name)
        if value is None or (name in RATES and seconds <= 0):
            continue
        records.append(
            Record(
                module="",
                tensor=name,
                step=attributes.get("torch.step", 0),
                call=0,
                loop=attributes.get("torch.loop", 0),
                model=str(attributes.get("torch.model", "")),
                phase=PHASE,
                branch=None,
                stats=_named(quantity.metric, value / seconds if name in RATES else value),
                time_ns=scope.end_ns,
            )
        )
    return records
