"""An explanation names what differs between two regions, not how each program writes the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import otel_torch
from otel_torch.parity.finding import Report

WIDTH = 16


class Encoder(nn.Module):
    """Three layers, and a projection of what one of them returns."""

    def __init__(self, is_port: bool, taken: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.project = nn.Linear(WIDTH, WIDTH, bias=False)
        self.is_port, self.taken = is_port, taken

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        states = [x]
        for layer in self.layers:
            states.append(states[-1] + layer(states[-1]).tanh())
        features = states[self.taken][:, 1:]  # without the first token
        pooled = states[-1].mean(1)
        if self.is_port:
            weight = self.project.weight.t().expand(len(x), -1, -1)
            return torch.bmm(features, weight), pooled
        return self.project(features), pooled


class Scaled(nn.Module):
    """A gain between two layers, whose features the port has in another order."""

    def __init__(self, is_port: bool, is_gain_moved: bool = True) -> None:
        super().__init__()
        first, second, gain = (
            torch.randn(WIDTH, WIDTH),
            torch.randn(WIDTH, WIDTH),
            torch.randn(WIDTH),
        )
        if is_port:
            order = torch.arange(WIDTH).view(2, -1).t().flatten()
            first, second = first[:, order], second[order]
            gain = gain[order] if is_gain_moved else gain
        self.first, self.second = nn.Parameter(first), nn.Parameter(second)
        self.gain, self.is_port = nn.Parameter(gain), is_port

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.first
        return (x * self.gain if self.is_port else self.gain * x) @ self.second


class Wide(nn.Module):
    """A scale that is a number in the reference and a tensor in the port."""

    def __init__(self, is_port: bool, scale: float = 6.0, *, is_squared: bool = True) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.scale = torch.tensor(scale) if is_port else scale
        self.is_squared = is_squared

    def forward(self, x: Tensor) -> Tensor:
        wide = self.proj(x).tanh() * self.scale
        return (wide * wide if self.is_squared else wide.relu()) + x


class Pinned(nn.Module):
    """Some tokens are put back before patches are embedded: by a convolution, or by a product whose weight is laid out
    for it.
    """

    def __init__(self, is_port: bool, is_pinned: bool = True) -> None:
        super().__init__()
        self.pinned, weight = torch.randn(2, 10, 2), torch.randn(WIDTH, 10, 4)
        self.weight = nn.Parameter(weight.permute(2, 1, 0).flatten(0, 1) if is_port else weight)
        self.is_port, self.is_pinned = is_port, is_pinned

    def forward(self, x: Tensor) -> Tensor:
        x = x.tanh()
        if self.is_pinned:
            x[:, :, :2] = self.pinned
        if self.is_port:
            return x.unfold(-1, 4, 4).permute(0, 2, 3, 1).flatten(2) @ self.weight
        return F.conv1d(x, self.weight, stride=4).transpose(1, 2)


def compare(folder: Path, model: type[nn.Module], **fault: object) -> Report:
    """Compare a model with its port, which is written otherwise and has a fault."""
    paths = []
    for is_port in (False, True):
        torch.manual_seed(0)
        built = model(is_port, **(fault if is_port else {}))
        paths.append(folder / f"{'port' if is_port else 'reference'}.jsonl")
        assert otel_torch.start(jsonl=str(paths[-1]), capture="graph")
        try:
            built(torch.randn(2, 10, WIDTH, generator=torch.Generator().manual_seed(1)))
        finally:
            otel_torch.stop()
    return otel_torch.diff(*paths)


@pytest.mark.parametrize("model", [Encoder, Pinned, Scaled, Wide])
def test_other_ways_to_write_the_same_match(tmp_path: Path, model: type[nn.Module]) -> None:
    assert compare(tmp_path, model).verdict == "match"


def test_another_value_that_is_read_is_named_where_it_is_taken(tmp_path: Path) -> None:
    # `bmm` and `mm` are one product; the layer whose result is sliced is what differs
    report = compare(tmp_path, Encoder, taken=3)
    finding = report.introduced[0]
    assert finding.port_line is not None and "states[self.taken][:, 1:]" in finding.port_line.text
    assert finding.line == finding.port_line
    assert finding.explanation is not None and finding.explanation.startswith("`slice` reads")


def test_a_gain_in_another_order_than_what_it_scales_is_told(tmp_path: Path) -> None:
    # the factors of the port come in another order, which is no difference
    finding = compare(tmp_path, Scaled, is_gain_moved=False).introduced[0]
    assert finding.port_line is not None and "x * self.gain" in finding.port_line.text
    assert finding.explanation is not None
    assert finding.explanation.startswith("`mul` reads the result of `_unsafe_view`")
    assert finding.explanation.endswith("but the parameter `gain` in the same one.")


def test_a_tensor_of_one_element_is_told_by_its_number(tmp_path: Path) -> None:
    explanation = compare(tmp_path, Wide, scale=6.5).introduced[0].explanation
    assert explanation == "`mul` has 6.0 in the reference and 6.5 in the port."


def test_a_number_that_is_a_tensor_in_the_port_is_no_difference(tmp_path: Path) -> None:
    explanation = compare(tmp_path, Wide, is_squared=False).introduced[0].explanation
    assert explanation == "The reference computes `mul` where the port computes `relu`."


def test_what_reads_a_weight_in_another_form_is_not_left_out(tmp_path: Path) -> None:
    explanation = compare(tmp_path, Pinned, is_pinned=False).introduced[0].explanation
    assert explanation is not None and "leaves out" not in explanation, explanation
    assert "`copy_`" in explanation
