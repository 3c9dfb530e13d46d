"""The `otel-torch` command: one table of subcommands, each loaded only when it is the one that was
asked for.

Exit status: 0 fine, 1 diverged, 2 bad input or usage. What goes wrong is one line on stderr, never
a traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from otel_torch import __version__
from otel_torch.console import say

# name -> (module with add_arguments(parser) and run(arguments) -> exit status, what it does)
COMMANDS = {
    "run": ("otel_torch.cli.run", "run a command with recording switched on"),
    "show": (
        "otel_torch.cli.show",
        "show a recording as a table, as a page of pictures or as a trace",
    ),
    "diff": ("otel_torch.cli.diff", "find where a port first goes wrong"),
    "scan": (
        "otel_torch.scanning.scan",
        "list the modules that would be recorded, without a real run",
    ),
    "doctor": (
        "otel_torch.cli.doctor",
        "say what is set, what would be recorded and what is reachable",
    ),
    "send": ("otel_torch.cli.send", "deliver OTLP JSON lines to the standard endpoint"),
}


class BadInput(Exception):
    """What a person gave cannot be used; the message is the one line that they get. Exit status 2."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message}; see {self.prog} --help")


def make_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """The parser with every subcommand's name, and the arguments of the chosen one."""
    parser = _Parser(
        prog="otel-torch",
        description="Records what an unmodified PyTorch program did and what its numbers did.",
        epilog="Settings are environment variables: OTEL_TORCH_ENABLED=1 python anything.py is the whole installation.",
    )
    parser.add_argument("--version", action="version", version=f"otel-torch {__version__}")
    subparsers = parser.add_subparsers(dest="subcommand", metavar="COMMAND", required=True)
    for name, (module, text) in COMMANDS.items():
        subparser = subparsers.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}."
        )
        if name == chosen:
            subcommand = import_module(module)
            subcommand.add_arguments(subparser)
            subparser.set_defaults(run=subcommand.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status. `arguments` are those of the process unless
    given.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    try:
        parsed = make_parser(chosen).parse_args(arguments)
        status: int = parsed.run(parsed)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # `| head` has seen enough: nothing to complain of
        return 0
    except KeyboardInterrupt:
        return 130
    except BadInput as error:
        say(str(error))
    except OSError as error:
        say(
            f"{error.filename}: {error.strerror}"
            if error.filename and error.strerror
            else str(error)
        )
    except (ValueError, ImportError) as error:
        say(" ".join(str(error).split()))
    except Exception as error:
        say(f"{chosen}: {type(error).__name__}: {' '.join(str(error).split())}")
    return 2
