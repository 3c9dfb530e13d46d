"""Programs that lay their tensors out otherwise: they meet where their axes are in one order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import otel_torch


class Reference(nn.Module):
    """A residual block of pictures with channels first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.up, self.down = nn.Conv2d(6, 16, 1), nn.Conv2d(16, 6, 1)
        self.scale = nn.Parameter(torch.rand(6, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.up(self.depthwise(x)))
        y = y / (1 + y.square().mean((2, 3), keepdim=True))
        return x + self.scale * self.down(y)


class ChannelsLast(nn.Module):
    """The same with channels last, and flat pictures."""

    def __init__(self, reference: Reference, fault: str = "") -> None:
        super().__init__()
        self.model, self.fault = reference, fault

    def forward(self, x: Tensor) -> Tensor:
        model = self.model
        y = model.depthwise(x).flatten(2).mT
        x = x.flatten(2).mT
        y = F.gelu(F.linear(y, model.up.weight.flatten(1), model.up.bias))
        y = y / (1 + y.square().mean(-1 if self.fault == "energy" else -2, keepdim=True))
        y = F.linear(y, model.down.weight.flatten(1), model.down.bias)
        if self.fault == "scale":
            return ((x + y) * model.scale.flatten()).mT.unflatten(2, (5, 4))
        return (x + y * model.scale.flatten()).mT.unflatten(2, (5, 4))


X = torch.linspace(-2, 2, 240).sin().reshape(2, 6, 5, 4)


def test_another_layout_matches() -> None:
    answer = otel_torch.bisect(Reference(), ChannelsLast(Reference()), X)
    assert (answer.verdict, len(answer.runs)) == ("match", 2)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("energy", "y = y / (1 + y.square().mean(-1 if"),
        ("scale", "return ((x + y) * model.scale.flatten())"),
    ],
)
def test_a_fault_in_another_layout_is_proven_at_its_line(fault: str, text: str) -> None:
    answer: Any = otel_torch.bisect(Reference(), ChannelsLast(Reference(), fault), X)
    (finding,) = answer.faults
    assert finding.port_line.text.strip().startswith(text)
    assert finding.proof == "proven"
    assert answer.is_healed
