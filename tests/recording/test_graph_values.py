"""The files of single values: how one is copied for another one's place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from otel_torch.recording.graph_values import ValueKey, copy_value, file_name, write_wanted
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
