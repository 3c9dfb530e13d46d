"""The command `otel-torch run CMD…`: record a command where no start-up file can be installed in
the interpreter.

The command replaces this process, so exit status, signals and streams are those of the command.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import MutableMapping
from pathlib import Path

from otel_torch.cli.main import BadInput
from otel_torch.process.job import name_run

# contains a sitecustomize.py that starts recording
STARTUP_SITE = str(Path(__file__).parents[1] / "startup" / "site")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `otel-torch run`."""
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="CMD…",
        help="the command and its arguments, such as python train.py --steps 10",
    )


def enable_recording(environ: MutableMapping[str, str]) -> None:
    """Make every Python interpreter with this environment record, with or without an installed
    start-up file.

    >>> environ = {"PYTHONPATH": "/home/me/lib"}; enable_recording(environ)
    >>> environ["OTEL_TORCH_ENABLED"], environ["PYTHONPATH"].endswith("site:/home/me/lib")
    ('1', True)
    """
    environ["OTEL_TORCH_ENABLED"] = "1"
    environ["OTEL_TORCH_RUN_ID"] = name_run(environ)
    folders = environ.get("PYTHONPATH", "").split(os.pathsep)
    existing = [folder for folder in folders if folder and folder != STARTUP_SITE]
    environ["PYTHONPATH"] = os.pathsep.join([STARTUP_SITE, *existing])


def run(arguments: argparse.Namespace) -> int:
    """Replace this process by the command. Raises BadInput if that is not possible."""
    command: list[str] = arguments.command
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        raise BadInput("nothing to run; write otel-torch run python train.py")
    program = shutil.which(command[0])
    if program is None:
        hint = ""
        if command[0].endswith(".py"):
            hint = f"; did you mean: otel-torch run python {command[0]}"
        raise BadInput(f"{command[0]}: no such command{hint}")
    enable_recording(os.environ)
    try:
        os.execv(program, command)
    except OSError as error:
        raise BadInput(f"{command[0]}: {error.strerror}") from None
