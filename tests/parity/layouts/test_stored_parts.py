"""Whole tensors show which rank's part is wrong, and where."""

from __future__ import annotations

from pathlib import Path

import pytest

from otel_torch.parity.diff import diff
from tests.support import run_python, run_ranks

# a blur over rows that two ranks share: each needs the first or last row of the other one
BLUR = """
import os
import torch
import torch.distributed as dist
from torch import nn

torch.manual_seed(0)
rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Blur(nn.Module):
    def forward(self, x):
        above = below = torch.zeros_like(x[:, :1])
        if size > 1 and HALO:
            other = torch.zeros_like(above)
            rows = [torch.zeros_like(other) for _ in range(2)]
            dist.all_gather(rows, (x[:, :1] if rank else x[:, -1:]).contiguous())
            above, below = (rows[0], below) if rank else (above, rows[1])
        padded = torch.cat([above, x, below], 1)
        return (padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]) / 3


model = nn.Sequential(nn.Linear(6, 6), Blur(), nn.Linear(6, 6))
x = torch.randn(2, 8, 6)
if size > 1:
    dist.init_process_group("gloo")
    x = x.chunk(size, 1)[rank].contiguous()
with torch.no_grad():
    model(x)
"""
RECORDED = {"OTEL_TORCH_ENABLED": "1", "OTEL_TORCH_CAPTURE": "parity"}


def test_a_halo_that_is_not_exchanged_is_seen_at_the_seam(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = f"HALO = False\n{BLUR}"
    run_python(
        tmp_path,
        program,
        OTEL_TORCH_JSONL="reference.jsonl",
        OTEL_TORCH_TENSORS="whole",
        **RECORDED,
    )
    run_ranks(
        tmp_path, program, OTEL_TORCH_JSONL="port/run.jsonl", OTEL_TORCH_TENSORS="parts", **RECORDED
    )
    monkeypatch.chdir(tmp_path)  # where the programs ran
    reference, port = Path("reference.jsonl"), Path("port")
    first = diff(reference, port).first
    assert first is not None and (first.port_module, first.rank) == ("1", 0)
    assert first.explanation.endswith(
        "Along dimension 1, rank 0 is wrong at index 3 of 0 to 3, and rank 1 is wrong at index 0 "
        "of 0 to 3."
    )
    given = diff(reference, port, tensors=("whole", "parts")).first
    assert given is not None and given.explanation == first.explanation


def test_one_that_is_exchanged_is_silent(tmp_path: Path) -> None:
    program = f"HALO = True\n{BLUR}"
    run_python(tmp_path, program, OTEL_TORCH_JSONL="reference.jsonl", **RECORDED)
    run_ranks(tmp_path, program, OTEL_TORCH_JSONL="port/run.jsonl", **RECORDED)
    report = diff(tmp_path / "reference.jsonl", tmp_path / "port")
    assert report.verdict == "match", report
