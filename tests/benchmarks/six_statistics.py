"""The overhead of six statistics of all modules of a 12-layer Llama, on the CPU.

FastVideo adds a fifth of the forward's time in fp32 and three quarters in bf16, half of it for
`std`; a copy of every output costs as much. This measures how much remains if a tensor is read once.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from tests.benchmarks.figures import Figure, Size, command
from tests.benchmarks.pairing import CONTROL, Measured, interleave
from tests.benchmarks.sides import SIX, Sides, one_thread

FASTVIDEO, EMPTY, CLONES = "FastVideo's hook", "empty hooks", "a copy of each output"
OUTPUTS, INPUTS, SKETCH = "ours, outputs", "ours, inputs too", "ours, with the sketch"
# as a person sets it: OTEL_TORCH_CAPTURE=parity, and nothing else
PARITY = "ours, parity"
_GOALS = {
    "inputs and outputs": (INPUTS, 1 / 4),
    "with the sketch": (SKETCH, 1 / 3),
    "parity by default": (PARITY, 0.45),
}


def llama(size: Size, dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
    """Make a Llama: 46.9 million parameters, 163 modules.

    A forward of 2 × 256 tokens has 147 tensors (236 MB in fp32).
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=size.of(512, 64), intermediate_size=size.of(1408, 96), num_hidden_layers=size.of(12, 2),
        num_attention_heads=8, vocab_size=size.of(8192, 128), tie_word_embeddings=False,
    )  # fmt: skip
    tokens = torch.randint(config.vocab_size, (2, size.of(256, 16)))
    return LlamaForCausalLM(config).eval().to(dtype), tokens


def measured(size: Size, dtype: torch.dtype, times: int) -> Measured:
    """Measure all sides in turns on one model."""
    one_thread()
    model, tokens = llama(size, dtype)

    def forward() -> None:
        with torch.no_grad():
            model(tokens, use_cache=False)

    statistics = ",".join(SIX)
    with tempfile.TemporaryDirectory() as folder:
        sides = Sides(model, forward, Path(folder))
        return interleave(
            sides.bare()
            | {
                EMPTY: sides.empty_hooks(),
                CLONES: sides.cloning(),
                FASTVIDEO: sides.fastvideo(FASTVIDEO, SIX),
                OUTPUTS: sides.ours(OUTPUTS, stats=statistics),
                INPUTS: sides.ours(INPUTS, stats=statistics, capture="inputs,outputs"),
                SKETCH: sides.ours(SKETCH, stats=statistics, capture="parity"),
                PARITY: sides.ours(PARITY, capture="parity"),
            },
            rounds=size.count(15),
            times=times,
        )


def measure(size: Size) -> list[Figure]:
    """Measure our overhead as a share of FastVideo's, in CPU time."""
    figures = []
    for dtype, times in ((torch.float32, 3), (torch.bfloat16, 6)):
        name = str(dtype).removeprefix("torch.")
        timings = measured(size, dtype, times)
        over = {
            side: timings.cpu.overhead(side)
            for side in (CONTROL, EMPTY, CLONES, FASTVIDEO, OUTPUTS, INPUTS, SKETCH, PARITY)
        }
        all_sides = "; ".join(f"{side} {overhead}" for side, overhead in over.items())
        for label, (side, goal) in _GOALS.items():
            share = timings.cpu.share(side, FASTVIDEO)
            detail = f"share of FastVideo's overhead {share}; on the wall {timings.wall.share(side, FASTVIDEO)}"
            if side == INPUTS:
                detail += f"; over bare: {all_sides}"
            figures.append(
                Figure.estimated(
                    f"six statistics, {name}, {label}: overhead over FastVideo's",
                    share,
                    goal,
                    detail,
                )
            )
    return figures


def main(argv: Sequence[str]) -> int:
    """Measure and print the figures."""
    return command(__doc__, measure, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
