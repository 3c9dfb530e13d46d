"""FastVideo's activation trace, attached in code: its contract without its defects."""

from __future__ import annotations

import copy
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from otel_torch import (
    ActivationStatHook,
    ActivationTraceManager,
    JsonlSink,
    ModuleHookManager,
    attach_activation_trace,
    current_step_idx,
    detach_activation_trace,
    trace_step,
)
from tests.support import lines, recording

X = torch.tensor([[1.0, -3.0]])


class Halves(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        return x * 0.5, {"rest": x, "none": None}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Identity(), nn.ReLU())
        self.halves = Halves()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.halves(self.block(x))[0]


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set FastVideo's variables, which are read at the call."""
    path = tmp_path / "made" / "trace.jsonl"
    monkeypatch.setenv("FASTVIDEO_TRACE_ACTIVATIONS", "1")
    monkeypatch.setenv("FASTVIDEO_TRACE_OUTPUT", str(path))
    return path


def attach(net: nn.Module) -> ActivationTraceManager:
    manager = attach_activation_trace(net)
    assert manager is not None
    return manager


def test_off_attaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTVIDEO_TRACE_ACTIVATIONS", raising=False)
    monkeypatch.delenv("OTEL_TORCH_ENABLED", raising=False)
    net = Net()
    assert attach_activation_trace(net) is None
    assert all(
        not module._forward_hooks and ModuleHookManager.get_from(module) is None
        for module in net.modules()
    )


def test_no_model_is_no_trace(trace: Path) -> None:
    assert attach_activation_trace(None) is None
    detach_activation_trace(None)


def test_records_have_the_asked_fields_in_order_of_completion(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTVIDEO_TRACE_STATS", "abs_mean,sum,min,max,mean,shape,dtype")
    net = Net()
    manager = attach(net)
    with trace_step(4):
        assert current_step_idx() == 4
        net(X)
    detach_activation_trace(manager)
    rows = lines(trace)
    assert [(row["module"], row["tensor"]) for row in rows] == [
        ("block.0", "out"), ("block.1", "out"), ("block", "out"), ("halves", "out[0]"), ("halves", "out[1].rest"),
    ]  # fmt: skip
    assert list(rows[0]) == [
        "module",
        "tensor",
        "step",
        "abs_mean",
        "sum",
        "min",
        "max",
        "mean",
        "shape",
        "dtype",
    ]
    assert rows[0] == {
        "module": "block.0", "tensor": "out", "step": 4, "abs_mean": 2.0, "sum": -2.0, "min": -3.0, "max": 1.0, "mean": -1.0,
        "shape": [1, 2], "dtype": "torch.float32",
    }  # fmt: skip


def test_the_pattern_attaches_to_its_matches_only_whatever_wraps_them(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTVIDEO_TRACE_LAYERS", r"^block\.\d$")
    net = Net()
    manager = attach(torch.compile(net, backend="eager"))
    attached = {
        name
        for name, module in net.named_modules()
        if ModuleHookManager.get_from(module) is not None
    }
    assert attached == {"block.0", "block.1"}
    detach_activation_trace(manager)


def test_a_pattern_that_matches_nothing_says_so(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FASTVIDEO_TRACE_LAYERS", "^transformer")
    detach_activation_trace(attach(Net()))
    assert "no module of Net is selected" in capfd.readouterr().err
    assert lines(trace) == []


def test_only_selected_steps_are_kept_and_outside_a_step_it_is_null(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Net()
    manager = attach(net)
    net(X)
    detach_activation_trace(manager)
    assert {row["step"] for row in lines(trace)} == {None}
    trace.unlink()
    monkeypatch.setenv("FASTVIDEO_TRACE_STEPS", "0,2")
    manager = attach(net)
    net(X)
    for step in range(4):
        with trace_step(step):
            net(X)
    detach_activation_trace(manager)
    assert sorted({row["step"] for row in lines(trace)}) == [0, 2]


def test_detaching_removes_everything_and_twice_is_fine(trace: Path) -> None:
    net = Net()
    manager = attach(net)
    detach_activation_trace(manager)
    detach_activation_trace(manager)
    assert all(
        not module._forward_hooks and ModuleHookManager.get_from(module) is None
        for module in net.modules()
    )
    net(X)
    assert lines(trace) == []


def test_another_hook_of_a_module_stays(trace: Path) -> None:
    class Other(ActivationStatHook):
        @classmethod
        def name(cls) -> str:
            return "other"

        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return output

    net = Net()
    halves_manager = ModuleHookManager.get_from_or_default(net.halves)
    manager = attach(net)
    halves_manager.append_forward_hook(Other("halves", [], JsonlSink(trace)))
    detach_activation_trace(manager)
    assert (
        ModuleHookManager.get_from(net.halves) is halves_manager
        and halves_manager.get_forward_hook("other") is not None
    )


def test_a_second_trace_is_refused_and_leaves_the_first_as_it_was(trace: Path) -> None:
    net = Net()
    manager = attach(net.block)
    with pytest.raises(ValueError, match="already"):
        attach_activation_trace(net)
    assert ModuleHookManager.get_from(net.halves) is None
    net(X)
    detach_activation_trace(manager)
    assert [row["module"] for row in lines(trace)] == ["0", "1"]


def test_numbers_that_json_lacks_are_strings(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTVIDEO_TRACE_STATS", "max,mean,std")
    net = Net()
    manager = attach(net.block)
    net(torch.tensor([[float("inf")]]))
    net(torch.tensor([[float("nan")]]))
    net(torch.empty(0, 2))
    detach_activation_trace(manager)
    first, _, second, _, empty, _ = lines(trace)
    assert first["max"] == "Infinity" and second["mean"] == "NaN"
    assert set(empty) == {"module", "tensor", "step"}  # an empty tensor has none of these


def test_an_unknown_statistic_is_said_and_skipped(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FASTVIDEO_TRACE_STATS", "sum,avg_trace_test")
    net = Net()
    manager = attach(net)
    net(X)
    detach_activation_trace(manager)
    assert list(lines(trace)[0]) == ["module", "tensor", "step", "sum"]
    assert "avg_trace_test" in capfd.readouterr().err


def test_a_closed_sink_or_a_failing_statistic_never_reaches_the_forward(
    trace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def failing(tensor: torch.Tensor) -> float:
        raise RuntimeError("no such number")

    sink = JsonlSink(trace)
    module = nn.Identity()
    manager = ModuleHookManager.get_from_or_default(module)
    manager.append_forward_hook(ActivationStatHook("failing", [("bad", failing)], sink))
    assert module(X) is X
    manager.replace_forward_hook(
        "activation_stats",
        ActivationStatHook("closed", [("sum", lambda t: float(t.sum()))], sink, {0, 2}),
    )
    with trace_step(0):
        module(X)
    with trace_step(1):
        module(X)
    sink.close()
    sink.close()
    with trace_step(2):
        assert module(X) is X
    stderr = capfd.readouterr().err
    assert "no such number" in stderr and "is closed" in stderr
    assert lines(trace) == [{"module": "closed", "tensor": "out", "step": 0, "sum": -2.0}]


def test_a_sink_may_be_written_to_by_many_threads(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "deep" / "threads.jsonl")
    threads = [
        threading.Thread(target=lambda n=n: [sink.write({"n": n, "i": i}) for i in range(200)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sink.close()
    assert len({json.dumps(row) for row in lines(sink.path)}) == 800


def test_a_traced_model_can_be_copied_and_compiled(trace: Path) -> None:
    net = Net()
    manager = attach(net)
    twin = copy.deepcopy(net)
    twin(X)
    assert lines(trace) == []
    assert torch.equal(torch.compile(net, backend="eager")(X), twin(X))
    detach_activation_trace(manager)
    assert lines(trace)


def test_where_a_session_records_nothing_is_recorded_twice(trace: Path) -> None:
    with recording() as sink:
        net = Net()
        manager = attach(net)
        net(X)
        detach_activation_trace(manager)
        net(X)
    assert sink.rows("step", module="block") == [0, 1]
    assert not trace.exists()
