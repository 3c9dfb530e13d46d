"""What every way of `otel-torch bisect` does around its runs."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from otel_torch.cli.main import BadInput
from otel_torch.process.console import say
from otel_torch.rendering.progress import Progress

_OWN = re.compile(
    r"\d+-\w+|put-\d+|kept|links|exchange-\d+|executed-\w+|plan-[\w-]+\.json|commit-[ab]"
)


def prepare_folder(folder: Path, *, resumes: bool) -> None:
    """Make the folder of the runs, and delete what an earlier call left unless it is resumed.

    Raises:
        BadInput: The folder holds something else.
    """
    if folder.exists() and not resumes:
        names = sorted(path.name for path in folder.iterdir())
        strange = [name for name in names if not _OWN.fullmatch(name)]
        if strange:
            message = f"{folder} holds {strange[0]}, which is no run: choose another with --out"
            raise BadInput(message)
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)


def end_with_what_runs() -> None:
    """Have SIGTERM end the run, too."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def make_teller(progress: Progress) -> Callable[[str], None]:
    """Return what prints a line of what is known so far."""

    def tell(text: str) -> None:
        progress.clear()
        say(text)

    return tell
