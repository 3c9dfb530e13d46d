"""The health of a training as a small table, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from otel_torch.laws.facts import BrokenLaw
from otel_torch.laws.series import Series, TrainingSeries, quantity_of
from otel_torch.laws.table import facts_of, verdict_on
from otel_torch.rendering.table import Line, escape, format_table
from otel_torch.rendering.words import plural
from otel_torch.show.training.trouble import WORDS, troubles
from otel_torch.training_quantities import split_label

_KINDS = {"trains": "fine", "does not train": "trouble", "cannot tell": "unknown"}
_MAX_GROUPS = 8  # lines of one quantity in the table
_HEADER = ("quantity", "first", "last", "least", "largest", "at")


class Extent(NamedTuple):
    """The values of a series in short; NaN where no value is finite. at: step of the largest."""

    first: float
    last: float
    least: float
    largest: float
    at: str


def training_json(
    training: TrainingSeries, metadata: dict[str, Any], laws: Sequence[BrokenLaw]
) -> dict[str, Any]:
    """Return the health of a training for `--json`, with NaN and Inf as numbers."""
    return {
        "models": {
            model: {
                "verdict": verdict_on(training, metadata, laws, model)._asdict(),
                "quantities": {
                    label: extent_of(series, training)._asdict()
                    for label, series in training.totals(model).items()
                },
                "skipped_steps": _skipped_steps(training, model),
                "summary": _summary(metadata, model),
            }
            for model in training.models
        },
        "laws": [law._asdict() for law in laws],
        "troubles": troubles(training, laws),
    }


def training_lines(
    training: TrainingSeries, metadata: dict[str, Any], color: bool, width: int | None
) -> Iterator[str]:
    """Yield a line about the time of each model's steps, and a table of its quantities."""
    for model in training.models:
        header, lines = table_of(training, model)
        yield escape(title_of(training, metadata, model))
        yield format_table(header, lines, color=color, width=width)
        yield ""


class VerdictLine(NamedTuple):
    """A verdict in words: `fine`, `trouble` or `unknown`."""

    kind: str
    text: str


def verdict_lines(
    training: TrainingSeries, metadata: dict[str, Any], laws: Sequence[BrokenLaw]
) -> Iterator[VerdictLine]:
    """Yield for each model whether it trains, and why."""
    for model in training.models:
        verdict = verdict_on(training, metadata, laws, model)
        is_broken = any(law.model == model for law in laws)
        kind = "trouble" if is_broken else _KINDS[verdict.word]
        yield VerdictLine(kind, f"{model or 'the model'} {verdict}")


def title_of(training: TrainingSeries, metadata: dict[str, Any], model: str) -> str:
    """Return the name of a model, and how fast it was trained."""
    return ", ".join([f"training of {model or 'a model'}", *_speed(training, metadata, model)])


def table_of(training: TrainingSeries, model: str) -> tuple[Sequence[str], list[Line]]:
    """Return the header of a model's table and its lines: one for each quantity and group."""
    return _HEADER, list(_table_lines(training, model))


def extent_of(series: Series, training: TrainingSeries) -> Extent:
    """Return first, last, least and largest value; the last two of the finite values."""
    values = series.values
    finite = [index for index, value in enumerate(values) if math.isfinite(value)]
    if not finite:
        return Extent(values[0], values[-1], math.nan, math.nan, "")
    largest = max(finite, key=values.__getitem__)
    least = min(values[index] for index in finite)
    at = str(training.steps[series.steps[largest]])
    return Extent(values[0], values[-1], least, values[largest], at)


def _table_lines(training: TrainingSeries, model: str) -> Iterator[Line]:
    totals = training.totals(model)
    for quantity, words in WORDS.items():
        labels = [label for label in totals if quantity_of(label) == quantity]
        for label in labels[:_MAX_GROUPS]:
            *numbers, at = extent_of(totals[label], training)
            group = split_label(label).group
            name = words if group is None else f"{words} [{group}]"
            style = None if all(map(math.isfinite, totals[label].values)) else "red"
            yield Line([name, *map(_shown, numbers), at], style)
        if len(labels) > _MAX_GROUPS:
            left_out = plural(len(labels) - _MAX_GROUPS, "more group")
            yield Line([f"{words}, {left_out}", "", "", "", "", ""])


def _shown(number: float) -> str:
    """Format a number.

    >>> _shown(0.51234), _shown(math.nan), _shown(-math.inf)
    ('0.5123', 'NaN', '-Inf')
    """
    return f"{number:.4g}".replace("nan", "NaN").replace("inf", "Inf")


def _speed(training: TrainingSeries, metadata: dict[str, Any], model: str) -> Iterator[str]:
    """Yield the steps of a model, the median of their time, throughput, and what was skipped."""
    summary = _summary(metadata, model)
    if isinstance(steps := summary.get("steps"), int):
        yield plural(steps, "step")
    if isinstance(seconds := summary.get("step_s"), int | float):
        yield f"{1e3 * seconds:.3g} ms a step (median)"
    for key, unit in (("samples_per_s", "samples/s"), ("tokens_per_s", "tokens/s")):
        if isinstance(rate := summary.get(key), int | float):
            yield f"{rate:,.4g} {unit}" if rate < 1000 else f"{rate:,.0f} {unit}"
    if isinstance(memory := summary.get("device_memory"), int | float) and memory:
        yield f"{memory / 2**30:.3g} GiB of device memory"
    if frozen := set(facts_of(training, metadata, (), model).named("frozen")):
        yield f"{plural(len(frozen), 'parameter')} frozen"
    if skipped := _skipped_steps(training, model):
        yield f"{plural(skipped, 'step')} skipped by the gradient scaler"


def _skipped_steps(training: TrainingSeries, model: str) -> int:
    values = training.totals(model).get("skipped", Series()).values
    return int(sum(value for value in values if math.isfinite(value)))


def _summary(metadata: dict[str, Any], model: str) -> dict[str, Any]:
    """Return what the run itself said of the times of a model's training."""
    models = metadata.get("training")
    summary = models.get(model) if isinstance(models, dict) else None
    return summary if isinstance(summary, dict) else {}
