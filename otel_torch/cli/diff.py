"""`otel-torch diff`: where a port first goes wrong, as a screen of text, as JSON, as HTML, and as a
function.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

from otel_torch.console import say
from otel_torch.parity.breakdown import break_down_finding
from otel_torch.parity.compare import compare
from otel_torch.parity.finding import Report
from otel_torch.parity.mapping import load_map
from otel_torch.parity.naming import has_loader
from otel_torch.parity.pairing_finder import PairingFinder
from otel_torch.recording.isolation_pairing import pairing_file
from otel_torch.recording.metadata import read_metadata
from otel_torch.rendering.progress import Progress
from otel_torch.rendering.table import colourful, write
from otel_torch.rendering.writable import check_writable

_STATUS = {"match": 0, "diverged": 1, "incomparable": 2}


def diff(
    reference: str | Path,
    port: str | Path,
    *,
    noise: str | Path | None = None,
    map: str | Path | None = None,
    save_map: str | Path | None = None,
    rtol: float | None = None,
    progress: Callable[[str], None] = lambda text: None,
    save_isolation: str | Path | None = None,
) -> Report:
    """Compare a port's recording with its reference's; the result holds what `otel-torch diff
    --json` prints.

    reference, port: recordings, made with OTEL_TORCH_CAPTURE=parity (others are compared by
    statistics alone, which is weaker, and said), or folders of the recordings of all ranks. noise:
    the reference, recorded once more with OTEL_TORCH_NOISE. map: a TOML file that says what
    corresponds. save_map: where to write what was found to. rtol: a relative L2 error instead of
    the constants of the dtypes. progress: is called with a short text now and then. Raises
    ValueError, of one line, for bad input, and OSError for files that cannot be read or written.
    """
    for path in (reference, port, noise):
        if path is not None:
            os.stat(path)  # one that is not there is said before anything long begins
    said = None if map is None else load_map(map)
    pairing = None if save_isolation is None else PairingFinder()
    report = compare(
        reference,
        port,
        noise=noise,
        rtol=rtol,
        map=said,
        save_map=save_map,
        progress=progress,
        pairing=pairing,
    )
    if pairing is not None and save_isolation is not None:
        pairing.pairing().save(save_isolation)
    report.warnings[:0] = _look_again(reference, port, noise)
    return report


def _look_again(reference: str | Path, port: str | Path, noise: str | Path | None) -> list[str]:
    """What a person probably did not mean."""
    found = []
    if os.path.samefile(reference, port):
        found.append(f"{reference} and {port} are the same file: it cannot but match itself")
    if noise is not None:
        if os.path.samefile(reference, noise):
            found.append(
                f"{noise} is the reference itself: as its own noise it says that there is none"
            )
        elif (
            isinstance(settings := read_metadata(noise).get("settings"), dict)
            and "OTEL_TORCH_NOISE" not in settings
        ):
            found.append(
                f"{noise} does not say that it was recorded with OTEL_TORCH_NOISE: is it noise?"
            )
    if has_loader(read_metadata(reference)) and not has_loader(read_metadata(port)):
        found.append(
            f"{reference} carries a port's mapping of names and {port} does not: are the two exchanged?"
        )
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `otel-torch diff`."""
    parser.usage = "otel-torch diff [options] REFERENCE PORT"
    parser.epilog = (
        "Record both programs with OTEL_TORCH_ENABLED=1 OTEL_TORCH_CAPTURE=parity. Exit status: 0 the port computes what the "
        "reference does, 1 it does not, 2 bad input, or nothing that can be compared."
    )
    parser.add_argument(
        "reference",
        metavar="REFERENCE",
        help="the recording of the reference: a file, or the folder of all ranks",
    )
    parser.add_argument("port", metavar="PORT", help="the recording of the port, likewise")
    judging = parser.add_argument_group("what counts as a difference")
    judging.add_argument(
        "--noise", metavar="RECORDING",
        help="the reference, recorded once more with OTEL_TORCH_NOISE=1: no more than a multiple of what half an ulp does to a "
        "tensor is rounding. Without it constants of the dtypes decide",
    )  # fmt: skip
    judging.add_argument(
        "--rtol",
        metavar="ERROR",
        type=_tolerance,
        help="relative L2 error instead of these constants: 1e-4",
    )
    names = parser.add_argument_group("what corresponds to what")
    names.add_argument(
        "--map", metavar="FILE", help="a map (TOML) of names, which overrides what is found"
    )
    names.add_argument(
        "--save-map",
        metavar="FILE",
        help="write what was found as a map, to be corrected and given back",
    )
    zoom = parser.add_argument_group("a closer look")
    zoom.add_argument(
        "--tensors", metavar=("REFERENCE", "PORT"), nargs=2,
        help="the folders of OTEL_TORCH_TENSORS of both runs: say where in its tensor the first finding is",
    )  # fmt: skip
    zoom.add_argument(
        "--save-isolation", metavar="FOLDER",
        help="write into the folder of the reference's tensors what belongs where, for a run of the port with OTEL_TORCH_ISOLATE",
    )  # fmt: skip
    output = parser.add_argument_group("output")
    output.add_argument(
        "--html", metavar="FILE", help="write the report as one page that opens without a network"
    )
    output.add_argument(
        "--json",
        metavar="FILE",
        help="write one JSON object; - for stdout, and then nothing else there",
    )
    output.add_argument(
        "--all",
        action="store_true",
        help="everything: whole lists, and every compared pair of tensors",
    )


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a relative error; use a number above 0, such as 1e-4"
        )
    return value


def run(arguments: argparse.Namespace) -> int:
    """Compare and show. 0 for a match, 1 if the port diverges, 2 if the two cannot be compared."""
    pairing = None if arguments.save_isolation is None else pairing_file(arguments.save_isolation)
    for place in (
        arguments.html,
        arguments.json if arguments.json != "-" else None,
        arguments.save_map,
        pairing,
    ):
        if place is not None:
            check_writable(Path(place))  # now, and not after a long comparison
    given = {
        name: getattr(arguments, name)
        for name in ("noise", "map", "save_map", "rtol", "save_isolation")
    }
    try:
        with Progress() as progress:
            report = diff(arguments.reference, arguments.port, progress=progress, **given)
    except (ValueError, OSError) as error:
        # a file from yesterday that says "match" must not stay where a program looks for today's
        # verdict
        reason = (
            " ".join(str(error).split())
            if isinstance(error, ValueError)
            else f"{error.filename}: {error.strerror}"
        )
        report = Report("incomparable", reason, reference=arguments.reference, port=arguments.port)
        _write_json(arguments, report)
        raise
    # the screen first: whatever becomes of the files, the result is seen
    if arguments.json != "-":
        from otel_torch.parity.report import render

        _print(render(report, colour=colourful(sys.stdout), everything=arguments.all))
        if arguments.tensors and report.first is not None:
            _print("\n".join(break_down_finding(report.first, *arguments.tensors).lines()))
    _write_json(arguments, report)
    if arguments.html:
        from otel_torch.parity.html import write_html

        write_html(report, Path(arguments.html))
    if report.verdict == "incomparable":
        say(f"incomparable: {report.reason}")
    return _STATUS[report.verdict]


def _write_json(arguments: argparse.Namespace, report: Report) -> None:
    if arguments.json:
        text = json.dumps(report.as_json(arguments.all), allow_nan=False)
        if arguments.json == "-":
            _print(text)
        else:
            Path(arguments.json).write_text(text + "\n", encoding="utf-8")


def _print(text: str) -> None:
    """Print; a reader that has seen enough (`| head`) changes nothing about the exit status."""
    try:
        write(sys.stdout, text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
