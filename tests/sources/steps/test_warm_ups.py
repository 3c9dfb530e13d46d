"""Forwards that a framework runs for itself are recorded as such, and change nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from otel_torch.parity.diff import diff
from otel_torch.sources.steps.trace_step import trace_step
from otel_torch.sources.steps.warm_ups import warming_up
from tests.support import ListSink, recording, run_python

X = torch.ones(2, 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def places(sink: ListSink, module: str = "linear") -> list[tuple[str, int, int, int]]:
    return sink.rows("phase", "loop", "step", "call", module=module, tensor="out")


def test_a_warm_up_is_one_step_of_its_own_and_takes_none_from_the_program() -> None:
    with recording() as sink:
        net = Net()
        for _ in range(2):
            with warming_up():
                net(X)
                with warming_up():
                    net(X)
            net(X)
    assert places(sink) == [
        ("warmup", 0, 0, 0), ("warmup", 0, 0, 1), ("forward", 0, 0, 0),
        ("warmup", 0, 1, 0), ("warmup", 0, 1, 1), ("forward", 0, 1, 0),
    ]  # fmt: skip
    steps = [scope.attributes["torch.step"] for scope in sink.closed if scope.name == "torch.step"]
    assert steps == [0, 0, 1, 1]


def test_a_warm_up_without_a_forward_is_no_step() -> None:
    with recording() as sink:
        net = Net()
        with warming_up():
            pass
        with warming_up():
            net(X)
    assert places(sink) == [("warmup", 0, 0, 0)]


def test_a_warm_up_begins_no_training_step_and_ends_none() -> None:
    with recording(capture="outputs,gradients") as sink:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with warming_up():
            net(X).sum().backward()
        for _ in range(2):
            net(X).sum().backward()
            with warming_up(), torch.no_grad():
                net(X)
            net(X).sum().backward()
            optimizer.step()
    assert places(sink) == [
        ("warmup", 0, 0, 0),
        ("forward", 0, 0, 0), ("warmup", 0, 1, 0), ("forward", 0, 0, 1),
        ("forward", 0, 1, 0), ("warmup", 0, 2, 0), ("forward", 0, 1, 1),
    ]  # fmt: skip
    gradients = sink.rows("step", "call", module="linear", phase="backward")
    assert gradients == [(0, 0), (0, 1), (1, 0), (1, 1)]
    trained = [scope for scope in sink.closed if scope.name == "torch.step" and scope.training]
    assert [scope.attributes["torch.step"] for scope in trained] == [0, 1]


def test_a_warm_up_inside_a_traced_step_has_its_number() -> None:
    with recording() as sink:
        net = Net()
        with trace_step(3):
            with warming_up():
                net(X)
            net(X)
    assert places(sink) == [("warmup", 0, 3, 0), ("forward", 0, 3, 0)]


def test_a_method_of_a_root_that_nobody_calls_can_warm_up() -> None:
    with recording() as sink:
        net = Net()
        with warming_up():
            net.encode(X)
        net.encode(X)
    assert places(sink) == [("warmup", 0, 0, 0), ("forward", 0, 0, 0)]


def test_a_tensor_that_a_warm_up_has_seen_has_its_sketch_in_the_program_s_own_rows() -> None:
    with recording(capture="parity") as sink:
        net = Net()
        with warming_up():
            net(X)
        net(X)
    for stats in sink.rows("stats", tensor="in[0]", module=""):
        assert "sketch" in stats


def test_a_nan_of_dummy_inputs_neither_is_reported_nor_stops_the_program() -> None:
    with recording(on_nonfinite="stop") as sink:
        net = Net()
        with warming_up():
            net(X * float("nan"))
        net(X)
    assert places(sink) == [("warmup", 0, 0, 0), ("forward", 0, 0, 0)]


def test_without_a_session_a_warm_up_does_nothing() -> None:
    with warming_up():
        Net()(X)


PROGRAM = """
import os, sys, torch
from otel_torch.sources.steps.warm_ups import warming_up

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x)

torch.manual_seed(0)
net, buffer = Net(), torch.ones(2, 3)
warm_ups, size = map(int, sys.argv[1:])
for _ in range(warm_ups):
    with warming_up():
        net(buffer)
        net(torch.full((size, 3), float(size)))
net(buffer)
for _ in range(2):
    net(torch.randn(2, 3))
"""


@pytest.mark.parametrize("options", [{}, {"bitwise": True}])
def test_a_comparison_passes_over_warm_ups_unless_asked(tmp_path: Path, options: Any) -> None:
    recordings = []
    for warm_ups, size in ((2, 4), (1, 5), (0, 0)):
        run_python(tmp_path, PROGRAM, str(warm_ups), str(size), OTEL_TORCH_CAPTURE="parity")
        recordings.append((tmp_path / "run.jsonl").rename(tmp_path / f"{warm_ups}.jsonl"))
        metadata_file = tmp_path / "run.meta.json"
        metadata_file.rename(tmp_path / f"{warm_ups}.meta.json")
    two, one, none = recordings
    for port in (one, none):
        for pair in ((two, port), (port, two)):
            report = diff(*pair, **options)
            assert (report.verdict, report.unpaired) == ("match", {"reference": [], "port": []})
            assert not [warning for warning in report.warnings if "hash" not in warning]
    asked = diff(two, one, warm_ups=True, **options)
    assert asked.pairs > diff(two, one, **options).pairs
