"""A port may have features in another order, as those of queries and keys for rotary pairs: then the
one weight that was left out is at fault, and not those that were reordered with a purpose.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from otel_torch.bisecting.search import Options, bisect_programs
from tests.bisecting.recorded_runs import RecordedRuns

PROGRAM = """
import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(6, 16)
order = torch.arange(16).view(2, -1).t().flatten()

def normed(x, gain):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * gain

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        for name in "qk":
            self.register_parameter(name, nn.Parameter(torch.randn(16, 16) / 4))
        for name in ("norm", "q_norm", "k_norm"):
            self.register_parameter(name, nn.Parameter(torch.rand(16) + 0.5))

    def forward(self, x):
        h = normed(x, self.norm)
        q = normed(h @ self.q, self.q_norm)
        k = normed(h @ self.k, self.k_norm)
        return x + torch.softmax(q @ k.t(), -1) @ h

net = nn.Sequential(Layer(), Layer(), Layer())
for layer in net:
    for name in MOVED:
        own = getattr(layer, name)
        own.data = own.data[..., order].clone()
with torch.no_grad():
    net(x)
"""


def program(*moved: str) -> str:
    return PROGRAM.replace("MOVED", repr(moved))


@pytest.mark.parametrize(
    ("moved", "text"),
    [
        (("q", "k", "q_norm"), "but the parameter `0.k_norm` in the same one."),
        (("q", "q_norm", "k_norm"), "`mul` reads the parameter `0.k_norm` in another order"),
    ],
    ids=["a gain", "a matrix"],
)
def test_what_was_not_reordered_with_the_rest_is_named(
    tmp_path: Path, moved: tuple[str, ...], text: str
) -> None:
    answer = bisect_programs(RecordedRuns(tmp_path, program(), program(*moved)), Options())
    # of the three layers and of all calls of the helper, this line alone
    assert [(fault.port_line and fault.port_line.text, fault.proof) for fault in answer.faults] == [
        ("k = normed(h @ self.k, self.k_norm)", "proven")
    ]
    assert text in str(answer.faults[0].explanation)
    assert answer.is_healed


def test_all_weights_in_another_order_are_legal(tmp_path: Path) -> None:
    port = program("q", "k", "q_norm", "k_norm")
    assert bisect_programs(RecordedRuns(tmp_path, program(), port), Options()).verdict == "match"
