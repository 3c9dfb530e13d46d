"""A port whose weights were put together wrongly when it was converted."""

from __future__ import annotations

import pytest
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
    line = finding.port_set_by[0].line
    assert f"port sets what it reads in test_preparation.py:{line} in convert" in str(answer)


def test_a_program_that_is_recorded_from_its_beginning_runs_no_further_time() -> None:
    def reference(x: Tensor) -> Tensor:
        return Gated()((x * 2).tanh())

    def port(x: Tensor) -> Tensor:
        return convert(is_exchanged=True)((x * 3).tanh())

    answer = otel_torch.bisect(reference, port, X)
    scaled, gated = answer.faults
    assert "x * 3" in scaled.port_line.text and scaled.port_set_by == ()
    assert [line.text for line in gated.port_set_by] == ["both = torch.cat([up, gate])"]
    assert not any("what has made its weights" in run.why for run in answer.runs)


HEADS, GROUPS, SIZE = 4, 2, 6


class Attention(nn.Module):
    """Four queries for two keys and values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q = nn.Linear(WIDTH, HEADS * SIZE, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, GROUPS * SIZE, bias=False) for _ in range(2))
        self.out = nn.Linear(HEADS * SIZE, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            own(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for own in (self.q, self.k, self.v)
        )
        k, v = (own.repeat_interleave(HEADS // GROUPS, 1) for own in (k, v))
        mixed = (q @ k.mT / SIZE**0.5).softmax(-1) @ v
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Grouped(nn.Module):
    """All of a group side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * GROUPS) * SIZE, bias=False)
        self.out = nn.Linear(HEADS * SIZE, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made = self.qkv(x).unflatten(-1, (GROUPS, -1, SIZE))
        q, k, v = made.split([HEADS // GROUPS, 1, 1], 3)
        q, k, v = q.flatten(2, 3), k.squeeze(3), v.squeeze(3)
        q = q.unflatten(2, (GROUPS, -1))
        scores = torch.einsum("btgrd,bsgd->bgrts", q, k) / SIZE**0.5
        mixed = torch.einsum("bgrts,bsgd->btgrd", scores.softmax(-1), v)
        return x + self.out(mixed.flatten(2))


def grouped(*, is_regrouped: bool) -> Grouped:
    parts = Attention().state_dict()
    k, v = (parts[f"{name}.weight"].view(GROUPS, 1, SIZE, WIDTH) for name in "kv")
    q = parts["q.weight"].view(GROUPS, -1, SIZE, WIDTH)
    if is_regrouped:
        q = parts["q.weight"].view(-1, GROUPS, SIZE, WIDTH).transpose(0, 1)
    port = Grouped()
    port.qkv.weight.data = torch.cat([q, k, v], 1).reshape(-1, WIDTH)
    port.out.weight.data = parts["out.weight"]
    return port


@pytest.mark.parametrize("is_regrouped", [False, True])
def test_heads_in_another_order_are_named_where_they_come_to_be(is_regrouped: bool) -> None:
    answer = otel_torch.bisect(
        lambda x: Attention()(x), lambda x: grouped(is_regrouped=is_regrouped)(x), X
    )
    if not is_regrouped:
        assert answer.verdict == "match"
        return
    (finding,) = answer.faults
    assert "self.qkv(x)" in finding.port_line.text and finding.proof == "proven"
    assert finding.explanation == "The same numbers are in another order."
    texts = [line.text.split("=")[0].strip() for line in finding.port_set_by]
    assert texts == ["q", "port.qkv.weight.data"]
    lines = {line.text for line in answer.proven_lines(0)}
    assert {line.text for line in finding.port_set_by} < lines
    assert not any("einsum" in text for text in lines)
