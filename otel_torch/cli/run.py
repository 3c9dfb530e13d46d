"""The command `otel-torch run CMD…`: record a command where no start-up file can be installed in
the interpreter.

The command replaces this process, so exit status, signals and streams are those of the command.
"""

from __future__ import annotations

import argparse
import os
import shutil

from otel_torch.cli.main import BadInput
from otel_torch.process.recorded_child import enable_recording


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="CMD…",
        help="the command and its arguments, such as python train.py --steps 10",
    )


def find_program(name: str, before: str = "") -> str:
    """Return the path of a command.

    Args:
        before: What stands before the command where the user wrote it.

    Raises:
        BadInput: There is none.
    """
    program = shutil.which(name)
    if program is None:
        hint = f"; did you mean: {before}python {name}" if name.endswith(".py") else ""
        raise BadInput(f"{name}: no such command{hint}")
    return program


def run(arguments: argparse.Namespace) -> int:
    """Replace this process by the command. Raises BadInput if that is not possible."""
    command: list[str] = arguments.command
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        raise BadInput("nothing to run; write otel-torch run python train.py")
    program = find_program(command[0], "otel-torch run ")
    enable_recording(os.environ)
    try:
        os.execv(program, command)
    except OSError as error:
        raise BadInput(f"{command[0]}: {error.strerror}") from None
