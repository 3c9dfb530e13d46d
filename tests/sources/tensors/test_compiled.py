"""Compiled programs give the records of eager ones, and keep the graphs that they have without
recording.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from otel_torch.process import console
from otel_torch.records import Record
from otel_torch.sources.tensors import compiled
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


class Checkpointed(Net):
    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Breaking(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        return self.blocks[2](self.blocks[1](x))


def run(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for turn in range(3):
        call(X * turn)


# how a program compiles: (a name) a function that is given the module and how to compile, and runs
# it three times
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


WAYS = (
    whole,
    in_place,
    regional,
    of_the_method,
    of_a_function,
    with_graph_breaks,
    without_gradients,
)


pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which lines an earlier test logged: some are logged once per process."""
    monkeypatch.setattr(console, "_printed", {})


def make(kind: type[Net] = Net) -> Net:
    torch.manual_seed(0)
    return kind()


def graphs_of(work: Callable[[], object]) -> tuple[int, int]:
    """Return the numbers of graphs and graph breaks that a function compiles."""
    torch._dynamo.reset()
    counters.clear()
    work()
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def by_key(records: list[Record]) -> dict[tuple[object, ...], dict[str, object]]:
    found = {
        tuple(value for name, value in record.key().items() if name != "model"): record.stats
        for record in records
    }
    assert len(found) == len(records), "a key was recorded twice"
    return found


def assert_same_records(records: list[Record], expected: list[Record]) -> None:
    actual, wanted = by_key(records), by_key(expected)
    assert actual.keys() == wanted.keys()
    for key, stats in wanted.items():
        assert actual[key].keys() == stats.keys()
        for name, value in stats.items():
            assert actual[key][name] == (
                pytest.approx(value, rel=1e-5, abs=1e-6) if isinstance(value, float) else value
            ), key


def assert_recorded_as_eager(work: Callable[[], object], eager_work: Callable[[], object]) -> None:
    """Check that two programs leave the same records."""
    with recording(capture="inputs,outputs") as sink:
        work()
    with recording(capture="inputs,outputs") as eager:
        eager_work()
    assert_same_records(sink.records, eager.records)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_compiled_model_gives_the_records_of_an_eager_one_with_the_same_graphs(way) -> None:
    bare = graphs_of(lambda: way(make(), backend="eager"))
    with recording(capture="inputs,outputs") as sink:
        recorded = graphs_of(lambda: way(make(), backend="eager"))
    with recording(capture="inputs,outputs") as eager:
        run(make())
    assert recorded == bare
    assert len(eager.records) == 3 * 10 * 2
    assert_same_records(sink.records, eager.records)


@pytest.mark.parametrize(
    ("way", "how"),
    [(whole, {}), (regional, {}), (whole, {"mode": "reduce-overhead"})],
    ids=["whole", "regional", "reduce"],
)
def test_inductor_keeps_every_record(way, how: dict[str, str]) -> None:
    """Inductor removes code that it considers without effect."""
    how = how or {"backend": "inductor"}
    assert_recorded_as_eager(lambda: way(make(), **how), lambda: run(make()))


def test_the_values_are_those_of_the_compiled_program() -> None:
    """They are not those of an eager run: errors of the compiler must be visible."""

    def halved(graph: Any, inputs: Any) -> Any:
        for node in graph.graph.nodes:
            if node.target is torch._C._nn.gelu:
                node.target, node.kwargs = torch.nn.functional.relu, {}
        graph.recompile()
        return graph.forward

    with recording() as sink:
        net = make()
        out = torch.compile(net, backend=halved, fullgraph=True)(X)
    assert not torch.equal(out, net(X))
    assert next(stats["sum"] for stats in sink.rows("stats", module="")) == pytest.approx(
        float(out.double().sum())
    )


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_training_records_parameters_their_gradients_and_one_graph(backend: str) -> None:
    def train() -> None:
        net = torch.compile(make(), fullgraph=True, backend=backend)
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


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_gradients_that_a_graph_hides_are_said(
    backend: str, nothing_said: None, capfd: pytest.CaptureFixture[str]
) -> None:
    with recording(capture="outputs,gradients") as sink:
        net = torch.compile(make(), fullgraph=True, backend=backend)
        for _ in range(2):
            net(X).sum().backward()
    assert Counter(sink.rows("phase"))["forward"] == 20
    assert capfd.readouterr().err.count("gradients inside compiled code are not recorded") == 1


class Sliced(Net):
    """Makes a container in its forward, as the models of transformers do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[:2]:
            x = block(x)
        return x


def test_a_slice_of_layers_keeps_one_graph() -> None:
    with recording() as sink:
        torch.compile(Sliced(), fullgraph=True, backend="eager")(X)
    assert sink.rows("module", model="Sliced")[-1] == "" and len(sink.records) == 7


class TwoOutputs(nn.Module):
    """Has an output that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.used(x), self.unused(x)


def test_an_output_without_a_gradient_loses_nothing(
    nothing_said: None, capfd: pytest.CaptureFixture[str]
) -> None:
    with recording(capture="outputs,gradients") as sink:
        net = torch.compile(TwoOutputs(), fullgraph=True, backend="aot_eager")
        for _ in range(2):
            net(X)[0].sum().backward()
    assert sink.rows("tensor", phase="backward") == ["grad[0]"] * 2
    assert "was not recorded" not in capfd.readouterr().err


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_compiled_backward_pass_keeps_its_graphs(
    compiled: bool, nothing_said: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """Hooks on gradients are part of its graph; a graph break would raise here."""

    def train() -> None:
        net = make()
        call = torch.compile(net, fullgraph=True, backend="aot_eager") if compiled else net
        with torch._dynamo.compiled_autograd._enable(
            torch.compile(backend="eager", fullgraph=True)
        ):
            for _ in range(2):
                call(X).sum().backward()

    bare = graphs_of(train)
    with recording(capture="outputs,gradients") as sink:
        assert graphs_of(train) == bare
    assert Counter(sink.rows("phase")) == {"forward": 20}
    said = capfd.readouterr().err
    assert said.count("gradients inside a compiled backward pass are not recorded") == 1


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved tensors", "reentrant"])
def test_what_a_checkpoint_recomputes_is_labelled_and_not_counted_as_forward(
    reentrant: bool,
) -> None:
    def train(compile: Callable[[Net], Any]) -> None:
        net = make(Checkpointed)
        net.reentrant = reentrant
        call = compile(net)
        for _ in range(2):
            call(X.clone().requires_grad_()).sum().backward()

    def compiled_blocks(net: Net) -> Net:
        for block in net.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
        return net

    bare = graphs_of(lambda: train(compiled_blocks))
    with recording() as sink:
        assert graphs_of(lambda: train(compiled_blocks)) == bare
    by_key(sink.records)
    assert Counter(sink.rows("step", "call", phase="forward")) == {(0, 0): 10, (1, 0): 10}
    again = [r for r in sink.records if r.phase == "recompute"]
    assert again and {r.call for r in again} == {0}
    first = {(r.module, r.step): r.stats for r in sink.records if r.phase == "forward"}
    assert all(r.stats == first[r.module, r.step] for r in again)


def test_what_a_graph_recomputes_itself_is_recorded_once() -> None:
    def train() -> None:
        net = torch.compile(make(Checkpointed), backend="aot_eager", fullgraph=True)
        for _ in range(2):
            net(X.clone().requires_grad_()).sum().backward()

    bare = graphs_of(train)
    with recording() as sink:
        assert graphs_of(train) == bare
    by_key(sink.records)
    assert Counter(sink.rows("phase", "step")) == {("forward", 0): 10, ("forward", 1): 10}


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
    assert Counter(sink.rows("step", phase="forward")) == {0: 10, 1: 10, 2: 10}
    assert Counter(sink.rows("step", tensor="grad_norm", module="")) == {0: 1, 1: 1, 2: 1}


@pytest.mark.parametrize("way", [whole, regional], ids=lambda way: way.__name__)
@pytest.mark.parametrize("student", ["Net", "Net#2"], ids=["student first", "teacher first"])
def test_teacher_and_student_of_one_class_are_told_apart(student: str, way) -> None:
    """By default the compiler uses the hooks of the instance that ran first for all instances."""
    with recording(models=f"^{student}$") as sink:
        for net in (Net(), Net()):
            way(net, backend="eager")
    assert Counter(sink.rows("model")) == {student: 30}


@pytest.mark.parametrize("way", [whole, regional, in_place], ids=lambda way: way.__name__)
def test_every_other_layer_of_one_class(way) -> None:
    def six() -> Net:
        net = make()
        net.blocks = nn.ModuleList(Block() for _ in range(6))
        return net

    bare = graphs_of(lambda: way(six(), backend="eager"))
    with recording(modules=r"^blocks\.[135](\.act)?$") as sink:
        graphs = graphs_of(lambda: way(six(), backend="eager"))
    expected = {f"blocks.{layer}{part}": 3 for layer in (1, 3, 5) for part in ("", ".act")}
    assert Counter(sink.rows("module")) == expected
    if way is not regional:
        assert graphs == bare
    else:  # one for the blocks with hooks inside, one for those without
        assert graphs == (bare[0] + 1, 0)


@pytest.mark.parametrize(
    ("modules", "expected"),
    [(r"^blocks\.1$", 3), (r"^blocks\.[12]\.linear$", 6), (r"^blocks\.2", 9)],
)
def test_some_layers_of_a_regionally_compiled_model(modules: str, expected: int) -> None:
    with recording(modules=modules) as sink:
        regional(make(), backend="eager")
    assert len(sink.records) == expected
    assert set(sink.rows("step")) == {0, 1, 2}


@pytest.mark.parametrize("way", [whole, regional], ids=lambda way: way.__name__)
def test_a_change_of_step_makes_no_new_graph(way) -> None:
    def work() -> None:
        net = make()
        way(net, backend="aot_eager")  # steps 0 to 2
        net = torch.compile(net, fullgraph=True, backend="aot_eager") if way is whole else net
        for turn in range(9):
            net(X * turn)

    bare = graphs_of(work)
    with recording(steps="*/5", capture="inputs,outputs") as sink:
        assert graphs_of(work) == bare
    assert sorted(set(sink.rows("step"))) == [0, 5, 10]
    assert len(sink.records) == 3 * 20


def changing(net: Net, how: str) -> list[torch.Size]:
    net = torch.compile(
        net, fullgraph=True, backend="aot_eager", dynamic=True if how == "dynamic" else None
    )
    batches = [torch.linspace(-1, 1, 3 * size).reshape(size, 3) for size in (2, 5, 3, 7)]
    for batch in batches:
        if how == "marked":
            torch._dynamo.mark_dynamic(batch, 0)
        net(batch)
    return [batch.shape for batch in batches]


@pytest.mark.parametrize("how", ["dynamic", "marked", "found out"])
def test_shapes_may_change(how: str) -> None:
    bare = graphs_of(lambda: changing(make(), how))
    with recording(capture="inputs,outputs") as sink:
        assert graphs_of(lambda: changing(make(), how)) == bare
    with recording(capture="inputs,outputs") as eager:
        torch._dynamo.config.disable = True
        try:
            shapes = changing(make(), how)
        finally:
            torch._dynamo.config.disable = False
    assert [stats["shape"] for stats in eager.rows("stats", module="", tensor="out")] == [
        list(shape) for shape in shapes
    ]
    assert_same_records(sink.records, eager.records)


@dataclass
class Result:
    hidden: torch.Tensor
    extra: dict[str, Any]


class Structured(Net):
    def forward(self, x: torch.Tensor) -> Result:
        hidden = super().forward(x)
        return Result(hidden, {"twice": (hidden * 2, None), "shape": x.shape[0]})


class Told(nn.Module):
    """Called with keywords and a mapping; one part returns no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.sizes = Structured(), Sizes()

    def forward(self, x: torch.Tensor, *, masks: dict[str, torch.Tensor]) -> dict[str, Any]:
        result = self.inner(x=x * masks["keep"])
        return {"result": result, "rows": self.sizes(7)}


class Sizes(nn.Module):
    def forward(self, count: int) -> int:
        return count + 1


def test_structured_values_have_the_labels_of_an_eager_run_and_one_operator_a_call() -> None:
    operators: list[int] = []

    def counting(graph: Any, inputs: Any) -> Any:
        operators.append(sum("otel_torch" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    def work(compile: Callable[[nn.Module], Any]) -> None:
        torch.manual_seed(0)
        model = compile(Told())
        for _ in range(2):
            model(X, masks={"keep": X > 0, "unused": X})

    with recording(capture="inputs,outputs") as sink:
        work(lambda model: torch.compile(model, fullgraph=True, backend=counting))
    with recording(capture="inputs,outputs") as eager:
        work(lambda model: model)
    assert_same_records(sink.records, eager.records)
    labels = set(sink.rows("tensor", module=""))
    assert labels == {
        "in[0]", "in.masks.keep", "in.masks.unused", "out.result.hidden", "out.result.extra.twice[0]",
    }  # fmt: skip
    assert operators == [2 * 11]  # the outermost module's own hooks run outside of the graph


def test_a_compiled_part_of_an_eager_loop() -> None:
    def work(net: Net) -> None:
        for turn in range(2):
            x = X * (turn + 1)
            for _ in range(2):
                x = net(x)

    def compiled_work() -> None:
        net = make()
        net.blocks[1] = torch.compile(net.blocks[1], fullgraph=True, backend="aot_eager")
        work(net)

    assert_recorded_as_eager(compiled_work, lambda: work(make()))


@pytest.mark.parametrize("way", [whole, regional], ids=lambda way: way.__name__)
def test_what_ran_before_it_was_compiled_goes_on(way) -> None:
    def work(then: Callable[[Net], None]) -> None:
        net = make()
        net(X * 0)
        then(net)

    assert_recorded_as_eager(
        lambda: work(lambda net: way(net, backend="aot_eager")), lambda: work(run)
    )


@pytest.mark.parametrize("way", [whole, regional, of_a_function], ids=lambda way: way.__name__)
def test_a_recording_for_comparison_says_of_compiled_calls_what_it_says_of_eager_ones(way) -> None:
    with recording(capture="parity") as sink:
        way(make(), backend="eager")
    with recording(capture="parity") as eager:
        run(make())

    def facts(records: list[Record]) -> dict[tuple[object, ...], object]:
        found = {}
        for r in records:
            assert r.position is not None
            # a compiled program uses memory again as it likes: there every tensor is a value of its
            # own, with a sketch
            found[r.module, r.tensor, r.step, r.call, r.phase] = (
                r.position.class_name, r.position.argument, r.stats["shape"], pytest.approx(r.stats["mean"], rel=1e-5, abs=1e-6),
            )  # fmt: skip
        return found

    assert facts(sink.records) == facts(eager.records)
    assert all("sketch" in r.stats for r in sink.records if r.tensor == "out" and r.module)
    entered = {
        r.position.order[0]: r.module
        for r in sink.records
        if r.position is not None and r.phase == "forward"
    }
    for r in sink.records:
        if r.phase == "forward" and r.position is not None:
            assert r.position.order[1] is None or r.position.order[0] < r.position.order[1]
            holder = (
                None
                if r.module == ""
                else ""
                if r.module.count(".") < 2
                else r.module.rpartition(".")[0]
            )
            assert (None if r.position.parent is None else entered[r.position.parent]) == holder


def test_a_shared_module_has_its_name_in_the_compiled_block_that_calls_it() -> None:
    net = Net()
    for block in net.blocks:
        block.act = net.blocks[0].act
    with recording(capture="parity") as sink:
        torch.compile(net, backend="aot_eager")(X)
    outputs = sink.rows("module", "call", tensor="out", phase="forward")
    activations = [row for row in outputs if row[0].endswith("act")]
    assert activations == [(f"blocks.{index}.act", 0) for index in range(3)]


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_functional_transforms_compile_as_before(transform: str) -> None:
    def work() -> torch.Tensor:
        net = make()
        if transform == "vmap":
            call = torch.compile(
                lambda x: torch.vmap(lambda one: net(one))(x), backend="eager", fullgraph=True
            )
        else:
            call = torch.compile(
                lambda x: torch.func.grad(lambda y: net(y).sum())(x),
                backend="eager",
                fullgraph=True,
            )
        return call(X)

    results: list[torch.Tensor] = []
    bare = graphs_of(lambda: results.append(work()))
    with recording(capture="inputs,outputs") as sink:
        assert graphs_of(lambda: results.append(work())) == bare
    assert torch.equal(*results)
    assert len(sink.records) == 20
    assert sink.rows("stats", module="", tensor="in[0]")[0]["shape"] == [2, 3]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_distributed_tensors_in_a_graph(backend: str, tmp_path: Path) -> None:
    """Distributed tensors refuse operators for which torch has no rule."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        with recording() as sink, torch.no_grad():
            net = make()
            for module in net.modules():
                for name, parameter in module._parameters.items():
                    module._parameters[name] = nn.Parameter(
                        distribute_tensor(parameter.data, mesh, [Shard(0)])
                    )
            call = torch.compile(net, backend=backend, fullgraph=True)
            for turn in range(3):
                call(distribute_tensor(X * turn, mesh, [Replicate()]))
    finally:
        dist.destroy_process_group()
    with recording() as eager:
        run(make())
    assert_same_records(sink.records, eager.records)


def test_a_graph_that_was_compiled_before_recording_began_is_named(
    capfd: pytest.CaptureFixture[str],
) -> None:
    net = torch.compile(make(), backend="eager")
    net(X)
    with recording() as sink:
        run(net)
    assert set(sink.rows("module")) == {""}
    said = capfd.readouterr().err
    assert said.count("no records from 9 modules") == 1
    assert "inside compiled 'Net'" in said and "torch._dynamo.reset()" in said


@pytest.mark.parametrize("modules", [r"^blocks", "linear$"])
def test_that_nothing_came_is_said_after_the_first_step(
    modules: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A run of a week should not report this only at its end."""
    net = make()
    for block in net.blocks:
        block.compile(backend="eager")
    net(X)
    with recording(modules=modules):
        net(X)
        said = capfd.readouterr().err
        assert said.count("no records from") == 1 and "inside compiled 'blocks.0'" in said


def test_compiled_parts_that_fired_or_were_not_called_are_not_named(
    capfd: pytest.CaptureFixture[str],
) -> None:
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
        return [
            *(str(torch.export.export(net, (X,), strict=how).graph) for how in (False, True)),
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


def test_the_graphs_that_a_compiler_makes_are_no_models() -> None:
    """Graphs are modules too, and are called where a function is compiled."""
    with recording() as sink:
        of_a_function(make(), backend="aot_eager")
    assert Counter(sink.rows("model")) == {"Net": 30}


def test_a_run_of_compiled_code_in_which_no_model_was_seen_says_so(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with recording():
        torch.compile(lambda x: x + 1, backend="eager")(X)
    assert "no model was seen: what ran was compiled" in capfd.readouterr().err


def test_inductor_takes_no_record_into_a_cuda_graph() -> None:
    from torch._inductor.utils import get_first_incompatible_cudagraph_node
    from torch.fx.experimental.proxy_tensor import make_fx

    nobody = torch.full((1,), -1)

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        compiled.observe_outputs(nobody, x)
        return x

    found = get_first_incompatible_cudagraph_node(make_fx(forward)(X))
    assert found is not None and found.target is torch.ops.otel_torch.observe.default
