"""`diff` of two graphs whose tensors have different layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import otel_torch


class Channels(nn.Module):
    def __init__(self, last: bool, wrong: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.narrow, self.last, self.wrong = nn.Conv2d(3, 6, 1), last, wrong

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.last:
            return F.silu(self.narrow(x)).exp().square()
        x = x.permute(0, 2, 3, 1)
        x = F.silu(F.linear(x, self.narrow.weight.flatten(1), self.narrow.bias)).exp()
        x = x * 1.5 if self.wrong else x
        return x.square().permute(0, 3, 1, 2)


@pytest.mark.parametrize(("axes", "lines"), [("off", 1), ("on", 0)])
def test_a_closer_place_is_offered_where_axes_were_not_moved(
    tmp_path: Path, axes: str, lines: int
) -> None:
    paths = []
    for side, model in (("reference", Channels(False, False)), ("port", Channels(True, True))):
        path = tmp_path / f"{side}.jsonl"
        otel_torch.start(capture="graph", signals="", jsonl=str(path), graph_axes=axes)
        model(torch.linspace(-1, 1, 120).reshape(2, 3, 4, 5))
        otel_torch.stop()
        paths.append(path)
    report = otel_torch.diff(*paths)
    assert report.first is not None and report.first.port_line is not None
    assert report.first.port_line.text == "x = x * 1.5 if self.wrong else x"
    assert sum("OTEL_TORCH_GRAPH_AXES=1" in warning for warning in report.warnings) == lines
