"""Draws the state of a recording: as lines for a terminal, as one line for a pipe, as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from otel_torch.laws.series import quantity_of
from otel_torch.records import json_safe
from otel_torch.rendering.table import Line, escape, format_table, paint, shorten
from otel_torch.rendering.words import plural
from otel_torch.show.live import LiveRun
from otel_torch.show.training.trouble import WORDS
from otel_torch.show.watched import WatchedRecording
from otel_torch.training_quantities import split_label

SCHEMA = "otel_torch.watch/1"

_BLOCKS = "▁▂▃▄▅▆▇█"
# lines of one model's quantities, of changes, and of regions
_MAX_QUANTITIES, _MAX_CHANGES, _MAX_REGIONS = 10, 5, 5
# in a single line of text
BRIEF = ("loss", "lr", "grad_norm")


def view_lines(watched: WatchedRecording, *, width: int, color: bool) -> list[str]:
    run, name = watched.run, str(watched.path)
    state = f"{watched.state}, {watched.note}" if watched.note else watched.state
    lines = [
        paint(shorten(escape(name), max(width - 2 - len(state), 10)), "bold", color) + f": {state}",
        shorten(", ".join(_progress(watched)), width),
        "",
    ]
    for model, health in run.training.items():
        lines.append(paint(shorten(escape(f"training of {model}"), width), "bold", color))
        labels = [label for label in health.values if quantity_of(label) in WORDS]
        for label in sorted(labels, key=_rank)[:_MAX_QUANTITIES]:
            value = health.values[label]
            text = shorten(escape(f"{words_of(label):<24}"), 24) + f" {value:>11.5g}"
            if label == "loss" and width > len(text) + 10:
                text += "  " + sparkline(list(health.losses)[2 + len(text) - width :])
            lines.append(paint(text[:width], None if math.isfinite(value) else "red", color))
        if laws := _broken(health.values):
            lines.append(paint(shorten(escape(f"breaks {laws}"), width), "red", color))
        lines.append("")
    if run.nonfinite:
        text = f"{plural(run.nonfinite, 'record')} with NaN or Inf, the first: "
        lines += [paint(shorten(escape(text + run.first_nonfinite), width), "red", color)]
        worst, count = run.worst_tensor()
        if worst:
            text = f"most of them in {worst}: {count:,}"
            lines.append(paint(shorten(escape(text), width), "red", color))
        lines.append("")
    if changes := run.largest_changes(_MAX_CHANGES):
        cells = [
            Line([change.where, f"{change.before:.4g}", f"{change.now:.4g}", f"{change.ratio:.3g}"])
            for change in changes
        ]
        header = ["largest changes", "before", "now", "times"]
        lines += format_table(header, cells, color=color, width=width).splitlines()
    if regions := _slowest_regions(watched.metadata):
        cells = [
            Line([region, f"{times.get('count', 0):,}", *_seconds(times)])
            for region, times in regions
        ]
        header = ["slowest regions", "count", "total s", "longest s"]
        lines += ["", *format_table(header, cells, color=color, width=width).splitlines()]
    if run.damaged:
        lines += ["", shorten(escape(_damage(run)), width)]
    if run.unfollowed:
        text = f"changes not seen: {plural(run.unfollowed, 'record')} of too many tensors"
        lines += ["", shorten(text, width)]
    return lines


def brief_lines(watched: WatchedRecording) -> list[str]:
    run, parts = watched.run, _progress(watched)
    for model, health in run.training.items():
        prefix = f"{model} " if len(run.training) > 1 else ""
        parts += [
            f"{prefix}{words_of(label)} {value:.5g}"
            for label, value in health.values.items()
            if quantity_of(label) in BRIEF
        ]
        if laws := _broken(health.values):
            parts.append(f"{prefix}breaks {laws}")
    if run.nonfinite:
        parts.append(f"{run.nonfinite:,} with NaN or Inf, the first: {run.first_nonfinite}")
    if run.damaged:
        parts.append(_damage(run))
    return [escape(f"{watched.state}: " + ", ".join(parts))]


def view_json(watched: WatchedRecording) -> dict[str, Any]:
    """Return the state as a JSON object; NaN and Inf are strings, as in a recording."""
    run = watched.run
    return {
        "schema": SCHEMA,
        "recording": str(watched.path),
        "rank": watched.metadata.get("rank"),
        "state": watched.state,
        "records": run.records,
        "damaged": run.damaged,
        "first_damage": run.first_damage or None,
        "step": None if run.step is None else run.step._asdict(),
        "steps_per_second": watched.pace,
        "training": {
            model: {label: json_safe(value) for label, value in health.values.items()}
            for model, health in run.training.items()
        },
        "nonfinite": {
            "records": run.nonfinite,
            "first": run.first_nonfinite or None,
            "most_in": run.worst_tensor()[0] or None,
        },
        "changes": [dataclasses.asdict(change) for change in run.largest_changes(_MAX_CHANGES)],
        "regions": dict(_slowest_regions(watched.metadata)),
    }


def sparkline(values: Iterable[float]) -> str:
    """Draw values as a line of blocks, from the least to the largest; NaN and Inf as `!`.

    >>> sparkline([1.0, 0.5, float("nan"), 0.0])
    '█▅!▁'
    """
    values = list(values)
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        _BLOCKS[round((value - low) * scale)] if math.isfinite(value) else "!" for value in values
    )


def _progress(watched: WatchedRecording) -> list[str]:
    parts = [plural(watched.run.records, "record")]
    if watched.run.step is not None:
        parts.append(str(watched.run.step))
    if (pace := watched.pace) is not None:
        parts.append(f"{pace:.3g} steps a second")
    return parts


def _slowest_regions(metadata: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the regions with the longest total times, as the run wrote them down."""
    timed = [item for item in metadata.get("regions", {}).items() if item[1].get("host_total_s")]
    return sorted(timed, key=lambda item: -item[1]["host_total_s"])[:_MAX_REGIONS]


def _seconds(times: dict[str, Any]) -> list[str]:
    """Return total and longest host time of a region."""
    seconds = (times.get("host_total_s"), times.get("host_longest_s"))
    return ["" if each is None else f"{each:.4g}" for each in seconds]


def _damage(run: LiveRun) -> str:
    return f"{plural(run.damaged, 'damaged line')} left out, the first: {run.first_damage}"


def _broken(values: Iterable[str]) -> str:
    """Return the laws of training that a run has said to be broken, by the labels of its values.

    >>> _broken(["loss", "broken_law[same_batch]"])
    'same_batch'
    """
    names = (split_label(label) for label in values)
    return ", ".join(group for quantity, group in names if quantity == "broken_law" and group)


def words_of(label: str) -> str:
    quantity, group = split_label(label)
    words = WORDS.get(quantity, quantity)
    return words if group is None else f"{words} [{group}]"


def _rank(label: str) -> int:
    return list(WORDS).index(quantity_of(label))
