"""Modules that a model holds in plain objects are its parts; those that a forward makes are not."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import recording, work_of

X = torch.ones(1, 3)
EVERYWHERE = nn.GELU()


class Pair:
    __slots__ = ("first", "second")

    def __init__(self) -> None:
        self.first, self.second = nn.ReLU(), nn.GELU()

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def closure() -> Callable[[torch.Tensor], torch.Tensor]:
    act = nn.GELU()
    return lambda x: act(x)


class Holding(nn.Module):
    """Runs something that it holds as an attribute."""

    def __init__(self, held: Any, run: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.held, self.run = held, run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self.held, self.linear(x))


HELD: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], Any], list[str]]] = {
    "list": (lambda: [nn.GELU()], lambda held, x: held[0](x), ["held.0"]),
    "tuple": (lambda: (None, (nn.GELU(),)), lambda held, x: held[1][0](x), ["held.1.0"]),
    "dict": (lambda: {"act": nn.GELU()}, lambda held, x: held["act"](x), ["held.act"]),
    "deque": (lambda: deque([nn.GELU()]), lambda held, x: held[0](x), ["held.0"]),
    "object": (Pair, lambda held, x: held.run(x), ["held.first", "held.second"]),
    "method": (lambda: Pair().run, lambda held, x: held(x), ["held.self.first", "held.self.second"]),
    "partial": (
        lambda: partial(lambda act, x: act(x), nn.GELU()),
        lambda held, x: held(x),
        ["held.args.0"],
    ),
    "closure": (closure, lambda held, x: held(x), ["held.act"]),
    "one module twice": (lambda: [nn.GELU()] * 2, lambda held, x: held[1](held[0](x)), ["held.0"] * 2),
}  # fmt: skip


@pytest.mark.parametrize("kind", HELD)
@pytest.mark.parametrize("capture", ["outputs", "parity"])
def test_what_a_module_holds_is_named_by_the_way_to_it(kind: str, capture: str) -> None:
    make, run, names = HELD[kind]
    with recording(capture=capture) as sink:
        net = nn.Sequential(Holding(make(), run))
        net(X), net(X)
    called = [
        (step, module.removeprefix("0."))
        for step, module, tensor in sink.rows("step", "module", "tensor")
        if tensor == "out"
    ]
    for step in (0, 1):
        assert [name for at, name in called if at == step] == ["linear", *names, "0", ""]


class OfClass(nn.Module):
    act = nn.GELU()

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return EVERYWHERE(self.act(self.linear(x)))


def test_what_its_class_or_its_file_holds_is_a_part_of_each_model_that_calls_it() -> None:
    with recording() as sink:
        nets = OfClass(), OfClass()
        for _ in range(2):
            for net in nets:
                net(X)
    rows = sink.rows("model", "module", "step")
    for model in ("OfClass", "OfClass#2"):
        for step in (0, 1):
            names = [module for name, module, at in rows if (name, at) == (model, step)]
            assert names == ["linear", "act", "EVERYWHERE", ""]
    assert len(rows) == 16


def test_what_a_forward_makes_is_no_part_and_is_searched_once() -> None:
    class Making(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.vocabulary = [str(number) for number in range(5000)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for act in [nn.GELU(), nn.ReLU()]:
                x = act(x)
            return nn.Softmax(-1)(self.linear(x))

    with recording() as sink:
        net = Making()
        first = work_of(lambda: net(X)).total()
        later = work_of(lambda: net(X)).total()
    assert sink.rows("module") == ["linear", "", "linear", ""]
    assert later < first / 5


def test_a_part_that_the_program_calls_alone_begins_a_forward_of_its_model() -> None:
    with recording() as sink:
        net = Holding([nn.GELU()], lambda held, x: held[0](x))
        net(X)
        net.held[0](X)
    assert sink.rows("model", "module", "step")[-1] == ("Holding", "held.0", 1)


def test_a_module_may_be_called_alone_before_it_is_called_as_a_part() -> None:
    with recording() as sink:
        net = Holding([nn.GELU()], lambda held, x: held[0](x))
        net.held[0](X)
        net(X)
    assert sink.rows("model", "module") == [
        ("GELU", ""), ("Holding", "linear"), ("Holding", "held.0"), ("Holding", ""),
    ]  # fmt: skip


def test_nothing_is_found_after_the_session() -> None:
    from otel_torch.sources.modules.module_names import part_finders

    before = part_finders.copy()
    with recording():
        Holding([nn.GELU()], lambda held, x: held[0](x))(X)
        assert len(part_finders) == len(before) + 1
    assert part_finders == before
