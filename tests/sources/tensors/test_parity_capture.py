"""The records of OTEL_TORCH_CAPTURE=parity: which tensors are the same, how calls nest, and the
table of modules.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from otel_torch.records import Record
from otel_torch.settings import PARITY_STATISTICS
from otel_torch.telemetry.attributes import event_attributes
from otel_torch.telemetry.otlp.otlp_protobuf import encode_span_events
from tests.support import PROGRAMS, ListSink, lines, metadata, recording, run_python, run_ranks
from tests.test_neutral import ALL_STATS, assert_neutral, train


def parity(**settings: str) -> AbstractContextManager[ListSink]:
    return recording(capture="parity", **settings)


def named(sink: ListSink, phase: str = "forward", **filters: Any) -> dict[tuple[str, str], Record]:
    """Return the last record of a phase for each (module, tensor)."""
    return {
        (record.module, record.tensor): record
        for record in sink.records
        if record.phase == phase
        and all(getattr(record, name) == value for name, value in filters.items())
    }


def values(sink: ListSink, **filters: Any) -> dict[tuple[str, str], int]:
    return {place: record.position.value for place, record in named(sink, **filters).items()}


class Mixed(nn.Module):
    """Returns inputs unchanged, changes tensors in place, and passes views of one tensor to two
    modules.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Linear(6, 12)
        self.relu = nn.ReLU(inplace=True)
        self.keep = nn.Identity()
        self.left, self.right = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        first, second = self.keep(self.relu(self.fused(x))).chunk(2, -1)
        return self.left(first) + self.right(second) * scale


MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
def test_a_tensor_has_one_number_and_one_sketch_until_it_is_changed_in_place(
    mode: Callable[[], Any],
) -> None:
    with parity() as sink, mode():
        Mixed()(torch.randn(5, 6))
    actual = values(sink)
    assert actual["", "in[0]"] == actual["fused", "in[0]"]
    assert actual["fused", "out"] == actual["relu", "in[0]"] != actual["relu", "out"]
    assert actual["relu", "out"] == actual["keep", "in[0]"] == actual["keep", "out"]
    assert (
        len({actual[place] for place in (("left", "in[0]"), ("right", "in[0]"), ("keep", "out"))})
        == 3
    )
    sketched: dict[int, list[str]] = {}
    for record in sink.records:
        sketched.setdefault(record.position.value, []).extend(
            name for name in record.stats if name == "sketch"
        )
    assert sorted(sketched) == list(range(len(sketched)))  # in order of first sight
    assert all(len(sketches) == 1 for sketches in sketched.values())
    again = named(sink)["relu", "in[0]"].stats
    assert again == {
        name: value for name, value in named(sink)["fused", "out"].stats.items() if name != "sketch"
    }
    assert named(sink)["relu", "in[0]"].stats["min"] < 0 == named(sink)["relu", "out"].stats["min"]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
def test_views_share_their_storage(mode: Callable[[], Any]) -> None:
    with parity() as sink, mode():
        Mixed()(torch.randn(5, 6))
    storages = {place: record.position.storage for place, record in named(sink).items()}
    places = [("fused", "out"), ("relu", "out"), ("left", "in[0]"), ("right", "in[0]")]
    assert len({storages[place] for place in places}) == 1
    assert (
        len(
            {
                storages[place]
                for place in (("", "in[0]"), ("fused", "out"), ("left", "out"), ("right", "out"))
            }
        )
        == 4
    )


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
def test_memory_that_is_used_again_is_another_tensor(mode: Callable[[], Any]) -> None:
    """An allocator reuses addresses; here all tensors are in one array."""
    memory = np.empty((64, 64), dtype=np.float32)

    class Looping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = torch.zeros(())
            for turn in range(30):
                memory[:] = turn
                piece = torch.from_numpy(memory)
                total = total + self.inner(piece).sum()
                del piece
            return total

    with parity() as sink, mode():
        Looping()(torch.ones(1))
    inner = [r for r in sink.records if (r.module, r.tensor) == ("inner", "in[0]")]
    assert [r.stats["max"] for r in inner] == list(range(30))
    assert len({r.position.value for r in inner}) == len({r.position.storage for r in inner}) == 30


def test_tensors_that_live_on_are_one_over_steps_and_measured_anew() -> None:
    net, buffer = nn.Identity(), torch.ones(3)
    with parity() as sink:
        net(buffer)
        net(buffer)
        buffer.data.mul_(2)  # which torch does not count
        net(buffer)
    entering = [r for r in sink.records if r.tensor == "in[0]"]
    assert [r.position.value for r in entering] == [0, 0, 1]
    assert [r.stats["sum"] for r in entering] == [3.0, 3.0, 6.0]
    assert ["sketch" in r.stats for r in entering] == [True, False, True]


def test_a_module_that_changes_its_input_by_other_means_than_torch_is_not_believed() -> None:
    """A program's own kernel may write without torch's version counter."""

    class Kernel(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.detach().numpy()[:] += 1
            return x

    with parity() as sink:
        nn.Sequential(nn.Identity(), Kernel(), nn.Identity())(torch.zeros(4))
    actual = values(sink)
    assert actual["0", "out"] == actual["1", "in[0]"] != actual["1", "out"] == actual["2", "in[0]"]
    assert (
        named(sink)["1", "in[0]"].stats["sum"] == 0.0
        and named(sink)["1", "out"].stats["sum"] == 4.0
    )


def test_what_is_not_a_number_is_one_tensor_under_inference_mode_too() -> None:
    with parity() as sink, torch.inference_mode():
        nn.Sequential(nn.Identity(), nn.Identity())(torch.tensor([float("nan"), 1.0]))
    assert set(values(sink).values()) == {0}


def test_collectives_change_a_tensor_and_are_noticed(tmp_path: Path) -> None:
    code = PROGRAMS / "layouts/all_reduce_between_modules.py"
    run_ranks(tmp_path, code, OTEL_TORCH_CAPTURE="parity")
    actual = {(row["module"], row["tensor"]): row for row in lines(tmp_path / "run.rank0.jsonl")}
    assert (actual["part", "out"]["sum"], actual["rest", "in[0]"]["sum"]) == (3.0, 6.0)
    assert (
        actual["part", "in[0]"]["value"]
        == actual["part", "out"]["value"]
        != actual["rest", "in[0]"]["value"]
    )
    assert actual["part", "out"]["storage"] == actual["rest", "in[0]"]["storage"]


# -- the tree of calls


def tree(sink: ListSink) -> list[tuple[str, str | None]]:
    """Return (module, enclosing module) in the order of calls."""
    calls = {
        r.position.order[0]: (r.module, r.position.parent)
        for r in sink.records
        if r.phase == "forward"
    }
    return [
        (module, None if parent is None else calls[parent][0])
        for _, (module, parent) in sorted(calls.items())
    ]


def test_order_and_parent_are_the_tree_of_calls() -> None:
    net = nn.Sequential(nn.Sequential(nn.Identity(), nn.Identity()), nn.Identity())
    with parity() as sink:
        net(torch.ones(2))
    assert tree(sink) == [("", None), ("0", ""), ("0.0", "0"), ("0.1", "0"), ("1", "")]
    orders = {r.module: r.position.order for r in sink.records}
    assert orders == {"": (0, 9), "0": (1, 6), "0.0": (2, 3), "0.1": (4, 5), "1": (7, 8)}


class Catching(nn.Module):
    """Calls a module that raises two levels down, then another one."""

    def __init__(self) -> None:
        super().__init__()
        self.fast = nn.Sequential(nn.Sequential(nn.Identity(), Raising()))
        self.slow = nn.Sequential(nn.Identity())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.fast(x)
        except NotImplementedError:
            return self.slow(x)


class Raising(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def test_the_tree_survives_a_forward_that_raised_and_was_caught() -> None:
    net = Catching()
    with parity() as sink:
        net(torch.ones(2))
        with pytest.raises(NotImplementedError):
            net.fast(torch.ones(2))
        net(torch.ones(2))
    once = [
        ("", None),
        ("fast", ""),
        ("fast.0", "fast"),
        ("fast.0.0", "fast.0"),
        ("fast.0.1", "fast.0"),
    ]
    once += [("slow", ""), ("slow.0", "slow")]
    alone = [("fast", None), ("fast.0", "fast"), ("fast.0.0", "fast.0"), ("fast.0.1", "fast.0")]
    assert tree(sink) == once + alone + once
    raised = {r.module for r in sink.records if r.position.order[1] is None}
    assert raised == {"fast", "fast.0", "fast.0.1"}


def test_two_models_of_a_pipeline_are_one_tree() -> None:
    inner = nn.Sequential(nn.Linear(2, 2))
    containers = [
        inner
    ]  # in a list, so that torch does not know of it: another model, called from within

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.after = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.after(containers[0](x))

    encoder, outer = nn.Sequential(nn.Linear(2, 2)), Outer()
    with parity() as sink:
        outer(encoder(torch.ones(1, 2)))
    calls = {
        r.position.order[0]: (r.model, r.module, r.position.parent)
        for r in sink.records
        if r.phase == "forward"
    }
    actual = [
        (*calls[entered][:2], None if (p := calls[entered][2]) is None else calls[p][:2])
        for entered in sorted(calls)
    ]
    assert actual == [
        ("Sequential", "", None), ("Sequential", "0", ("Sequential", "")),
        ("Outer", "", None),
        ("Sequential#2", "", ("Outer", "")), ("Sequential#2", "0", ("Sequential#2", "")),
        ("Outer", "after", ("Outer", "")),
    ]  # fmt: skip
    passed = [
        r.position.value
        for r in sink.records
        if (r.module, r.tensor) in (("", "out"), ("", "in[0]"))
    ]
    assert passed[1] == passed[2]  # what the first model returns is what the second gets


def test_arguments_are_called_what_the_signature_calls_them() -> None:
    class Net(nn.Module):
        def forward(
            self,
            x: torch.Tensor,
            cache: Any = None,
            *rest: torch.Tensor,
            mask: Any = None,
            **more: Any,
        ) -> torch.Tensor:
            return x

    one = torch.ones(1)
    with parity() as sink:
        Net()(one, {"key": one}, one, mask=one, other=(one,))
    actual = {r.tensor: r.position.fields().get("argument") for r in sink.records}
    assert actual == {
        "in[0]": "x", "in[1].key": "cache.key", "in[2]": None, "in.mask": "mask", "in.other[0]": "other[0]", "out": None,
    }  # fmt: skip
    assert {r.position.class_name for r in sink.records} == {"Net"}


# -- parameters


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(1, 1)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(x)) + self.table)


def test_parameters_and_buffers_are_recorded_at_attach_and_shared_ones_once() -> None:
    with parity() as sink:
        net = Tied()
        net(torch.tensor([1, 2]))
        net(torch.tensor([1, 2]))
    actual = named(sink, phase="attach")
    assert set(actual) == {
        ("embed", "param.weight"), ("head", "param.weight"), ("norm", "param.weight"), ("norm", "param.bias"),
        ("norm", "buffer.running_mean"), ("norm", "buffer.running_var"), ("norm", "buffer.num_batches_tracked"),
        ("unused", "param.weight"), ("unused", "param.bias"), ("", "buffer.table"),
    }  # fmt: skip
    assert len(sink.rows("tensor", phase="attach")) == len(actual)
    assert (
        actual["embed", "param.weight"].position.value
        == actual["head", "param.weight"].position.value
    )
    assert (
        "sketch" in actual["embed", "param.weight"].stats
        and "sketch" not in actual["head", "param.weight"].stats
    )
    assert all(("row_sketch" in r.stats) == ("sketch" in r.stats) for r in actual.values())
    assert len({r.position.value for r in actual.values()}) == len(actual) - 1
    assert all(
        r.position.order == (None, None) and r.position.parent is None for r in actual.values()
    )
    assert not any("row_sketch" in r.stats for r in named(sink).values())


def test_a_buffer_that_a_module_is_given_is_known_again() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(4.0))
            self.inner = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(self.table)

    net = Net()
    with parity() as sink:
        for _ in range(2):
            net(torch.ones(4))
    (buffer,) = [r.position.value for r in sink.records if r.tensor == "buffer.table"]
    assert [
        r.position.value for r in sink.records if (r.module, r.tensor) == ("inner", "in[0]")
    ] == [
        buffer,
        buffer,
    ]


PROGRAM = PROGRAMS / "blocks_called_twice.py"


def test_two_runs_write_identical_bytes_in_which_every_field_is(tmp_path: Path) -> None:
    written = []
    for run in ("one", "two"):
        (tmp_path / run).mkdir()
        # one of them in a fresh interpreter, so that they hash strings differently
        run_python(tmp_path / run, PROGRAM, fresh=run == "two", OTEL_TORCH_CAPTURE="parity")
        written.append((tmp_path / run / "run.jsonl").read_bytes())
    assert written[0] == written[1]
    rows = lines(tmp_path / "one" / "run.jsonl")
    assert {"class", "value", "storage", "order", "parent"} <= set.intersection(*map(set, rows))
    first = next(row for row in rows if (row["module"], row["tensor"]) == ("", "in[0]"))
    assert set(PARITY_STATISTICS) <= set(first)
    assert (first["class"], first["argument"], first["order"], first["parent"]) == (
        "Net",
        "x",
        [0, 19],
        None,
    )
    assert len(first["sketch"]) == 344
    page = (Path(__file__).parents[3] / "docs" / "record-format.md").read_text()
    missing = [name for row in rows for name in row if f"`{name}`" not in page]
    assert not missing, f"docs/record-format.md does not explain {missing[0]}"
    assert "row_sketch" in next(row for row in rows if row["phase"] == "attach")


def test_the_metadata_has_the_table_of_modules_and_a_ports_own_names(tmp_path: Path) -> None:
    run_python(tmp_path, PROGRAM, OTEL_TORCH_CAPTURE="parity")
    facts = metadata(tmp_path / "run.jsonl")["models"]["Net"]
    table = {line["module"]: line for line in facts["table"]}
    assert table["blocks.0.linear"] == {
        "module": "blocks.0.linear", "class": "Linear", "called": True, "parameters": ["weight", "bias"],
        "aliases": ["blocks.2.linear"],
    }  # fmt: skip
    assert table["blocks.1.act"] == {
        "module": "blocks.1.act",
        "class": "GELU",
        "called": True,
        "parameters": [],
    }
    assert [name for name, line in table.items() if not line["called"]] == [
        "blocks",
        "blocks.0.never",
        "blocks.1.never",
    ]
    assert facts["param_names_mapping"] == [
        ["^blocks\\.(\\d+)\\.(.*)$", "layers.\\1.\\2"],
        ["qkv", ["q", 0, 3]],
    ]
    assert facts["stacked_params_mapping"] == [["qkv_proj", "q_proj", "q"]]


def test_nobody_claims_that_a_module_was_never_called_whose_calls_nobody_sees(
    tmp_path: Path,
) -> None:
    run_python(tmp_path, PROGRAM, OTEL_TORCH_CAPTURE="parity", OTEL_TORCH_MODULES="linear|never")
    table = {
        line["module"]: line["called"]
        for line in metadata(tmp_path / "run.jsonl")["models"]["Net"]["table"]
    }
    assert table["blocks.0.linear"] is True and table["blocks.0.never"] is False
    assert table[""] is None and table["blocks.0.act"] is None


def test_a_model_whose_mapping_cannot_be_read_is_recorded_all_the_same(
    capfd: pytest.CaptureFixture[str],
) -> None:
    class Odd(nn.Linear):
        @property
        def param_names_mapping(self) -> Any:
            raise RuntimeError("not loaded yet")

    with parity() as sink:
        Odd(2, 2)(torch.ones(1, 2))
    assert ("", "out") in named(sink)
    assert (
        "name mappings are not in the metadata: RuntimeError: not loaded yet"
        in capfd.readouterr().err
    )


# -- the program, compilers, and other sinks


def test_training_is_bit_identical_with_parity_on() -> None:
    records = assert_neutral(train, capture="parity,gradients", stats=f"{ALL_STATS},histogram")
    assert any("sketch" in record.stats for record in records)
    assert any(record.phase == "backward" and record.position is not None for record in records)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
def test_inference_is_bit_identical_with_parity_on(mode: Callable[[], Any]) -> None:
    transformers = pytest.importorskip("transformers")

    def program() -> Any:
        config = transformers.GPT2Config(
            vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=32
        )
        model = transformers.GPT2LMHeadModel(config).eval()
        ids = torch.arange(16).reshape(2, 8)
        with mode():
            return model(ids, use_cache=False).logits, model.generate(
                ids, max_new_tokens=3, do_sample=True, pad_token_id=0
            )

    assert_neutral(program, capture="parity")


def test_recording_keeps_no_tensor_alive() -> None:
    from torch.multiprocessing.reductions import StorageWeakRef

    references = []

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = x * 2
            references.append(StorageWeakRef(made.untyped_storage()))
            return self.inner(made).sum()

    with parity(), torch.no_grad():
        Net()(torch.ones(5))
        assert references[0].expired()


def test_compiled_models_have_parity_records_and_no_further_graph() -> None:
    def compiled() -> nn.Module:
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.GELU()), nn.Linear(4, 4))

    net = compiled()
    eager = copy.deepcopy(net)
    torch.compile(net, fullgraph=True, backend="aot_eager")(torch.ones(2, 4))
    graphs = counters["stats"]["unique_graphs"]
    net = compiled()
    with parity() as sink:
        torch.compile(net, fullgraph=True, backend="aot_eager")(torch.ones(2, 4))
        torch.compile(net, fullgraph=True, backend="aot_eager")(torch.ones(2, 4))
    assert counters["stats"]["unique_graphs"] == graphs and not counters["graph_break"]
    with parity() as plain:
        eager(torch.ones(2, 4))
        eager(torch.ones(2, 4))
    actual, wanted = named(sink, step=1), named(plain, step=1)
    assert set(actual) == set(wanted)
    for place, record in actual.items():
        assert record.position.class_name == wanted[place].position.class_name
        assert record.position.argument == wanted[place].position.argument
    # inside a graph no tensor is known again; which calls there were is
    inside = [r for (module, _), r in actual.items() if module]
    assert len({r.position.value for r in inside}) == len(inside) and all(
        r.position.storage is None for r in inside
    )
    assert all("sketch" in r.stats for r in inside)
    assert tree(sink) == tree(plain)
    one = {r.position.order[0] for (module, _), r in actual.items() if module == "0.0"}
    assert len(one) == 1  # input and output are of one call


def test_sketches_stay_out_of_the_table_and_of_what_is_sent(tmp_path: Path) -> None:
    run_python(
        tmp_path, PROGRAM, OTEL_TORCH_CAPTURE="parity", OTEL_TORCH_STATS="abs_mean,histogram"
    )
    shown = run_python(tmp_path, "import sys; from otel_torch.cli.main import main; sys.exit(main(sys.argv[1:]))", "show",
                       str(tmp_path / "run.jsonl"), OTEL_TORCH_ENABLED="0").stdout  # fmt: skip
    (columns,) = [
        line.split() for line in shown.splitlines() if line.split()[:2] == ["module", "tensor"]
    ]
    assert "abs_mean" in columns and "numel" in columns
    assert not {"sketch", "row_sketch", "histogram", "storage", "value"} & set(columns)
    with parity(stats="abs_mean,histogram") as sink:
        nn.Linear(2, 2)(torch.ones(1, 2))
    for record in sink.records:
        assert not [name for name in event_attributes(record) if "sketch" in name]
        event = b"".join(encode_span_events([record]))
        assert b"sketch" not in event and b"torch.stat.histogram" in event
        assert json.dumps(record.stats["histogram"]) == str(record.stats["histogram"])
