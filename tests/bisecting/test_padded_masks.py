"""A batch with paddings: what programs make of these may differ, and is no fault."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import otel_torch
from otel_torch.bisecting.compared import Exchange, compare_runs
from tests.bisecting.recorded_runs import RecordedRuns

WIDTH, LAYERS = 16, 2
TOKENS = torch.tensor([[0, 0, 0, 5, 9, 3], [0, 7, 2, 4, 8, 6], [1, 2, 3, 4, 5, 6]])
NORMS = ("behind", "before")


class Layer(nn.Module):
    """Attention and a gated product, each with a norm: behind the one, before the other."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out, self.up, self.down = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)
        )
        for name in NORMS:
            setattr(self, name, nn.Parameter(1 + 0.3 * torch.randn(WIDTH)))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(1, 2) / math.sqrt(WIDTH)
        weights = scores.masked_fill(~mask, -math.inf).softmax(-1).nan_to_num(0.0)
        x = x + F.rms_norm(self.out(weights @ self.v(x)), (WIDTH,), self.behind)
        return x + self.down(F.silu(self.up(F.rms_norm(x, (WIDTH,), self.before))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(10, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        mask = torch.ones(6, 6).tril().bool() & (tokens != 0)[:, None]
        for layer in self.layers:
            x = layer(x, mask)
        return x[:, -1] @ self.embed.weight.T


def port(norms: tuple[str, str]) -> Callable[[Tensor], Tensor]:
    """Return a port in functions, with large numbers for -inf; `norms` are what its norms read."""
    state = {name: value.detach() for name, value in Model().state_dict().items()}

    def weights(name: str) -> Tensor:
        return torch.stack([state[f"layers.{layer}.{name}"] for layer in range(LAYERS)])

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1.1920929e-07) * weight

    def run(tokens: Tensor) -> Tensor:
        p = {name: weights(f"{name}.weight") for name in ("q", "k", "v", "out", "up", "down")}
        p |= {name: weights(own) for name, own in zip(NORMS, norms, strict=True)}
        x = state["embed.weight"][tokens]
        hidden = torch.ones(6, 6).triu(1).bool() | (tokens == 0)[:, None]
        bias = torch.where(hidden, -1e9, 0.0)
        for i in range(LAYERS):
            q, k, v = (torch.einsum("bsc,dc->bsd", x, p[name][i]) for name in "qkv")
            scores = torch.einsum("bsd,btd->bst", q, k) * WIDTH**-0.5 + bias
            powers = torch.exp(scores - scores.amax(-1, keepdim=True))
            mixed = torch.einsum("bst,btd->bsd", powers, v) / powers.sum(-1, keepdim=True)
            x = x + norm(torch.einsum("bsc,dc->bsd", mixed, p["out"][i]), p["behind"][i])
            up = torch.einsum("bsc,dc->bsd", norm(x, p["before"][i]), p["up"][i])
            x = x + torch.einsum("bsc,dc->bsd", up * torch.sigmoid(up), p["down"][i])
        return x[:, -1] @ state["embed.weight"].T

    return run


def test_what_paddings_become_is_not_compared() -> None:
    assert otel_torch.bisect(Model(), port(NORMS), TOKENS).verdict == "match"


def test_a_fault_behind_paddings_is_at_its_line() -> None:
    """Exchanged masks would make NaN of paddings, or heal what the fault makes in a later layer."""
    answer = otel_torch.bisect(Model(), port(("before", "behind")), TOKENS)
    first = answer.faults[0]
    assert first.port_line.text.strip().startswith("return x * torch.rsqrt(")
    assert "reads the parameter `layers.0.behind` in the reference" in first.explanation
    assert answer.is_healed


MASKED = """
import torch
x = torch.linspace(-1, 1, 36).reshape(6, 6)
scores = torch.nn.Linear(6, 6)(x).masked_fill(x > 0.5, {fill})
print(scores.softmax(-1).sum())
"""


def test_what_another_rank_exchanges_is_not_asked_of_this_one(tmp_path: Path) -> None:
    texts = [MASKED.format(fill=fill) for fill in ("float('-inf')", "-1e9")]
    programs = RecordedRuns(tmp_path, *texts)
    runs = [programs.run(side, "", {}) for side in ("reference", "port")]
    rank = compare_runs(*runs).leading
    masked = (
        (port, exchange)
        for exchange in (Exchange(own, None, None) for own in rank.results_of_reference())
        for port in rank.values_of_port
        if rank.is_less_finite(port, exchange)
    )
    own, exchange = next(masked)
    elsewhere = own._replace(rank=own.rank + 1)
    assert not rank.is_less_finite(elsewhere, exchange)
    assert rank.first_of([own, elsewhere]) == {own}
