"""The rows `dead` of a training: the share of units behind a ReLU that no sample activates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support import ListSink, recording


def killed(layer: nn.Module, count: int) -> nn.Module:
    """Return a layer whose first units are negative for every sample."""
    with torch.no_grad():
        layer.bias[:count] = -1e3  # type: ignore[index, operator]
    return layer


def train(model: nn.Module, x: torch.Tensor, steps: int = 1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def dead(sink: ListSink) -> list[tuple[str, int, int, float]]:
    """Return module, step, call and share of each row."""
    rows = sink.rows("module", "step", "call", "stats", phase="train", tensor="dead")
    return [(module, step, call, stats["mean"]) for module, step, call, stats in rows]


@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        ([partial(nn.Linear, 4, 8), nn.ReLU], (32, 4)),
        ([partial(nn.Linear, 4, 8), nn.ReLU6], (16, 3, 4)),
        ([partial(nn.Linear, 4, 8), partial(nn.ReLU, inplace=True)], (4, 6, 6, 4)),
        ([partial(nn.Conv1d, 4, 8, 3), nn.ReLU], (2, 4, 20)),
        ([partial(nn.Conv2d, 4, 8, 3), nn.ReLU], (2, 4, 9, 9)),
    ],
)
def test_the_units_are_the_channels(
    layers: list[Callable[[], nn.Module]], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    first, *others = (make() for make in layers)
    with recording() as sink:
        train(nn.Sequential(killed(first, 6), *others), torch.randn(shape))
    ((module, step, call, share),) = dead(sink)
    assert (module, step, call) == ("1", 0, 0)
    assert share == 6 / 8


def test_a_module_that_is_called_again_has_another_row() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.act = killed(nn.Linear(4, 8), 2), nn.ReLU()
            self.down = killed(nn.Linear(8, 8), 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.act(self.down(self.act(self.up(x))))
            return output

    torch.manual_seed(0)
    with recording() as sink:
        train(Twice(), torch.randn(64, 4))
    assert dead(sink) == [("act", 0, 0, 2 / 8), ("act", 0, 1, 6 / 8)]


def test_every_tenth_step_has_them_after_the_first_ten() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    x = torch.randn(32, 4)
    with recording() as sink:
        train(model, x, steps=25)
        with torch.no_grad():
            model(x)
    assert [step for _, step, _, _ in dead(sink)] == [*range(10), 10, 20]


@pytest.mark.parametrize(
    ("activation", "batch"),
    [(nn.ReLU, 7), (nn.LeakyReLU, 32), (nn.GELU, 32)],
)
def test_what_would_say_nothing_is_not_recorded(
    activation: Callable[[], nn.Module], batch: int
) -> None:
    with recording() as sink:
        train(nn.Sequential(killed(nn.Linear(4, 8), 6), activation()), torch.randn(batch, 4))
    assert sink.rows("step", phase="train", tensor="loss") and not dead(sink)


def test_a_model_that_is_not_trained_gets_no_hook() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    with recording() as sink:
        model(torch.randn(32, 4))
        plain = len(sink.records)
        hooks = len(model[1]._forward_hooks)
        train(model, torch.randn(32, 4))
    assert plain == 3 and hooks == 1 and len(dead(sink)) == 1
    assert not model[1]._forward_hooks


def test_without_activations_no_module_gets_a_hook() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    with recording(activations="off") as sink:
        train(model, torch.randn(32, 4))
        assert not model[1]._forward_hooks
    assert sink.rows("step", phase="train", tensor="loss") and not dead(sink)


def test_functions_are_not_seen_and_compiled_code_runs_on() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.act = nn.Linear(4, 8), nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.act(F.relu(self.up(x)))
            return output

    torch._dynamo.reset()
    model = Functional()
    with recording() as sink:
        train(model, torch.randn(32, 4))
        assert [module for module, *_ in dead(sink)] == ["act"]
        train(torch.compile(model, backend="eager", fullgraph=True), torch.randn(32, 4))
    torch._dynamo.reset()
    assert len(dead(sink)) == 1
    assert len(sink.rows("step", phase="train", tensor="loss")) == 2


def test_nan_is_not_dead() -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 4)
    x[3] = float("nan")
    with recording() as sink:
        train(nn.Sequential(killed(nn.Linear(4, 8), 6), nn.ReLU()), x)
    assert [share for *_, share in dead(sink)] == [0.0]
