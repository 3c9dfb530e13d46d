"""Weights that were never loaded: a gain of ones leaves what it scales as it was."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import otel_torch

WIDTH, DEPTH, LENGTH = 16, 4, 6
X = torch.linspace(-2, 2, 2 * LENGTH * WIDTH).cos().reshape(2, LENGTH, WIDTH)


class Block(nn.Module):
    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.gain = nn.Parameter(1 + torch.rand(WIDTH))
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
        if is_causal:
            self.mask = self.mask.tril()

    def forward(self, x: Tensor) -> Tensor:
        h = self.gain * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        scores = self.up(h) @ h.mT
        scores = scores.masked_fill(~self.mask, float("-inf"))
        return x + self.down(scores.softmax(-1) @ h)


def blocks(*, is_causal: bool = True, unloaded: int | None = None) -> nn.Module:
    """Return a stack of blocks; the gain of `unloaded` keeps its initial ones."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(is_causal) for _ in range(DEPTH)))
    if unloaded is not None:
        nn.init.ones_(model[unloaded].gain)
    return model


def test_a_gain_of_ones_is_named_and_not_what_reads_the_result() -> None:
    answer = otel_torch.bisect(blocks(), blocks(unloaded=2), X)
    (finding,) = answer.faults
    assert (finding.kind, finding.port_module, finding.port_tensor) == (
        "weights",
        "2",
        "param.gain",
    )
    assert "self.gain * x" in finding.port_line.text
    assert finding.proof == "proven" and answer.is_healed


def test_values_that_a_trial_put_there_acquit_nothing_before_them() -> None:
    # behind the exchanged attention all is right, though the reference made it of the gain
    answer = otel_torch.bisect(blocks(), blocks(is_causal=False, unloaded=2), X)
    masked, unloaded = answer.faults
    assert "scores.softmax(-1)" in masked.port_line.text
    assert (unloaded.kind, unloaded.port_module, unloaded.port_tensor) == (
        "weights",
        "2",
        "param.gain",
    )
    assert [finding.proof for finding in answer.faults] == ["proven", "proven"]
    assert answer.is_healed
