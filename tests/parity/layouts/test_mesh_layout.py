"""What the ranks of a mesh hold of a tensor when several have the same part."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from otel_torch.parity.layouts.mesh_layout import is_on_mesh, is_reordered, recognize_on_mesh
from otel_torch.parity.layouts.rank_rows import RankRow
from otel_torch.statistics.sketch import sketch

WHOLE = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
TOP, BOTTOM = WHOLE.chunk(2)


def row(rank, values, phase="forward"):
    numbers = {
        "l2": float(values.norm()),
        "sum": float(values.sum()),
        "min": float(values.min()),
        "max": float(values.max()),
        "numel": values.numel(),
        "shape": list(values.shape),
        "dtype": "torch.float32",
        "phase": phase,
    }
    return RankRow(rank, numbers, np.array(sketch(values).tolist()))


def rows(*tensors, phase="forward"):
    return [row(rank, values, phase) for rank, values in enumerate(tensors)]


@pytest.mark.parametrize("ranks", [(TOP, TOP, BOTTOM, BOTTOM), (TOP, BOTTOM, TOP, BOTTOM)])
def test_one_copy_of_each_part_counts(ranks):
    reference, held = row(-1, WHOLE), rows(*ranks)
    assert is_on_mesh(reference, held, count=4)
    parts, layout = recognize_on_mesh(reference, held, count=4)
    assert (layout.kind, layout.is_wrong, layout.scale) == ("parts", False, 1.0)
    norms = sorted(part.row["l2"] for part in parts)
    assert norms == sorted([float(TOP.norm()), float(BOTTOM.norm())])


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("wrong", range(4))
def test_a_copy_that_differs_is_wrong_on_its_rank(stride, wrong):
    ranks = [(TOP, BOTTOM)[rank // stride % 2] for rank in range(4)]
    ranks[wrong] = ranks[wrong] * 1.5 + 1
    worst, layout = recognize_on_mesh(row(-1, WHOLE), rows(*ranks), count=4)
    assert layout.is_wrong and layout.wrong is not None
    assert worst[layout.wrong].rank == wrong


def test_gradients_of_a_mean_over_half_of_the_batch_are_twice_as_large():
    reference = row(-1, WHOLE, "backward")
    held = rows(2 * TOP, 2 * TOP, 2 * BOTTOM, 2 * BOTTOM, phase="backward")
    _, layout = recognize_on_mesh(reference, held, count=4)
    assert (layout.kind, layout.is_wrong, layout.scale) == ("parts", False, 0.5)


def test_terms_of_parts_add_up_to_the_whole():
    held = rows(0.25 * TOP, 0.75 * TOP, 0.5 * BOTTOM + 1, 0.5 * BOTTOM - 1)
    _, layout = recognize_on_mesh(row(-1, WHOLE), held, count=4)
    assert (layout.kind, layout.is_wrong) == ("sum", False)


def test_parts_that_are_zero_match():
    held = rows(*[torch.zeros(2, 6)] * 4)
    _, layout = recognize_on_mesh(row(-1, torch.zeros(4, 6)), held, count=4)
    assert (layout.kind, layout.is_wrong) == ("parts", False)


def test_only_the_same_numbers_are_reordered():
    reference = row(-1, WHOLE)
    assert is_reordered(reference, rows(WHOLE[::2], WHOLE[1::2]))
    assert not is_reordered(reference, rows(WHOLE[::2], WHOLE[::2]))
    assert not is_reordered(reference, rows(WHOLE[::2], 1.001 * WHOLE[1::2]))


def test_parts_that_are_cut_once_over_all_ranks_are_no_mesh():
    assert not is_on_mesh(row(-1, WHOLE), rows(WHOLE, WHOLE), count=2)
    held = [RankRow(part.rank, part.row, part.sketch, (part.sketch,)) for part in rows(TOP, BOTTOM)]
    assert not is_on_mesh(row(-1, WHOLE), held, count=2)
    assert is_on_mesh(row(-1, WHOLE), held, count=4)
