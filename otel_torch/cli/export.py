"""`otel-torch export`: a recording for the tools that people have already."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from otel_torch.cli.remote_arguments import path_or_url
from otel_torch.exporting.exported_recording import ExportError, exported_recordings
from otel_torch.exporting.targets import TARGETS, check_targets, write_target
from otel_torch.process.console import say
from otel_torch.rendering.progress import Progress
from otel_torch.rendering.table import escape, write_line

SCHEMA = "otel_torch.export/1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Give one target or several. Exit status: 0 written, 2 bad input."
    parser.add_argument(
        "recording",
        metavar="RECORDING",
        type=path_or_url,
        help="a recording (.jsonl), or a folder with those of all ranks",
    )
    targets = parser.add_argument_group("targets")
    for name, target in TARGETS.items():
        targets.add_argument(f"--{name}", metavar=target.metavar, help=target.text)
    parser.add_argument(
        "--json", action="store_true", help="print what was written as one JSON object"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write what was asked for, and say what that is."""
    chosen = {name: getattr(arguments, name) for name in TARGETS}
    destinations = {name: value for name, value in chosen.items() if value is not None}
    if not destinations:
        options = ", ".join(f"--{name} {target.metavar}" for name, target in TARGETS.items())
        raise ExportError(f"nothing to write: give a target ({options})")
    check_targets(destinations)
    warnings: dict[str, None] = {}
    with Progress() as progress:
        recordings = exported_recordings(arguments.recording, warnings.setdefault, progress)
        written = [
            write_target(name, recordings, destination)
            for name, destination in destinations.items()
        ]
    for warning in warnings:
        say(warning)
    if arguments.json:
        answer = {"schema": SCHEMA, "recording": arguments.recording, "written": written}
        write_line(sys.stdout, json.dumps(answer | {"warnings": list(warnings)}))
    else:
        write_line(sys.stdout, "\n".join(map(_describe, written)))
    return 0


def _describe(written: dict[str, Any]) -> str:
    """Return what was written in a line.

    >>> _describe({"target": "pprof", "destination": "a.pb.gz", "recordings": 1, "samples": 1200})
    'a.pb.gz: pprof, recordings 1, samples 1,200'
    """
    counts = [
        f"{name} {len(count) if isinstance(count, list) else count:,}"
        for name, count in written.items()
        if name not in ("target", "destination")
    ]
    return escape(f"{written['destination']}: {', '.join([written['target'], *counts])}")
