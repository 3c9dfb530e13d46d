"""Draws the cases of a long corpus that run today, so that all of them run within two weeks.

The seed is the number of the day, unless the variable `SAMPLE_SEED` says another, such as that of a
run that failed; pytest prints it above its tests. With `SAMPLE_SEED=all` every case runs, as
`make scores` does.

    python -m tests.sampling PATH…

prints the paths that are files, and of those that are folders a third of their test files.
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

ONCE_A_FORTNIGHT = 14
OF_FILES = 3
VARIABLE = "SAMPLE_SEED"
EVERY_CASE = "all"

Drawn = TypeVar("Drawn")


def seed_of_this_run() -> str:
    """Return the seed that the environment gives, or else the number of the day."""
    return os.environ.get(VARIABLE) or str(datetime.date.today().toordinal())


def sample(
    cases: Iterable[Drawn], share: int = ONCE_A_FORTNIGHT, seed: str | None = None
) -> list[Drawn]:
    """Return one of `share` cases, in their order. Any `share` seeds in a row draw each case once.

    Neighbors in a table are of one family: drawing every so-manieth takes some of each family.

    Args:
        share: 14 draws a fourteenth, so that each case runs once in two weeks.
        seed: a whole number, or `all`; None takes that of this run.
    """
    cases = list(cases)
    seed = seed or seed_of_this_run()
    if seed == EVERY_CASE:
        return cases
    return cases[int(seed) % share :: share]


def drawn_files(paths: Iterable[str]) -> Iterator[Path]:
    """Yield the files among some paths, and those that this run draws from the folders."""
    files = [Path(path) for path in paths]
    yield from (path for path in files if path.is_file())
    folders = [sorted(path.rglob("test_*.py")) for path in files if path.is_dir()]
    yield from sample([path for folder in folders for path in folder], OF_FILES)


if __name__ == "__main__":
    print(*drawn_files(sys.argv[1:]))
