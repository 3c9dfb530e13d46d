"""A port whose weights were put together wrongly when it was converted."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import otel_torch

WIDTH = 12
X = torch.linspace(-2, 2, 2 * 5 * WIDTH).cos().reshape(2, 5, WIDTH)


class Gated(nn.Module):
    """A gated layer with two projections."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Fused(nn.Module):
    """Both in one."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def convert(*, is_exchanged: bool) -> Fused:
    parts = Gated().state_dict()
    gate, up = parts["gate.weight"], parts["up.weight"]
    if is_exchanged:
        both = torch.cat([up, gate])
    else:
        both = torch.cat([gate, up])
    port = Fused()
    port.load_state_dict({"both.weight": both, "down.weight": parts["down.weight"]})
    return port


def test_the_line_that_put_a_weight_together_is_told() -> None:
    answer = otel_torch.bisect(Gated(), convert(is_exchanged=True), X)
    assert answer.verdict == "diverged" and answer.faults[0].port_set_by == ()

    def run(x: Tensor) -> Tensor:
        return convert(is_exchanged=True)(x)

    answer = otel_torch.bisect(lambda x: Gated()(x), run, X)
    (finding,) = answer.faults
    assert "F.silu(gate)" in finding.port_line.text
    assert [line.text for line in finding.port_set_by] == ["both = torch.cat([up, gate])"]
    assert "port sets what it reads in test_preparation.py:45 in convert" in str(answer)
