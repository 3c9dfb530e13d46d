"""One side of a pair of models, run once, as a program that knows nothing of being watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from tests.fastvideo.ports.quiet import quietly


@contextmanager
def side(name: str, side: str, variant: str, seed: int) -> Iterator[Callable[[], object]]:
    """Build one side; `name` is a pair, a bug, or a pair and the fault that is planted in its port."""
    quietly()
    from tests.fastvideo.ports.bugs import BUGS
    from tests.fastvideo.ports.corpus import Side, build

    pair, _, fault = name.partition(" ")
    bug = name if name in BUGS else None
    with build(
        BUGS[name].pair if bug else pair,
        cast(Side, side),
        bug=bug,
        fault=fault or None,
        dtype=variant,
        seed=seed,
    ) as built:
        yield built.run
