"""A module whose only hook is ours is called without torch's dispatch of hooks, with the same results
and records.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import otel_torch
from otel_torch import torch_private
from otel_torch.sources.models import model_registry as modules
from otel_torch.sources.modules import module_call
from otel_torch.statistics import cpu_kernel
from tests.support import ListSink, recording

pytestmark = pytest.mark.skipif(
    cpu_kernel.load() is None or cpu_kernel.load().objects is None, reason=cpu_kernel.describe()
)
X = torch.arange(6.0).reshape(2, 3)


class Part(nn.Module):
    """Doubles its input; keeps the functions that called it, innermost first."""

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        self.callers = []
        frame = sys._getframe(1)
        while frame is not None:
            self.callers.append(frame.f_code)
            frame = frame.f_back  # type: ignore[assignment]
        return x * scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()
        self.block = nn.Sequential(nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.part(x, scale=3.0))


def passed_torch(part: Part) -> bool:
    """Return whether the last call of a part came by torch's way for hooks."""
    return nn.Module._call_impl.__code__ in part.callers[:4]


@pytest.fixture(params=["outputs", "inputs,outputs", "parity"])
def sink(request: pytest.FixtureRequest) -> Iterator[ListSink]:
    with recording(capture=request.param, stats="sum") as sink:
        yield sink


def sums(sink: ListSink, step: int) -> list[float]:
    """Return the sums of the outputs of the part."""
    return [
        record.stats["sum"]
        for record in sink.records
        if (record.module, record.tensor, record.step) == ("part", "out", step)
    ]


def test_a_module_with_our_hook_alone_is_called_directly(sink: ListSink) -> None:
    net = Net()
    with torch.no_grad():
        net(X)
        assert not passed_torch(net.part)
    assert sums(sink, 0) == [45.0]


def scaled(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 10


def own_hook(net: Net) -> Callable[[], None]:
    return net.part.register_forward_hook(scaled).remove


def own_pre_hook(net: Net) -> Callable[[], None]:
    return net.part.register_forward_pre_hook(lambda module, args: (args[0] * 10,)).remove


def global_hook(net: Net) -> Callable[[], None]:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return output * 10 if isinstance(module, Part) else None

    return nn.modules.module.register_module_forward_hook(hook).remove


def global_pre_hook(net: Net) -> Callable[[], None]:
    def hook(module: nn.Module, args: Any) -> Any:
        return (args[0] * 10,) if isinstance(module, Part) else None

    return nn.modules.module.register_module_forward_pre_hook(hook).remove


def another_hook_of_ours(net: Net) -> Callable[[], None]:
    class Scaling(otel_torch.ForwardHook):
        @classmethod
        def name(cls) -> str:
            return "scaling"

        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return output * 10

    manager = otel_torch.ModuleHookManager.get_from_or_default(net.part)
    manager.append_forward_hook(Scaling())
    return lambda: manager.remove_forward_hook("scaling")


def method_of_the_module(net: Net) -> Callable[[], None]:
    original = net.part._call_impl
    net.part._call_impl = lambda *args, **kwargs: original(*args, **kwargs) * 10

    def undo() -> None:
        del net.part._call_impl

    return undo


def method_of_the_class(net: Net) -> Callable[[], None]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return nn.Module._call_impl(self, *args, **kwargs) * 10

    Part._call_impl = call  # type: ignore[method-assign]

    def undo() -> None:
        del Part._call_impl

    return undo


def compiled_call(net: Net) -> Callable[[], None]:
    net.part._compiled_call_impl = lambda x, scale: net.part._call_impl(x, scale=scale) * 10

    def undo() -> None:
        net.part._compiled_call_impl = None

    return undo


CHANGES = [
    own_hook, own_pre_hook, global_hook, global_pre_hook, another_hook_of_ours, method_of_the_module,
    method_of_the_class, compiled_call,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_the_program_adds_to_a_call_runs(
    change: Callable[[Net], Callable[[], None]], sink: ListSink
) -> None:
    net = Net()
    with torch.no_grad():
        net(X)
        undo = change(net)
        changed = net(X)
        undo()
        again = net(X)
    assert changed.sum() == 450.0 and again.sum() == 45.0
    assert [len(sums(sink, step)) for step in range(3)] == [1, 1, 1]


@pytest.mark.parametrize(
    "register",
    [nn.Module.register_full_backward_hook, nn.Module.register_full_backward_pre_hook],
)
def test_backward_hooks_run(register: Any, sink: ListSink) -> None:
    net, seen = Net(), []
    x = X.clone().requires_grad_()
    net(x)
    register(net.part, lambda *_: seen.append("backward"))
    net(x).sum().backward()
    assert seen == ["backward"] and sums(sink, 1) == [45.0]


def test_a_hook_that_the_forward_itself_registers_runs_after_it(sink: ListSink) -> None:
    net = Net()

    def forward(x: torch.Tensor, scale: float) -> torch.Tensor:
        net.part.register_forward_hook(
            lambda module, args, kwargs, output: output * kwargs["scale"], with_kwargs=True
        )
        return x * scale

    net.part.forward = forward  # type: ignore[assignment]
    with torch.no_grad():
        output = net(X)
    assert output.sum() == 135.0
    assert sums(sink, 0) == [45.0]  # our hook was there before


def test_a_session_may_end_in_a_forward(sink: ListSink) -> None:
    net = Net()

    def forward(x: torch.Tensor, scale: float) -> torch.Tensor:
        otel_torch.stop()
        return x * scale

    with torch.no_grad():
        net(X)
        net.part.forward = forward  # type: ignore[assignment]
        output = net(X)
    assert output.sum() == 45.0
    assert sums(sink, 0) == [45.0]
    assert not net.part._forward_hooks and not net.part._forward_pre_hooks


def test_what_a_forward_raises_reaches_the_program(sink: ListSink) -> None:
    net = Net()
    with torch.no_grad():
        with pytest.raises(TypeError, match="unexpected keyword argument 'power'"):
            net.block.append(net.part)(X)  # the part alone runs
            net.part(X, power=2)
        net(X)
    assert sums(sink, sink.records[-1].step)[-1:] == [45.0]


def test_a_forward_that_the_program_exchanges_runs(sink: ListSink) -> None:
    """In the module, in the class, and as code: containers have other code around theirs."""

    class Container(nn.Sequential):
        def forward(self, x: torch.Tensor, add: float = 1.0) -> torch.Tensor:
            return super().forward(x) + add

    def another(self: Any, x: torch.Tensor, add: float = 5.0) -> torch.Tensor:
        return x + add

    net = nn.Sequential(Container(nn.ReLU()))
    results = []
    with torch.no_grad():
        results.append(net(X).sum().item())
        Container.forward.__defaults__ = (2.0,)
        results.append(net(X).sum().item())
        net[0].forward = lambda x: x - 1  # type: ignore[assignment]
        results.append(net(X).sum().item())
        del net[0].forward
        net[0].forward = another.__get__(net[0])  # type: ignore[assignment]
        results.append(net(X).sum().item())
        del net[0].forward
        Container.forward = another  # type: ignore[assignment]
        results.append(net(X).sum().item())
    assert results == [21.0, 27.0, 9.0, 45.0, 45.0]
    outputs = [
        record.stats["sum"]
        for record in sink.records
        if (record.module, record.tensor) == ("0", "out")
    ]
    assert outputs == results


def test_a_tracer_sees_every_module() -> None:
    with recording():
        net = Net()
        with torch.no_grad():
            net(X)
            traced = torch.jit.trace(net, X)
    assert {name for name, _ in traced.named_modules()} == {"", "part", "block", "block.0"}
    assert traced(X).sum() == 45.0


def test_a_torch_that_is_not_known_makes_all_calls_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    assert torch_private.module_call() is not None
    monkeypatch.setattr(nn.Module, "_call_impl", call)
    assert torch_private.module_call() is None
    assert module_call.direct_call(None, None) is None


def test_records_are_the_same_by_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def records(capture: str) -> list[Any]:
        with recording(capture=capture) as sink, torch.no_grad():
            net = Net()
            for _ in range(2):
                net(X)
        return [
            (record.module, record.tensor, record.step, record.stats) for record in sink.records
        ]

    for capture in ("outputs", "inputs,outputs", "parity"):
        directly = records(capture)
        with monkeypatch.context() as patch:
            patch.setattr(torch_private, "module_call", lambda: None)
            assert records(capture) == directly
        assert directly and modules.LEFT_TO_TORCH is module_call.LEFT_TO_TORCH


def test_the_compiler_compiles_forwards_and_nothing_of_ours(sink: ListSink) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.ReLU())

        def forward(self, x: torch.Tensor, *, add: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
            return self.block(x) + add, [1]

    compiled = torch.compile(Named(), fullgraph=True, backend="eager")  # raises for other frames
    with torch.no_grad():
        output, _ = compiled(X, add=X)
    assert output.sum() == 30.0
