"""`otel-torch import`: a reference that is not torch becomes a recording."""

from __future__ import annotations

import argparse

from otel_torch.process.console import say
from otel_torch.rendering.progress import Progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Make a recording of tensors that a program without torch dumped (.npy, .npz, "
        "safetensors), for `otel-torch diff`."
    )
    parser.epilog = (
        "The shortest manifest is a JSON list of the arrays' names in the order of execution, "
        "dump.json beside dump.npz. Exit status: 0 written, 2 bad input."
    )
    parser.add_argument(
        "manifest",
        metavar="MANIFEST",
        help="JSON or JSON lines that list the tensors in the order of execution; or an .npz file "
        "that was written in this order",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="the recording to write; default: NAME.recording.jsonl beside the manifest",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the recording and say where it is."""
    with Progress() as progress:
        from otel_torch.importing.importer import import_dump  # loads torch

        path, count = import_dump(arguments.manifest, arguments.output, progress)
    say(f"{count} records in {path}")
    return 0
