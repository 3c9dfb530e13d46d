"""A recording as a DataFrame of polars, which only this group of tests installs."""

from __future__ import annotations

import json
import math

import pytest

import otel_torch

pytestmark = pytest.mark.frameworks


def test_as_a_dataframe_of_polars(tmp_path):
    import polars

    row = {"module": "a", "tensor": "out", "step": 0, "abs_mean": 1, "shape": [2, 3]}
    rows = [row] * 200 + [{**row, "step": 1, "abs_mean": "NaN", "late": 0.5, "shape": []}]
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    frame = otel_torch.read_recording(path, dataframe="polars")
    assert isinstance(frame, polars.DataFrame) and frame.height == 201
    assert frame["abs_mean"][0] == 1 and math.isnan(frame["abs_mean"][200])
    assert frame["late"].to_list() == [None] * 200 + [0.5]
    assert frame["shape"].to_list()[::200] == [[2, 3], []]
