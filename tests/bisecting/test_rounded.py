"""A port that rounds one value to a coarser dtype on its way."""

from __future__ import annotations

import torch
from torch import Tensor

import otel_torch

TIMES = torch.tensor([987.3, 411.7])


def waves(times: Tensor, scale: float = 1.0) -> Tensor:
    angles = times[:, None] * 1000.0 ** (-torch.arange(16) / 16)
    return torch.cat([angles.cos(), scale * angles.sin()], -1).cumsum(-1)


def rounded(times: Tensor, scale: float = 1.0) -> Tensor:
    times = times.to(torch.bfloat16).float()
    return waves(times, scale)


def test_a_time_that_is_rounded_is_named_where_that_is_done() -> None:
    answer = otel_torch.bisect(waves, rounded, TIMES)
    (finding,) = answer.faults
    assert "times.to(torch.bfloat16).float()" in finding.port_line.text
    assert finding.proof == "proven"
    assert finding.explanation == "The port rounds to bfloat16 here, and the reference does not."


def test_what_is_rounded_and_does_not_matter_is_no_fault() -> None:
    exact = TIMES.to(torch.bfloat16).float()
    answer = otel_torch.bisect(waves, lambda times: rounded(times, 2.0), exact)
    (finding,) = answer.faults
    assert "scale * angles.sin()" in finding.port_line.text
