"""Kernels that are launched past torch's dispatcher are operations of the graph."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import otel_torch
from otel_torch.sources.operations import kernel_launches
from tests.sources.operations.test_operation_recorder import Net, record
from tests.support import recording, run_python

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="no Triton here"
)
# Triton's interpreter runs its kernels on a CPU
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
        ],
    ),
]
PROGRAM = """
import torch, triton
import triton.language as tl

@triton.jit
def scale(x, y, n, times: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + place, tl.load(x + place, mask=place < n) * times, mask=place < n)

class Net(torch.nn.Module):
    def forward(self, x):
        hidden = x + 1
        doubled = torch.empty_like(hidden)
        scale[(1,)](hidden, doubled, 16, times=2.0, BLOCK=16)
        scale[(1,)](doubled, doubled, 16, times=TIMES, BLOCK=16)
        return doubled * hidden

print(Net()(torch.arange(16.0, device=DEVICE)).sum().item())
"""


def rows_of(
    tmp_path: Path, device: str = "cpu", times: str = "3.0"
) -> tuple[list[dict[str, Any]], str]:
    tmp_path.mkdir(exist_ok=True)
    program = PROGRAM.replace("TIMES", times).replace("DEVICE", repr(device))
    done = run_python(
        tmp_path, program, fresh=True, TRITON_INTERPRET=str(int(device == "cpu")),
        OTEL_TORCH_ENABLED="1", OTEL_TORCH_CAPTURE="graph", OTEL_TORCH_JSONL="run.jsonl",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], done.stdout


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_a_kernel_of_triton_reads_and_makes_its_tensors(tmp_path: Path, device: str) -> None:
    rows, printed = rows_of(tmp_path, device)
    operations = [row for row in rows if "op" in row]
    assert [row["op"] for row in operations] == [
        "aten.add.Tensor", *["triton.scale"] * 3, "aten.mul.Tensor", "aten.sum.default",
    ]  # fmt: skip
    added, read, doubled, tripled, product, _ = operations
    assert not [row for row in rows if row.get("leaf") == "unseen"]
    assert doubled["reads"] == [added["value"]]  # and not the memory for its result
    assert doubled["args"][-1] == {"times": 2.0, "BLOCK": 16}
    assert doubled["mean"] == 2 * read["mean"] and tripled["mean"] == 6 * read["mean"]
    assert set(tripled["reads"]) == {doubled["value"]}
    assert product["reads"] == [tripled["value"], read["value"]]
    assert float(printed) == 16 * product["mean"]


@needs_triton
def test_a_fault_in_front_of_a_kernel_is_found_at_its_launch(tmp_path: Path) -> None:
    rows_of(tmp_path / "reference")
    rows_of(tmp_path / "port", times="2.5")
    report = otel_torch.diff(tmp_path / "reference/run.jsonl", tmp_path / "port/run.jsonl")
    assert report.first is not None and "times=2.5" in report.first.port_line.text


def test_behind_a_replayed_graph_nothing_is_taken_for_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The device is a stand-in: a graph whose replay writes without an operation."""
    static = torch.zeros(4)

    class Graph:
        def replay(self) -> None:
            static.numpy()[:] += 1

    monkeypatch.setattr(kernel_launches.torch.cuda, "CUDAGraph", Graph)
    graph = Graph()

    def compute(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = static * x
        graph.replay()
        return static * y

    rows = record(lambda: Net(compute)(torch.ones(4)))
    leaves = [(row["name"], row["mean"]) for row in rows.fields() if "leaf" in row]
    assert leaves == [("", 0.0), ("x", 1.0), ("", 1.0), ("", 0.0)]
    assert "replayed" in capsys.readouterr().err
    assert "replay" in vars(Graph) and not hasattr(Graph.replay, "__wrapped__")


def test_launches_are_as_before_when_recording_ends() -> None:
    module = SimpleNamespace(KernelInterface=type("KernelInterface", (), {"__getitem__": list}))
    before = module.KernelInterface.__getitem__
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "triton.runtime.jit", module)
        with recording(capture="graph"):
            assert module.KernelInterface.__getitem__ is not before
    assert module.KernelInterface.__getitem__ is before
