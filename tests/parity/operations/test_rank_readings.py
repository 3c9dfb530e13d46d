"""How values of ranks are read together."""

from __future__ import annotations

from binascii import b2a_base64
from typing import Any

import numpy as np
import pytest

from otel_torch.parity.operations.rank_readings import readings_of_ranks

LINES = [("split.py", 4, "forward", "y = x @ w"), ("split.py", 4, "forward", "y = x @ w")]


def row(rank: int, content: list[float], **fields: Any) -> Any:
    sketch = b2a_base64(np.array(content, "<f4").tobytes()).decode()
    common = {"op": "mm", "phase": "forward", "step": 0, "shape": [4], "dtype": "torch.float32"}
    return (common | {"rank": rank, "line": rank, "sketch": sketch} | fields, 0)


def readings(*rows: Any) -> list[tuple[str, list[int], list[float]]]:
    return [
        (reading.name, list(reading.values), reading.row["sketch"].tolist())
        for reading in readings_of_ranks(dict(enumerate(rows)), LINES)
    ]


def test_values_of_one_line_may_be_terms_of_a_sum() -> None:
    assert readings(row(0, [1, 2]), row(1, [3, -1])) == [("otel_torch.sum", [0, 1], [4, 1])]


@pytest.mark.parametrize(
    "other",
    [row(1, [1, 2]), row(1, [3, -1], op="add"), row(1, [3, -1], step=1), row(0, [3, -1])],
    ids=["replicated", "another operation", "another step", "the same rank"],
)
def test_other_values_are_none(other: Any) -> None:
    assert readings(row(0, [1, 2]), other) == []


def test_gradients_may_be_of_a_mean_over_fewer_rows() -> None:
    both = [row(rank, [rank + 1.0], phase="backward") for rank in (0, 1)]
    assert readings(*both) == [
        ("otel_torch.sum", [0, 1], [3.0]),
        ("otel_torch.sum", [0, 1], [1.5]),
        ("otel_torch.share", [0], [0.5]),
        ("otel_torch.share", [1], [1.0]),
    ]


def test_ranks_of_a_mesh_add_up_in_groups() -> None:
    sums = readings(*(row(rank, [float(1 << rank)], line=0) for rank in range(4)))
    assert {tuple(ranks): total for _, ranks, (total,) in sums} == {
        (0, 1): 3, (2, 3): 12, (0, 2): 5, (1, 3): 10, (0, 1, 2, 3): 15
    }  # fmt: skip
