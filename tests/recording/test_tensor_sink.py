"""Whole tensors on disk: complete, unchanged, within the budget."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support import PROGRAMS, lines, recording, run_python

safetensors = pytest.importorskip("safetensors")

PROGRAM = PROGRAMS / "relu_in_place.py"


def load(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensors_by_key: dict[str, torch.Tensor] = load_file(path)
    return tensors_by_key


def test_every_record_has_its_tensor_as_it_was(tmp_path: Path) -> None:
    done = run_python(
        tmp_path,
        PROGRAM,
        "2",
        OTEL_TORCH_TENSORS=str(tmp_path / "tensors"),
        OTEL_TORCH_RUN_ID="mine",
    )
    folder = tmp_path / "tensors" / "mine.rank0"
    assert sorted(path.name for path in folder.iterdir()) == [
        "loop0.step0.safetensors",
        "loop0.step1.safetensors",
    ]
    rows = lines(tmp_path / "run.jsonl")
    for step in range(2):
        tensors = load(folder / f"loop0.step{step}.safetensors")
        rows_of_step = [row for row in rows if row["step"] == step]
        assert len(tensors) == len(rows_of_step) == 4
        for row in rows_of_step:
            tensor = tensors[
                f"{row['model']}/{row['module']}/{row['tensor']}/call{row['call']}/{row['phase']}"
            ]
            # the next module changes the first one's output in place: the copy is from before that
            assert tensor.double().sum().item() == pytest.approx(row["sum"], rel=1e-12, abs=1e-12)
    assert f"8 tensors in {folder}" in done.stderr


def test_only_what_is_selected_is_kept_and_the_budget_ends_it(tmp_path: Path) -> None:
    done = run_python(
        tmp_path, PROGRAM, "5", OTEL_TORCH_TENSORS=str(tmp_path), OTEL_TORCH_RUN_ID="mine", OTEL_TORCH_MODULES="^2$",
        OTEL_TORCH_JSONL="off", OTEL_TORCH_MAX_BYTES="300",
    )  # fmt: skip
    files = sorted((tmp_path / "mine.rank0").iterdir())
    assert 1 <= len(files) < 5
    assert list(load(files[0])) == ["Sequential/2/out/call0/forward"]
    assert "no more tensors are written: OTEL_TORCH_MAX_BYTES (300 bytes) is reached" in done.stderr
    assert f"lost: {5 - len(files)} tensors (disk)" in done.stderr


def test_a_folder_that_cannot_be_made_costs_the_program_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run_python(tmp_path, PROGRAM, "2", OTEL_TORCH_TENSORS=str(tmp_path / "file" / "deeper"))
    assert "no more tensors are written" in done.stderr and "Traceback" not in done.stderr
    assert len(lines(tmp_path / "run.jsonl")) == 8


def test_sparse_and_low_precision_tensors_are_kept(tmp_path: Path) -> None:
    class Kinds(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x.to_sparse(), x.bfloat16(), x.long(), x[:0], x[0, 0]

    with recording(tensors=str(tmp_path), run_id="mine"):
        Kinds()(torch.eye(3))
    tensors = load(tmp_path / "mine.rank0" / "loop0.step0.safetensors")
    assert [tuple(tensor.shape) for _, tensor in sorted(tensors.items())] == [
        (3, 3),
        (3, 3),
        (3, 3),
        (0, 3),
        (),
    ]
    assert torch.equal(tensors["Kinds//out[0]/call0/forward"], torch.eye(3))


def test_nothing_is_copied_where_nobody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from otel_torch.sources.tensors import tensor_measurer

    def refuse(tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a tensor was copied")

    monkeypatch.setattr(tensor_measurer, "copy_of", refuse)
    with recording() as sink:
        nn.Linear(2, 2)(torch.ones(1, 2))
    assert len(sink.records) == 1 and sink.records[0].data is None
