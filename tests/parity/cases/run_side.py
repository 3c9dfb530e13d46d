"""One side of one case, run once: a model with random weights, random inputs, one forward.

    python run_side.py CASE {reference|port} [--dtype fp32|bf16] [--clean] [--seed N]

A case is the name of a family for a clean pair, or of a bug, which only the port has. Nothing here
records anything.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[3])

from tests.parity.cases import families  # noqa: E402
from tests.parity.cases.bugs import BUGS, Patches  # noqa: E402


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("case", choices=[*families.FAMILIES, *BUGS])
    arguments.add_argument("side", choices=["reference", "port"])
    arguments.add_argument("--dtype", choices=families.DTYPES, default="fp32")
    arguments.add_argument("--clean", action="store_true", help="the port without its bug")
    arguments.add_argument("--seed", type=int, default=0)
    given = arguments.parse_args()
    family = given.case.partition("_")[0]
    model = families.load(family, given.side, given.dtype, given.seed)
    if given.side == "port" and given.case in BUGS and not given.clean:
        BUGS[given.case](model, Patches())
    output = families.run(family, model, given.dtype, given.seed)
    print(
        f"{given.case} {given.side}: {tuple(output.shape)} {output.dtype} mean magnitude {output.float().abs().mean():.6f}"
    )


if __name__ == "__main__":
    main()
