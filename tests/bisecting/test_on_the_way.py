"""A port of functions has on its way what the models of the reference return."""

from __future__ import annotations

from pathlib import Path

import pytest

from otel_torch.bisecting.search import Options, bisect_programs
from tests.bisecting.recorded_runs import RecordedRuns

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(30, 8), nn.Linear(8, 30)
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, ids, mask):
        x = self.embed(ids)
        q, k, v = self.q(x), self.k(x), self.v(x)
        allowed = mask[:, None, None] & torch.ones(ids.shape[1], ids.shape[1]).tril().bool()
        x = x + F.scaled_dot_product_attention(*(own[:, None] for own in (q, k, v)), allowed)[:, 0]
        return self.head(x[:, -1:])

model = Model().eval()
ids = torch.tensor([[3, 8, 5, 1], [2, 9, 4, 7], [6, 1, 3, 8]])
mask = torch.ones_like(ids).bool()
"""
REFERENCE = """
with torch.no_grad():
    for _ in range(3):
        logits = model(ids, mask)
        ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], 1)
        mask = torch.cat([mask, torch.ones_like(ids[:, :1]).bool()], 1)
print(ids[:, 4:].tolist())
"""
# the port ends with a mask that has the shape of the reference's tokens
PORT = """
p = {name: own.detach() for name, own in model.named_parameters()}

def project(x, name):
    return x @ p[name + ".weight"].T + p[name + ".bias"]

def step(ids, seen):
    x = p["embed.weight"][ids]
    later = torch.arange(ids.shape[1]) > torch.arange(ids.shape[1])[:, None]
    scores = project(x, "q") @ project(x, "k").transpose(1, 2) * SCALE
    scores = scores.masked_fill(later | ~seen[:, None], -1e9)
    x = x + scores.softmax(-1) @ project(x, "v")
    return project(x[:, -1], "head")

rows, norms = ids.tolist(), []
with torch.inference_mode():
    for _ in range(3):
        logits = step(torch.tensor(rows), mask)
        norms.append(logits.norm(dim=-1))
        rows = [[*row, new] for row, new in zip(rows, logits.argmax(-1).tolist())]
        mask = F.pad(mask, (0, 1), value=True)
print([row[4:] for row in rows], torch.stack(norms, 1).tolist())
"""
LINE = 'scores = project(x, "q") @ project(x, "k").transpose(1, 2) * 8 ** 0.5'


@pytest.mark.parametrize(
    ("scale", "lines"),
    [("8 ** -0.5", []), ("8 ** 0.5", [LINE])],
    ids=["legal", "another_scale"],
)
def test_logits_that_a_port_of_functions_reads_are_compared(
    tmp_path: Path, scale: str, lines: list[str]
) -> None:
    programs = RecordedRuns(tmp_path, MODEL + REFERENCE, MODEL + PORT.replace("SCALE", scale))
    answer = bisect_programs(programs, Options())
    assert [found.port_line.text for found in answer.faults if found.port_line] == lines
    assert [found.proof for found in answer.faults] == ["proven"] * len(lines)
