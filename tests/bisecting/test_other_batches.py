"""Programs that compute the same tokens in other batches: their rows are compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from otel_torch.bisecting.bisection import Bisection
from otel_torch.bisecting.search import Options, bisect_programs
from tests.bisecting.recorded_runs import RecordedRuns

_MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.keys, self.values = {}, {}
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def attend(self, q, k, v):
        scores = q @ k.transpose(-1, -2) * 32**-0.5
        ahead = torch.arange(k.shape[-2]) > torch.arange(q.shape[-2])[:, None] + k.shape[-2] - q.shape[-2]
        return torch.softmax(scores.masked_fill(ahead, -torch.inf), -1) @ v

TOKENS = {0: torch.randint(0, 50, (9,)), 1: torch.randint(0, 50, (5,))}
"""
# all tokens in one padded batch
REFERENCE = f"""{_MODEL}
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(50, 32), Block(), nn.Linear(32, 50)

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k, v = self.block.qkv(self.block.norm(x)).chunk(3, -1)
        x = x + self.block.out(self.block.attend(q, k, v))
        return self.head(F.gelu(x))

model = Model()
padded = torch.stack([F.pad(tokens, (0, 9 - len(tokens))) for tokens in TOKENS.values()])
with torch.no_grad():
    model(padded)
"""
# a cache, chunks of four tokens and steps of one, packed without paddings
PORT = f"""{_MODEL}
FAULT = "{{fault}}"

class Engine(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(50, 32), Block(), nn.Linear(32, 50)

    def forward(self, tokens, requests):
        x = self.embed(tokens)
        qkv = self.block.qkv(self.block.norm(x))
        if FAULT == "scaled":
            qkv = qkv * 1.01
        attended, block = [], self.block
        for request, own in enumerate(qkv.split(requests)):
            q, k, v = own.chunk(3, -1)
            if request in block.keys:
                past = block.keys[request][:-1] if FAULT == "lost" else block.keys[request]
                k, v = torch.cat([past, k]), torch.cat([block.values[request][: len(past)], v])
            block.keys[request], block.values[request] = k, v
            attended.append(block.attend(q, k, v))
        x = x + block.out(torch.cat(attended))
        return self.head(F.gelu(x, approximate="tanh" if FAULT == "tanh" else "none"))

model = Engine()
with torch.no_grad():
    for first, last in [(0, 4), (4, 8), (8, 9)]:
        parts = [tokens[first:last] for tokens in TOKENS.values()]
        parts = [part for part in parts if len(part)]
        model(torch.cat(parts), [len(part) for part in parts])
"""


def _bisect(folder: Path, fault: str) -> Bisection:
    runs = RecordedRuns(folder / "runs", REFERENCE, PORT.replace("{fault}", fault))
    return bisect_programs(runs, Options())


def test_an_engine_that_computes_the_same_tokens_matches(tmp_path: Path) -> None:
    answer = _bisect(tmp_path, "")
    assert (answer.verdict, answer.faults) == ("partial", [])
    assert answer.report.reason is not None
    assert answer.report.reason.startswith("4 rows of the reference's outputs")  # of paddings
    assert [run.side for run in answer.runs] == 2 * ["reference", "port"]


@pytest.mark.parametrize(
    ("fault", "texts"),
    [
        ("scaled", ("qkv = qkv * 1.01",)),
        ("lost", ("k, v = torch.cat([past, k])", "attended.append", "torch.softmax", "scores =")),
        ("tanh", ("F.gelu(x, approximate=",)),
    ],
)
def test_a_fault_of_an_engine_is_named_at_its_line(
    tmp_path: Path, fault: str, texts: tuple[str, ...]
) -> None:
    answer = _bisect(tmp_path, fault)
    first = answer.faults[0]
    assert first.port_line is not None
    assert any(text in first.port_line.text for text in texts)
    assert answer.is_healed and not answer.unproven
    assert {finding.proof for finding in answer.faults} == {"proven"}
