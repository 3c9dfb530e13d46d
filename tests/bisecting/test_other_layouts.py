"""Programs that lay their tensors out otherwise: they meet where their axes are in one order."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import otel_torch


class Reference(nn.Module):
    """A residual block of pictures with channels first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.up, self.down = nn.Conv2d(6, 16, 1), nn.Conv2d(16, 6, 1)
        self.scale = nn.Parameter(torch.rand(6, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.up(self.depthwise(x)))
        y = y / (1 + y.square().mean((2, 3), keepdim=True))
        return x + self.scale * self.down(y)


class ChannelsLast(nn.Module):
    """The same with channels last, and flat pictures."""

    def __init__(self, reference: Reference, fault: str = "") -> None:
        super().__init__()
        self.model, self.fault = reference, fault

    def forward(self, x: Tensor) -> Tensor:
        model = self.model
        y = model.depthwise(x).flatten(2).mT
        x = x.flatten(2).mT
        y = F.gelu(F.linear(y, model.up.weight.flatten(1), model.up.bias))
        y = y / (1 + y.square().mean(-1 if self.fault == "energy" else -2, keepdim=True))
        y = F.linear(y, model.down.weight.flatten(1), model.down.bias)
        if self.fault == "scale":
            return ((x + y) * model.scale.flatten()).mT.unflatten(2, (5, 4))
        return (x + y * model.scale.flatten()).mT.unflatten(2, (5, 4))


X = torch.linspace(-2, 2, 240).sin().reshape(2, 6, 5, 4)


def test_another_layout_matches() -> None:
    answer = otel_torch.bisect(Reference(), ChannelsLast(Reference()), X)
    assert (answer.verdict, len(answer.runs)) == ("match", 2)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("energy", "y = y / (1 + y.square().mean(-1 if"),
        ("scale", "return ((x + y) * model.scale.flatten())"),
    ],
)
def test_a_fault_in_another_layout_is_proven_at_its_line(fault: str, text: str) -> None:
    answer: Any = otel_torch.bisect(Reference(), ChannelsLast(Reference(), fault), X)
    (finding,) = answer.faults
    assert finding.port_line.text.strip().startswith(text)
    assert finding.proof == "proven"
    assert answer.is_healed


class Convolutions(nn.Module):
    """Two convolutions, of as many channels as the pictures have rows and columns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.silu(self.first(x))).tanh()


def windows(x: Tensor, convolution: nn.Conv2d, pads: tuple[int, int] = (1, 1)) -> Tensor:
    """Convolve pictures with channels last, as a product of windows."""
    x = F.pad(x, (0, 0, *pads, *pads))
    x = x.unfold(1, 3, 1).unfold(2, 3, 1).flatten(3)
    return F.linear(x, convolution.weight.flatten(1), convolution.bias)


@pytest.mark.parametrize("wrong", ["", "pads", "activation"])
def test_what_windows_make_is_what_a_convolution_makes(wrong: str) -> None:
    """Nothing but earlier values tells which of three axes of one size is that of the channels."""
    model = Convolutions()

    def port(x: Tensor) -> Tensor:
        x = windows(x.permute(0, 2, 3, 1), model.first)
        x = F.gelu(x) if wrong == "activation" else F.silu(x)
        x = windows(x, model.second, (2, 0) if wrong == "pads" else (1, 1))
        return x.tanh().permute(0, 3, 1, 2)

    answer = otel_torch.bisect(model, port, torch.linspace(-2, 2, 432).sin().reshape(2, 6, 6, 6))
    if not wrong:
        assert answer.verdict == "match"
        return
    (finding,) = answer.faults
    text = {"pads": "x = F.pad(x", "activation": "x = F.gelu(x) if"}[wrong]
    assert finding.port_line is not None and finding.port_line.text.strip().startswith(text)
    assert (finding.proof, answer.is_healed) == ("proven", True)


class Pieces(Convolutions):
    """The same, of which the first result is written piece by piece."""

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.empty(2, 6, 6, 6)
        for part in (slice(0, 4), slice(4, 6)):
            kept[:, part] = self.first(x)[:, part] * (1.0 if part.start else 1.5)
        return self.second(F.silu(kept)).tanh()


def test_a_value_that_is_written_piece_by_piece_is_exchanged_where_it_is_read() -> None:
    x = torch.linspace(-2, 2, 432).sin().reshape(2, 6, 6, 6)
    answer = otel_torch.bisect(Convolutions(), Pieces(), x)
    (finding,) = answer.faults
    assert finding.port_line is not None and "kept[:, part] =" in finding.port_line.text
    assert (finding.proof, answer.is_healed) == ("proven", True)


def test_words_of_a_batch_and_a_batch_of_words_look_alike_once_flattened() -> None:
    """Put in place as it lies, the reference's value would be a fault of its own."""
    first, second = torch.linspace(-1, 1, 64).sin().reshape(8, 8), torch.linspace(-2, 1, 40).cos()
    x = torch.linspace(-2, 2, 9 * 3 * 8).sin().reshape(9, 3, 8)

    def reference(x: Tensor) -> Tensor:
        hidden = (x @ first).tanh()
        flat = (hidden.flatten(0, 1) @ second.view(8, 5)).view(9, 3, 5)
        return flat.softmax(0).cumsum(0)

    def port(x: Tensor) -> Tensor:
        hidden = (x.transpose(0, 1).contiguous() @ first * 1.1).tanh()
        flat = (hidden.flatten(0, 1) @ second.view(8, 5)).view(3, 9, 5)
        return flat.softmax(1).cumsum(1).transpose(0, 1)

    answer = otel_torch.bisect(reference, port, x)
    (finding,) = answer.faults
    assert (finding.proof, answer.is_healed) == ("proven", True)
    assert "first * 1.1" in finding.port_line.text


class Turned(nn.Module):
    """A square weight, which the port has transposed."""

    def __init__(self, is_port: bool) -> None:
        super().__init__()
        self.is_port = is_port
        start = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)) * 0.3
        self.weight = nn.Parameter(start.t().contiguous() if is_port else start)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.t() if self.is_port else x @ self.weight).tanh()


def trained(x: Tensor, *, is_port: bool) -> Tensor:
    model = Turned(is_port)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
    return loss


def test_a_clipped_gradient_of_a_square_weight_may_be_transposed() -> None:
    x = torch.linspace(-2, 2, 96).cos().reshape(2, 6, 8)
    answer = otel_torch.bisect(partial(trained, is_port=False), partial(trained, is_port=True), x)
    assert answer.verdict == "match"


FREQUENCIES = 0.5 ** torch.arange(3.0)


def blocks(height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the row and the column of each patch, block by block of two by two patches."""
    places = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    shape = height // 2, 2, width // 2, 2
    rows, columns = (own.reshape(shape).transpose(1, 2).flatten() for own in places)
    return rows, columns


def row_by_row(height: int, width: int) -> tuple[Tensor, Tensor]:
    rows = torch.arange(height)[:, None].expand(height, width)
    columns = torch.arange(width).expand(height, width)
    return rows.flatten(), columns.flatten()


def test_an_order_is_named_where_it_begins_though_its_axes_are_merged() -> None:
    """The table has one axis for both places and their frequencies in the port, and two in the
    reference.
    """

    def reference(x: Tensor) -> Tensor:
        places = torch.stack(blocks(4, 6), -1)
        angles = (places[..., None].float() * FREQUENCIES).flatten(1).repeat(1, 2)
        first, second = x.chunk(2, -1)
        turned = x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()
        return turned.tanh().cumsum(0)

    def port(x: Tensor) -> Tensor:
        places = row_by_row(4, 6)
        angles = torch.cat([own[:, None] * FREQUENCIES for own in places], -1)
        turn = torch.polar(torch.ones_like(angles), angles)
        turned = torch.complex(*x.chunk(2, -1)) * turn
        return torch.cat([turned.real, turned.imag], -1).tanh().cumsum(0)

    x = torch.linspace(-2, 2, 288).sin().reshape(24, 12)
    (finding,) = otel_torch.bisect(reference, port, x).faults
    assert finding.line is not None and ".transpose(1, 2)" in finding.line.text
    assert finding.port_line is not None and "own[:, None] * FREQ" in finding.port_line.text
    assert (finding.proof, finding.explanation) == (
        "proven",
        "The same numbers are in another order.",
    )
