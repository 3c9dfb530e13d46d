"""The reference with noise, which may run other operations than without."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import otel_torch


class Choosing(nn.Module):
    """A model that goes another way where its numbers are not those of its first run."""

    def __init__(self, scale: float = 1.0, *, chooses: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(16, 32), nn.Linear(32, 16)
        self.scale, self.chooses = scale, chooses
        self.first: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x).tanh() * self.scale
        total = hidden.double().sum().item()
        if self.first is None or not self.chooses:
            self.first = total
        return self.outer(hidden if total == self.first else hidden.clone().relu())


def test_a_reference_that_goes_another_way_under_noise_is_compared_without() -> None:
    x = torch.randn(4, 16)
    answer = otel_torch.bisect(Choosing(), Choosing(0.5, chooses=False), x, noise="on")
    (fault,) = answer.faults
    assert fault.proof == "proven" and "* self.scale" in fault.port_line.text
    (warning,) = [text for text in answer.report.warnings if "noise" in text]
    assert warning.startswith("what rounding may cause was computed, and not measured")


def test_noise_that_was_measured_in_other_steps_is_measured_again() -> None:
    model, x = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), torch.randn(4, 16)

    def reference() -> Tensor:
        return model(model(x))

    def port() -> Tensor:
        return model(model(model(2.0 * x)))

    answer = otel_torch.bisect(reference, port, (), noise="on")
    assert answer.verdict == "diverged"
    runs = [run.why.split(",")[0] for run in answer.runs]
    assert runs[2:6] == ["with noise", "in all steps", "in all steps", "with noise"]
