"""One side of a pair, run once, as a program that knows nothing of being watched.

python tests/fastvideo/ports/program.py PAIR {reference|port} [--bug NAME] [--fault SPEC] [--dtype
fp32|bf16] [--seed N]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(
        Path(__file__).resolve().parents[3]
    )  # as a script, too, it is a part of the package `tests`

from tests.fastvideo.ports.quiet import quietly


def main() -> None:
    quietly()
    from tests.fastvideo.ports.corpus import DTYPES, FAULTY, PAIRS, build

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pair", choices=sorted(PAIRS | FAULTY), metavar="PAIR")
    parser.add_argument("side", choices=["reference", "port"])
    parser.add_argument(
        "--bug", metavar="NAME", help="plant this bug of bugs.py in FastVideo's code"
    )
    parser.add_argument("--fault", metavar="SPEC", help="plant this fault of faults.py in the port")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32")
    parser.add_argument("--seed", type=int, default=0, help="of weights and inputs")
    parser.add_argument("--save", metavar="FILE", help="save the output here (torch.save)")
    given = parser.parse_args()

    import torch

    output = build(
        given.pair, given.side, bug=given.bug, fault=given.fault, dtype=given.dtype, seed=given.seed
    ).run()
    if given.save:
        torch.save(output, given.save)
    print(f"{given.pair} {given.side} {tuple(output.shape)} norm {output.double().norm():.9g}")


if __name__ == "__main__":
    main()
