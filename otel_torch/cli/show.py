"""`otel-torch show`: its arguments, and the choice between a table, a page and a trace."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from otel_torch.cli.main import BadInput
from otel_torch.cli.remote_arguments import folder_or_url, path_or_url
from otel_torch.process.console import say
from otel_torch.recording.recordings_folder import recordings_of
from otel_torch.rendering.progress import Progress
from otel_torch.rendering.table import write_line
from otel_torch.rendering.writable import check_writable
from otel_torch.settings import BadValue, NumberSet
from otel_torch.show.selection import Selection


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recordings",
        metavar="RECORDING",
        nargs="+",
        type=path_or_url,
        help="a recording (.jsonl), a folder with those of all ranks, or a trace of FastVideo; "
        "--html lays several on each other",
    )
    parser.add_argument("--module", metavar="REGEX", help="only modules whose name matches")
    parser.add_argument(
        "--step",
        metavar="LIST",
        help="only these steps (0,2,10-20,*/10), with one line for each record",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    pictures = parser.add_argument_group("pictures instead of the table")
    pictures.add_argument(
        "--html", metavar="FILE", help="write one HTML page that opens without a network"
    )
    pictures.add_argument(
        "--chrome-trace",
        metavar="FILE",
        help="write the run's spans as a trace for Perfetto or chrome://tracing",
    )
    pictures.add_argument(
        "--traces",
        metavar="PATH",
        action="append",
        type=folder_or_url,
        default=[],
        help="the run's spans: a traces.jsonl of OTEL_TORCH_OTLP_FILE, or a folder of them; "
        "repeat for further ranks. Default: search next to the recording, and where the run "
        "wrote them",
    )
    pictures.add_argument(
        "--counters",
        metavar="STATISTIC",
        action="append",
        default=[],
        help="with --chrome-trace: draw this statistic of each tensor as a counter; repeat for "
        "further statistics",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the table, or write the files that were requested instead."""
    try:
        modules = re.compile(arguments.module) if arguments.module else None
    except re.error as error:
        text = f"--module {arguments.module!r} is not a regular expression: {error}"
        raise BadInput(text) from None
    try:
        steps = _parse_steps(arguments.step) if arguments.step else None
    except BadValue as error:
        raise BadInput(f"--step {arguments.step!r}: {error}") from None
    if arguments.counters and not arguments.chrome_trace:
        raise BadInput("--counters needs a trace to draw in: give --chrome-trace FILE too")
    if arguments.json and (arguments.html or arguments.chrome_trace):
        raise BadInput("--json prints, --html and --chrome-trace write files: ask for one of them")
    paths = [path for name in arguments.recordings for path in recordings_of(name)]
    is_folder = len(arguments.recordings) == 1 < len(paths)
    if len(paths) > 1 and arguments.chrome_trace:
        raise BadInput(f"--chrome-trace draws one recording: give one of {', '.join(paths)}")
    if len(paths) > 1 and not (arguments.html or is_folder):
        raise BadInput(
            "several recordings are shown on one page: give --html FILE, and no --chrome-trace"
        )
    selections = [Selection(path, modules, steps) for path in paths]
    with Progress() as progress:
        return _show(arguments, selections, progress)


def _parse_steps(text: str) -> NumberSet:
    return NumberSet.parse(text, report=lambda message: say(f"--step: {message}"))


def _show(
    arguments: argparse.Namespace, selections: Sequence[Selection], progress: Progress
) -> int:
    """Print or write what was requested; each renderer is imported only when it is used."""
    selection = selections[0]
    if not (arguments.html or arguments.chrome_trace):
        if len(selections) > 1:
            from otel_torch.show.overview_ranks import print_ranks

            return print_ranks(arguments.recordings[0], selections, arguments.json, progress)
        from otel_torch.show.overview_table import print_overview

        return print_overview(selection, arguments.json, progress)
    targets = [Path(name).expanduser() for name in (arguments.html, arguments.chrome_trace) if name]
    for target in targets:
        check_writable(target)  # before the long read
    traces = [Path(name).expanduser() for name in arguments.traces]
    messages = []
    if arguments.html:
        from otel_torch.show.page import write_page

        messages.append(write_page(selections, targets[0], traces, progress))
    if arguments.chrome_trace:
        from otel_torch.show.chrome_trace import write_chrome_trace

        # A selection counts what it reads, so the trace needs its own.
        selection = Selection(selection.path, selection.modules, selection.steps)
        messages.append(
            write_chrome_trace(selection, targets[-1], traces, arguments.counters, progress)
        )
    write_line(sys.stdout, "\n".join(messages))
    return 0
