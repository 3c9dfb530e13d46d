"""One side of a comparison: a training of a few steps.

    python program.py SETUP [FAULT|CHANGE]

Nothing here records anything.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[3])

import torch.distributed as dist  # noqa: E402

from tests.parity.training.clean import CLEAN  # noqa: E402
from tests.parity.training.faults import FAULTS  # noqa: E402
from tests.parity.training.kept_back import CLEAN_KEPT_BACK, KEPT_BACK  # noqa: E402
from tests.parity.training.setups import prepared  # noqa: E402


def main(setup: str, planted: str = "") -> None:
    training = prepared(setup)
    if planted:
        cases = FAULTS | CLEAN | KEPT_BACK | CLEAN_KEPT_BACK
        cases[planted].plant(training)
    training.run()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
