"""Recordings of real programs to export: two ranks of a training, and a graph of operations."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import run_python

TRAIN = """
import os, torch
from torch import nn

torch.manual_seed(int(os.environ["RANK"]))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(12):
    x = torch.randn(32, 8)
    if step == 11:
        x[0, 0] = float("nan")
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()  # and no zero_grad: breaks a law
    optimizer.step()
"""
FORWARD = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
model(torch.randn(4, 8))
"""


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the recordings, spans and log records of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    for rank in ("0", "1"):
        run_python(
            folder,
            TRAIN,
            RANK=rank,
            WORLD_SIZE="2",
            OTEL_TORCH_RUN_ID="a-run",
            OTEL_TORCH_OTLP_FILE=str(folder),
        )
    return folder


@pytest.fixture(scope="session")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a recording of a graph of operations."""
    folder = tmp_path_factory.mktemp("graph")
    run_python(folder, FORWARD, OTEL_TORCH_CAPTURE="graph")
    return folder / "run.jsonl"
