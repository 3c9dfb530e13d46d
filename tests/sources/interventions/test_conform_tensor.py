"""A value of the reference in the layout of the port's, where the shapes do not say it."""

from __future__ import annotations

import pytest
import torch

from otel_torch.sources.interventions.conform_tensor import CannotConform, conform

REFERENCE = torch.arange(32.0).sin().reshape(2, 4, 4)


def test_axes_of_one_size_are_exchanged_where_only_that_is_near() -> None:
    port = 1.01 * REFERENCE.transpose(1, 2).reshape(8, 4)
    assert torch.equal(conform(REFERENCE, port), REFERENCE.transpose(1, 2).reshape(8, 4))


def test_they_are_not_if_their_order_is_all_that_differs() -> None:
    assert torch.equal(conform(REFERENCE, REFERENCE.transpose(1, 2).contiguous()), REFERENCE)


def test_they_are_not_if_nothing_is_near() -> None:
    assert torch.equal(conform(REFERENCE, REFERENCE.flip(0, 1, 2)), REFERENCE)


def test_another_shape_needs_a_near_order_or_one_axis_elsewhere() -> None:
    channels_first = torch.arange(96.0).sin().reshape(2, 3, 4, 4)
    far = torch.ones(2, 4, 4, 3)
    assert torch.equal(conform(channels_first, far), channels_first.movedim(1, -1))
    flat = conform(channels_first, far.flatten(1, 2))
    assert torch.equal(flat, channels_first.movedim(1, -1).flatten(1, 2))
    near = 1.01 * channels_first.permute(0, 3, 2, 1)
    assert torch.equal(conform(channels_first, near), channels_first.permute(0, 3, 2, 1))
    # of windows that are split in the port
    windows = REFERENCE.reshape(8, 4)[:, :3]
    assert torch.equal(
        conform(windows, torch.ones(2, 3, 4)), windows.reshape(2, 4, 3).transpose(1, 2)
    )
    with pytest.raises(CannotConform):  # either axis of four may be the one that moved
        conform(REFERENCE, torch.ones(4, 2, 4))


@pytest.mark.parametrize("axes", [None, (0, 1)])
def test_another_number_of_elements_never_fits(axes: tuple[int, int] | None) -> None:
    with pytest.raises(CannotConform):
        conform(REFERENCE, torch.ones(2, 4, 5), axes)
