"""What points at trouble in a training, in plain words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from statistics import median

from otel_torch.laws.facts import BrokenLaw
from otel_torch.laws.series import Series, TrainingSeries
from otel_torch.records import LoopStep
from otel_torch.rendering.words import plural
from otel_torch.training_quantities import ROWS

WINDOW = 20  # values before a spike
# A spike is so many times the median of the values before it, and twice the largest of them: a
# loss that cycles, or that is noisy because it is small, has none.
SPIKES = {"loss": 3.0, "grad_norm": 10.0}
_ABOVE_LARGEST = 2.0
VANISHED = 1e-7  # of the total
DEAD = 0.9  # of the units behind a ReLU
_LASTING_VALUES = 3  # at the end: what a module had in fewer may pass
SCALE_WINDOW, SCALE_FALLS = 50, 5
_MAX_MODULES = 5

WORDS = {
    "loss": "loss",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "grad_norm_clipped": "gradient norm, clipped",
    "param_norm": "parameter norm",
    "update_ratio": "update ratio",
    "loss_scale": "loss scale",
    "dead": "dead units",
}


def troubles(training: TrainingSeries, laws: Sequence[BrokenLaw]) -> list[str]:
    """Return a line for each trouble and each broken law, those of a model together."""
    models, lines = training.models, []
    for model in models:
        seen = [line for rule in _RULES for line in rule(training, model)]
        seen += [f"{law.text} (law: {law.law})" for law in laws if law.model == model]
        lines += [f"{model}: {line}" if len(models) > 1 else line for line in seen]
    return lines


def first_nonfinite(training: TrainingSeries) -> LoopStep | None:
    """Return the first step in which a quantity was NaN or infinite and is a trouble; or None."""
    steps = [bad[0][0] for model in training.models for _, bad in _bad_values(training, model)]
    return training.steps[min(steps)] if steps else None


def _nonfinite(training: TrainingSeries, model: str) -> Iterator[str]:
    """Yield which quantities became NaN or infinite.

    The gradients of a step that the gradient scaler skipped may be: it skipped it for that.
    """
    for label, bad in _bad_values(training, model):
        step, value = bad[0]
        kind = "NaN" if math.isnan(value) else "infinite"
        recorded = training.totals(model)[label].steps
        before = max((at for at in recorded if at < step), default=step)
        gap = f" (not recorded since {training.steps[before]})" if step - before > 1 else ""
        when = f"{training.steps[step]}{gap}{_more(bad)}"
        yield f"{WORDS.get(label, label)} became {kind} at {when}"


def _bad_values(
    training: TrainingSeries, model: str
) -> Iterator[tuple[str, list[tuple[int, float]]]]:
    """Yield the label of each quantity that became NaN or infinite, with these values by step."""
    totals = training.totals(model)
    skipped = totals.get("skipped", Series())
    skipped_steps = {
        step for step, value in zip(skipped.steps, skipped.values, strict=True) if value
    }
    for label in ROWS:
        series = totals.get(label, Series())
        bad = [
            (step, value)
            for step, value in zip(series.steps, series.values, strict=True)
            if not math.isfinite(value) and not (label != "loss" and step in skipped_steps)
        ]
        if bad:
            yield label, bad


def _spikes(training: TrainingSeries, model: str) -> Iterator[str]:
    """Yield the first value that is far above those before it."""
    totals = training.totals(model)
    for label, factor in SPIKES.items():
        series = totals.get(label, Series())
        spikes = list(_far_above(series, factor))
        if spikes:
            step, ratio = spikes[0]
            yield (
                f"{WORDS[label]} spike at {training.steps[step]}: {ratio:.3g} times the median of "
                f"the {WINDOW} steps before{_more(spikes)}"
            )


def _far_above(series: Series, factor: float) -> Iterator[tuple[int, float]]:
    """Yield the step of each spike, and how many times the median before it is."""
    values = series.values
    for index in range(WINDOW, len(values)):
        before = values[index - WINDOW : index]
        value = values[index]
        if not value > _ABOVE_LARGEST * max(before) or not all(map(math.isfinite, before)):
            continue
        middle = median(before)
        if middle > 0 and math.isfinite(value) and value > factor * middle:
            yield series.steps[index], value / middle


def _vanished_gradients(training: TrainingSeries, model: str) -> Iterator[str]:
    """Yield the modules whose gradient has become a negligible part of the total."""
    total = training.totals(model).get("grad_norm", Series())
    total_at = dict(zip(total.steps, total.values, strict=True))
    lines = []
    for module, series in training.modules(model, "grad_norm").items():
        since = _lasts_since(
            series, lambda step, value: value < VANISHED * total_at.get(step, math.nan)
        )
        if since is not None:
            lines.append(
                f"gradient of `{module}` below {VANISHED:.0e} of the total "
                f"from {training.steps[since]} on".replace("e-0", "e-")
            )
    yield from _shortened(lines, "the gradients of")


def _dead_units(training: TrainingSeries, model: str) -> Iterator[str]:
    """Yield the modules most of whose units no sample activates any more."""
    lines = []
    for module, series in training.modules(model, "dead").items():
        since = _lasts_since(series, lambda step, value: value >= DEAD)
        if since is not None:
            lines.append(
                f"{math.floor(100 * series.values[-1])} % of the units of `{module}` are dead, "
                f"{100 * DEAD:.0f} % or more from {training.steps[since]} on"
            )
    yield from _shortened(lines, "units of")


def _lasts_since(series: Series, is_bad: Callable[[int, float], bool]) -> int | None:
    """Return the step since which all values of a module are bad; None if there are too few."""
    since, count = None, 0
    for step, value in zip(reversed(series.steps), reversed(series.values), strict=True):
        if not is_bad(step, value):
            break
        since, count = step, count + 1
    return since if count >= _LASTING_VALUES else None


def _shortened(lines: list[str], what: str) -> Iterator[str]:
    """Yield the lines of the first modules, and how many more there are."""
    yield from lines[:_MAX_MODULES]
    if len(lines) > _MAX_MODULES:
        yield f"{what} {plural(len(lines) - _MAX_MODULES, 'further module')}, too"


def _scale_collapse(training: TrainingSeries, model: str) -> Iterator[str]:
    """Yield that the loss scale keeps falling; while it is searched for at first, it may."""
    values = training.totals(model).get("loss_scale", Series()).values
    last = values[-SCALE_WINDOW - 1 :]
    falls = sum(after < before for before, after in pairwise(last))
    is_search = len(values) <= SCALE_WINDOW and not (values and values[-1] < 1)
    if falls >= SCALE_FALLS and not is_search:
        yield f"loss scale fell {falls} times in the last {len(last) - 1} steps"


def _more(found: list[tuple[int, float]]) -> str:
    return f", and in {plural(len(found) - 1, 'more step')}" if len(found) > 1 else ""


_RULES: tuple[Callable[[TrainingSeries, str], Iterator[str]], ...] = (
    _nonfinite,
    _spikes,
    _vanished_gradients,
    _dead_units,
    _scale_collapse,
)
