"""Right results of a trial clear other suspects."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import otel_torch


class Attention(nn.Module):
    """A block that runs twice, the first time in a window of tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8, bias=False) for _ in range(4))

    def attend(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).mT / 8**0.5
        return self.out((scores + mask).softmax(-1) @ self.value(x))

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[0])
        near = (places[:, None] - places).abs() <= 2
        window = torch.zeros(near.shape).masked_fill(~near, -1e9)
        x = x + self.attend(x, window)
        return self.attend(x, torch.zeros(near.shape)).tanh()


class Folded(nn.Module):
    """The same with products of weights: nothing within the attention is in both programs."""

    def __init__(self, model: Attention, window: int, factor: float) -> None:
        super().__init__()
        self.model, self.window, self.factor = model, window, factor

    def forward(self, x: Tensor) -> Tensor:
        model = self.model
        scores = model.query.weight.mT @ model.key.weight * self.factor
        values = model.value.weight.mT @ model.out.weight.mT
        steps = torch.linspace(0, x.shape[0] - 1, x.shape[0])
        apart = (steps.outer(torch.ones_like(steps)) - steps).square()
        far = apart > self.window**2
        nearby = (x @ scores @ x.mT).masked_fill(far, -torch.inf).softmax(-1)
        x = x + torch.einsum("ts,sd,de->te", nearby, x, values)
        weights = (x @ scores @ x.mT).softmax(-1)
        return torch.tanh(torch.einsum("ts,sd,de->te", weights, x, values))


X = torch.linspace(-2, 2, 48).sin().reshape(6, 8)


def test_a_fault_is_proven_once_the_trial_has_acquitted_what_else_leads_there() -> None:
    """The second time the block has the right input, and its products of weights a right result."""
    answer = otel_torch.bisect(Attention(), Folded(Attention(), 3, 8**-0.5), X)
    (finding,) = answer.faults
    assert (finding.proof, answer.is_healed) == ("proven", True)
    assert (
        finding.port_line.text.strip()
        == "apart = (steps.outer(torch.ones_like(steps)) - steps).square()"
    )
    assert finding.region.port[1].line > finding.port_line.line


def test_places_that_nothing_acquits_are_proven_together_and_nothing_behind_them() -> None:
    """One of the values exchanged does not belong there: it would be a fault of the second call."""
    answer = otel_torch.bisect(Attention(), Folded(Attention(), 2, 8**-0.4), X)
    assert answer.is_healed
    first, second = answer.faults
    assert (first.proof, second.proof) == ("proven", "not proven")
    assert "* self.factor" in first.port_line.text
    assert first.region.port[1].line > first.port_line.line
    lines = [line["text"] for line in answer.as_json()["proven_lines"]["0"]]
    assert any("* self.factor" in line for line in lines) and len(lines) > 1
    assert "value behind test_narrowed.py:" in " ".join(str(answer).split())


def test_that_only_what_is_returned_was_exchanged_heals_nothing() -> None:
    first, second, third, fourth = torch.linspace(-1, 1, 256).sin().reshape(4, 8, 8)

    def reference(x: Tensor) -> Tensor:
        return x @ first @ second + x @ third @ fourth

    def port(x: Tensor) -> Tensor:
        right = third @ fourth
        wrong = first @ second * 1.1
        return x @ (wrong + right)

    answer = otel_torch.bisect(reference, port, X)
    assert [finding.proof for finding in answer.faults] == [None]
    assert not answer.is_healed
    assert "do not meet again" in " ".join(str(answer).split())
