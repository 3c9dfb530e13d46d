"""The parameters after each optimizer step are recorded, and how each optimizer was set."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import metadata, recording, run_python

X = torch.linspace(-1, 1, 12).view(3, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).tanh())


def loss_of(net: nn.Module) -> torch.Tensor:
    return net(X).square().mean()


def step(net: Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss_of(net).backward()
    optimizer.step()


def means(net: nn.Module) -> dict[str, float]:
    """Return the mean of each parameter, by name."""
    return {name: parameter.mean().item() for name, parameter in net.named_parameters()}


def recorded(sink: Any, phase: str = "update") -> dict[int, dict[str, float]]:
    """Return the recorded mean of each parameter, by step and name."""
    by_step: dict[int, dict[str, float]] = {}
    for at, module, tensor, stats in sink.rows("step", "module", "tensor", "stats", phase=phase):
        name = f"{module}.{tensor.removeprefix('param.')}"
        assert name not in by_step.setdefault(at, {})
        by_step[at][name] = pytest.approx(stats["mean"], abs=1e-7)
    return by_step


class ByData(torch.optim.Optimizer):
    """Changes parameters without torch's counting it."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-group["lr"])


class WithClosure:
    """Steps by a closure, which LBFGS evaluates several times."""

    def __init__(self, net: Net) -> None:
        self.optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)

    def __call__(self, net: Net) -> None:
        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = loss_of(net)
            loss.backward()
            return loss

        self.optimizer.step(closure)


class Compiled:
    """Steps in a compiled function."""

    def __init__(self, net: Net) -> None:
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        self.step = torch.compile(self.optimizer.step, backend="eager")

    def __call__(self, net: Net) -> None:
        self.optimizer.zero_grad()
        loss_of(net).backward()
        self.step()


class FromMasterWeights:
    """Steps copies of the parameters in one flat tensor, which are copied back afterwards."""

    def __init__(self, net: Net) -> None:
        self.flat = nn.Parameter(nn.utils.parameters_to_vector(net.parameters()).detach().double())
        self.optimizer = torch.optim.AdamW([self.flat], lr=0.1)

    def __call__(self, net: Net) -> None:
        net.zero_grad()
        loss_of(net).backward()
        gradients = [parameter.grad.flatten() for parameter in net.parameters()]
        self.flat.grad = torch.cat(gradients).double()
        self.optimizer.step()
        nn.utils.vector_to_parameters(self.flat.detach().float(), net.parameters())


def plain(make: Callable[..., torch.optim.Optimizer], **settings: Any) -> Any:
    def prepare(net: Net) -> Callable[[Net], None]:
        optimizer = make(net.parameters(), **settings)
        return lambda net: step(net, optimizer)

    return prepare


WAYS = {
    "sgd": plain(torch.optim.SGD, lr=0.1, momentum=0.9),
    "for-loop": plain(torch.optim.AdamW, lr=0.1, foreach=False),
    "foreach": plain(torch.optim.AdamW, lr=0.1, foreach=True),
    "fused": plain(torch.optim.AdamW, lr=0.1, fused=True),
    "by-data": plain(ByData),
    "closure": WithClosure,
    "compiled": Compiled,
    "master-weights": FromMasterWeights,
}


@pytest.mark.parametrize("capture", ["updates", "training"])
@pytest.mark.parametrize("way", WAYS)
def test_each_step_records_the_parameters_that_it_computed(way: str, capture: str) -> None:
    expected = {}
    stats = "mean,abs_mean"
    with recording(capture=capture, stats=stats) as sink:
        torch.manual_seed(0)
        net = Net()
        train = WAYS[way](net)
        for at in range(3):
            train(net)
            expected[at] = means(net)
    assert recorded(sink) == expected
    assert expected[0] != expected[1]
    places = sink.rows("model", "loop", "call", phase="update")
    assert set(places) == {("Net", 0, 0)}
    if capture == "training" and way != "closure":
        gradients = sink.rows("step", "module", "call", "loop", phase="backward")
        updates = sink.rows("step", "module", "call", "loop", phase="update")
        assert set(updates) <= set(gradients)
        stats_of_updates = sink.rows("stats", phase="update")
        assert all({"sketch", "row_sketch"} <= stats.keys() for stats in stats_of_updates)


def test_updates_are_on_the_span_of_their_step() -> None:
    with recording(capture="updates") as sink:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            step(net, optimizer)
    batches = [batch for batch in sink.batches if any(r.phase == "update" for r in batch.records)]
    assert [batch.step.attributes["torch.step"] for batch in batches if batch.step] == [0, 1]


def test_only_what_an_optimizer_holds_and_what_is_selected_is_recorded() -> None:
    with recording(capture="updates", modules="^(head|body)$", steps="1") as sink:
        net = Net()
        of_body = torch.optim.SGD(net.body.parameters(), lr=0.1)
        of_head = torch.optim.Adam([net.head.weight])
        for _ in range(3):
            loss_of(net).backward()
            of_body.step()
            if net.head.weight.grad is not None:
                of_head.step()
            net.zero_grad()
    tensors = sink.rows("step", "module", "tensor", phase="update")
    assert tensors == [
        (1, "body", "param.weight"),
        (1, "body", "param.bias"),
        (1, "head", "param.weight"),
    ]


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_updates_nothing(fused: bool) -> None:
    with recording(capture="updates,gradients,parameters") as sink:
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        for turn in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(net) * (float("inf") if turn == 1 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
    updates = sink.rows("step", "module", "tensor", phase="update")
    assert len(updates) == 2 * len(list(net.parameters()))


def test_copies_are_recorded_before_an_evaluation_and_at_the_end() -> None:
    with recording(capture="updates", stats="mean") as sink:
        net = Net()
        train = FromMasterWeights(net)
        expected = {}
        for at in range(2):
            train(net)
            expected[at] = means(net)
            with torch.no_grad():
                net(X)
            with torch.no_grad():
                net.body.weight.zero_()
    assert recorded(sink) == expected


def test_copies_that_outlive_their_model_are_reported(capfd: pytest.CaptureFixture[str]) -> None:
    with recording(capture="updates") as sink:
        net = Net()
        train = FromMasterWeights(net)
        train(net)
        del net
        gc.collect()
    assert not sink.rows("module", phase="update")
    assert (
        "Net was deleted before the parameters of its last step were seen" in capfd.readouterr().err
    )


DESCRIBED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 4, bias=False)
        self.body.bias.requires_grad_(False)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.head.weight
        self.scale = nn.Parameter(torch.ones(1))
    def forward(self, x):
        return self.tied(self.head(self.norm(self.body(x)))) * self.scale

net = Net()
made = lambda: torch.optim.AdamW(
    [{"params": [net.body.weight, net.head.weight], "name": "matrices"},
     {"params": list(net.norm.parameters()), "weight_decay": 0.0}],
    lr=torch.tensor(0.25), betas=(0.5, 0.75))
optimizer = made()
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

def train():
    optimizer.zero_grad()
    scaler.scale(net(torch.randn(2, 4)).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()

train()
for group in optimizer.param_groups:
    group["lr"] = 0.125
train()
state = optimizer.state_dict()
optimizer = made()
optimizer.load_state_dict(state)
train()
"""


def test_the_metadata_says_how_each_optimizer_was_set_at_its_first_step(tmp_path: Path) -> None:
    run_python(tmp_path, DESCRIBED)
    first, resumed = metadata(tmp_path / "run.jsonl")["optimizers"]
    assert first["class"] == "AdamW"
    assert first["models"] == ["Net"]
    assert (first["first_step"], first["loaded"], first["state"]) == (0, False, [])
    matrices, norms = first["groups"]
    assert matrices["parameters"] == ["Net:body.weight", "Net:head.weight", "Net:tied.weight"]
    assert norms["parameters"] == ["Net:norm.weight", "Net:norm.bias"]
    expected = {"name": "matrices", "lr": 0.25, "betas": [0.5, 0.75], "weight_decay": 0.01}
    assert matrices["settings"].items() >= expected.items()
    assert norms["settings"]["weight_decay"] == 0.0
    assert first["grad_scaler"]["scale"] == 4.0
    assert first["unheld"] == ["Net:scale"]
    assert first["frozen"] == ["Net:body.bias"]
    assert (resumed["first_step"], resumed["loaded"]) == (2, True)
    assert resumed["state"] == ["exp_avg", "exp_avg_sq", "step"]
    assert resumed["groups"][0]["settings"]["lr"] == 0.125
