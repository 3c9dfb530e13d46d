"""The graph of operations (OTEL_TORCH_CAPTURE=graph): exact, neutral, with the lines of the program."""

from __future__ import annotations

import base64
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from otel_torch import bootstrap
from otel_torch.process import console
from otel_torch.records import Record
from otel_torch.sources.operations.arguments import describe_arguments
from otel_torch.sources.operations.program_values import ProgramValues, Value
from otel_torch.statistics.sketch import sketch
from otel_torch.statistics.token_sketch import row_sketches
from tests.support import recording, run_python

Fields = dict[str, Any]


class Net(nn.Module):
    """A module whose forward is a function of it and its inputs."""

    def __init__(self, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.compute = compute
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16).reshape(4, 4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.compute(self, x)


class Graph:
    """The rows that a program has left, with its table of lines."""

    def __init__(self, records: list[Record], lines: list[list[Any]]) -> None:
        self.records = [record for record in records if record.is_of_graph]
        self.lines = lines

    def fields(self, **conditions: Any) -> list[Fields]:
        """Return the fields of the rows that have all these values."""
        return [
            fields
            for record in self.records
            for fields in [record.position.fields() | record.stats | record.key()]  # type: ignore[union-attr]
            if all(fields.get(name) == value for name, value in conditions.items())
        ]

    def operations(self) -> list[str]:
        """Return the names of all operations, without their overloads."""
        return [row["op"].rpartition(".")[0] for row in self.fields() if "op" in row]

    def operation(self, name: str) -> Fields:
        """Return the only operation of a name."""
        (row,) = (row for row in self.fields() if row.get("op") == name)
        return row

    def leaf(self, name: str) -> Fields:
        """Return the only leaf of a name."""
        (row,) = (row for row in self.fields() if "leaf" in row and row["name"] == name)
        return row

    def text(self, row: Fields, field: str = "line") -> str:
        """Return the text of a row's line."""
        text: str = self.lines[row[field]][3]
        return text


def record(program: Callable[[], Any], **settings: str) -> Graph:
    """Record a program's graph, and check that its values flow."""
    with recording(capture="graph", **settings) as sink:
        program()
        assert bootstrap._running is not None and bootstrap._running.graph_capture is not None
        capture = bootstrap._running.graph_capture
        assert not capture._has_failed
        bootstrap.flush()
        graph = Graph(sink.records, capture.describe())
    check_flow(graph.fields())
    return graph


def check_flow(rows: list[Fields]) -> None:
    """Check that every value is made before it is read, and once."""
    known: set[int] = set()
    for row in rows:
        if "end" in row:
            assert row["value"] in known
            continue
        assert set(row.get("reads", ())) <= known, row
        assert row["value"] not in known, row
        known.add(row["value"])


@pytest.fixture
def x() -> torch.Tensor:
    return torch.arange(12.0).reshape(3, 4)


# -- what flows


def test_an_operation_has_what_it_reads_and_makes(x: torch.Tensor) -> None:
    graph = record(lambda: Net(lambda net, x: x @ net.weight * 0.5)(x))
    product, scaled = graph.operation("aten.mm.default"), graph.operation("aten.mul.Tensor")
    assert product["reads"] == [graph.leaf("x")["value"], graph.leaf("weight")["value"]]
    assert scaled["args"] == [{"value": product["value"]}, 0.5]
    assert graph.fields(end="out")[0]["value"] == scaled["value"]
    assert graph.text(scaled).endswith("x @ net.weight * 0.5)(x))")
    assert scaled["shape"] == [3, 4] and scaled["dtype"] == "torch.float32" and scaled["sketch"]


def test_a_line_knows_which_lines_have_called_its_function(x: torch.Tensor) -> None:
    def helper(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    def compute(net: Net, x: torch.Tensor) -> torch.Tensor:
        first = helper(x)
        return helper(first)

    net = Net(compute)
    with recording(capture="graph") as sink:
        net(x)
        net(x)
        assert bootstrap._running is not None and bootstrap._running.graph_capture is not None
        bootstrap.flush()
        table = bootstrap._running.graph_capture.recorder.lines
        graph, callers = Graph(sink.records, table.describe()), table.callers()
    entries = [row["line"] for row in graph.fields() if row.get("op") == "aten.sin.default"]
    assert [graph.lines[entry][3] for entry in entries] == ["return x.sin()"] * 2
    outer = [callers[entry] for entry in entries]
    assert [graph.lines[entry][3] for entry in outer if entry is not None] == [
        "first = helper(x)",
        "return helper(first)",
    ]
    # neither torch's own frames nor the second call of the model are further ways to a line
    chain = [callers[entry] for entry in outer if entry is not None]
    texts = [graph.lines[entry][3] for entry in chain if entry is not None]
    assert texts == ["return self.compute(self, x)"] * 2


def test_leaves_have_kinds_and_names(x: torch.Tensor) -> None:
    def compute(net: Net, x: torch.Tensor) -> torch.Tensor:
        return x * net.weight[:3] + net.plain + net.table + torch.tensor([1.0, 2.0, 3.0, 4.0])

    net = Net(compute)
    net.register_buffer("table", torch.ones(4))
    net.plain = torch.full((4,), 2.0)
    graph = record(lambda: net(x))
    leaves = {(row["leaf"], row["name"]) for row in graph.fields() if "leaf" in row}
    assert leaves == {
        ("input", "x"),
        ("parameter", "weight"),
        ("buffer", "table"),
        ("attribute", "plain"),
        ("constant", ""),
    }


def test_the_line_of_an_input_is_the_one_that_passes_it(x: torch.Tensor) -> None:
    net = Net(lambda net, x: x * 2)
    graph = record(lambda: net(x))  # this line
    assert graph.text(graph.leaf("x")).endswith("# this line")


@pytest.mark.parametrize(("steps", "is_cut"), [("0", True), ("0-1", False)])
def test_a_program_that_goes_on_is_cut(x: torch.Tensor, steps: str, is_cut: bool) -> None:
    net = Net(lambda net, x: x * 2)

    def program() -> None:
        for _ in range(2):
            net(x)
        assert bootstrap._running is not None and bootstrap._running.graph_capture is not None
        assert bootstrap._running.graph_capture.is_cut == is_cut

    record(program, steps=steps)


def test_an_in_place_operation_makes_a_new_value(x: torch.Tensor) -> None:
    graph = record(lambda: Net(lambda net, x: (x + 1).mul_(2).exp())(x))
    total, doubled = graph.operation("aten.add.Tensor"), graph.operation("aten.mul_.Tensor")
    assert doubled["reads"] == [total["value"]] and doubled["value"] != total["value"]
    assert graph.operation("aten.exp.default")["reads"] == [doubled["value"]]


def test_a_write_through_a_view_reaches_the_base(x: torch.Tensor) -> None:
    def compute(net: Net, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[0].add_(1)
        return y.exp()

    graph = record(lambda: Net(compute)(x))
    base, written = graph.operation("aten.mul.Tensor"), graph.operation("aten.add_.Tensor")
    seen = graph.operation("otel_torch.reread")
    assert seen["reads"] == [base["value"], written["value"]] and seen["moves"]
    assert graph.operation("aten.exp.default")["reads"] == [seen["value"]]


def test_a_view_shows_what_was_written_to_its_base(x: torch.Tensor) -> None:
    def compute(net: Net, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        half = y[:, :2]
        y.add_(1)
        return half.exp()

    graph = record(lambda: Net(compute)(x))
    seen = graph.operation("otel_torch.reread")
    assert graph.operation("aten.add_.Tensor")["value"] in seen["reads"]


def test_a_view_beside_a_write_is_what_it_was(x: torch.Tensor) -> None:
    def compute(net: Net, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        first, second = y[0], y[1]
        first.add_(1)
        return second.exp()

    assert "otel_torch.reread" not in record(lambda: Net(compute)(x)).operations()


def test_what_an_operation_overwrites_is_not_read(x: torch.Tensor) -> None:
    def compute(net: Net, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(3, 4)
        torch.mul(x, 3, out=out)
        return out.copy_(x).fill_(2)

    graph = record(lambda: Net(compute)(x))
    assert "aten.empty" not in graph.operations()
    product = graph.operation("aten.mul.out")
    assert product["reads"] == [graph.leaf("x")["value"]]
    assert product["args"][-1] == {"out": {"value": None}}
    copied = graph.operation("aten.copy_.default")
    assert copied["reads"] == [graph.leaf("x")["value"]]
    # memory that holds nothing yet has no value to replace
    assert "replaces" not in product and copied["replaces"] == product["value"]
    assert graph.operation("aten.fill_.Scalar")["replaces"] == copied["value"]
    assert graph.operation("aten.fill_.Scalar")["reads"] == []


def test_lists_are_written_one_by_one(x: torch.Tensor) -> None:
    def compute(net: Net, x: torch.Tensor) -> list[torch.Tensor]:
        parts = [x + 1, x + 2]
        torch._foreach_mul_(parts, 2.0)
        return parts

    graph = record(lambda: Net(compute)(x))
    rows = graph.fields(op="aten._foreach_mul_.Scalar")
    assert [(row["tensor"], row["makes"]) for row in rows] == [("op[2][0]", 0), ("op[2][1]", 1)]
    ends = [row["value"] for row in graph.fields() if "end" in row]
    assert ends == [row["value"] for row in rows]


def test_inference_mode_is_followed_without_version_counters(x: torch.Tensor) -> None:
    net = Net(lambda net, x: F.linear(x, net.weight).add_(1).exp())
    with torch.inference_mode():
        graph = record(lambda: net(x.clone()))
    assert graph.operations() == ["aten.t", "aten.mm", "aten.add_", "aten.exp"]


def test_what_follows_inference_mode_is_recorded(x: torch.Tensor) -> None:
    net = Net(lambda net, x: x.exp())

    def run() -> torch.Tensor:
        with torch.inference_mode():
            y = net(x)
        return y + torch.ones(4)

    assert record(run).operations() == ["aten.exp", "aten.ones", "aten.add"]


def test_a_recording_that_ends_in_inference_mode_leaves_the_program_alone(x: torch.Tensor) -> None:
    net = Net(lambda net, x: x.exp())

    def run() -> None:
        net(x)
        with torch.inference_mode():
            net(x)  # a step that is not recorded
        assert torch.ones(3).sum() == 3

    assert record(run).operations() == ["aten.exp"]


@pytest.mark.parametrize(
    "write",
    [
        lambda y: y.numpy().__setitem__(0, 7.0),
        lambda y: y.data.numpy().fill(3.0),
        lambda y: torch.from_numpy(y.numpy()).mul_(2),
    ],
)
def test_a_write_that_no_operation_shows_is_unseen(x: torch.Tensor, write: Any) -> None:
    def compute(net: Net, x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        write(y)
        return y.exp()

    graph = record(lambda: Net(compute)(x))
    (unseen,) = graph.fields(leaf="unseen")
    assert graph.operation("aten.exp.default")["reads"] == [unseen["value"]]


def test_views_that_were_made_before_the_recording_are_leaves() -> None:
    times = list(torch.arange(3.0))
    net = Net(lambda net, x: x * 2)
    graph = record(lambda: [net(time) for time in times], steps="0-2")
    assert [row["leaf"] for row in graph.fields() if "leaf" in row] == ["input"] * 3


def test_numbers_beyond_fp32_do_not_end_the_graph(x: torch.Tensor) -> None:
    lowest = torch.finfo(torch.float32).min
    graph = record(lambda: Net(lambda net, x: torch.full((64, 64), lowest) + x[0, 0])(x))
    assert graph.operation("aten.full.default")["min"] == lowest


def test_memory_that_is_used_again_is_another_tensor() -> None:
    def compute(net: Net, x: torch.Tensor) -> torch.Tensor:
        total = x
        for number in range(50):  # each result is freed, and the next one takes its place
            total = total + float(number)
        return total

    graph = record(lambda: Net(compute)(torch.zeros(64, 64)))
    assert len(set(graph.operations())) == 1 and len(graph.fields(op="aten.add.Tensor")) == 50


def test_complex_sparse_and_nested_tensors_flow(x: torch.Tensor) -> None:
    def compute(net: Net, x: torch.Tensor) -> torch.Tensor:
        y = torch.view_as_real(torch.complex(x, x + 1).conj().resolve_conj()).sum(-1)
        sparse = torch.eye(3).to_sparse()
        nested = torch.nested.nested_tensor([x[0, :2], x[1, :3]], layout=torch.jagged)
        return torch.sparse.mm(sparse, y) + nested.values().sum()

    graph = record(lambda: Net(compute)(x))
    complex_row = graph.operation("aten.complex.default")
    assert complex_row["dtype"] == "torch.complex64" and complex_row["sketch"]
    assert graph.operation("aten._sparse_addmm.default")["reads"]


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def test_a_collective_writes_what_it_returns(group: None, x: torch.Tensor) -> None:
    def compute(net: Net, x: torch.Tensor) -> torch.Tensor:
        total, parts = x * 2, [torch.empty(3, 4)]
        torch.distributed.all_reduce(total)
        torch.distributed.all_gather(parts, total)
        return parts[0].exp() + total

    graph = record(lambda: Net(compute)(x))
    product = graph.operation("aten.mul.Tensor")
    reduced = graph.operation("c10d.allreduce_.default")
    gathered = graph.operation("c10d.allgather_.default")
    assert reduced["reads"] == [product["value"]] and reduced["collective"]
    assert gathered["reads"] == [reduced["value"]]
    assert graph.operation("aten.exp.default")["reads"] == [gathered["value"]]
    assert reduced["sketch"] == gathered["sketch"] == product["sketch"]
    assert not graph.fields(leaf="unseen")


def test_a_distributed_tensor_is_recorded_by_its_part(group: None) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    net = Net(lambda net, x: (net.weight * 2).sum() + x.sum())
    net.weight = nn.Parameter(distribute_tensor(net.weight.detach(), mesh, [Shard(0)]))
    whole = distribute_tensor(torch.ones(2), mesh, [Shard(0)])
    graph = record(lambda: net(whole))
    assert graph.operation("aten.mul.Tensor")["reads"] == [graph.leaf("weight")["value"]]
    assert graph.fields(end="out")


def test_a_sketch_leaves_out_what_is_not_finite(x: torch.Tensor) -> None:
    hidden = torch.zeros(3, 4, dtype=torch.bool)
    hidden[1] = True

    def compute(net: Net, x: torch.Tensor) -> Any:
        return x.masked_fill(hidden, -torch.inf), x.masked_fill(hidden, 0)

    graph = record(lambda: Net(compute)(x))
    infinite, finite = graph.fields(op="aten.masked_fill.Scalar")
    assert infinite["nonfinite"] == 4 and infinite["sketch"] == finite["sketch"]
    assert infinite["args"][-1] == "-Infinity"


@pytest.mark.parametrize("fill", [-1e4, -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("rows", [3, 40], ids=["small", "large"])
def test_a_sketch_leaves_out_what_masks(fill: float, rows: int) -> None:
    hidden = torch.zeros(rows, 4, dtype=torch.bool)
    hidden[1:] = True
    x = torch.linspace(-1, 1, 4 * rows).view(rows, 4)

    def compute(net: Net, x: torch.Tensor) -> Any:
        mask = torch.zeros(rows, 4).masked_fill(hidden, fill)
        return x + mask, x.masked_fill(hidden, 0), mask * 1

    graph = record(lambda: Net(compute)(x))
    assert (
        graph.operation("aten.add.Tensor")["sketch"]
        == graph.fields(op="aten.masked_fill.Scalar")[1]["sketch"]
    )
    assert graph.operation("aten.add.Tensor")["min"] <= fill + 1
    # the mask has nothing else
    assert any(graph.operation("aten.mul.Tensor")["sketch"])


@pytest.mark.parametrize("number", [math.nan, -math.inf, 1e4])
def test_eight_bits_are_measured_whatever_they_hold(number: float) -> None:
    x = torch.linspace(-1, 1, 12)
    x[2:4] = number
    graph = record(lambda: Net(lambda net, x: x.to(torch.float8_e5m2))(x))
    row = graph.operation("aten._to_copy.default")
    assert row["nonfinite"] == (0 if math.isfinite(number) else 2) and row["sketch"]


@pytest.mark.parametrize(
    "large", [[1e5], [1e5, 3e5], [50.0, 50.0]], ids=["one", "several", "small"]
)
def test_large_numbers_that_mask_nothing_stay_in_the_sketch(large: list[float]) -> None:
    x = torch.cat([torch.tensor(large), torch.linspace(-1, 1, 10)])
    rest = x.masked_fill(x > 1, 0)
    graph = record(lambda: Net(lambda net, x: (x * 1, rest * 1))(x))
    whole, without = graph.fields(op="aten.mul.Tensor")
    assert whole["sketch"] != without["sketch"]


# -- what kind of operation


def test_moves_casts_and_draws_are_marked(x: torch.Tensor) -> None:
    def compute(net: Net, x: torch.Tensor) -> Any:
        y = torch.cat([x.transpose(0, 1)[:2], x[:2, :3]])
        return y.contiguous().to(torch.bfloat16), torch.rand_like(x), x + 1

    graph = record(lambda: Net(compute)(x))
    marks = {
        row["op"]: {name for name in ("moves", "casts", "random") if row.get(name)}
        for row in graph.fields()
        if "op" in row
    }
    assert marks["aten.transpose.int"] == marks["aten.cat.default"] == {"moves"}
    assert marks["aten._to_copy.default"] == {"casts"}
    assert marks["aten.rand_like.default"] == {"random"}
    assert marks["aten.add.Tensor"] == set()
    assert graph.operation("aten.rand_like.default")["reads"] == []


def test_keyword_arguments_are_not_taken_for_tensors() -> None:
    assert describe_arguments((1.5,), {"value": 3, "out": None}, lambda tensor: 7) == [
        1.5,
        {"value=": 3},
    ]
    assert describe_arguments(([torch.ones(1)],), {}, lambda tensor: 7) == [[{"value": 7}]]


# -- inside of fused operations


def _attention(net: Net, query: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, query, query, is_causal=True)


def test_fused_attention_meets_what_another_program_writes_out() -> None:
    def eager(net: Net, query: torch.Tensor) -> torch.Tensor:
        scores = torch.matmul(query, query.transpose(-2, -1)) * 0.5
        hidden = torch.ones(5, 5, dtype=torch.bool).tril().logical_not()
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
        return torch.matmul(weights, query)

    query = torch.randn(1, 2, 5, 4)
    fused, plain = (
        record(lambda compute=compute: Net(compute)(query)) for compute in (_attention, eager)
    )
    node = fused.fields(op="aten._scaled_dot_product_flash_attention_for_cpu.default")[0]
    number = int(node["tensor"].partition("[")[2].partition("]")[0])
    inside = {row["sketch"] for row in fused.fields(inside=number)}
    assert {row["sketch"] for row in plain.fields(op="aten.bmm.default")[:1]} <= inside
    assert plain.operation("aten._softmax.default")["sketch"] in inside
    whole = record(lambda: Net(_attention)(query), graph_inside="off")
    assert not any("inside" in row for row in whole.fields())


def test_breaking_up_draws_no_random_number() -> None:
    def compute(net: Net, x: torch.Tensor) -> torch.Tensor:
        heads = x.reshape(1, 1, 3, 4)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5)
        return F.layer_norm(mixed, (4,))

    net, x = Net(compute), torch.randn(3, 4)
    torch.manual_seed(3)
    expected = net(x), torch.rand(1)
    torch.manual_seed(3)
    result: list[Any] = []
    record(lambda: result.extend((net(x), torch.rand(1))))
    assert torch.equal(result[0], expected[0]) and torch.equal(result[1], expected[1])


# -- trainings


class Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(self.norm(self.first(x)), 0.5)
        hidden = F.gelu(hidden)
        return self.last(hidden)


def _train(steps: int, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Trained()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    for _ in range(steps):
        loss = model(x).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return [*model.state_dict().values(), torch.rand(2)]


def test_a_training_is_one_graph_from_the_inputs_to_the_parameters(x: torch.Tensor) -> None:
    graph = record(lambda: _train(5, x), steps="0-4")
    ends = [row for row in graph.fields() if row.get("end", "").startswith("param.")]
    assert len(ends) == 5 * 6
    assert {(row["module"], row["end"], row["phase"]) for row in ends} >= {
        ("last", "param.weight", "update")
    }
    updates = [row for row in graph.fields(phase="update") if "op" in row]
    assert {row["step"] for row in updates} == set(range(5))
    # no step begins with leaves: it reads what the step before it has made
    assert {row["step"] for row in graph.fields(leaf="parameter")} == {0}
    assert not graph.fields(leaf="unseen")


def test_a_backward_operation_has_the_line_of_its_forward(x: torch.Tensor) -> None:
    graph = record(lambda: _train(1, x))
    backward = graph.operation("aten.gelu_backward.default")
    assert graph.text(backward) == "loss.backward()"
    assert graph.text(backward, "forward_line") == "hidden = F.gelu(hidden)"
    products = [row for row in graph.fields(phase="backward") if row.get("op") == "aten.mm.default"]
    assert {row["module"] for row in products} == {"first", "last"}


def test_only_the_first_step_is_recorded_by_default(x: torch.Tensor) -> None:
    assert {row["step"] for row in record(lambda: _train(3, x)).fields()} == {0}
    assert {row["step"] for row in record(lambda: _train(3, x), steps="1-2").fields()} == {1, 2}


def test_a_weight_that_steps_between_have_changed_is_unrecorded(x: torch.Tensor) -> None:
    net, frozen = Net(lambda net, x: x @ net.weight), Net(lambda net, x: x @ net.weight)
    average = Net(lambda net, x: x @ net.weight)

    @torch.no_grad()
    def program() -> None:
        for _ in range(3):
            net(x)
            average.weight.lerp_(net.weight, 0.5)
        average(x)
        frozen(x)

    leaves = [row for row in record(program).fields() if row.get("leaf", "unseen") != "unseen"]
    kinds = {row["model"]: row["leaf"] for row in leaves if row["name"] == "weight"}
    assert kinds == {"Net": "parameter", "Net#2": "unrecorded", "Net#3": "parameter"}


def test_a_checkpoint_is_recomputed_in_the_backward_pass(x: torch.Tensor) -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    net = Net(lambda net, x: checkpoint(net.inner, x, use_reentrant=False).exp())
    net.inner = inner
    graph = record(lambda: net(x).sum().backward())
    assert graph.fields(phase="recompute", module="inner.1", op="aten.tanh.default")
    assert graph.fields(phase="backward", module="inner.2")


# -- neutrality


def _states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


@pytest.mark.parametrize("readings", [{}, {"graph_parts": "2", "graph_axes": "on"}])
def test_a_training_is_the_same_to_the_bit(x: torch.Tensor, readings: dict[str, str]) -> None:
    expected = _train(3, x)
    states = _states()
    result: list[torch.Tensor] = []
    record(lambda: result.extend(_train(3, x)), steps="0-2", **readings)
    assert all(torch.equal(left, right) for left, right in zip(result, expected, strict=True))
    assert _states() == states
    assert not torch.utils._python_dispatch.is_in_torch_dispatch_mode()


def test_modes_of_the_program_may_leave_in_any_order(x: torch.Tensor) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    net = Net(lambda net, x: x @ net.weight)
    counted = []

    def program() -> None:
        with FlopCounterMode(display=False) as counter:
            net(x)
        counted.append(counter.get_total_flops())
        with FlopCounterMode(display=False) as counter:
            net(x)
        counted.append(counter.get_total_flops())

    graph = record(program, steps="0-1")
    assert counted == [96, 96] and len(graph.fields(op="aten.mm.default")) == 2


def test_an_error_of_recording_does_not_reach_the_program(
    x: torch.Tensor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: Any) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(ProgramValues, "look", fail)
    with recording(capture="graph"):
        result = Net(lambda net, x: x + 1)(x)
    assert torch.equal(result, x + 1)
    assert "the graph of operations ends here: ValueError: broken" in capsys.readouterr().err


def test_no_tensor_is_kept_alive() -> None:
    values = ProgramValues()
    tensor = torch.zeros(8)
    values.write(tensor, Value(0, None))
    values.see(tensor[:2], Value(1, None))
    assert len(values._memories) == 1
    del tensor
    assert not values._memories


def test_functorch_and_wrappers_of_tensors_run(x: torch.Tensor) -> None:
    class Wrapped(torch.Tensor):
        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            plain = [getattr(value, "inner", value) for value in args]
            return func(*plain, **(kwargs or {}))

    def compute(net: Net, x: torch.Tensor) -> torch.Tensor:
        wrapped = torch.Tensor._make_wrapper_subclass(Wrapped, x.shape, dtype=x.dtype)
        wrapped.inner = x
        slopes = torch.vmap(torch.func.grad(lambda row: row.sin().sum()))(x)
        return slopes + torch.mul(wrapped, 2.0)

    graph = record(lambda: Net(compute)(x))
    assert {"aten.sin", "aten.cos", "aten.mul"} <= set(graph.operations())


def test_compiled_code_runs_eagerly(
    x: torch.Tensor, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_printed", {})  # another test may have heard it
    compiled = torch.compile(lambda x: x.sin() + 1, backend="eager")
    compiled(x)
    graph = record(lambda: Net(lambda net, x: compiled(x))(x))
    assert graph.operations() == ["aten.sin", "aten.add"]
    assert "compiled code runs eagerly" in capsys.readouterr().err


# -- whole programs


PROGRAM = """
import torch
from torch import nn

class Sampler:
    def step(self, noise, sample):
        return sample - 0.1 * noise

torch.manual_seed(0)
model, sampler = nn.Linear(4, 4), Sampler()
sample = torch.randn(2, 4)
with torch.no_grad():
    for _ in range(2):
        sample = sampler.step(model(sample), sample)
print(sample.sum().item())
"""


def _rows(path: Path) -> Iterator[Fields]:
    for line in path.read_text().splitlines():
        yield json.loads(line)


def test_a_script_is_recorded_by_the_environment_alone(tmp_path: Path) -> None:
    first = run_python(tmp_path, PROGRAM, OTEL_TORCH_CAPTURE="graph")
    lines = json.loads((tmp_path / "run.meta.json").read_text())["lines"]
    rows = list(_rows(tmp_path / "run.jsonl"))
    check_flow(rows)
    (step,) = (row for row in rows if row.get("op") == "aten.sub.Tensor")
    assert lines[step["line"]][3] == "return sample - 0.1 * noise"
    assert lines[step["line"]][2] == "Sampler.step"
    assert (step["model"], step["module"], step["phase"]) == ("Linear", "", "forward")
    bare = run_python(tmp_path, PROGRAM, OTEL_TORCH_ENABLED="0")
    assert bare.stdout == first.stdout


def test_two_runs_write_the_same_bytes(tmp_path: Path) -> None:
    contents = []
    for name in ("a", "b"):
        path = tmp_path / f"{name}.jsonl"
        run_python(tmp_path, PROGRAM, OTEL_TORCH_CAPTURE="graph", OTEL_TORCH_JSONL=str(path))
        contents.append(path.read_bytes())
    assert contents[0] == contents[1] and contents[0].count(b"\n") > 5


WORKERS = """
import torch
from torch import nn
from torch.utils.data import DataLoader

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return torch.full((4,), float(index)) * 2

model = nn.Linear(4, 4)
model(torch.ones(4))
for batch in DataLoader(Numbers(), num_workers=1, multiprocessing_context="fork"):
    model(batch)
"""


def test_a_forked_worker_records_nothing(tmp_path: Path) -> None:
    run_python(tmp_path, WORKERS, OTEL_TORCH_CAPTURE="graph")
    assert [path.name for path in tmp_path.glob("*.jsonl")] == ["run.jsonl"]
    assert all(row.get("op") != "aten.full.default" for row in _rows(tmp_path / "run.jsonl"))


def test_memory_that_others_have_written_is_a_leaf_and_its_elements_are_no_arguments(x):
    def compute(net, y):
        shared = torch.empty(0)
        shared.set_(torch.tensor([7.25, 8.25]).untyped_storage(), 0, (2,), (1,))
        return y.sum() + shared

    graph = record(lambda: Net(compute)(x))
    assert "aten.set_" not in graph.operations()
    add = graph.operation("aten.add.Tensor")
    assert add["reads"][1] in [row["value"] for row in graph.fields() if "leaf" in row]
    assert "7.25" not in str([row["args"] for row in graph.fields() if "args" in row])


# -- parts


def test_values_are_measured_in_the_parts_that_ranks_may_have(x: torch.Tensor) -> None:
    weight = torch.linspace(-1, 1, 16).reshape(4, 4)
    bias = torch.ones(4)
    graph = record(lambda: Net(lambda net, x: F.linear(x, net.weight, bias))(x), graph_parts="2")
    leaf = graph.leaf("weight")
    rows = graph.fields(op="otel_torch.part", reads=[leaf["value"]])
    assert [(row["args"][1], row["shape"]) for row in rows] == [
        *2 * [({"0": 2}, [2, 4])],
        *2 * [({"1": 2}, [4, 2])],
    ]
    sums = [part.abs().mean().item() for axis in (0, 1) for part in weight.chunk(2, axis)]
    assert [row["abs_mean"] for row in rows] == pytest.approx(sums)
    product = graph.operation("aten.mm.default")
    assert product["inside"] == int(graph.operation("aten.addmm.default")["tensor"][3:-1])
    plain = record(lambda: Net(lambda net, x: F.linear(x, net.weight, bias))(x))
    assert {"otel_torch.part", "aten.mm.default"}.isdisjoint(
        row.get("op") for row in plain.fields()
    )


# -- axes


def test_what_is_computed_is_measured_with_each_axis_last(x: torch.Tensor) -> None:
    def compute(net: Net, x: torch.Tensor) -> torch.Tensor:
        return (x + 1).unflatten(-1, (2, 2)).transpose(0, 2).exp()

    graph = record(lambda: Net(compute)(x), graph_axes="on")
    computed = graph.operation("aten.exp.default")
    rows = graph.fields(op="otel_torch.axis_last", reads=[computed["value"]])
    assert [(row["args"][1], row["shape"], row["reading"]) for row in rows] == [
        (0, [2, 3, 2], True),
        (1, [2, 3, 2], True),
    ]
    made = (x + 1).unflatten(-1, (2, 2)).transpose(0, 2).exp()
    for row in rows:
        expected = sketch(made.movedim(row["args"][1], -1).contiguous()).float().numpy()
        found = np.frombuffer(base64.b64decode(row["sketch"]), "<f4")
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    # what only moves is another order of what was computed
    moved = graph.operation("aten.transpose.int")["value"]
    assert not graph.fields(op="otel_torch.axis_last", reads=[moved])
    plain = record(lambda: Net(compute)(x))
    assert not plain.fields(op="otel_torch.axis_last")


# -- rows


def test_the_rows_of_values_are_measured_where_they_are_asked_for(x: torch.Tensor) -> None:
    graph = record(lambda: Net(lambda net, x: (x + 1).unflatten(-1, (2, -1)))(x), graph_rows="on")
    (made,) = graph.fields(op="aten.add.Tensor")
    (view,) = graph.fields(op="aten.view.default")
    for row in (made, view):
        expected = row_sketches((x + 1).reshape(row["shape"])).numpy()
        found = np.frombuffer(base64.b64decode(row["rows"]), "<f4").reshape(expected.shape)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    plain = record(lambda: Net(lambda net, x: x + 1)(x))
    assert not any("rows" in row for row in plain.fields())


def test_memory_that_a_foreign_kernel_writes_to_is_not_read(x: torch.Tensor) -> None:
    @torch.library.custom_op("otel_torch_tests::double_into", mutates_args=("out",))
    def double_into(out: torch.Tensor, x: torch.Tensor) -> None:
        torch.mul(x, 2, out=out)

    def compute(net: Net, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        double_into(out, x)
        double_into(out[:1], out[1:2])  # reads what it has written
        return out + 1

    graph = record(lambda: Net(compute)(x))
    first, second = graph.fields(op="otel_torch_tests.double_into.default")
    assert len(first["reads"]) == 1
    assert first["value"] in second["reads"] or len(second["reads"]) == 2
    assert not [row for row in graph.fields() if row.get("leaf") == "unseen"]


def test_columns_of_one_matrix_do_not_overlap(x: torch.Tensor) -> None:
    def compute(net: Net, x: torch.Tensor) -> torch.Tensor:
        whole = torch.cat([x, x], -1)
        left, right = whole.chunk(2, -1)
        left.mul_(2)
        return right + 1

    graph = record(lambda: Net(compute)(x))
    (add,) = graph.fields(op="aten.add.Tensor")
    assert add["reads"][0] in [row["value"] for row in graph.fields(op="aten.split.Tensor")]
