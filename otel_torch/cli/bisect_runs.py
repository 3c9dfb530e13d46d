"""What both forms of `otel-torch bisect` share: options, the folder of the runs, the output."""

from __future__ import annotations

import argparse
import fcntl
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol

from otel_torch.bisecting.bisection import Bisection
from otel_torch.bisecting.recorded_programs import RunOptions
from otel_torch.bisecting.runs import EndedEarly
from otel_torch.cli.diff import EXIT_STATUS
from otel_torch.cli.main import BadInput
from otel_torch.cli.report_files import print_text, write_json
from otel_torch.parity.report.text import DEFAULT_WIDTH
from otel_torch.process.console import say
from otel_torch.rendering.progress import Progress
from otel_torch.rendering.table import supports_color, terminal_size

_OWN = re.compile(
    r"\d+-\w+|put-\d+|kept|links|exchange-\d+|executed-\w+|plan-[\w-]+\.json|commit-[ab]|lock"
)
# is locked as long as a call runs
_LOCK = "lock"


class BisectAnswer(Protocol):
    """What a bisection has found."""

    @property
    def verdict(self) -> str:
        """`match`, `diverged`, `partial` or `incomparable`."""

    def as_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""


def run_options(arguments: argparse.Namespace) -> RunOptions:
    """Return how the programs are recorded and compared."""
    steps = None if arguments.step is None else str(arguments.step)
    return RunOptions(arguments.noise, arguments.tolerance, steps)


def given_options(values: Mapping[str, object]) -> list[str]:
    """Return options with their values, without those that are None.

    >>> given_options({"--step": 3, "--module": None})
    ['--step', '3']
    """
    return [
        word for name, value in values.items() if value is not None for word in (name, str(value))
    ]


def print_answer(
    arguments: argparse.Namespace, answer: BisectAnswer, render: Callable[..., str]
) -> None:
    """Print an answer as text, by `render(color=…, width=…)`, and as JSON, if asked for."""
    if arguments.json != "-" and answer.verdict != "incomparable":
        terminal = terminal_size(sys.stdout)
        width = terminal.columns if terminal else DEFAULT_WIDTH
        print_text(render(color=supports_color(sys.stdout), width=width))
    if arguments.json:
        write_json(arguments.json, answer.as_json())


def close_runs(arguments: argparse.Namespace, bisection: Bisection) -> int:
    """Say what cannot be compared, or delete the recordings; return the exit status."""
    if bisection.verdict == "incomparable":
        say(f"incomparable: {bisection.report.reason}")
    elif bisection.ended_early:
        say(f"{bisection.ended_early}; --resume goes on from what {arguments.out} holds")
    elif not arguments.keep:
        shutil.rmtree(arguments.out, ignore_errors=True)
    return EXIT_STATUS[bisection.verdict]


@contextmanager
def run_folder(folder: Path, *, resumes: bool) -> Iterator[None]:
    """Hold the folder of the runs, without what an earlier call left there unless it is resumed.

    Raises:
        BadInput: The folder holds something else, or another call is running in it.
    """
    if folder.exists() and not resumes:
        names = sorted(path.name for path in folder.iterdir())
        strange = [name for name in names if not _OWN.fullmatch(name)]
        if strange:
            message = f"{folder} holds {strange[0]}, which is no run: choose another with --out"
            raise BadInput(message)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("w") as lock:
        _hold(lock, folder)
        if not resumes:
            _clear(folder)
        yield


def _clear(folder: Path) -> None:
    """Delete all that is in a folder but its lock."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != _LOCK:
            path.unlink()


def _hold(lock: IO[str], folder: Path) -> None:
    """Lock a file until it is closed. Raises BadInput if another process has locked it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        message = f"another bisect is running in {folder}: choose another folder with --out"
        raise BadInput(message) from None
    except OSError:  # not every file system has locks
        return


@contextmanager
def ends_early(seconds: float | None) -> Iterator[list[int]]:
    """Raise EndedEarly once: when the time is over, or on SIGINT or SIGTERM.

    Args:
        seconds: None for as long as it takes.

    Yields:
        The signal that came from outside, as soon as one did.
    """
    came: list[int] = []

    def end(number: int, frame: object) -> NoReturn:
        restore()  # a second signal ends at once
        if number == signal.SIGALRM:
            raise EndedEarly(f"the search did not end within {seconds:g} s")
        came.append(number)
        raise EndedEarly(f"the search was ended by {signal.Signals(number).name}")

    def restore() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)

    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGALRM
    before = {number: signal.signal(number, end) for number in numbers}
    signal.setitimer(signal.ITIMER_REAL, seconds or 0)
    try:
        yield came
    finally:
        restore()


def make_teller(progress: Progress) -> Callable[[str], None]:
    """Return what prints a line of what is known so far."""

    def tell(text: str) -> None:
        progress.clear()
        say(text)

    return tell
