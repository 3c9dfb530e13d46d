"""Values of a graph that are kept by one run and put in place in another, whatever their dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from otel_torch.recording.graph_values import ValueKey, file_name, write_wanted
from otel_torch.sources.interventions.graph_values import GraphValues

KEY = ValueKey(0, 0, "leaf[0]")
NAME = file_name(KEY, 0)


def kept(tmp_path: Path, tensor: torch.Tensor) -> GraphValues:
    write_wanted(tmp_path, [NAME])
    values = GraphValues(str(tmp_path), None, 0)
    values.meet(*KEY, tensor)
    return values


def put(tmp_path: Path, tensor: torch.Tensor) -> GraphValues:
    values = GraphValues(None, str(tmp_path), 0)
    values.meet(*KEY, tensor)
    return values


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.uint16,
        torch.bool,
    ],
    ids=str,
)
def test_a_value_of_any_dtype_comes_back_as_it_was(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    assert not kept(tmp_path, tensor).not_kept
    empty = torch.zeros(2, 3).to(dtype)
    assert put(tmp_path, empty).put == {NAME: None}
    assert torch.equal(empty.float(), tensor.float())


def no_dtype_of_safetensors() -> torch.Tensor:
    return torch.zeros(4, dtype=torch.complex32)


def sparse() -> torch.Tensor:
    return torch.eye(3).to_sparse()


@pytest.mark.parametrize("make", [no_dtype_of_safetensors, sparse])
def test_what_cannot_be_kept_is_noted_and_does_not_raise(tmp_path: Path, make: Any) -> None:
    values = kept(tmp_path, make())
    assert values.not_kept.keys() == {NAME} and not (tmp_path / NAME).exists()


def test_a_value_is_put_into_a_tensor_that_repeats_one_element(tmp_path: Path) -> None:
    kept(tmp_path, torch.tensor([7.0, 7.0]))
    time = torch.tensor(3.0)
    assert put(tmp_path, time.expand(2)).put == {NAME: None}
    assert time == 7


def test_a_value_that_does_not_repeat_is_not_put_into_one_that_does(tmp_path: Path) -> None:
    kept(tmp_path, torch.tensor([7.0, 8.0]))
    time = torch.tensor(3.0)
    assert put(tmp_path, time.expand(2)).put[NAME] is not None
    assert time == 3


def test_whole_numbers_are_said_where_they_differ_first(tmp_path: Path) -> None:
    kept(tmp_path, torch.tensor([[5, 6, 7], [8, 9, 10]]))
    values = put(tmp_path, torch.tensor([[5, 6, 0], [8, 0, 10]]))
    assert values.differed == {NAME: {"count": 2, "index": [0, 2], "reference": 7, "port": 0}}
