"""A training whose port splits the weights that the reference has fused."""

from __future__ import annotations

from pathlib import Path

import pytest

from otel_torch.bisecting.bisection import Bisection
from otel_torch.bisecting.search import Options, bisect_programs
from tests.bisecting.recorded_runs import RecordedRuns

# the fused weight of the narrow block has the size of a split one of the wide block
BLOCKS = """
import torch
from torch import nn

torch.manual_seed(0)
fused = [torch.randn(2 * width, 8) / 3 for width in (4, 8)]
start, end = torch.randn(4, 8) / 3, torch.randn(1, 8) / 3
x, condition = torch.randn(6, 8), torch.randn(6, 8)

class Block(nn.Module):
    def __init__(self, own):
        super().__init__()
        MAKE

    def forward(self, x):
        scale, shift = SPLIT
        return torch.tanh(x * (1 + scale) + shift)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.start, self.end = nn.Parameter(start.clone()), nn.Parameter(end.clone())
        self.NARROW, self.WIDE = map(Block, fused)

    def forward(self, x):
        h = self.NARROW(x @ self.start.T)
        return self.WIDE(torch.cat([h, h], -1)) @ self.end.T

net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(2):
    loss = net(x).square().mean() * FACTOR
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
REFERENCE = {
    "MAKE": "self.weight = nn.Parameter(own.clone())",
    "SPLIT": "(condition @ self.weight.T).chunk(2, -1)",
    "NARROW": "first",
    "WIDE": "second",
    "FACTOR": "1.0",
}
PORT = {
    "MAKE": "self.a, self.b = map(nn.Parameter, own.clone().chunk(2))",
    "SPLIT": "condition @ self.a.T, condition @ self.b.T",
    "NARROW": "low",
    "WIDE": "high",
    "FACTOR": "1.0",
}


def program(words: dict[str, str]) -> str:
    text = BLOCKS
    for word, own in words.items():
        text = text.replace(word, own)
    return text


def bisect(folder: Path, **change: str) -> Bisection:
    runs = RecordedRuns(folder, program(REFERENCE), program(PORT | change))
    return bisect_programs(runs, Options())


def test_gradients_of_other_weights_are_no_pair(tmp_path: Path) -> None:
    assert bisect(tmp_path).verdict == "match"


@pytest.mark.parametrize(
    ("word", "own", "text"),
    [
        ("FACTOR", "0.5", "loss = net(x).square().mean() * 0.5"),
        ("SPLIT", "condition @ self.b.T, condition @ self.a.T", "return torch.tanh(x"),
    ],
    ids=["loss", "order"],
)
def test_a_fault_is_found_by_the_weights_that_both_have(
    tmp_path: Path, word: str, own: str, text: str
) -> None:
    (fault, *_) = bisect(tmp_path, **{word: own}).faults
    assert fault.port_line is not None and fault.port_line.text.strip().startswith(text)
