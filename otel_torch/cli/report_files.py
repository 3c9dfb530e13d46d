"""The output of commands that compare: text, JSON, and files for other tools.

The formats for other tools are a table, so that every command that compares has all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from otel_torch.parity.finding import Report
from otel_torch.rendering.table import write_line


def _write_junit(report: Report, path: Path, command: str) -> None:
    from otel_torch.parity.report.junit import write_junit

    write_junit(report, path, command)


def _write_sarif(report: Report, path: Path, command: str) -> None:
    from otel_torch.parity.report.sarif import write_sarif

    write_sarif(report, path, command)


_FORMATS: dict[str, tuple[Callable[[Report, Path, str], None], str]] = {
    "junit": (_write_junit, "write the compared modules as test cases (JUnit XML)"),
    "sarif": (_write_sarif, "write the findings as remarks on lines of the port (SARIF 2.1.0)"),
}


def add_report_files(group: argparse._ArgumentGroup) -> None:
    for name, (_, help_text) in _FORMATS.items():
        group.add_argument(f"--{name}", metavar="FILE", help=help_text)


def report_files(arguments: argparse.Namespace) -> Iterator[str]:
    yield from filter(None, (getattr(arguments, name) for name in _FORMATS))


def write_report_files(arguments: argparse.Namespace, report: Report, command: str) -> None:
    """Write the files that were asked for.

    Raises:
        OSError: If one cannot be written.
    """
    for name, (write, _) in _FORMATS.items():
        if path := getattr(arguments, name):
            write(report, Path(path), command)


def write_json(file: str, content: dict[str, Any]) -> None:
    """Write an answer as one JSON object, to stdout if the file is `-`."""
    text = json.dumps(content, allow_nan=False)
    if file == "-":
        print_text(text)
    else:
        Path(file).write_text(text + "\n", encoding="utf-8")


def print_text(text: str) -> None:
    """Print the text. A closed pipe (`| head`) does not change the exit status."""
    try:
        write_line(sys.stdout, text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
