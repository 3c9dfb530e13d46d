"""One side of one case, run once. Nothing here records anything.

    python side.py CORPUS CASE {reference|port} [--variant fp32|bf16] [--seed N]

A case is named as its corpus names it; a family alone is a clean pair.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])

from tests.corpora import ROUNDS

# each has `side(name, side, variant, seed)`, which yields the program as a function without
# arguments, and undoes all patches on exit
BUILDERS = {
    "small": "tests.corpora.small.bugs",
    "causes": "tests.corpora.causes.faults",
    "training": "tests.corpora.training.kept_back",
    **dict.fromkeys(ROUNDS, "tests.corpora.unseen.programs"),
    "ports": "tests.fastvideo.ports.program",
}


def side(
    corpus: str, name: str, side: str, variant: str, seed: int
) -> AbstractContextManager[Callable[[], object]]:
    """Build the program of one side of a case."""
    builder = importlib.import_module(BUILDERS[corpus]).side
    built: AbstractContextManager[Callable[[], object]] = builder(name, side, variant, seed)
    return built


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("corpus", choices=BUILDERS)
    arguments.add_argument("case")
    arguments.add_argument("side", choices=["reference", "port"])
    arguments.add_argument("--variant", default="fp32")
    arguments.add_argument("--seed", type=int, default=0, help="of weights and inputs")
    given = arguments.parse_args()
    with side(given.corpus, given.case, given.side, given.variant, given.seed) as run:
        output = run()
    if hasattr(output, "norm"):
        print(f"{given.case} {given.side} {tuple(output.shape)} norm {output.double().norm():.9g}")


if __name__ == "__main__":
    main()
