"""The arguments of `otel-torch show`, and which of its three answers is given: a table, a page, a
trace.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from otel_torch.console import say
from otel_torch.recording.reader import RecordingError
from otel_torch.rendering.progress import Progress
from otel_torch.rendering.writable import check_writable
from otel_torch.settings import BadValue, NumberSet
from otel_torch.show.selection import Selection


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `otel-torch show`."""
    parser.add_argument(
        "recording",
        metavar="RECORDING",
        help="a recording (.jsonl), also one of FastVideo's own trace",
    )
    parser.add_argument(
        "--module", metavar="REGEX", help="only modules in whose name this is found"
    )
    parser.add_argument(
        "--step",
        metavar="LIST",
        help="only these steps (0,2,10-20,*/10), each record on a line of its own",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    pictures = parser.add_argument_group("pictures, in place of the table")
    pictures.add_argument(
        "--html", metavar="FILE", help="write one page with all of it that opens without a network"
    )
    pictures.add_argument(
        "--chrome-trace",
        metavar="FILE",
        help="write the run's spans as a trace for Perfetto or chrome://tracing",
    )
    pictures.add_argument(
        "--traces", metavar="PATH", action="append", default=[],
        help="the run's spans: a traces.jsonl of OTEL_TORCH_OTLP_FILE, or a folder of such; again for another rank's. "
        "Found by themselves where they lie beside the recording, or where the run wrote them",
    )  # fmt: skip
    pictures.add_argument(
        "--counters", metavar="STATISTIC", action="append", default=[],
        help="with --chrome-trace: this statistic of each tensor as a counter, step by step; again for another",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Print the table, or write what was asked for in its place. Returns 0, or 2 after one line on
    stderr for bad input.
    """
    try:
        modules = re.compile(arguments.module) if arguments.module else None
    except re.error as error:
        say(f"--module {arguments.module!r} is not a regular expression: {error}")
        return 2
    try:
        steps = (
            NumberSet.parse(arguments.step, report=lambda message: say(f"--step: {message}"))
            if arguments.step
            else None
        )
    except BadValue as error:
        say(f"--step {arguments.step!r}: {error}")
        return 2
    if arguments.counters and not arguments.chrome_trace:
        say("--counters stand in a trace: give --chrome-trace FILE too")
        return 2
    if arguments.json and (arguments.html or arguments.chrome_trace):
        say(
            "--json is what is printed in place of the table; --html and --chrome-trace write files: ask for one of them"
        )
        return 2
    try:
        with Progress() as progress:
            return _show(arguments, Selection(arguments.recording, modules, steps), progress)
    except RecordingError as error:
        say(str(error))
        return 2


def _show(arguments: argparse.Namespace, selection: Selection, progress: Progress) -> int:
    """Give the answer that was asked for. Each is a module of its own, loaded only when it is the
    one.
    """
    if not (arguments.html or arguments.chrome_trace):
        from otel_torch.show.overview import print_overview

        return print_overview(selection, arguments.json, progress)
    targets = [Path(name).expanduser() for name in (arguments.html, arguments.chrome_trace) if name]
    for target in targets:
        check_writable(target)  # now, and not after a long reading
    traces = [Path(name).expanduser() for name in arguments.traces]
    said = []
    if arguments.html:
        from otel_torch.show.page import write_page

        said.append(write_page(selection, targets[0], traces, progress))
    if arguments.chrome_trace:
        from otel_torch.show.chrome_trace import write_chrome_trace

        again = Selection(selection.path, selection.modules, selection.steps)
        said.append(write_chrome_trace(again, targets[-1], traces, arguments.counters, progress))
    sys.stdout.write("\n".join(said) + "\n")
    return 0
