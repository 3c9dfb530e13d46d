"""The files of single values: how one is copied for another one's place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from otel_torch.recording.graph_values import (
    ValueKey,
    copy_rows,
    copy_value,
    file_name,
    write_wanted,
)
from otel_torch.sources.interventions.graph_values import GraphValues


@pytest.mark.parametrize(
    ("axes", "shape"), [(None, (2, 3, 5)), ((1, -1), (2, 5, 3)), ((0, 2), (3, 5, 2))]
)
def test_a_value_is_put_with_its_axes_as_the_port_has_them(
    tmp_path: Path, axes: tuple[int, int] | None, shape: tuple[int, ...]
) -> None:
    value = torch.arange(30.0, dtype=torch.bfloat16).reshape(2, 3, 5)
    name = file_name(ValueKey(0, 0, "op[1]"), 0)
    write_wanted(tmp_path / "kept", [name])
    (tmp_path / "put").mkdir()
    GraphValues(str(tmp_path / "kept"), None, 0).meet(0, 0, "op[1]", value)
    copy_value(tmp_path / "kept" / name, tmp_path / "put" / name, axes)
    values = GraphValues(None, str(tmp_path / "put"), 0)
    tensor = torch.zeros(shape)
    assert values.meet(0, 0, "op[1]", tensor) is not None
    assert values.put == {name: None}
    expected = value if axes is None else value.movedim(*axes)
    assert torch.equal(tensor, expected.float())


@pytest.mark.parametrize("axes", [None, (0, 1)])
def test_a_part_of_a_value_is_put_on_a_rank(tmp_path: Path, axes: tuple[int, int] | None) -> None:
    value = torch.arange(24.0).reshape(2, 4, 3)
    name = file_name(ValueKey(0, 0, "op[1]"), 0)
    write_wanted(tmp_path / "kept", [name])
    (tmp_path / "put").mkdir()
    GraphValues(str(tmp_path / "kept"), None, 0).meet(0, 0, "op[1]", value)
    part = range(2), range(2, 4), range(3)
    copy_value(tmp_path / "kept" / name, tmp_path / "put" / name, axes, part)
    expected = value[:, 2:] if axes is None else value[:, 2:].movedim(*axes)
    tensor = torch.zeros(expected.shape)
    GraphValues(None, str(tmp_path / "put"), 0).meet(0, 0, "op[1]", tensor)
    assert torch.equal(tensor, expected)


@pytest.mark.parametrize(("width", "reason"), [(5, None), (6, "shape does not fit")])
def test_rows_of_several_values_are_put_in_their_places(
    tmp_path: Path, width: int, reason: str | None
) -> None:
    texts = {
        file_name(ValueKey(0, 0, f"op[{number}]"), 0): torch.full((2, 3, 5), number + 0.5).cumsum(1)
        for number in (1, 2)
    }
    write_wanted(tmp_path / "kept", texts)
    keep = GraphValues(str(tmp_path / "kept"), None, 0)
    for number, text in enumerate(texts.values(), 1):
        keep.meet(0, 0, f"op[{number}]", text.bfloat16())
    (tmp_path / "put").mkdir()
    first, second = (tmp_path / "kept" / name for name in texts)
    name = file_name(ValueKey(0, 0, "op[7]"), 0)
    copy_rows([(first, (4, 2), (0, 3)), (second, (0,), (1,))], tmp_path / "put" / name)
    values = GraphValues(None, str(tmp_path / "put"), 0)
    tensor = torch.zeros(width, 4).T  # laid out column by column
    values.meet(0, 0, "op[7]", tensor)
    assert values.put == {name: reason}
    # the third row has no counterpart, and stays
    assert tensor[:, 0].tolist() == ([3, 2.5, 0, 4.5] if reason is None else [0, 0, 0, 0])
