"""`otel-torch bisect`: two commands, run as often as needed, and the lines that are at fault."""

from __future__ import annotations

import argparse
import re
from functools import partial
from pathlib import Path

from otel_torch.bisecting.bisection import Bisection
from otel_torch.bisecting.processes import CommandPrograms
from otel_torch.bisecting.search import Options, bisect_programs
from otel_torch.bisecting.text import render_bisection
from otel_torch.cli.bisect_runs import (
    close_runs,
    ends_early,
    given_options,
    make_teller,
    print_answer,
    run_folder,
    run_options,
)
from otel_torch.cli.bisect_versions import (
    add_version_arguments,
    asks_for_versions,
    run_versions,
)
from otel_torch.cli.diff import parse_tolerance
from otel_torch.cli.main import INTERRUPTED, BadInput
from otel_torch.cli.report_files import (
    add_report_files,
    report_files,
    write_report_files,
)
from otel_torch.cli.run import find_program
from otel_torch.rendering.next_step import NextStep
from otel_torch.rendering.progress import Progress
from otel_torch.rendering.writable import check_writable

_FOLDER = Path("otel-torch") / "bisect"
_USAGE = "otel-torch bisect [options] -- REFERENCE CMD… -- PORT CMD…"
_EPILOG = (
    "Example: otel-torch bisect -- python reference.py -- python port.py. Both run several times, "
    "each time with nothing but environment variables changed. Exit status: 0 the port "
    "matches the reference, 1 it diverges, 2 a command failed or nothing can be compared."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage, parser.epilog = _USAGE, _EPILOG
    narrower = parser.add_argument_group("what is compared")
    narrower.add_argument(
        "--step", metavar="N", type=int, help="record this step. Default: the first of each model"
    )
    narrower.add_argument(
        "--module",
        metavar="REGEX",
        type=_parse_pattern,
        help="only faults in modules with such a name, in either program",
    )
    narrower.add_argument(
        "--noise",
        choices=("auto", "on", "off"),
        default="auto",
        help="whether the reference also runs with noise, to learn how far rounding moves each "
        "value. Default: if it computes in a dtype coarser than float32",
    )
    narrower.add_argument(
        "--tolerance",
        metavar="ERROR",
        type=parse_tolerance,
        help="relative L2 error that always matches, such as 1e-4",
    )
    add_version_arguments(parser)
    runs = parser.add_argument_group("runs")
    runs.add_argument(
        "--timeout", metavar="SECONDS", type=float, help="end a run that takes longer, and stop"
    )
    runs.add_argument(
        "--within",
        metavar="SECONDS",
        type=float,
        help="answer with what is known by then",
    )
    runs.add_argument(
        "--out",
        metavar="FOLDER",
        type=Path,
        default=_FOLDER,
        help=f"where the recordings lie meanwhile. Default: {_FOLDER}",
    )
    runs.add_argument("--keep", action="store_true", help="leave the recordings there")
    runs.add_argument(
        "--resume",
        action="store_true",
        help="take over the runs that an earlier call with the same commands left there",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json", metavar="FILE", help="write one JSON object; - prints only that, to stdout"
    )
    output.add_argument("--html", metavar="FILE", help="write the answer as a page")
    add_report_files(output)
    parser.add_argument("commands", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _parse_pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None


def split_commands(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the two commands behind the options.

    Raises:
        BadInput: There are not two.

    >>> split_commands(["--", "python", "ref.py", "--", "python", "port.py"])
    (['python', 'ref.py'], ['python', 'port.py'])
    """
    commands: list[list[str]] = [[]]
    for word in words[1:] if words[:1] == ["--"] else words:
        if word == "--":
            commands.append([])
        else:
            commands[-1].append(word)
    if len(commands) != 2 or not all(commands):
        hint = " A command that holds -- itself goes into sh -c '…'." if len(commands) > 2 else ""
        raise BadInput(f"two commands are needed: {_USAGE}.{hint}")
    return commands[0], commands[1]


def _check_outputs(arguments: argparse.Namespace) -> None:
    json_file = None if arguments.json == "-" else arguments.json
    for output in (arguments.html, json_file, *report_files(arguments)):
        if output is not None:
            check_writable(Path(output))


def run(arguments: argparse.Namespace) -> int:
    """Run both commands as often as needed, and print the answer."""
    if asks_for_versions(arguments):
        return run_versions(arguments)
    reference, port = split_commands(arguments.commands)
    for command in (reference, port):
        find_program(command[0])
    _check_outputs(arguments)
    folder: Path = arguments.out
    options = Options(run_options(arguments), arguments.module)
    with (
        run_folder(folder, resumes=arguments.resume),
        Progress() as progress,
        ends_early(arguments.within) as came,
    ):
        programs = CommandPrograms(
            reference,
            port,
            folder,
            timeout=arguments.timeout,
            resumes=arguments.resume,
            tell=progress,
        )
        bisection = bisect_programs(programs, options, make_teller(progress))
    if bisection.verdict == "diverged":
        bisection.report.following = [_again(arguments, bisection, reference, port)]
    _write(arguments, bisection)
    status = close_runs(arguments, bisection)
    return INTERRUPTED if came else status


def _again(
    arguments: argparse.Namespace, bisection: Bisection, reference: list[str], port: list[str]
) -> NextStep:
    """Return the command to run once the faults are mended: the same one again."""
    are_proven = all(fault.proof == "proven" for fault in bisection.faults)
    options = given_options(
        {
            "--step": arguments.step,
            "--module": arguments.module and arguments.module.pattern,
            "--noise": None if arguments.noise == "auto" else arguments.noise,
            "--tolerance": arguments.tolerance,
        }
    )
    return NextStep(
        ["otel-torch", "bisect", *options, "--", *reference, "--", *port],
        f"{'mend' if are_proven else 'check'} the lines of the port, and run this again",
        "status 0: verdict match, or the next faults",
    )


def _write(arguments: argparse.Namespace, bisection: Bisection) -> None:
    print_answer(arguments, bisection, partial(render_bisection, bisection))
    write_report_files(arguments, bisection.report, "bisect")
    if arguments.html and bisection.verdict != "incomparable":
        from otel_torch.bisecting.page import write_page

        write_page(bisection, Path(arguments.html))
