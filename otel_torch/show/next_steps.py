"""What to do about a recording: the table of what is wrong with it, and of the steps after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from otel_torch.process.console import as_given
from otel_torch.rendering.next_step import NextStep, beside, record
from otel_torch.show.overview import Overview
from otel_torch.show.training.trouble import first_nonfinite, troubles

_ZOOM = "record again, and look into what makes the first NaN or Inf"
_SHORTEN = "record again, every tenth step, which takes a tenth of the room"
_WATCH = "if the program still runs, watch it"
_DRAW = "see the quantities of the training by step"


class _Shown(NamedTuple):
    """An overview, and what the commands call its recording: a file, or a folder of ranks."""

    overview: Overview
    recording: str


def next_steps(overview: Overview, recording: str | None = None) -> list[NextStep]:
    """Return what to do about a recording, in order; empty if nothing is wrong with it.

    Args:
        recording: The folder that holds the recording beside those of other ranks, if it does.
    """
    shown = _Shown(overview, as_given(recording or overview.selection.path))
    return [step for applies, plan in _PLANS if applies(shown) for step in plan(shown)]


def _has_unexplained_nonfinite(shown: _Shown) -> bool:
    overview = shown.overview
    settings = overview.meta.get("settings", {})
    is_bad = overview.first_bad is not None or first_nonfinite(overview.selection.training)
    return bool(is_bad) and settings.get("OTEL_TORCH_ON_NONFINITE") != "zoom"


def _has_troubles(shown: _Shown) -> bool:
    return bool(troubles(shown.overview.selection.training, shown.overview.laws))


def _zoom(shown: _Shown) -> list[NextStep]:
    again = beside(shown.recording, "zoom")
    show = NextStep(
        ["otel-torch", "show", again], _ZOOM, "a first line with the operation and its line of code"
    )
    return [record("program", again, _ZOOM, {"OTEL_TORCH_ON_NONFINITE": "zoom"}), show]


def _shorten(shown: _Shown) -> list[NextStep]:
    again = beside(shown.recording, "whole")
    return [record("program", again, _SHORTEN, {"OTEL_TORCH_STEPS": "*/10"})]


def _watch(shown: _Shown) -> list[NextStep]:
    expects = "a live view that ends with the run"
    return [NextStep(["otel-torch", "watch", shown.recording], _WATCH, expects)]


def _draw(shown: _Shown) -> list[NextStep]:
    page = f"{beside(shown.recording, 'page', is_folder=True)}.html"
    words = ["otel-torch", "show", shown.recording, "--html", page]
    return [NextStep(words, _DRAW, "a page that opens without a network")]


# Every line that applies adds its steps.
_PLANS: tuple[tuple[Callable[[_Shown], bool], Callable[[_Shown], list[NextStep]]], ...] = (
    (_has_unexplained_nonfinite, _zoom),
    (lambda shown: bool(shown.overview.meta.get("writing_ended")), _shorten),
    (lambda shown: shown.overview.meta.get("ended_cleanly") is False, _watch),
    (_has_troubles, _draw),
)
