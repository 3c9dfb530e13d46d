"""`otel-torch run CMD…`: the environment switch for places that forbid start-up files in the
interpreter.

The command replaces this process, so its exit status, signals and streams are its own.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import MutableMapping
from pathlib import Path

from otel_torch.cli.main import BadInput
from otel_torch.job import name_run

# holds a sitecustomize that starts us
STARTUP_SITE = str(Path(__file__).parents[1] / "startup" / "site")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `run` takes."""
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="CMD…",
        help="such as: python train.py --steps 10",
    )


def switch_on(environ: MutableMapping[str, str]) -> None:
    """Make every Python that is started with this environment record, whether or not our start-up
    file is installed.

    >>> environ = {"PYTHONPATH": "/mine"}; switch_on(environ)
    >>> environ["OTEL_TORCH_ENABLED"], environ["PYTHONPATH"].endswith("site:/mine")
    ('1', True)
    """
    environ["OTEL_TORCH_ENABLED"] = "1"
    environ["OTEL_TORCH_RUN_ID"] = name_run(environ)
    others = [
        folder
        for folder in environ.get("PYTHONPATH", "").split(os.pathsep)
        if folder and folder != STARTUP_SITE
    ]
    environ["PYTHONPATH"] = os.pathsep.join([STARTUP_SITE, *others])


def run(arguments: argparse.Namespace) -> int:
    """Become the command. Returns only by raising BadInput, when there is nothing that could be
    run.
    """
    command: list[str] = (
        arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    )
    if not command:
        raise BadInput("nothing to run; write otel-torch run python train.py")
    program = shutil.which(command[0])
    if program is None:
        hint = (
            f"; did you mean: otel-torch run python {command[0]}"
            if command[0].endswith(".py")
            else ""
        )
        raise BadInput(f"{command[0]}: no such command{hint}")
    switch_on(os.environ)
    try:
        os.execv(program, command)
    except OSError as error:
        raise BadInput(f"{command[0]}: {error.strerror}") from None
