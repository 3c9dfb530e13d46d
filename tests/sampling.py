"""Draws the cases of a long corpus that run today, so that all of them run within two weeks.

The seed is the number of the day, unless the variable `SAMPLE_SEED` says another, such as that of a
run that failed; pytest prints it above its tests. With `SAMPLE_SEED=all` every case runs, as
`make scores` does.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable
from typing import TypeVar

ONCE_A_FORTNIGHT = 14
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
