"""Programs that sort what they compute, and return what they have chosen."""

from __future__ import annotations

from pathlib import Path

import pytest

from otel_torch.bisecting.search import Options, bisect_programs
from tests.bisecting.recorded_runs import RecordedRuns

PROGRAM = """
import torch

torch.manual_seed(0)
x, weight = torch.randn(40, 12), torch.randn(12, 5)

def scores(x):
    logits = x @ weight
    variance = logits.var(-1, keepdim=True) + EPS
    return logits / variance.sqrt()

with torch.no_grad():
    found = scores(x)
    best = found.amax(-1)
    order = best.argsort(descending=True)[:20]
    boxes, chosen, labels = found[order], best[order], found.argmax(-1)[order]
    print(float(chosen.sum()), float(boxes.mean()), int(labels.sum()))
"""


@pytest.mark.parametrize("eps", ["1e-5", "1e-2"])
def test_an_order_that_stays_acquits_no_score(tmp_path: Path, eps: str) -> None:
    port = PROGRAM.replace("EPS", eps)
    answer = bisect_programs(
        RecordedRuns(tmp_path, PROGRAM.replace("EPS", "1e-5"), port), Options()
    )
    if eps == "1e-5":
        assert answer.verdict == "match"
        return
    assert "+ 1e-2" in answer.faults[0].port_line.text and answer.faults[0].proof == "proven"


SAMPLER = """
import torch
from torch import nn

torch.manual_seed(0)

class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(6, 6)

    def forward(self, x, time):
        return torch.tanh(self.mix(x)) * time.cos()

class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.grow = nn.Linear(6, 12)

    def forward(self, x):
        return torch.sigmoid(self.grow(x))

denoiser, decoder = Denoiser(), Decoder()
noise, times = torch.randn(3, 6), torch.linspace(1, 0.1, 5)

class Pipeline(nn.Module):
    def __init__(self):
        super().__init__()
        self.denoiser, self.decoder = denoiser, decoder

    def forward(self, x):
        for now, after in zip(times[:-1], times[1:]):
            x = x + (after - now) * self.denoiser(x, now)
        return self.decoder(x)
"""
AT_ONCE = "with torch.no_grad(): Pipeline()(noise)"
STEP_BY_STEP = """
with torch.no_grad():
    x = noise
    for now, after in zip(times[:-1], times[1:]):
        slope = denoiser(x, now)
        x = x + FACTOR * (after - now) * slope
    image = decoder(x)
"""


@pytest.mark.parametrize("factor", ["1", "1.1"])
def test_what_steps_that_were_not_recorded_have_made_is_no_fault(
    tmp_path: Path, factor: str
) -> None:
    port = SAMPLER + STEP_BY_STEP.replace("FACTOR", factor)
    answer = bisect_programs(RecordedRuns(tmp_path, SAMPLER + AT_ONCE, port), Options())
    if factor == "1":
        assert answer.verdict == "match"
        return
    assert [fault.port_line.text for fault in answer.faults if fault.proof == "proven"] == [
        "x = x + 1.1 * (after - now) * slope"
    ]


GENERATOR = """
import torch
from torch import nn

torch.manual_seed(0)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 12)
        self.mix, self.head = nn.Linear(12, 12), nn.Linear(12, 40, bias=False)

    def forward(self, ids):
        return self.head(self.mix(self.embed(ids).mean(0)).tanh())

model, ids = Model(), torch.tensor([3, 1, 4, 1, 5])
"""
WHOLE = """
with torch.inference_mode():
    for _ in range(3):
        ids = torch.cat([ids, model(ids).argmax()[None]])
"""
BY_PARTS = """
with torch.inference_mode():
    for _ in range(3):
        hidden = model.mix(model.embed(ids).sum(0) / COUNT).tanh()
        ids = torch.cat([ids, model.head(hidden).argmax()[None]])
"""


def test_programs_with_other_forwards_are_compared_whole(tmp_path: Path) -> None:
    """The first steps of each end elsewhere: what the programs made last by then is no pair."""
    port = GENERATOR + BY_PARTS.replace("COUNT", "4")
    answer = bisect_programs(RecordedRuns(tmp_path, GENERATOR + WHOLE, port), Options())
    assert "in all steps" in [run.why for run in answer.runs]
    (fault,) = answer.faults
    assert "sum(0) / 4" in fault.port_line.text
