"""A forward that the program calls itself, past `nn.Module.__call__`, is recorded like a call."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import marshal
import pickle
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import FunctionType, MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from otel_torch import Cache, bootstrap
from tests.support import ListSink, recording

pytestmark = pytest.mark.usefixtures("fresh_compiler")
X = torch.linspace(-1, 1, 6).reshape(2, 3)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        x = self.linear(x)
        return x if scale is None else x * scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


class Nested(Net):
    """Calls the forward of a part."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b.forward(self.a(x))


class Derived(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


class Delegating(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner_forward(x)

    def inner_forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


class OwnCall(Net):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


class Decorated(Net):
    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


class Annotated(Net):
    """Takes `*args`, as decorators of libraries make it."""

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        self, x = (*args, *kwargs.values())
        return self.b(self.a(x))


CALLS = ["a.linear", "a", "b.linear", "b", ""]


def calls(sink: ListSink, tensor: str = "out") -> list[tuple[str, int, int]]:
    return sink.rows("module", "step", "call", tensor=tensor)


def steps(*numbers: int) -> list[tuple[str, int, int]]:
    return [(module, step, 0) for step in numbers for module in CALLS]


@pytest.mark.parametrize("kind", [Net, Nested, Derived, Delegating, OwnCall, Decorated, Annotated])
def test_a_forward_called_by_name_is_recorded_once_with_its_root_and_inputs(
    kind: type[Net],
) -> None:
    results = []
    for capture in (None, "inputs,outputs"):
        torch.manual_seed(0)
        if capture is None:
            net = kind()
            results.append([net.forward(X), net(X), net.forward(x=X)])
            continue
        with recording(capture=capture) as sink:
            net = kind()
            results.append([net.forward(X), net(X), net.forward(x=X)])
    assert all(map(torch.equal, *results))
    assert calls(sink) == steps(0, 1, 2)
    inputs = [row for row in sink.rows("module", "step", "tensor") if row[2].startswith("in")]
    assert [row[:2] for row in inputs] == [
        (module, step) for step in range(3) for module in ("", "a", "a.linear", "b", "b.linear")
    ]
    assert {scope.name for scope in sink.closed} == {"torch.step", "torch.forward"}


def test_a_parameter_with_a_default_is_labeled_by_its_name() -> None:
    with recording(capture="inputs") as sink:
        block = Block()
        block.forward(X, torch.ones(1))
    assert sink.rows("tensor", module="") == ["in[0]", "in.scale"]


def ways(net: nn.Module) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    return {
        "bound": net.forward,
        "partial": functools.partial(net.forward),
        "unbound": lambda x: type(net).forward(net, x),
        "checkpointed": lambda x: torch.utils.checkpoint.checkpoint(
            net.forward, x, use_reentrant=False
        ),
    }


@pytest.mark.parametrize("way", ["bound", "partial", "unbound", "checkpointed"])
def test_a_method_that_was_bound_before_recording_began_is_seen(way: str) -> None:
    net = Net()
    call = ways(net)[way]
    with recording() as sink:
        call(X)
        call(X)
    assert calls(sink) == steps(0, 1)


def test_hooks_of_the_program_do_not_run_as_without_recording() -> None:
    ran = []
    net = Net()
    net.register_forward_hook(lambda *arguments: ran.append("hook"))
    with recording() as sink:
        net.forward(X)
        assert ran == []
        net(X)
    assert ran == ["hook"]
    assert calls(sink) == steps(0, 1)


def test_a_cache_of_the_program_sees_what_it_sees_without_recording() -> None:
    """Its hooks do not run around a direct call, although they are registered like the session's."""
    net = Net()
    seen = []
    for context in (nullcontext(), recording()):
        with context, Cache(include_inputs=True).attach(net) as cache:
            net.forward(X)
            seen.append(set(cache.keys()))
    assert seen == [{"model.a", "model.a.linear", "model.b", "model.b.linear"}] * 2


def test_a_forward_that_raises_ends_its_forward() -> None:
    class Failing(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.isnan().any():
                raise KeyError("nan")
            return super().forward(x)

    with recording(capture="inputs,outputs", operations="a") as sink:
        net = Failing()
        with pytest.raises(KeyError):
            net.forward(X * float("nan"))
        net.forward(X)
    assert [row for row in calls(sink) if row[0] == ""] == [("", 0, 1)]


def test_only_what_may_be_called_so_has_other_code() -> None:
    own = Block.forward.__code__, Net.forward.__code__, nn.Linear.forward.__code__
    with recording():
        net = Net()
        net(X)
        during = Block.forward.__code__, Net.forward.__code__, nn.Linear.forward.__code__
    after = Block.forward.__code__, Net.forward.__code__, nn.Linear.forward.__code__
    assert [code is before for code, before in zip(during, own, strict=True)] == [
        False,
        False,
        True,
    ]
    assert after == own
    assert not [name for name in dir(nn.Module) if name.startswith("_otel_torch")]


def test_a_forward_stays_the_function_that_it_is() -> None:
    function = Block.forward
    with recording():
        block = Block()
        block(X)
        method = block.forward
        assert method.__func__ is function is Block.forward
        assert str(inspect.signature(method)) == (
            "(x: 'torch.Tensor', scale: 'torch.Tensor | None' = None) -> 'torch.Tensor'"
        )
        assert list(inspect.signature(function).parameters) == ["self", "x", "scale"]
        assert "x * scale" in inspect.getsource(method)
        assert "forward" not in vars(block)
        copied, loaded = copy.deepcopy(block), pickle.loads(pickle.dumps(block))
    for other in (copied, loaded):
        assert torch.equal(other.forward(X), block(X))
        assert vars(other).keys() == vars(block).keys()


def test_a_class_pickled_by_value_runs_where_nothing_is_recorded() -> None:
    """As cloudpickle does with classes of `__main__`: it pickles the code of their functions."""
    own = Net.forward.__code__
    with recording():
        net = Net()
        expected = net(X)
        code = marshal.dumps(Net.forward.__code__)
        assert Net.forward.__code__ is not own
        with_session = FunctionType(marshal.loads(code), vars(sys.modules[__name__]))
        assert torch.equal(with_session(net, X), expected)
    assert torch.equal(
        FunctionType(marshal.loads(code), vars(sys.modules[__name__]))(net, X), expected
    )


def test_a_forward_runs_with_a_self_that_is_no_module() -> None:
    class Parts:
        a = b = staticmethod(torch.neg)

    with recording():
        Net()(X)
        assert torch.equal(Net.forward(Parts(), X), X)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Net, Nested, Derived, OwnCall])
@pytest.mark.parametrize("way", ["whole", "forward", "function", "calls_forward"])
def test_compiling_makes_the_same_graphs_and_the_same_records(kind: type[Net], way: str) -> None:
    def run() -> tuple[list[torch.Tensor], tuple[int, int, int]]:
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        net = kind()
        compiled = {
            "whole": lambda: torch.compile(net, fullgraph=True, backend="aot_eager"),
            "forward": lambda: torch.compile(net.forward, fullgraph=True, backend="aot_eager"),
            "function": lambda: torch.compile(
                lambda x: net(x), fullgraph=True, backend="aot_eager"
            ),
            "calls_forward": lambda: torch.compile(
                lambda x: net.forward(x), fullgraph=True, backend="aot_eager"
            ),
        }[way]()
        results = [compiled(X * turn) for turn in range(3)]
        graphs = counters["stats"]["unique_graphs"]
        breaks = sum(counters["graph_break"].values())
        return results, (graphs, breaks, sum(counters["recompiles"].values()))

    bare, graphs = run()
    with recording(capture="inputs,outputs") as sink:
        results, recorded_graphs = run()
    assert all(map(torch.equal, results, bare))
    assert recorded_graphs == graphs == (1, 0, 0)
    assert sorted(calls(sink)) == sorted(steps(0, 1, 2))
    assert sorted(calls(sink, "in[0]")) == sorted(steps(0, 1, 2))


def test_a_graph_with_constants_that_a_compiler_makes_is_no_model() -> None:
    class Shifted(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.tensor([1.0, 2.0, 3.0])

    with recording() as sink, torch.no_grad():
        torch.compile(Shifted(), backend="aot_eager")(X)
    assert set(sink.rows("model")) == {"Shifted"}


def test_a_module_without_parts_is_recorded() -> None:
    with recording() as sink:
        linear = nn.Linear(3, 3)
        linear.forward(X)
        linear(X)
    assert calls(sink) == [("", 0, 0), ("", 1, 0)]


def test_a_library_may_replace_and_restore_the_forward_of_a_module() -> None:
    """As accelerate does, whose hooks keep the forward that was there."""
    with recording() as sink:
        net = Net()
        original = net.forward
        net.forward = functools.update_wrapper(  # type: ignore[method-assign]
            functools.partial(lambda module, x: original(x + 0), net), original
        )
        net(X)
        net.forward(X)
        net.forward = original  # type: ignore[method-assign]
        net.forward(X)
    assert calls(sink) == steps(0, 1, 2)
    assert net.forward.__func__ is Net.forward


def doubled(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.a(x)
    return self.b(x) * 2


def replace_in_class(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Net, "forward", doubled)


def replace_by_method(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    net.forward = MethodType(doubled, net)  # type: ignore[method-assign]


def replace_by_partial(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    net.forward = functools.partial(doubled, net)  # type: ignore[method-assign]


@pytest.mark.parametrize("replace", [replace_in_class, replace_by_method, replace_by_partial])
def test_a_forward_that_the_program_replaces_is_recorded(
    replace: Callable[[Net, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with recording(capture="inputs,outputs") as sink:
        net = Net()
        net(X)
        replace(net, monkeypatch)
        results = [net.forward(X) for _ in range(3)]
    assert all(torch.equal(result, net.b(net.a(X)) * 2) for result in results)
    in_class = replace is replace_in_class
    # what a class gets is seen by the first call of a part: of that forward, only parts are there
    expected = [call for call in steps(0, 1, 2, 3) if not (in_class and call[:2] == ("", 1))]
    assert calls(sink) == expected
    last = [record.stats["sum"] for record in sink.records if record.module == ""][-1]
    assert last == pytest.approx(results[0].sum().item())


def test_a_forward_that_was_replaced_keeps_no_module_alive() -> None:
    with recording():
        net = Net()
        net.forward = MethodType(lambda self, x, net=net: self.a(x), net)  # type: ignore[misc]
        net.forward(X)
        reference = weakref.ref(net)
        del net
        gc.collect()
        assert reference() is None


def test_a_part_whose_forward_the_program_calls_is_recorded() -> None:
    with recording(capture="inputs,outputs") as sink:
        net = Net()
        net(X)
        net.b.forward(X)
        net.a.forward(X)
    names = [("in[0]", "a"), ("in[0]", "a.linear"), ("out", "a.linear"), ("out", "a")]
    assert sink.rows("tensor", "module", step=2) == names
    assert sink.rows("tensor", "module", step=1) == [
        (tensor, name.replace("a", "b", 1)) for tensor, name in names
    ]


def test_a_forward_that_a_part_runs_in_place_of_its_own_is_no_call_of_another_part() -> None:
    with recording() as sink:
        net = Net()
        net.a.forward = net.b.forward  # type: ignore[method-assign]
        net(X)
    assert [module for module, *_ in calls(sink)] == ["b.linear", "a", "b.linear", "b", ""]


def test_a_graph_that_the_program_traces_is_no_forward(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with recording() as sink:
        net = Net()
        graph = torch.fx.symbolic_trace(net)
        scripted = torch.jit.script(Block())
        net(X)
        torch.fx.symbolic_trace(net)
    assert calls(sink) == steps(0)
    assert "Proxy" not in capfd.readouterr().err
    assert list(inspect.signature(graph.forward).parameters) == ["x"]
    assert scripted(X).shape == X.shape


def test_stopping_inside_a_forward_breaks_nothing() -> None:
    class Stopping(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            bootstrap.stop()
            return super().forward(x)

    with recording():
        net = Stopping()
        net.forward(X)
    assert net.forward(X).shape == X.shape


class Wrapper:
    """A base class like the one that vLLM's `support_torch_compile` adds."""

    def compile_forward(self) -> None:
        self.compiled_callable = torch.compile(self.forward, fullgraph=True, backend="aot_eager")


def support_compile(cls: type[nn.Module]) -> type[nn.Module]:
    """Replace `__call__`, as vLLM's decorator does."""
    cls.__bases__ = (*cls.__bases__, Wrapper)
    original = cls.__init__

    def __init__(self: Any, compiles: bool) -> None:
        original(self)
        self.do_not_compile = not compiles
        if compiles:
            self.compile_forward()

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.do_not_compile or torch.compiler.is_compiling():
            return self.forward(*args, **kwargs)
        code = type(self).forward.__code__
        torch._dynamo.eval_frame.remove_from_cache(code)
        return self.compiled_callable(*args, **kwargs)

    cls.__init__, cls.__call__ = __init__, __call__  # type: ignore[method-assign]
    return cls


class Inner(Net):
    """The transformer of an engine's model."""


support_compile(Inner)


class Engine(nn.Module):
    def __init__(self, compiles: bool) -> None:
        super().__init__()
        self.model = Inner(compiles)  # type: ignore[call-arg]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


@pytest.mark.parametrize("compiles", [False, True])
def test_a_class_that_replaces_call_is_recorded(compiles: bool) -> None:
    results = []
    for records in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        if not records:
            net = Engine(compiles)
            results.append([net(X * turn) for turn in range(3)])
            continue
        with recording() as sink:
            net = Engine(compiles)
            results.append([net(X * turn) for turn in range(3)])
    assert all(map(torch.equal, *results))
    expected = ["model.a.linear", "model.a", "model.b.linear", "model.b", "model", ""]
    assert calls(sink) == [(module, step, 0) for step in range(3) for module in expected]


class Link(nn.Module):
    """Calls the forward of the next link."""

    def __init__(self, following: nn.Module | None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.following = (following,)  # not as a part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        following = self.following[0]
        return x * self.scale if following is None else following.forward(x)


class NestsDeeply(nn.Module):
    """Calls its own forward, and then that of a chain of parts."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth
        links: list[nn.Module] = [Link(None)]
        for _ in range(depth):
            links.append(Link(links[-1]))
        self.links = nn.ModuleList(links)

    def forward(self, x: torch.Tensor, calls: int = 0) -> torch.Tensor:
        if calls < self.depth:
            return self.forward(x, calls + 1)
        return self.links[-1].forward(x)


def test_forwards_that_nest_deeply_take_hardly_more_frames(
    capfd: pytest.CaptureFixture[str],
) -> None:
    net = NestsDeeply(sys.getrecursionlimit() * 3 // 8)
    expected = net.forward(X)
    with recording(capture="outputs") as sink:
        assert torch.equal(net.forward(X), expected)
        assert torch.equal(net.forward(X), expected)
    assert len(sink.rows("module", module="")) == 2
    assert "NestsDeeply: forwards that nest near Python's recursion limit" in capfd.readouterr().err
