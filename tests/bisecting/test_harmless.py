"""Differences between the programs that leave the results of the port as they are."""

from __future__ import annotations

import torch
from torch import Tensor

import otel_torch

WEIGHTS = torch.linspace(-1, 1, 64).sin().reshape(8, 8)
GATE = torch.linspace(1, 2, 64).reshape(8, 8)
X = torch.linspace(-2, 2, 96).cos().reshape(2, 6, 8)
MASK = torch.arange(6) < torch.tensor([[4], [6]])


def pooled(x: Tensor, mask: Tensor) -> Tensor:
    hidden = (x @ WEIGHTS).tanh() * mask[..., None]
    return (hidden @ WEIGHTS).abs().sum(1)


def test_paddings_that_count_for_nothing_are_no_fault_and_hide_none() -> None:
    def port(x: Tensor, mask: Tensor) -> Tensor:
        hidden = (x @ WEIGHTS).tanh()
        return torch.einsum("btd,bt->bd", (hidden @ WEIGHTS).abs(), mask * 1.1)

    answer = otel_torch.bisect(pooled, port, (X, MASK))
    (finding,) = answer.faults
    assert "mask * 1.1" in finding.port_line.text
    assert "changes nothing that the port returns" in " ".join(answer.report.warnings)


QUERIES, KEYS = WEIGHTS.flip(0), WEIGHTS.flip(1)


def attended(x: Tensor, mask: Tensor) -> Tensor:
    for _ in range(2):
        q, k = (x @ QUERIES).tanh(), (x @ KEYS).tanh()
        scores = (q @ k.mT).masked_fill(~mask[:, None], -30.0)
        x = x + scores.softmax(-1) @ x @ WEIGHTS
    return (x * mask[..., None]).sum(1)


def test_a_mask_of_paddings_behind_a_fault_is_no_fault() -> None:
    def port(x: Tensor, mask: Tensor) -> Tensor:
        itself = torch.eye(6, dtype=torch.bool) & ~mask[..., None]
        for _ in range(2):
            q, k = (x @ QUERIES * 1.1).tanh(), (x @ KEYS).tanh()
            seen = mask[:, None].expand(2, 6, 6) & mask[..., None] | itself
            scores = (q @ k.mT).masked_fill(~seen, -30.0)
            x = x + scores.softmax(-1) @ x @ WEIGHTS
        return (x * mask[..., None]).sum(1)

    answer = otel_torch.bisect(attended, port, (X, MASK))
    (finding,) = answer.faults
    assert "QUERIES * 1.1" in finding.port_line.text
    assert finding.proof == "proven" and answer.is_healed


def gated(x: Tensor) -> Tensor:
    gate = (x.abs() @ GATE).relu()
    return (x @ WEIGHTS).tanh() @ WEIGHTS * gate


def test_what_only_another_fault_makes_harmless_is_a_fault() -> None:
    def port(x: Tensor) -> Tensor:
        gate = (x.abs() @ GATE.neg()).relu()
        hidden = (x @ WEIGHTS * 1.1).tanh()
        return hidden @ WEIGHTS * gate

    answer = otel_torch.bisect(gated, port, X)
    lines = {finding.port_line.text.strip(): finding.proof for finding in answer.faults}
    assert lines == {
        "gate = (x.abs() @ GATE.neg()).relu()": "proven",
        "hidden = (x @ WEIGHTS * 1.1).tanh()": "proven",
    }
    assert answer.is_healed
