"""Programs that compute the same tokens in other batches: their rows are compared."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import Tensor

import otel_torch
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


_draw = torch.Generator().manual_seed(0)
EMBED = torch.randn(24, 8, generator=_draw)
QUERY, KEY, VALUE, OUT, UP, DOWN = 0.5 * torch.randn(6, 8, 8, generator=_draw)
PROMPTS = [torch.tensor(own) for own in ([3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8])]
LAYERS, COUNT = 2, 3


def norm(x: Tensor) -> Tensor:
    square = x.square().mean(-1, keepdim=True)
    return x * torch.rsqrt(square + 1e-6)


def mixed(x: Tensor) -> Tensor:
    hidden = norm(x) @ UP
    gate = torch.sigmoid(hidden)
    return x + hidden * gate @ DOWN


def attend(q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
    ahead = torch.arange(len(k)) > torch.arange(len(q))[:, None] + first
    scores = q @ k.T / 8**0.5
    weights = scores.masked_fill(ahead, -torch.inf).softmax(-1)
    return weights @ v


def one_by_one(prompts: list[Tensor]) -> Tensor:
    scores = []
    for tokens in prompts:
        for _ in range(COUNT):
            x = EMBED[tokens]
            for _ in range(LAYERS):
                y = norm(x)
                q, k, v = y @ QUERY, y @ KEY, y @ VALUE
                x = mixed(x + attend(q, k, v, 0) @ OUT)
            scores.append(norm(x)[-1] @ EMBED.T)
            tokens = torch.cat([tokens, scores[-1].argmax()[None]])
    return torch.stack(scores)


def in_chunks(prompts: list[Tensor], factor: float) -> Tensor:
    """Return the same as `one_by_one`, with a cache and two tokens of each prompt at a time."""
    fused = torch.cat([QUERY, KEY, VALUE], 1)
    keys = [[torch.zeros(0, 8)] * 3 for _ in range(LAYERS)]
    values = [[torch.zeros(0, 8)] * 3 for _ in range(LAYERS)]
    tokens = [own.tolist() for own in prompts]
    scores: list[list[Tensor]] = [[], [], []]
    while any(len(own) < COUNT for own in scores):
        parts = [own[len(done) :][:2] for own, done in zip(tokens, keys[0], strict=True)]
        sizes = [len(part) for part in parts]
        x = EMBED[torch.tensor([*chain(*parts)])]
        for layer in range(LAYERS):
            attended = []
            for own, qkv in enumerate((norm(x) @ fused).split(sizes)):
                q, k, v = qkv.chunk(3, 1)
                keys[layer][own] = torch.cat([keys[layer][own], k])
                values[layer][own] = torch.cat([values[layer][own], v])
                first = len(keys[layer][own]) - len(q)
                attended.append(attend(q * factor, keys[layer][own], values[layer][own], first))
            x = mixed(x + torch.cat(attended) @ OUT)
        rows = norm(x).split(sizes)
        for own, done in enumerate(keys[0]):
            if len(done) == len(tokens[own]) and len(scores[own]) < COUNT:
                scores[own].append(rows[own][-1] @ EMBED.T)
                tokens[own].append(int(scores[own][-1].argmax()))
    return torch.stack([*chain(*scores)])


def test_what_nothing_can_prove_in_whole_values_is_searched_by_rows_at_once() -> None:
    answer = otel_torch.bisect(one_by_one, lambda prompts: in_chunks(prompts, 1.3), (PROMPTS,))
    (finding,) = answer.faults
    assert "attend(q * factor" in finding.port_line.text
    assert [run.why for run in answer.runs[:2]] == ["as it is", "as it is"]
    assert all(run.why.startswith("by rows") for run in answer.runs[2:4])


def test_a_match_in_whole_values_is_not_recorded_by_rows() -> None:
    answer = otel_torch.bisect(one_by_one, lambda prompts: in_chunks(prompts, 1.0), (PROMPTS,))
    assert answer.verdict == "match" and len(answer.runs) == 2
