"""The replay of a forward that gave NaN: it names the operation and changes nothing of the program."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from otel_torch import torch_private
from otel_torch.sources.tensors.operations import _OperationMode
from tests.support import recording


class Faulty(nn.Module):
    """Layers whose state a forward changes, and behind them a function that gives NaN."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.dropout, self.calls = nn.Dropout(0.5), 0

    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        self.calls += 1
        return self.function(self.dropout(self.norm(self.linear(x))))


def log_of_negative(x: torch.Tensor) -> torch.Tensor:
    noise = random.random() + float(np.random.rand()) + torch.rand(()).item()
    return (x.abs() + noise).neg_().log()


def run(model: nn.Sequential, **call: Any) -> list[bytes]:
    """Train for three steps; return every number and random state as bytes."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    for layer in model.modules():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    states: list[bytes] = []
    for _ in range(3):
        optimizer.zero_grad()
        output = model(torch.randn(8, 4), **call)
        output.square().mean().backward()
        tensors = [output, *(p.grad for p in model.parameters()), *model.state_dict().values()]
        states += [t.detach().numpy().tobytes() for t in tensors if t is not None]
        states.append(torch.get_rng_state().numpy().tobytes())
        states.append(repr((random.getstate(), np.random.get_state())).encode())
        optimizer.step()
    return states


class Net(nn.Sequential):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        output: torch.Tensor = self[1](self[0](x), **kwargs)
        return output


def network(function: Callable[[torch.Tensor], torch.Tensor]) -> Net:
    return Net(nn.Linear(4, 4), Faulty(function))


def zoomed(make: Callable[[], Net], capfd: pytest.CaptureFixture[str], **call: Any) -> str:
    """Check that a run under `zoom` has the bits of a bare one; return the first line it says."""
    bare = run(make(), **call)
    capfd.readouterr()
    with recording(on_nonfinite="zoom") as sink:
        model = make()
        assert run(model, **call) == bare
    assert model[1].calls == 3
    # each call has one record of its output, as without a replay
    assert sink.rows("step", "call", module="1.linear", phase="forward") == [
        (0, 0), (1, 0), (2, 0)
    ]  # fmt: skip
    said = [line for line in capfd.readouterr().err.splitlines() if ": step " in line]
    return said[0]


def test_the_operation_is_named_and_nothing_changes(capfd: pytest.CaptureFixture[str]) -> None:
    line = zoomed(lambda: network(log_of_negative), capfd)
    assert "'1' of Net produced it, after its modules had returned finite values" in line
    assert "replayed: aten.log made NaN of -" in line and "(test_replay.py:" in line


def test_operations_that_led_there_are_named_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    def difference(x: torch.Tensor) -> torch.Tensor:
        large = (x.abs() * 1e4 + 1e3).exp()
        return large - large

    line = zoomed(lambda: network(difference), capfd)
    assert "replayed: aten.exp made Inf of 1" in line
    assert ", aten.sub made NaN of inf and inf (test_replay.py:" in line


def test_weights_keep_their_gradients_under_autocast(capfd: pytest.CaptureFixture[str]) -> None:
    class Autocast(Net):
        def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                output: torch.Tensor = self[1](super().forward(x)).float()
            return output

    class Often(nn.Module):
        """Uses a weight in the replay that the program has not cast yet."""

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.late, self.calls = nn.Linear(4, 4), nn.Linear(4, 4), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            chosen = self.linear if self.calls % 2 else self.late
            output: torch.Tensor = chosen(x) / 0
            return output

    bare = run(Autocast(nn.Linear(4, 4), Often()))
    with recording(on_nonfinite="zoom"):
        assert run(Autocast(nn.Linear(4, 4), Often())) == bare
    assert "replayed: aten.div made " in capfd.readouterr().err


GENERATOR, STATE = torch.Generator(), torch.zeros(4)
OUTSIDE = nn.Linear(4, 4)


def own_generator(x: torch.Tensor) -> torch.Tensor:
    return (x.abs() + torch.rand(x.shape, generator=GENERATOR)).neg().log()


def own_state(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        STATE.add_(1)
    return (x.abs() + STATE).neg().log()


def other_module(x: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = OUTSIDE(x).abs().add(1).neg().log()
    return output


@pytest.mark.parametrize(
    ("function", "call", "reason"),
    [
        (own_generator, {}, "it draws from a random generator of its own"),
        (own_state, {}, "its aten.add_ changes a tensor in place"),
        (other_module, {}, "it calls modules that it does not contain"),
        (log_of_negative, {"cache": object()}, "an argument is of class object"),
    ],
)
def test_what_would_have_an_effect_is_refused(
    function: Callable[[torch.Tensor], torch.Tensor],
    call: dict[str, Any],
    reason: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    OUTSIDE(torch.zeros(1, 4))

    def make() -> Net:
        GENERATOR.manual_seed(0)
        STATE.zero_()
        return network(function)

    line = zoomed(make, capfd, **call)
    assert f"not replayed: {reason}" in line
    assert STATE.tolist() == [3 * (function is own_state)] * 4


def test_hooks_of_the_program_run_once(capfd: pytest.CaptureFixture[str]) -> None:
    called: list[int] = []

    def make() -> Net:
        called.clear()
        model = network(log_of_negative)
        model[1].linear.register_forward_hook(lambda *_: called.append(1))
        return model

    assert "replayed: aten.log made NaN" in zoomed(make, capfd)
    assert len(called) == 3


def test_a_forward_of_the_object_is_not_replayed(capfd: pytest.CaptureFixture[str]) -> None:
    def make() -> Net:
        model = network(log_of_negative)
        model[1].forward = model[1].forward
        return model

    line = zoomed(make, capfd)
    assert "not replayed: the forward of Faulty is not that of its class" in line


def test_a_nan_of_a_random_mask_may_not_come_again(capfd: pytest.CaptureFixture[str]) -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drawn = [0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.drawn[0] += 1
            noise = torch.rand(()) if self.drawn[0] > 1 else torch.tensor(float("nan"))
            return x * noise

    with recording(on_nonfinite="zoom"):
        nn.Sequential(nn.Linear(4, 4), Once())(torch.ones(2, 4))
    assert "gave no NaN this time, with other random numbers" in capfd.readouterr().err


def test_only_zoom_replays(capfd: pytest.CaptureFixture[str]) -> None:
    with recording():
        run(network(log_of_negative))
    assert "replayed" not in capfd.readouterr().err


def test_a_program_that_counts_functions_counts_none_of_the_replay(
    capfd: pytest.CaptureFixture[str],
) -> None:
    class Count(TorchFunctionMode):
        calls = 0

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.calls += 1
            return func(*args, **(kwargs or {}))

    counts = []
    for on_nonfinite in ("report", "zoom"):
        with recording(on_nonfinite=on_nonfinite), Count() as count:
            network(log_of_negative)(torch.ones(8, 4))
        counts.append(count.calls)
    assert counts[0] == counts[1] > 0
    assert "replayed: aten.log made NaN" in capfd.readouterr().err


def test_a_mode_of_the_program_is_seen() -> None:
    assert not torch_private.has_dispatch_modes()
    with _OperationMode(lambda label, tensor: None, 0):  # type: ignore[no-untyped-call]
        assert torch_private.has_dispatch_modes()
