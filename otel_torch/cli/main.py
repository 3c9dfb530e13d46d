"""The `otel-torch` command: a table of subcommands. Only the requested one is imported.

Exit status: 0 success, 1 diverged, 2 bad input or usage. Errors are one line on stderr, never a
traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
from argparse import PARSER, REMAINDER
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, NoReturn

from otel_torch import __version__
from otel_torch.process.console import say
from otel_torch.startup import keep_off

# the exit status of a command that the user has interrupted
INTERRUPTED = 130
# name -> (module with `add_arguments(parser)` and `run(arguments) -> exit status`, description)
COMMANDS = {
    "run": ("otel_torch.cli.run", "run a command and record it"),
    "show": ("otel_torch.cli.show", "show a recording as a table, as an HTML page or as a trace"),
    "watch": ("otel_torch.cli.watch", "watch a run in the terminal while it is under way"),
    "bisect": (
        "otel_torch.cli.bisect",
        "run two programs, and find the lines in which the port goes wrong, each one tried",
    ),
    "diff": ("otel_torch.cli.diff", "find where a port first diverges from its reference"),
    "export": (
        "otel_torch.cli.export",
        "export a recording to Parquet, TensorBoard, Trackio or pprof",
    ),
    "import": (
        "otel_torch.cli.import_dump",
        "make a recording of tensors that another program dumped",
    ),
    "scan": ("otel_torch.cli.scan", "list what would be recorded and its cost, without a run"),
    "doctor": (
        "otel_torch.cli.doctor",
        "check the settings, what would be recorded, and the endpoints",
    ),
    "send": ("otel_torch.cli.send", "send OTLP files to the configured endpoint"),
    "skill": ("otel_torch.cli.skill", "print how to use these commands, for coding agents"),
}


class BadInput(Exception):
    """The user's input cannot be used; the message is the one line to print. Exit status 2."""


class _Parser(argparse.ArgumentParser):
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Name a misspelt option first: what else is wrong often follows from it."""
        has_rest = any(action.nargs in (PARSER, REMAINDER) for action in self._actions)
        for word in args:
            if word == "--" or (has_rest and not word.startswith("-")):
                break  # the words after it are no options, or another parser's
            option = word.partition("=")[0]
            known = self._option_string_actions
            if option.startswith("--") and not any(name.startswith(option) for name in known):
                meant = _find_misspelled(option, known)
                hint = f"; did you mean {meant}?" if meant else ""
                self.error(f"unrecognized arguments: {option}{hint}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message}; see {self.prog} --help")


def make_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """Return the parser with the names of all subcommands and the arguments of the chosen one."""
    parser = _Parser(
        prog="otel-torch",
        description="Record what an unmodified PyTorch program does, and compare recordings.",
        epilog="To record, set OTEL_TORCH_ENABLED=1: OTEL_TORCH_ENABLED=1 python train.py. "
        "All settings are environment variables.",
    )
    parser.add_argument("--version", action="version", version=f"otel-torch {__version__}")
    subparsers = parser.add_subparsers(dest="subcommand", metavar="COMMAND", required=True)
    for name, (module, help_text) in COMMANDS.items():
        description = f"{help_text[0].upper()}{help_text[1:]}."
        subparser = subparsers.add_parser(name, help=help_text, description=description)
        if name == chosen:
            subcommand = import_module(module)
            subcommand.add_arguments(subparser)
            subparser.set_defaults(run=subcommand.run)
    return parser


def _find_misspelled(word: str, names: Iterable[str]) -> str | None:
    """Return the name that differs from a word by one slip of the keys, if any.

    A looser measure offers other words: `report` is closer to `import` than `rn` is to `run`.

    >>> _find_misspelled("wacth", COMMANDS), _find_misspelled("report", COMMANDS)
    ('watch', None)
    """
    return next((name for name in names if _is_one_slip(word, name)), None)


def _is_one_slip(word: str, name: str) -> bool:
    """Return whether a letter is missing, added or wrong, or two neighbors are exchanged."""
    word, name = _drop_common_start(word, name)
    word, name = _drop_common_start(word[::-1], name[::-1])
    return max(len(word), len(name)) <= 1 or (len(word) == 2 and word == name[::-1])


def _drop_common_start(word: str, name: str) -> tuple[str, str]:
    while word and name and word[0] == name[0]:
        word, name = word[1:], name[1:]
    return word, name


def _check_command(chosen: str | None) -> None:
    """Raise BadInput for a command that does not exist, with the one that was probably meant."""
    if chosen is None or chosen in COMMANDS:
        return
    meant = _find_misspelled(chosen, COMMANDS)
    hint = f"did you mean {meant}?" if meant else f"choose from {', '.join(COMMANDS)}"
    raise BadInput(f"invalid choice: {chosen!r}; {hint}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status.

    Args:
        arguments: By default those of the process.
    """
    if arguments is None:
        keep_off()  # this process is the command, and no program to record
        arguments = sys.argv[1:]
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    try:
        _check_command(chosen)
        from otel_torch.cli.remote_arguments import local_copies

        parsed = make_parser(chosen).parse_args(arguments)
        with local_copies(parsed):
            status: int = parsed.run(parsed)
            sys.stdout.flush()
        return status
    except BrokenPipeError:
        # the reader, such as `| head`, has closed the pipe; keeps Python's exit from complaining
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except BadInput as error:
        say(str(error))
    except OSError as error:
        has_file = error.filename and error.strerror
        say(f"{error.filename}: {error.strerror}" if has_file else str(error))
    except (ValueError, ImportError) as error:
        say(" ".join(str(error).split()))
    except Exception as error:
        say(f"{chosen}: {type(error).__name__}: {' '.join(str(error).split())}")
    return 2
