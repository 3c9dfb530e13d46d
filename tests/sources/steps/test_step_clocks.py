"""The rules that give a record its step, loop, call and phase."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import otel_torch
from otel_torch import recorder
from otel_torch.settings import NumberSet
from tests.support import recording


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


X = torch.ones(2, 3)


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, passes: int = 1) -> None:
    for _ in range(passes):
        model(X).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def keys(sink, module: str = "body", **filters):
    return sink.rows("step", "call", "phase", module=module, **filters)


def test_forwards_count_when_nothing_else_says_the_step() -> None:
    with recording() as sink:
        net = Net()
        for _ in range(3):
            net(X)
    assert keys(sink) == [(0, 0, "forward"), (1, 0, "forward"), (2, 0, "forward")]


def test_an_optimizer_makes_the_step_and_accumulation_makes_calls() -> None:
    with recording(training="0") as sink:
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters())
        train(net, optimizer, passes=2)
        with torch.no_grad():
            net(X)
            net(X)
        train(net, optimizer, passes=2)
    assert keys(sink) == [
        (0, 0, "forward"), (0, 1, "forward"), (1, 0, "eval"), (1, 1, "eval"), (1, 0, "forward"), (1, 1, "forward"),
    ]  # fmt: skip


def test_the_busiest_optimizer_that_holds_the_parameters_counts() -> None:
    with recording() as sink:
        net, second_net = Net(), Net()
        slow, fast = torch.optim.SGD([net.body.bias]), torch.optim.SGD([net.body.weight])
        foreign = torch.optim.SGD(second_net.parameters())
        for turn in range(3):
            train(net, fast, *([slow] if turn == 0 else []))
            train(second_net, foreign, foreign)
    assert sink.rows("step", module="body", model="Net", phase="forward") == [0, 1, 2]
    assert sink.rows("step", module="body", model="Net#2", phase="forward") == [0, 2, 4]


def test_an_optimizer_made_before_the_session_counts_from_the_session_on() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters())
    with recording(training="0") as sink:
        train(net, optimizer)
        train(net, optimizer)
    assert sink.rows("step", module="body") == [0, 1]


def test_trace_step_wins_nests_and_is_restored() -> None:
    with recording() as sink:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters())
        with otel_torch.trace_step(7):
            assert otel_torch.current_step_idx() == 7
            train(net, optimizer)
            with otel_torch.trace_step(9):
                net(X)
            assert otel_torch.current_step_idx() == 7
            net(X)
        assert otel_torch.current_step_idx() is None
    assert sink.rows("step", "call", module="body", phase="forward") == [(7, 0), (9, 0), (7, 1)]


def test_trace_step_begins_a_loop_when_the_step_does_not_grow() -> None:
    with recording() as sink:
        net = Net()
        for _ in range(2):
            for step in (0, 1, 5):
                with otel_torch.trace_step(step):
                    net(X)
    assert sink.rows("loop", "step", "call", module="body") == [
        (0, 0, 0),
        (0, 1, 0),
        (0, 5, 0),
        (1, 0, 0),
        (1, 1, 0),
        (1, 5, 0),
    ]


def test_trace_step_is_seen_in_a_worker_thread() -> None:
    with recording() as sink:
        net = Net()
        with otel_torch.trace_step(4):
            thread = threading.Thread(target=net, args=(X,))
            thread.start()
            thread.join()
    assert sink.rows("step", module="body") == [4]


def test_trace_step_survives_an_exception() -> None:
    with recording() as sink:
        with pytest.raises(RuntimeError, match="mine"), otel_torch.trace_step(3):
            raise RuntimeError("mine")
        assert otel_torch.current_step_idx() is None
    assert [type(scope.error) for scope in sink.closed if scope.name == "torch.step"] == [
        RuntimeError
    ]


def test_gradients_have_the_step_and_call_of_their_forward() -> None:
    with recording(capture="outputs,gradients") as sink:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters())
        first, second = net(X), net(X)
        (first.sum() + second.sum()).backward()
        optimizer.step()
        train(net, optimizer)
    assert sorted(sink.rows("step", "call", module="body", phase="backward")) == [
        (0, 0),
        (0, 1),
        (1, 0),
    ]
    assert set(sink.rows("tensor", phase="backward")) == {"grad"}


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_labelled_and_counts_for_itself(reentrant: bool) -> None:
    class Checkpointed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.body, x, use_reentrant=reentrant)

    with recording(training="0") as sink:
        net = Checkpointed()
        optimizer = torch.optim.SGD(net.parameters())
        for _ in range(2):
            net(X.clone().requires_grad_()).sum().backward()
            optimizer.step()
    # without reentrance torch stops recomputing as soon as it has what it needs: only the first
    # layers run twice
    assert keys(sink, "body.0") == [
        (0, 0, "forward"),
        (0, 0, "recompute"),
        (1, 0, "forward"),
        (1, 0, "recompute"),
    ]


def test_steps_are_filtered_and_calls_that_are_left_out_still_count() -> None:
    with recording(steps="1,4-5,*/10") as sink:
        net = Net()
        for _ in range(12):
            net(X)
    assert sink.rows("step", module="body") == [0, 1, 4, 5, 10]


def test_a_filter_that_matches_no_step_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    with recording(steps="100") as sink:
        Net()(X)
    assert not sink.records
    assert "OTEL_TORCH_STEPS selects none" in capfd.readouterr().err


def test_a_step_is_one_scope_and_its_records_come_before_it_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        recorder, "FLUSH_INTERVAL_S", math.inf
    )  # a slow start would have the first step handed on in parts
    with recording(training="0") as sink:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters())
        train(net, optimizer, passes=2)
        train(net, optimizer, passes=2)
    scopes = [scope for scope in sink.closed if scope.kind == "step"]
    assert [scope.attributes["torch.step"] for scope in scopes] == [0, 1]
    assert all(
        scope.training and not scope.bounded and scope.attributes["torch.model"] == "Net"
        for scope in scopes
    )
    assert [(batch.step, len(batch.records)) for batch in sink.batches] == [
        (scopes[0], 4),
        (scopes[1], 4),
    ]


def test_natural_regions_of_training_need_no_call_site() -> None:
    with recording() as sink:
        net = Net()
        train(net, torch.optim.SGD(net.parameters()))
    assert [scope.attributes["torch.region"] for scope in sink.closed if scope.kind == "natural"] == [
        "torch.backward", "torch.optimizer.step", "torch.step",
    ]  # fmt: skip


class TestNumbers:
    def test_nothing_written_is_everything(self) -> None:
        assert 0 in NumberSet.parse("") and 10**9 in NumberSet.parse(" , ")

    def test_a_bad_entry_is_named_and_skipped(self) -> None:
        problems: list[str] = []
        assert 3 in NumberSet.parse("3,9-7,*/0,x", problems.append)
        assert [problem.split()[0] for problem in problems] == ["'9-7'", "'*/0'", "'x'"]
