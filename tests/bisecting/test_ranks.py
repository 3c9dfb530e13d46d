"""One process beside the ranks of the same model: parts, terms, and what is wrong between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from otel_torch.bisecting.bisection import Bisection
from otel_torch.bisecting.search import Options, bisect_programs
from tests.bisecting.recorded_runs import RecordedRuns
from tests.support import run_ranks

# how each program begins, FAULT being replaced by what is wrong, and ends
START = """
import os, torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
FAULT = "{fault}"
if RANKS > 1:
    dist.init_process_group("gloo")
"""
END = """
if RANKS > 1:
    dist.destroy_process_group()
"""
# a block split by columns and rows, trained for two steps
PROGRAM = (
    START
    + """
class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if RANKS > 1 and FAULT != "not_reduced":
            dist.all_reduce(x)
        if RANKS > 1 and FAULT == "reduced_twice":
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient

def part(tensor, axis):
    rank = 1 - RANK if FAULT == "other_part" and axis == 1 else RANK
    if FAULT == "part_not_loaded" and tensor.shape == (32, 16) and RANK == 1:
        tensor = torch.randn(32, 16)
    return nn.Parameter(tensor.detach().chunk(RANKS, axis)[rank].clone())

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        up, down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.up, self.up_bias = part(up.weight, 0), part(up.bias, 0)
        self.down, self.down_bias = part(down.weight, 1), nn.Parameter(down.bias.detach().clone())

    def forward(self, x):
        h = F.gelu(F.linear(x, self.up, self.up_bias))
        if FAULT == "scaled":
            h = h * 1.1
        y = F.linear(h, self.down)
        if RANKS > 1 and FAULT == "bias_on_each_rank":
            y = y + self.down_bias
            return Reduce.apply(y)
        return Reduce.apply(y) + (0 if FAULT == "no_bias" else self.down_bias)

model = Block()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
torch.manual_seed(1)
for _ in range(2):
    x = torch.randn(8, 16)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""
    + END
)
BATCHES = (
    START
    + """torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    x = torch.randn(8, 16).chunk(RANKS)[RANK]
    optimizer.zero_grad()
    model(x).square().mean().backward()
    for parameter in model.parameters():
        if RANKS > 1 and not (FAULT == "one_not_reduced" and parameter is model[0].weight):
            dist.all_reduce(parameter.grad)
            parameter.grad /= RANKS
    optimizer.step()
"""
    + END
)

# attention to all tokens by ranks that have some each: they exchange these for heads, and back
TOKENS = (
    START
    + """
def exchange(x):
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x) if RANKS > 1 else received.copy_(x)
    return received

def turn(x, angles):
    if RANKS == 1:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    a, b, cos, sin = x[..., ::2], x[..., 1::2], angles.cos(), angles.sin()
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def to_heads(self, x):
        return exchange(x.unflatten(1, (RANKS, -1)).transpose(0, 1).contiguous()).flatten(0, 1)

    def to_tokens(self, x):
        x = exchange(x.unflatten(0, (RANKS, -1)).contiguous())
        if FAULT == "heads_mixed":
            return x.permute(1, 2, 0, 3).flatten(1)
        return x.transpose(0, 1).flatten(1)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(1, (3, 4, 4)).unbind(1)
        first = 0 if FAULT == "positions_of_rank_0" else RANK * len(x)
        angles = torch.arange(first, first + len(x))[:, None, None] * torch.tensor([0.3, 0.1])
        q, k = turn(q, angles), turn(k, angles)
        q, k, v = (self.to_heads(own).transpose(0, 1) for own in (q, k, v))
        y = F.softmax(q @ k.mT, -1) @ v
        return self.out(self.to_tokens(y.transpose(0, 1)))

torch.manual_seed(0)
model, x = nn.ModuleList(Attention() for _ in range(2)), torch.randn(8, 16).chunk(RANKS)[RANK]
with torch.no_grad():
    for layer in model:
        x = x + layer(F.layer_norm(x, (16,), torch.linspace(1, 2, 16)))
"""
    + END
)


def bisect(tmp_path: Path, program: str, fault: str) -> Bisection:
    reference, port = (program.replace("{fault}", name) for name in ("", fault))
    return bisect_programs(RecordedRuns(tmp_path / "runs", reference, port, run_ranks), Options())


@pytest.mark.parametrize("program", [PROGRAM, BATCHES, TOKENS], ids=["parts", "batches", "tokens"])
def test_ranks_that_share_the_work_match(tmp_path: Path, program: str) -> None:
    answer = bisect(tmp_path, program, "")
    assert (answer.verdict, answer.faults) == ("match", [])
    runs = ["reference", "port", "reference"]  # the last one with the parts of ranks
    last_step = [] if program == TOKENS else ["reference", "port"]  # of a training
    assert [run.side for run in answer.runs] == runs + last_step


@pytest.mark.parametrize(
    ("program", "fault", "text"),
    [
        (PROGRAM, "not_reduced", "y = F.linear(h, self.down)"),
        (PROGRAM, "reduced_twice", "dist.all_reduce(x)"),
        (PROGRAM, "bias_on_each_rank", "y = y + self.down_bias"),
        (PROGRAM, "other_part", "y = F.linear(h, self.down)"),
        (PROGRAM, "scaled", "h = h * 1.1"),
        (PROGRAM, "part_not_loaded", "h = F.gelu(F.linear(x, self.up, self.up_bias))"),
        (BATCHES, "one_not_reduced", "optimizer.step()"),
    ],
)
def test_a_fault_of_ranks_is_named_at_its_line(
    tmp_path: Path, program: str, fault: str, text: str
) -> None:
    answer = bisect(tmp_path, program, fault)
    first = answer.faults[0]
    assert first.port_line is not None and text in first.port_line.text
    has_terms = "Each rank of the port has a term here" in first.explanation
    assert has_terms == (fault in ("not_reduced", "bias_on_each_rank", "one_not_reduced"))
    if fault == "one_not_reduced":  # nothing reads the parameters after the step
        assert first.proof is None and "do not meet again" in answer.unproven[0]
    elif fault == "other_part":  # the weights are wrong in the backward pass, too
        assert first.proof == "not proven" and "not all results" in answer.unproven[0]
    else:
        assert first.proof == "proven" and answer.is_healed


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("positions_of_rank_0", "angles.cos(), angles.sin()"),
        ("heads_mixed", "x = exchange(x.unflatten(0"),
    ],
)
def test_what_a_rank_gives_to_others_is_named_where_it_is_made(
    tmp_path: Path, fault: str, text: str
) -> None:
    first = bisect(tmp_path, TOKENS, fault).faults[0]
    assert first.port_line is not None and text in first.port_line.text


@pytest.mark.parametrize(
    ("fault", "faults"),
    [
        ("", []),
        ("no_bias", [(True, "proven")]),
        ("scaled", [(False, "not proven")]),  # the backward pass has parts of the port's gradients
    ],
)
def test_a_reference_may_run_on_ranks(
    tmp_path: Path, fault: str, faults: list[tuple[bool, str]]
) -> None:
    reference, port = (PROGRAM.replace("{fault}", name) for name in ("", fault))
    runs = RecordedRuns(tmp_path / "runs", reference, port, run_reference=run_ranks)
    answer = bisect_programs(runs, Options())
    lines = [found.line.text for found in answer.faults if found.line is not None]
    named = zip(lines, answer.faults, strict=True)
    assert [("no_bias" in text, found.proof) for text, found in named] == faults


# a sampler whose ranks have rows of its latents; the last ones of the last rank are paddings
SAMPLER = (
    START
    + """
def gathered(x):
    if RANKS == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(RANKS)]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 1)

class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.places = nn.Linear(6, 8), nn.Embedding(8, 8)
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.back = nn.Linear(8, 6)

    def forward(self, latents, time):
        count = latents.shape[1]
        x = self.embed(latents) + self.places(torch.arange(count) + RANK * count) + time
        q, k, v = self.q(x), gathered(self.k(x)), gathered(self.v(x))
        is_token = torch.arange(k.shape[1]) < (8 if FAULT == "padding_attended" else 7)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=is_token.expand(2, count, -1))
        return self.back(x + self.out(y))

model = Denoiser().eval()
torch.manual_seed(1)
latents = torch.randn(2, 7, 6)
with torch.no_grad():
    latents = F.pad(latents, (0, 0, 0, -7 % RANKS)).chunk(RANKS, 1)[RANK]
    for step in range(3):
        scale = 0.4 if FAULT == "later_step" and step == 1 and RANK == 0 else 0.3
        latents = latents - scale * model(latents, step / 3)
"""
    + END
)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("", ""),
        (
            "padding_attended",
            "y = F.scaled_dot_product_attention(q, k, v, attn_mask=is_token.expand(2, count, -1))",
        ),
        ("later_step", "latents = latents - scale * model(latents, step / 3)"),
    ],
    ids=["right", "padding_attended", "later_step"],
)
def test_ranks_that_pad_are_compared_by_rows_and_in_all_steps(
    tmp_path: Path, fault: str, text: str
) -> None:
    answer = bisect(tmp_path, SAMPLER, fault)
    lines = [found.port_line.text for found in answer.faults[:1] if found.port_line is not None]
    assert lines == ([text] if text else [])
    assert answer.verdict == ("diverged" if fault else "match")
