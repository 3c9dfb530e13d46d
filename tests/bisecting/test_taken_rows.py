"""A table that the port keeps and takes rows of, while the reference computes each row."""

from __future__ import annotations

import torch
from torch import Tensor

import otel_torch

WIDTH, LONGEST = 8, 12
X = torch.linspace(-2, 2, 3 * WIDTH).cos().reshape(3, WIDTH)


def angles(positions: Tensor) -> Tensor:
    return positions[:, None] * 10.0 ** (-torch.arange(WIDTH) / WIDTH)


def reference(x: Tensor) -> Tensor:
    """Each step has its position."""
    made = [row * angles(torch.tensor([float(place)])).cos() for place, row in enumerate(x, 4)]
    return torch.cat(made).exp()


class Table:
    def __init__(self, base: float) -> None:
        self.base = base

    def rows(self, start: int) -> Tensor:
        scaled = torch.arange(LONGEST)[:, None] * self.base ** (-torch.arange(WIDTH) / WIDTH)
        return scaled.cos()[start : start + 1]


def port(x: Tensor, *, late: int = 0, base: float = 10.0) -> Tensor:
    table, made = Table(base), []
    for place, row in enumerate(x, 4):
        taken = table.rows(place + late)
        made.append(row * taken)
    return torch.cat(made).exp()


def test_a_table_without_a_fault_is_silent() -> None:
    assert otel_torch.bisect(reference, port, X).verdict == "match"


def test_other_rows_are_told_where_they_are_taken() -> None:
    answer = otel_torch.bisect(reference, lambda x: port(x, late=1), X)
    (finding,) = answer.faults
    assert "scaled.cos()[start : start + 1]" in finding.port_line.text
    assert finding.proof == "proven"
    expected = "`slice` takes row 5 of a table, and the reference computes row 4 of it."
    assert finding.explanation == expected
    assert any("place + late" in line.text for line in finding.port_set_by)


def test_a_wrong_table_is_named_where_it_is_made() -> None:
    answer = otel_torch.bisect(reference, lambda x: port(x, base=100.0), X)
    (finding,) = answer.faults
    assert "self.base **" in finding.port_line.text
    assert finding.port_set_by[0].text == "self.base = base"
