"""Modules that answer otherwise than modules do compute what they compute without recording."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import recording


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class GetattrRaises(Plain):
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise RuntimeError(f"called {name}") from None


class SetattrRaises(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.__dict__["is_closed"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("is_closed"):
            raise RuntimeError(f"set {name}")
        super().__setattr__(name, value)


class EqualToAll(Plain):
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 1


class Unhashable(Plain):
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    __hash__ = None  # type: ignore[assignment]


class Slotted(Plain):
    __slots__ = ("extra",)


class WithoutTruth(Plain):
    def __bool__(self) -> bool:
        raise RuntimeError("asked for its truth")

    def __len__(self) -> int:
        raise RuntimeError("asked for its length")

    def __repr__(self) -> str:
        raise RuntimeError("asked for its text")


class HiddenTree(Plain):
    """Its parts cannot be listed."""

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        raise RuntimeError("listed")

    modules = children = named_children = parameters = named_parameters = named_modules


class RaisingProperties(Plain):
    @property
    def config(self) -> Any:
        raise RuntimeError("asked for its configuration")

    param_names_mapping = module = _orig_mod = to_local = config


class DeletesItsPart(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "second" in self._modules:
            x = self.second(x)
            del self.second
        return self.first(x)


class ForgetsItsHooks(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in (self, self.first):
            part._forward_hooks.clear()
            part._forward_pre_hooks.clear()
        return super().forward(x)


class ReplacesForward(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.forward = lambda x: self.first(x) * 2  # type: ignore[method-assign]


class OwnCall(Plain):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x) + 1


class OwnState(Plain):
    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


KINDS = Plain.__subclasses__()


def program(kind: type[nn.Module]) -> list[Any]:
    torch.manual_seed(0)
    net = kind()
    seen = []
    for _ in range(3):
        output = net(torch.ones(2, 4))
        output.sum().backward()
        seen.append(output.tolist())
    seen.append(nn.Module.__call__(nn.Sequential(net, nn.ReLU()), torch.ones(2, 4)).tolist())
    if kind not in (SetattrRaises, GetattrRaises):  # these cannot be copied
        seen.append(copy.deepcopy(net)(torch.ones(2, 4)).tolist())
    return [seen, net]


@pytest.mark.parametrize("capture", ["outputs", "parity,gradients"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_hostile_module_runs_and_nothing_stays_on_it(
    kind: type[nn.Module], capture: str, capfd: pytest.CaptureFixture[str]
) -> None:
    expected, _ = program(kind)
    with recording(capture=capture, noise="off") as sink:
        seen, net = program(kind)
    assert seen == expected
    assert sink.records
    for part in (net, *net._modules.values()):
        assert not part._forward_hooks and not part._forward_pre_hooks
        assert not part._forward_hooks_with_kwargs and not part._forward_pre_hooks_with_kwargs
    assert "failed" not in capfd.readouterr().err


class CallsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        return self(x, depth - 1) if depth else self.inner(x)


def deepest_nesting() -> int:
    net = CallsItself()
    for depth in range(50, 400):
        try:
            net(torch.ones(1), depth)
        except RecursionError:
            break
    return depth


def test_forwards_nest_as_deeply_as_without_recording(capfd: pytest.CaptureFixture[str]) -> None:
    bare = deepest_nesting()
    with recording(capture="inputs,outputs") as sink:
        recorded = deepest_nesting()
    assert recorded >= bare
    assert sink.rows("module", module="inner")
    message = capfd.readouterr().err
    assert "CallsItself: forwards that nest near Python's recursion limit" in message
    assert "records (recursion)" in message
