"""`otel-torch diff`: where a port first goes wrong, as a screen of text, as JSON, as HTML, and as a function."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

from otel_torch.console import say
from otel_torch.parity.compare import compare
from otel_torch.parity.finding import Report
from otel_torch.table import colourful, write

_STATUS = {"match": 0, "diverged": 1, "incomparable": 2}


def diff(
    reference: str | Path,
    port: str | Path,
    *,
    noise: str | Path | None = None,
    map: str | Path | None = None,
    rtol: float | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Compare a port's recording with its reference's; the result holds what `otel-torch diff --json` prints.

    reference, port: recordings, made with OTEL_TORCH_CAPTURE=parity (others are compared by statistics alone, which is
    weaker, and said), or folders of the recordings of all ranks. noise: the reference, recorded once more with
    OTEL_TORCH_NOISE. map: a TOML file that says what corresponds. rtol: a relative L2 error instead of the constants of
    the dtypes. progress: is called with a short text now and then. Raises ValueError, of one line, for bad input.
    """
    return compare(reference, port, noise=noise, rtol=rtol, progress=progress)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `otel-torch diff`."""
    parser.add_argument("reference", metavar="REFERENCE", help="the recording of the reference")
    parser.add_argument("port", metavar="PORT", help="the recording of the port")
    parser.add_argument("--noise", metavar="RECORDING", help="the reference recorded again with OTEL_TORCH_NOISE=1")
    parser.add_argument("--map", metavar="FILE", help="TOML: which names correspond; overrides what is found")
    parser.add_argument("--save-map", metavar="FILE", help="write what was found to correspond, ready to edit")
    parser.add_argument("--rtol", metavar="ERROR", type=_tolerance, help="relative L2 error instead of the dtypes' constants")
    parser.add_argument("--html", metavar="FILE", help="write a self-contained report")
    parser.add_argument("--json", metavar="FILE", help="write one JSON object; - for stdout, and no other text there")
    parser.add_argument("--all", action="store_true", help="list everything, every compared pair too")


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a relative error; use a number above 0, such as 1e-4")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Compare and show. 0 for a match, 1 if the port diverges, 2 if the two cannot be compared."""
    with _Progress() as progress:
        report = diff(
            arguments.reference, arguments.port, noise=arguments.noise, map=arguments.map, rtol=arguments.rtol, progress=progress
        )
    if arguments.html:
        from otel_torch.parity.html import write_html

        write_html(report, Path(arguments.html))
    if arguments.json:
        text = json.dumps(report.as_json(arguments.all), allow_nan=False)
        if arguments.json == "-":
            write(sys.stdout, text)
        else:
            Path(arguments.json).write_text(text + "\n", encoding="utf-8")
    if arguments.json != "-":
        from otel_torch.parity.report import render

        write(sys.stdout, render(report, colour=colourful(sys.stdout), everything=arguments.all))
    if report.verdict == "incomparable":
        say(f"incomparable: {report.reason}")
    return _STATUS[report.verdict]


class _Progress:
    """Says in a terminal how far it is, on one line that is gone at the end; says nothing in a pipe."""

    def __init__(self) -> None:
        self._shown = False
        self._terminal = sys.stderr.isatty()

    def __call__(self, text: str) -> None:
        if self._terminal:
            self._shown = True
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
