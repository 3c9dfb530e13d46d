"""Two programs recorded as graphs of operations, compared down to the line that differs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import otel_torch
from otel_torch.parity.finding import Report
from otel_torch.parity.report.html import write_html
from otel_torch.parity.report.text import render_text

WIDTH = 16


class Block(nn.Module):
    """A gated feed-forward after attention; what it computes is its `choices`."""

    def __init__(self, fused: bool, window: int = 4, eps: float = 1e-6, gate: bool = True) -> None:
        super().__init__()
        self.qkv, self.up = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down, self.norm = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.fused, self.window, self.eps, self.gate = fused, window, eps, gate

    def normalized(self, x: torch.Tensor) -> torch.Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(variance + self.eps) * self.norm

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        steps = torch.arange(x.shape[-2])
        seen = (steps[:, None] - steps).abs() < self.window
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        scores = q @ k.transpose(-1, -2) * WIDTH**-0.5
        return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.normalized(x))
        up, gate = self.up(self.normalized(x)).chunk(2, -1)
        if self.gate:
            up = up * F.silu(gate)
        return x + self.down(up)


@pytest.fixture
def compared(tmp_path: Path) -> Callable[..., Report]:
    """Return the comparison of an eager block with a fused one that has other choices."""

    def record(name: str, block: Block, **settings: object) -> Path:
        path = tmp_path / f"{name}.jsonl"
        assert otel_torch.start(jsonl=str(path), capture="graph", **settings)
        try:
            block(torch.randn(2, 10, WIDTH, generator=torch.Generator().manual_seed(1)))
        finally:
            otel_torch.stop()
        return path

    def compare(
        change: Callable[[Block], None] = lambda block: None, noise: bool = False, **choices: object
    ) -> Report:
        blocks = []
        for fused, chosen in ((False, {}), (True, choices)):
            torch.manual_seed(0)
            blocks.append(Block(fused, **chosen))  # type: ignore[arg-type]
        change(blocks[1])
        noisy = record("noise", blocks[0], noise="1") if noise else None
        recordings = record("reference", blocks[0]), record("port", blocks[1])
        return otel_torch.diff(*recordings, noise=noisy)

    return compare


def line_of(text: str) -> int:
    """Return the number of the line of this file that holds a text."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def test_other_ways_to_compute_the_same_match(compared: Callable[..., Report]) -> None:
    report = compared()
    assert (report.verdict, report.introduced) == ("match", [])
    assert report.pairs > 20


@pytest.mark.parametrize(
    ("choices", "text", "explanation"),
    [
        ({"window": 3}, "seen = (steps", "`lt` has 4 in the reference and 3 in the port."),
        ({"eps": 1e-2}, "return x * torch.rsqrt", "`add` has 1e-06 in the reference and 0.01 in the port."),
    ],
)  # fmt: skip
def test_another_number_is_named_with_its_line(
    compared: Callable[..., Report], choices: dict[str, object], text: str, explanation: str
) -> None:
    first = compared(**choices).first
    assert first is not None and first.line is not None and first.port_line is not None
    assert {first.line.line, first.port_line.line} == {line_of(text)}
    assert first.port_line.file.endswith("test_compare_operations.py")
    assert first.explanation == explanation
    assert first.error is not None and first.floor is not None and first.error > first.floor


def test_noise_gives_each_operation_its_own_floor(compared: Callable[..., Report]) -> None:
    report = compared(noise=True)
    assert report.verdict == "match"
    floors = {pair.tensor: pair.floor for pair in report.compared}
    modelled = {pair.tensor: pair.floor for pair in compared().compared}
    assert floors.keys() == modelled.keys() and floors != modelled
    first = compared(noise=True, eps=1e-4).first
    assert first is not None and first.port_line is not None
    assert first.port_line.line == line_of("return x * torch.rsqrt")


def test_a_missing_gate_is_named_where_it_is_or_where_it_lacks(
    compared: Callable[..., Report],
) -> None:
    first = compared(gate=False).first
    assert first is not None and first.region is not None
    lines = [line for side in (first.region.reference, first.region.port) for line in side or ()]
    assert {line_of("up = up * F.silu"), line_of("return x + self.down")} & {
        line.line for line in lines
    }


def test_a_wrong_weight_is_a_finding_of_weights(compared: Callable[..., Report]) -> None:
    def shift(block: Block) -> None:
        with torch.no_grad():
            block.down.weight[3] += 0.5

    first = compared(shift).first
    assert first is not None
    assert (first.kind, first.side, first.port_side) == ("weights", "parameter", "parameter")
    assert (first.module, first.port_module) == ("down", "down")
    assert first.port_tensor == "param.weight"


def test_every_report_shows_both_lines(compared: Callable[..., Report], tmp_path: Path) -> None:
    report = compared(window=3)
    text = render_text(report, color=False)
    number = line_of("seen = (steps")
    assert text.count(f"test_compare_operations.py:{number}") >= 3
    assert text.count("▸") == 2
    assert "OTEL_TORCH_CAPTURE=graph" in text
    found = report.as_json()["first"]
    assert (found["line"]["line"], found["port_line"]["line"]) == (number, number)
    assert found["line"]["text"].strip().startswith("seen = (steps")
    assert set(found["region"]) == {"reference", "port"} and found["proof"] is None
    write_html(report, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count(f"test_compare_operations.py:{number}") >= 4
    assert "lt(" in page
