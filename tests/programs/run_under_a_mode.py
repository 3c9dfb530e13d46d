"""Prints every operation that a mode, tracer or transform of the program sees from its first forward.

usage: run_under_a_mode.py MODE
"""

import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8), nn.LayerNorm(8)
        self.second, self.act = nn.Linear(8, 4), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.act(self.norm(self.first(x)))
        return {"transposed": self.second(hidden).t(), "half": hidden.bfloat16()}


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        print(function)
        return function(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        owner = getattr(function, "__self__", "")
        print(
            re.sub(" at 0x[0-9a-f]+", "", f"{getattr(function, '__qualname__', function)} {owner}")
        )
        return function(*args, **(kwargs or {}))


def train(net: nn.Module, mode: AbstractContextManager[Any]) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with mode:
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.ones(3, 4))["transposed"].sum().backward()
            optimizer.step()
        with torch.no_grad():
            net(torch.ones(3, 4))


def count_flops(net: nn.Module) -> None:
    with FlopCounterMode(display=False) as counter:
        net(torch.ones(3, 4))["transposed"].sum().backward()
    for module, counts in sorted(counter.get_flop_counts().items()):
        print(module, sorted((str(operation), count) for operation, count in counts.items()))


def forward_of_fakes(net: nn.Module) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), Dispatch():
        print(net(torch.ones(3, 4))["transposed"].shape)


def transposed(net: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: net(x)["transposed"]


def trace(net: nn.Module) -> None:
    traced = torch.jit.trace(net, torch.ones(3, 4), strict=False)
    print(traced.inlined_graph)


def functionalize(net: nn.Module) -> None:
    graph = make_fx(torch.func.functionalize(transposed(net)))(torch.ones(3, 4))
    print(graph.code)


def differentiate(net: nn.Module) -> None:
    x = torch.ones(3, 4)
    print(make_fx(torch.vmap(torch.func.jacrev(transposed(net))))(x[:, None]).code)


PROGRAMS: dict[str, Callable[[nn.Module], None]] = {
    "dispatch": lambda net: train(net, Dispatch()),
    "function": lambda net: train(net, Functions()),
    "flops": count_flops,
    "fake": forward_of_fakes,
    "jit": trace,
    "make_fx": lambda net: print(make_fx(transposed(net))(torch.ones(3, 4)).code),
    "functionalize": functionalize,
    "transforms": differentiate,
    "export": lambda net: print(torch.export.export(net, (torch.ones(3, 4),)).graph),
}

if __name__ == "__main__":
    torch.manual_seed(0)
    net = Net()
    PROGRAMS[sys.argv[1]](net)
    # what came first must not have changed how the process measures
    print([value.tolist() for value in net(torch.ones(2, 4)).values()])
