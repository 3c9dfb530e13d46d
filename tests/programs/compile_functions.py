"""Compile functions of every kind that call models, each in the way that an argument names.

The models run nowhere else. A line per turn with its result, and one per way with its graphs and
recompilations.
"""

import sys

import torch
from torch import nn
from torch._dynamo.utils import counters


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu())

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x)


class Teacher(Net):
    pass


class Trainer:
    """Holds a model, as trainers do that are no module."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).square().mean()


def train(way: str) -> None:
    """Train and evaluate a new model in a compiled function."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    net, teacher = type(f"Net_{way}", (Net,), {})(), Teacher()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def function(x: torch.Tensor) -> torch.Tensor:
        return net(x).square().mean()

    def argument(x: torch.Tensor, model: nn.Module = net) -> torch.Tensor:
        return model(x).square().mean()

    def two_models(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = teacher(x)
        return (net(x) - target).square().mean()

    def loop(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = x + 0.1 * net(x)
        return x.square().mean()

    def method_of_model(x: torch.Tensor) -> torch.Tensor:
        return net.encode(x).square().mean()

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    functions = {
        "function": function,
        "argument": argument,
        "two_models": two_models,
        "loop": loop,
        "method_of_model": method_of_model,
        "method_of_trainer": Trainer(net).loss,
        "step": step,
    }
    run = torch.compile(functions[way], backend="aot_eager", fullgraph=way != "step")
    for turn in range(3):
        loss = run(torch.randn(3, 4))
        if way != "step":
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(way, turn, float(loss.detach()).hex())
    if way != "step":
        with torch.no_grad():
            print(way, "evaluation", float(run(torch.ones(3, 4))).hex())
    print(way, counters["stats"]["unique_graphs"], sum(counters["recompiles"].values()))


for argument in sys.argv[1:]:
    train(argument)
