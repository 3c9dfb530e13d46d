"""`otel-torch diff`: its arguments, its exit status, and where its output goes."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from otel_torch.cli.remote_arguments import folder_or_url, path_or_url
from otel_torch.cli.report_files import (
    add_report_files,
    print_text,
    report_files,
    write_json,
    write_report_files,
)
from otel_torch.parity.diff import diff, name_files_as_given
from otel_torch.parity.finding import Report
from otel_torch.process.console import say
from otel_torch.recording.isolation_pairing import pairing_file
from otel_torch.rendering.progress import Progress
from otel_torch.rendering.table import supports_color, terminal_size
from otel_torch.rendering.writable import check_writable

# by verdict
EXIT_STATUS = {"match": 0, "diverged": 1, "incomparable": 2, "partial": 2}
_EPILOG = (
    "Record both programs with OTEL_TORCH_ENABLED=1 OTEL_TORCH_CAPTURE=parity. Exit status: 0 the "
    "port matches the reference, 1 it diverges, 2 bad input, nothing to compare, or only a part of "
    "what was computed."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "otel-torch diff [options] REFERENCE PORT\n"
        "       otel-torch diff [options] RECORDING --models REFERENCE PORT"
    )
    parser.epilog = _EPILOG
    parser.add_argument(
        "reference",
        metavar="REFERENCE",
        type=path_or_url,
        help="recording of the reference: a file, or a folder with the recordings of all ranks",
    )
    port = parser.add_argument(
        "port", metavar="PORT", type=path_or_url, help="recording of the port, likewise"
    )
    tolerances = parser.add_argument_group("tolerances")
    tolerances.add_argument(
        "--noise",
        metavar="RECORDING",
        type=path_or_url,
        help="a second recording of the reference, made with OTEL_TORCH_NOISE=1: errors up to a "
        "multiple of its rounding noise match. Default: a constant for each dtype",
    )
    tolerances.add_argument(
        "--golden",
        metavar="RECORDING",
        type=path_or_url,
        help="the same computation in higher precision, such as the reference in float64: says "
        "which of the two is nearer to it, module by module",
    )
    tolerances.add_argument(
        "--rtol",
        metavar="ERROR",
        type=parse_tolerance,
        help="relative L2 error that replaces the constants of the dtypes, such as 1e-4",
    )
    tolerances.add_argument(
        "--bitwise",
        action="store_true",
        help="compare two runs of one program and name the first tensor that is not identical in "
        "every bit; record both with OTEL_TORCH_STATS=hash,shape,dtype",
    )
    parser.add_argument(
        "--on",
        metavar="CLUSTER",
        help="compare the ranks of folders on a cluster of Ray whose machines see the same files: "
        "ray, or ray://HOST:PORT. Default: processes of this machine",
    )
    tolerances.add_argument(
        "--quantized",
        action="store_true",
        help="the port computes in lower precision on purpose: rank its modules by the error that "
        "each adds. Default: where weights of 8 bits or fewer say so",
    )
    pairing = parser.add_argument_group("pairing")
    pairing.add_argument(
        "--warm-ups",
        action="store_true",
        help="compare the forwards of phase warmup, too, which frameworks run on dummy inputs",
    )
    pairing.add_argument(
        "--models",
        metavar=("REFERENCE", "PORT"),
        nargs=2,
        action=_Models,
        port=port,
        help="compare only this model of the reference's recording with this one of the port's. "
        "Without PORT, both are of one recording",
    )
    pairing.add_argument(
        "--map",
        metavar="FILE",
        help="map of names (TOML); overrides the pairs found automatically",
    )
    pairing.add_argument(
        "--save-map",
        metavar="FILE",
        help="write the pairs found as a map, to correct and pass to --map",
    )
    zoom = parser.add_argument_group("a closer look")
    zoom.add_argument(
        "--tensors",
        metavar=("REFERENCE", "PORT"),
        nargs=2,
        type=folder_or_url,
        help="the OTEL_TORCH_TENSORS folders of both runs, which show where in its tensor a "
        "finding is, and often what it is. Default: where the recordings say",
    )
    zoom.add_argument(
        "--save-isolation",
        metavar="FOLDER",
        help="write the pairing into the folder of the reference's tensors, for a run of the port "
        "with OTEL_TORCH_ISOLATE",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--html", metavar="FILE", help="write the report as one page that opens offline"
    )
    output.add_argument(
        "--json", metavar="FILE", help="write one JSON object; - prints only that, to stdout"
    )
    add_report_files(output)
    output.add_argument(
        "--all", action="store_true", help="show full lists, and every compared pair of tensors"
    )


class _Models(argparse.Action):
    """The option `--models`, with which one recording is enough."""

    def __init__(self, *, port: argparse.Action, **options: Any) -> None:
        super().__init__(**options)
        self._port = port

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        self._port.required = False
        setattr(namespace, self.dest, tuple(values))


def parse_tolerance(text: str) -> float:
    """Return a relative error, for argparse."""
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
    """Compare, print the report and write the files. Return the exit status of the verdict."""
    _check_outputs(arguments)
    options = {
        name: getattr(arguments, name)
        for name in (
            "models",
            "noise",
            "golden",
            "map",
            "save_map",
            "rtol",
            "save_isolation",
            "tensors",
            "bitwise",
            "warm_ups",
            "quantized",
            "on",
        )
    }
    try:
        with Progress() as progress:
            report = diff(arguments.reference, arguments.port, progress=progress, **options)
    except (ValueError, OSError) as error:
        # An older file that says "match" must not survive as today's verdict.
        _write_files(arguments, _incomparable(arguments, error))
        raise
    # Print first: the result is visible even if writing a file fails.
    if arguments.json != "-":
        from otel_torch.parity.report.text import DEFAULT_WIDTH, render_text

        terminal = terminal_size(sys.stdout)
        width = min(terminal.columns, DEFAULT_WIDTH) if terminal else DEFAULT_WIDTH
        color = supports_color(sys.stdout)
        print_text(render_text(report, color=color, show_all=arguments.all, width=width))
    _write_files(arguments, report)
    if arguments.html:
        from otel_torch.parity.report.html import write_html

        write_html(report, Path(arguments.html))
    if EXIT_STATUS[report.verdict] == 2:
        say(f"{report.verdict}: {report.reason}")
    return EXIT_STATUS[report.verdict]


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Raise OSError for an output that cannot be written, before the long comparison."""
    outputs = [arguments.html, arguments.save_map, *report_files(arguments)]
    if arguments.json != "-":
        outputs.append(arguments.json)
    if arguments.save_isolation is not None:
        outputs.append(pairing_file(arguments.save_isolation))
    for output in outputs:
        if output is not None:
            check_writable(Path(output))


def _incomparable(arguments: argparse.Namespace, error: ValueError | OSError) -> Report:
    if isinstance(error, OSError):
        reason = f"{error.filename}: {error.strerror}"
    else:
        reason = " ".join(str(error).split())
    port = arguments.port or arguments.reference
    report = Report("incomparable", reason, reference=arguments.reference, port=port)
    name_files_as_given(report)
    return report


def _write_files(arguments: argparse.Namespace, report: Report) -> None:
    write_report_files(arguments, report, "diff")
    if arguments.json:
        write_json(arguments.json, report.as_json(arguments.all))
