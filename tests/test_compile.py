"""Compiled programs record what eager ones do, with the graphs that they have anyway."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from otel_torch.records import Record
from otel_torch.torch_private import COMPILER_TELLS
from tests.support import recording

X = torch.linspace(-1, 1, 6).reshape(2, 3)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.act = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.linear(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Breaking(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        return self.blocks[2](self.blocks[1](x))


def run(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for turn in range(3):
        call(X * turn)


# how a program compiles: (a name) a function that is given the module and how to compile, and runs it three times
def whole(net: Net, **how: str) -> None:
    run(torch.compile(net, fullgraph=True, **how))


def in_place(net: Net, **how: str) -> None:
    net.compile(fullgraph=True, **how)
    run(net)


def regional(net: Net, **how: str) -> None:
    for block in net.blocks:
        block.compile(fullgraph=True, **how)
    run(net)


def of_the_method(net: Net, **how: str) -> None:
    net.forward = torch.compile(net.forward, fullgraph=True, **how)
    run(net)


def of_a_function(net: Net, **how: str) -> None:
    run(torch.compile(lambda x: net(x), fullgraph=True, **how))


def with_graph_breaks(net: Net, **how: str) -> None:
    net.__class__ = Breaking
    run(torch.compile(net, **how))


def without_gradients(net: Net, **how: str) -> None:
    with torch.inference_mode():
        run(torch.compile(net, fullgraph=True, **how))


WAYS = (whole, in_place, regional, of_the_method, of_a_function, with_graph_breaks, without_gradients)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def make() -> Net:
    torch.manual_seed(0)
    return Net()


def graphs_of(work: Callable[[], object]) -> tuple[int, int]:
    """(graphs, graph breaks) of some work."""
    torch._dynamo.reset()
    counters.clear()
    work()
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def by_key(records: list[Record]) -> dict[tuple[object, ...], dict[str, object]]:
    found = {tuple(value for name, value in record.key().items() if name != "model"): record.stats for record in records}
    assert len(found) == len(records), "a key was recorded twice"
    return found


def assert_same_records(records: list[Record], expected: list[Record]) -> None:
    actual, wanted = by_key(records), by_key(expected)
    assert actual.keys() == wanted.keys()
    for key, stats in wanted.items():
        assert actual[key].keys() == stats.keys()
        for name, value in stats.items():
            assert actual[key][name] == (pytest.approx(value, rel=1e-5, abs=1e-6) if isinstance(value, float) else value), key


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_compiled_model_gives_the_records_of_an_eager_one_with_the_same_graphs(way) -> None:
    bare = graphs_of(lambda: way(make(), backend="eager"))
    with recording(capture="inputs,outputs") as sink:
        recorded = graphs_of(lambda: way(make(), backend="eager"))
    with recording(capture="inputs,outputs") as eager:
        run(make())
    assert recorded == bare or not COMPILER_TELLS
    assert len(eager.records) == 3 * 10 * 2
    assert_same_records(sink.records, eager.records)


@pytest.mark.parametrize("way", [whole, regional], ids=lambda way: way.__name__)
def test_inductor_keeps_every_record(way) -> None:
    """It drops what it believes to be without effect."""
    with recording(capture="inputs,outputs") as sink:
        way(make(), backend="inductor")
    with recording(capture="inputs,outputs") as eager:
        run(make())
    assert_same_records(sink.records, eager.records)


def test_a_model_that_ran_before_it_was_compiled_goes_on() -> None:
    with recording() as sink:
        net = make()
        net(X)
        whole(net, backend="eager")
    assert Counter(sink.rows("step")) == {0: 10, 1: 10, 2: 10, 3: 10}
    assert set(sink.rows("model")) == {"Net"}


def test_training_records_parameters_their_gradients_and_one_graph() -> None:
    def train() -> None:
        net = torch.compile(make(), fullgraph=True, backend="aot_eager")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            net(X).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    bare = graphs_of(train)
    with recording(capture="outputs,parameters,gradients") as sink:
        assert graphs_of(train) == bare
    by_key(sink.records)
    kinds = Counter((r.phase, r.tensor.partition(".")[0]) for r in sink.records)
    assert kinds["forward", "out"] == 30
    assert (kinds["attach", "param"], kinds["backward", "param_grad"]) == (6, 18)


def test_gradients_that_a_graph_hides_are_said(capfd: pytest.CaptureFixture[str]) -> None:
    with recording(capture="gradients"):
        torch.compile(make(), backend="eager")(X).sum().backward()
    assert capfd.readouterr().err.count("gradients inside compiled code are not recorded") <= 1  # once a process


@pytest.mark.skipif(not COMPILER_TELLS, reason="older torch does not say which model a graph calls")
def test_a_compiled_training_step_is_recorded() -> None:
    with recording() as sink:
        net = make()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        @torch.compile(backend="eager")
        def step(x: torch.Tensor) -> None:
            net(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(3):
            step(X)
    by_key(sink.records)
    assert Counter(sink.rows("step")) == {0: 10, 1: 10, 2: 10}


def test_teacher_and_student_of_one_class_are_told_apart() -> None:
    """By default the compiler takes the hooks of whichever instance ran first for those of all."""
    with recording(models="Net#2") as sink:
        teacher, student = Net(), Net()
        compiled = [torch.compile(net, backend="eager") for net in (teacher, student)]
        for net in compiled:
            run(net)
    assert Counter(sink.rows("model")) == {"Net#2": 30}


@pytest.mark.parametrize(("modules", "expected"), [(r"^blocks\.1$", 3), (r"^blocks\.[12]\.linear$", 6), (r"^blocks\.2", 9)])
def test_some_layers_of_a_regionally_compiled_model(modules: str, expected: int) -> None:
    with recording(modules=modules) as sink:
        regional(make(), backend="eager")
    assert len(sink.records) == expected
    assert set(sink.rows("step")) == {0, 1, 2}


def test_a_change_of_step_or_filter_makes_no_new_graph() -> None:
    def work() -> None:
        net = torch.compile(make(), fullgraph=True, backend="eager")
        for turn in range(12):
            net(X * turn)

    bare = graphs_of(work)
    with recording(steps="*/5") as sink:
        assert graphs_of(work) == bare
    assert sorted(set(sink.rows("step"))) == [0, 5, 10]


def test_a_graph_that_was_compiled_before_recording_began_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    net = torch.compile(make(), backend="eager")
    net(X)
    with recording() as sink:
        run(net)
    assert set(sink.rows("module")) == {""}
    said = capfd.readouterr().err
    assert said.count("nothing came from 9 modules") == 1
    assert "inside compiled 'Net'" in said and "torch._dynamo.reset()" in said


def test_compiled_parts_that_fired_or_were_not_called_are_not_named(capfd: pytest.CaptureFixture[str]) -> None:
    with recording():
        net = make()
        net.unused = torch.compile(Block(), backend="eager")
        regional(net, backend="eager")
    assert "nothing came" not in capfd.readouterr().err


def test_stopping_leaves_the_compiler_as_it_was() -> None:
    net = make()
    before = torch._dynamo.config.skip_nnmodule_hook_guards
    with recording():
        compiled = torch.compile(net, backend="eager")
        expected = compiled(X)
        assert torch._dynamo.config.skip_nnmodule_hook_guards is False
    assert torch._dynamo.config.skip_nnmodule_hook_guards is before
    assert torch.equal(compiled(X), expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_exported_and_traced_programs_hold_nothing_of_ours() -> None:
    def texts(net: Net) -> list[str]:
        # older torch traces an export as it does any compiled program
        strict = (False, True) if COMPILER_TELLS else ()
        return [
            *(str(torch.export.export(net, (X,), strict=how).graph) for how in strict),
            str(torch.fx.symbolic_trace(net).graph),
            str(torch.fx.experimental.proxy_tensor.make_fx(net)(X).graph),
            "\n".join(node.kind() for node in torch.jit.trace(net, X).inlined_graph.nodes()),
        ]

    import torch.fx.experimental.proxy_tensor

    bare = texts(make())
    with recording(capture="inputs,outputs,gradients"):
        net = make()
        net(X)
        assert texts(net) == bare
        scripted = torch.jit.script(net)
        assert torch.equal(scripted(X), net(X))
        assert len(net.blocks[0]._forward_hooks) == 1


def test_a_run_of_compiled_code_in_which_no_model_was_seen_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    with recording():
        torch.compile(lambda x: x + 1, backend="eager")(X)
    assert "no model was seen: what ran was compiled" in capfd.readouterr().err
