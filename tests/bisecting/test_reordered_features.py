"""A port may reorder features, as queries and keys for rotary pairs: the weight that was left out is
at fault, and not the ones that were reordered on purpose.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from otel_torch.bisecting.search import Options, bisect_programs
from tests.bisecting.recorded_runs import RecordedRuns

GAINS = """
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


# the same with biases in place of gains
LAYERS = """
import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(6, 16)
order = torch.arange(16).view(2, -1).t().flatten()

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        h = self.norm(x)
        q = self.q(h)
        k = self.k(h)
        # else no bias of keys would make a difference
        scores = (q @ k.t()).tanh()
        return x + torch.softmax(scores, -1) @ self.v(h)

net = nn.Sequential(Layer(), Layer(), Layer())
for layer in net:
    for name in MOVED:
        own = layer.get_parameter(name)
        own.data = own.data[order].clone()
with torch.no_grad():
    net(x)
"""


def runs(folder: Path, program: str, *moved: str) -> RecordedRuns:
    """Return the runs of a program, and of a port with some weights in another order."""
    texts = (program.replace("MOVED", repr(names)) for names in ((), moved))
    return RecordedRuns(folder, *texts)


KEYS = {GAINS: "k = normed(h @ self.k, self.k_norm)", LAYERS: "k = self.k(h)"}
SENTENCE = "`{}` reads {} in another order than the reference does, but {} in the same one."
PRODUCT = "the result of `mul` of program.py:10"


@pytest.mark.parametrize(
    ("program", "moved", "operation", "reordered", "kept"),
    [
        (GAINS, "q k q_norm", "mul", PRODUCT, "the parameter `0.k_norm`"),
        (GAINS, "q q_norm k_norm", "mul", "the parameter `0.k_norm`", PRODUCT),
        (LAYERS, "q.weight q.bias k.weight", "addmm", "the parameter `0.k.weight`", "the parameter `0.k.bias`"),
        (LAYERS, "q.weight q.bias k.bias", "addmm", "the parameter `0.k.bias`", "the parameter `0.k.weight`"),
    ],
    ids=["a gain", "what it scales", "a bias", "its weight"],
)  # fmt: skip
def test_what_was_not_reordered_with_the_rest_is_named(
    tmp_path: Path, program: str, moved: str, operation: str, reordered: str, kept: str
) -> None:
    answer = bisect_programs(runs(tmp_path, program, *moved.split()), Options())
    # of the three layers and of all calls of the helper, this line alone
    assert [(fault.port_line and fault.port_line.text, fault.proof) for fault in answer.faults] == [
        (KEYS[program], "proven")
    ]
    assert answer.faults[0].explanation == SENTENCE.format(operation, reordered, kept)
    assert answer.is_healed


@pytest.mark.parametrize(
    ("program", "moved"),
    [
        (GAINS, ("q", "k", "q_norm", "k_norm")),
        (LAYERS, ("q.weight", "k.weight", "q.bias", "k.bias")),
    ],
    ids=["gains", "biases"],
)
def test_all_weights_in_another_order_are_legal(
    tmp_path: Path, program: str, moved: tuple[str, ...]
) -> None:
    assert bisect_programs(runs(tmp_path, program, *moved), Options()).verdict == "match"


def test_biases_that_no_layer_has_reordered_with_their_weights_are_named(tmp_path: Path) -> None:
    answer = bisect_programs(runs(tmp_path, LAYERS, "q.weight", "k.weight"), Options())
    assert answer.faults[0].port_line.text == "q = self.q(h)"
    assert answer.faults[0].explanation == SENTENCE.format(
        "addmm", "the parameter `0.q.weight`", "the parameter `0.q.bias`"
    )
    assert (answer.begins_proven, answer.is_healed) == (True, True)
