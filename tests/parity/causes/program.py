"""One side of a comparison, run once: a model with random weights, random inputs, one forward.

    python program.py {llama|unet|wan} {reference|port} [FAULT]

Nothing here records anything.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path[0] = str(Path(__file__).parents[3])

from tests.parity.causes.faults import FAULTS, KEPT_BACK  # noqa: E402
from tests.parity.causes.models import build  # noqa: E402


def main(family: str, side: str, fault: str = "") -> None:
    reference, port, inputs = build(family)
    with torch.no_grad():
        if fault:
            (FAULTS | KEPT_BACK)[fault].plant(port)
        (reference if side == "reference" else port)(*inputs)


if __name__ == "__main__":
    main(*sys.argv[1:])
