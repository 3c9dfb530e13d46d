"""Narrowing down the first divergence: operations inside a module, isolated modules, and the part of
a tensor that differs.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from otel_torch import session
from otel_torch.parity.breakdown import break_down
from otel_torch.recording.isolation_pairing import Pairing
from otel_torch.recording.tensor_files import TensorFolder, tensor_key
from otel_torch.sources.interventions.isolation import rebuilt
from otel_torch.sources.tensors.values import walk
from tests.support import PROGRAMS, lines, metadata, recording, run_command, run_python

pytest.importorskip("safetensors")

# The same model written twice: different names, another split of the attention, a fused activation.
# Command-line arguments choose the bugs of the port.
pytestmark = pytest.mark.scoreboard
PROGRAM = PROGRAMS / "reference_and_port.py"

Place = tuple[str, str, str]


def record(
    folder: Path, name: str, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run one side and record it to `name`.jsonl."""
    recorded = {"OTEL_TORCH_CAPTURE": "parity", "OTEL_TORCH_JSONL": str(folder / f"{name}.jsonl")}
    return run_python(folder, PROGRAM, *arguments, **(recorded | variables))


def diff(folder: Path, *arguments: str) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    """Run `otel-torch diff` in `folder`; return its JSON report and the finished process."""
    done = run_command("diff", *arguments, "--json", "diff.json", cwd=folder)
    assert done.returncode in (0, 1), done.stderr
    return json.loads((folder / "diff.json").read_text()), done


def places(report: dict[str, Any]) -> list[Place]:
    """Return the module, side and kind of each introduced divergence."""
    return [
        (divergence["port_module"], divergence["port_side"], divergence["kind"])
        for divergence in report["introduced"]
    ]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the reference's recording and tensors, and its pairing with the port."""
    folder = tmp_path_factory.mktemp("zoom")
    record(
        folder,
        "reference",
        "reference",
        OTEL_TORCH_TENSORS=str(folder / "tensors"),
        OTEL_TORCH_RUN_ID="reference",
    )
    record(folder, "clean", "port")
    report, _ = diff(folder, "reference.jsonl", "clean.jsonl", "--save-isolation", "tensors")
    assert report["verdict"] == "match"
    return folder


# -- isolation
# --------------------------------------------------------------------------------------------------


def test_isolation_separates_stacked_bugs(reference: Path, tmp_path: Path) -> None:
    bugs = ("scale", "act", "weight", "residual")
    record(reference, "stacked", "port", *bugs)
    # The pairing is learned from the wrong port: in practice there is no correct one.
    tensors = tmp_path / "tensors"
    (tmp_path / "tensors").symlink_to(reference / "tensors")
    (reference / "tensors" / "isolation.json").unlink()
    together, _ = diff(
        reference, "reference.jsonl", "stacked.jsonl", "--save-isolation", str(tensors)
    )
    assert places(together)[0] == ("blocks.0.attention.to_out", "input", "value")

    done = record(reference, "isolated", "port", *bugs, OTEL_TORCH_ISOLATE=str(tensors))
    apart, _ = diff(reference, "reference.jsonl", "isolated.jsonl")
    assert places(apart) == [
        ("blocks.0.attention.to_out", "input", "value"),
        ("blocks.1.mlp.1", "output", "value"),
        ("blocks.2.attention.to_v", "parameter", "weights"),
        ("blocks.2.mlp_norm", "input", "value"),
    ]
    assert apart["introduced"][3]["error"] == pytest.approx(0.1, rel=0.25)
    assert "inputs and" in done.stderr and "were replaced by the reference's" in done.stderr
    isolated = metadata(reference / "isolated.jsonl")["isolated"]
    assert isolated["inputs"] > 40 and isolated["outputs"] > 40


def test_a_clean_port_is_silent_and_a_program_fed_with_itself_is_itself(reference: Path) -> None:
    record(reference, "isolated", "port", OTEL_TORCH_ISOLATE="tensors")
    assert diff(reference, "reference.jsonl", "isolated.jsonl")[0]["verdict"] == "match"

    bare = record(reference, "bare", "reference", OTEL_TORCH_ENABLED="0")
    diff(reference, "reference.jsonl", "reference.jsonl", "--save-isolation", "tensors")
    fed = record(reference, "fed", "reference", OTEL_TORCH_ISOLATE="tensors")
    assert fed.stdout == bare.stdout and (reference / "fed.jsonl").exists()
    assert (
        metadata(reference / "fed.jsonl")["isolated"]["stayed"] == []
    )  # every tensor was exchanged


def test_one_bug_is_one_fault_and_reaches_nothing(reference: Path) -> None:
    diff(reference, "reference.jsonl", "clean.jsonl", "--save-isolation", "tensors")
    clean = record(reference, "clean", "port")
    wrong = record(reference, "wrong", "port", "scale")
    fed = record(reference, "fed", "port", "scale", OTEL_TORCH_ISOLATE="tensors")
    assert wrong.stdout != clean.stdout == fed.stdout
    assert places(diff(reference, "reference.jsonl", "fed.jsonl")[0]) == [
        ("blocks.0.attention.to_out", "input", "value")
    ]


def test_isolation_skips_warm_up_steps(reference: Path) -> None:
    record(reference, "warm", "port", "warm", "act")
    diff(reference, "reference.jsonl", "warm.jsonl", "--save-isolation", "tensors")
    done = record(reference, "fed", "port", "warm", "act", OTEL_TORCH_ISOLATE="tensors")
    assert places(diff(reference, "reference.jsonl", "fed.jsonl")[0]) == [
        ("blocks.1.mlp.1", "output", "value")
    ]
    assert "tensors are of steps that it does not have" in done.stderr
    assert {reason for *_, reason in metadata(reference / "fed.jsonl")["isolated"]["stayed"]} == {
        "unpaired"
    }


def test_gradients_flow_through_replaced_tensors(reference: Path) -> None:
    diff(reference, "reference.jsonl", "clean.jsonl", "--save-isolation", "tensors")
    done = record(reference, "train", "port", "train", OTEL_TORCH_ISOLATE="tensors")
    assert done.stdout.startswith("grad True")
    assert metadata(reference / "train.jsonl")["isolated"]["inputs"] > 20


def test_tensors_that_cannot_be_replaced_stay_and_are_reported(
    reference: Path, tmp_path: Path
) -> None:
    (tmp_path / "tensors").mkdir()
    for file in (reference / "tensors" / "reference.rank0").iterdir():
        (tmp_path / "tensors" / file.name).symlink_to(file)
    pairing = Pairing()
    for tensor in ("in[0]", "out"):
        pairing.slots["Net", "embed", tensor] = "Net", "head", tensor  # of another shape
        pairing.slots["Net", "head", tensor] = "Net", "nowhere", tensor
    pairing.save(tmp_path / "tensors")
    done = record(tmp_path, "run", "port", OTEL_TORCH_ISOLATE=str(tmp_path / "tensors"))
    assert done.stdout == record(tmp_path, "bare", "port", OTEL_TORCH_ENABLED="0").stdout
    stayed = {
        (module, tensor): reason
        for _, module, tensor, reason in metadata(tmp_path / "run.jsonl")["isolated"]["stayed"]
    }
    assert stayed["embed", "in[0]"] == stayed["embed", "out"] == "shape"
    assert stayed["head", "in[0]"] == stayed["head", "out"] == "unrecorded"
    assert stayed["blocks.0", "in[0]"] == "unpaired"
    assert "2 have another shape there" in done.stderr and "have no counterpart" in done.stderr


@pytest.mark.parametrize(
    ("capture", "content", "message"),
    [
        (
            "parity",
            None,
            "isolation.json is not there; write it with `otel-torch diff REFERENCE PORT --save-isolation",
        ),
        ("parity", "{", "does not say what belongs where"),
        ("parity", '{"schema": "otel_torch.isolation/1", "modules": []}', "holds no whole tensors"),
        ("outputs", None, "OTEL_TORCH_ISOLATE needs OTEL_TORCH_CAPTURE=parity"),
    ],
)
def test_an_unusable_isolation_folder_is_reported_in_one_line(
    tmp_path: Path, capture: str, content: str | None, message: str
) -> None:
    (tmp_path / "folder").mkdir()
    if content is not None:
        (tmp_path / "folder" / "isolation.json").write_text(content)
    done = record(tmp_path, "run", "port", OTEL_TORCH_ISOLATE="folder", OTEL_TORCH_CAPTURE=capture)
    assert message in done.stderr and "nothing is isolated" in done.stderr.lower()
    assert "Traceback" not in done.stderr
    assert done.stdout == record(tmp_path, "bare", "port", OTEL_TORCH_ENABLED="0").stdout


def test_structured_values_are_put_together_again() -> None:
    from collections import OrderedDict, namedtuple
    from dataclasses import dataclass

    Pair = namedtuple("Pair", "left right")

    @dataclass(frozen=True)
    class Data:
        tensor: torch.Tensor
        name: str

    value = {
        "a": [torch.zeros(1), (torch.ones(1), None)],
        "b": OrderedDict(c=Pair(torch.ones(1), 3)),
        "d": Data(torch.ones(1), "x"),
    }
    labels: list[str] = []

    def swap(label: str, tensor: torch.Tensor) -> torch.Tensor:
        labels.append(label)
        return tensor + 1

    again = rebuilt(value, "out", swap, lambda label: pytest.fail(label))
    assert labels == [label for label, _ in walk(value, "out")]
    assert [tensor.item() for _, tensor in walk(again, "out")] == [1, 2, 2, 2]
    assert type(again["b"]["c"]) is Pair and again["d"].name == "x"
    assert value["d"].tensor.item() == 1 and rebuilt((None, 3), "out", swap, print) == (None, 3)


def test_counts_that_are_shifted_are_put_side_by_side(tmp_path: Path) -> None:
    pairing = Pairing({("Port", "b", "out"): ("Net", "a", "out")}, {("Port", "b"): (0, 1, 2)})
    again = Pairing.load(pairing.save(tmp_path).parent)
    assert again == pairing
    assert again.partner(("Port", "b", "out"), 0, 3, 2) == (("Net", "a", "out"), (0, 2, 0))
    assert again.partner(("Port", "b", "in[0]"), 0, 3, 2) is None


# -- operations
# --------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A block with the operations that watching could disturb: dropout, attention, in-place
    operations, integers and an error.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.convolution, self.dropout = nn.Conv1d(8, 8, 3, padding=1), nn.Dropout(0.3)
        self.table = nn.Embedding(4, 8)

    def forward(self, x: torch.Tensor, fail: bool = False) -> torch.Tensor:
        h = self.norm(x)
        h = h + self.attention(h, h, h)[0] + self.table(torch.arange(5) % 4)
        h = self.dropout(torch.relu_(self.convolution(h.transpose(1, 2)).transpose(1, 2)))
        if fail:
            raise ValueError("not today")
        return h * 0.5


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.second(self.first(x))
        return output


def run_two() -> list[bytes]:
    """Return the output, a gradient and the random state as bytes."""
    torch.manual_seed(0)
    model = Two()
    output = model(torch.randn(2, 5, 8))
    output.square().sum().backward()
    gradient = model.first.norm.weight.grad
    assert gradient is not None
    return [
        tensor.detach().numpy().tobytes() for tensor in (output, gradient, torch.get_rng_state())
    ]


def test_operations_of_one_module_only() -> None:
    with recording(operations=r"^second$", capture="parity") as sink:
        run_two()
    operations = [(row.module, row.tensor) for row in sink.records if row.tensor.startswith("op[")]
    assert {module for module, _ in operations} == {"second"}
    labels = [label for _, label in operations]
    assert labels[0] == "op[0].aten.native_layer_norm.out[0]"
    numbers = [int(label[3:].partition("]")[0]) for label in labels]
    assert numbers == sorted(numbers) and set(numbers) == set(range(numbers[-1] + 1))
    assert any(".aten.relu_." in label for label in labels) and any(
        ".aten.convolution." in label for label in labels
    )
    assert labels[-1].endswith(".aten.mul.out") and not any(
        ".aten.arange." in label for label in labels
    )
    last = next(row for row in sink.records if row.tensor == labels[-1])
    out = next(row for row in sink.records if (row.module, row.tensor) == ("second", "out"))
    assert (
        last.stats["sketch"] == out.stats["sketch"]
        and last.position is not None
        and out.position is not None
    )
    assert last.position.order == out.position.order


def test_an_operation_belongs_to_the_innermost_watched_module() -> None:
    with recording(operations="second") as sink:
        run_two()
    rows = [row for row in sink.records if row.tensor.startswith("op[")]
    assert [row.module for row in rows if ".native_layer_norm." in row.tensor] == [
        "second.norm"
    ] * 3
    assert [row.tensor for row in rows if row.module == "second"][-1].endswith("aten.mul.out")
    assert all(row.module.startswith("second") for row in rows)


@pytest.mark.parametrize("capture", ["outputs", "inputs,outputs,gradients,parameters", "parity"])
def test_watching_operations_changes_nothing(capture: str) -> None:
    bare = run_two()
    with recording(operations=".", capture=capture) as sink:
        watched = run_two()
    assert watched == bare
    keys = [tuple(row.key().values()) for row in sink.records]
    assert len(set(keys)) == len(keys) and any(row.tensor.startswith("op[") for row in sink.records)


def test_operation_watching_ends_when_a_forward_raises() -> None:
    model = Two()
    with recording(operations=".") as sink:
        with pytest.raises(ValueError, match="not today"):
            model.first(torch.randn(2, 5, 8), fail=True)
        assert _get_current_dispatch_mode() is None
        before = len(sink.records)
        torch.ones(2) * 2
        model.second.norm(torch.randn(5, 8))
    assert {row.module for row in sink.records[before:] if row.tensor.startswith("op[")} >= {
        "second.norm"
    }
    assert not any(row.module == "first" and row.step > 0 for row in sink.records)
    assert _get_current_dispatch_mode() is None and session.current() is None
    assert not model.first._forward_hooks and not model.first._forward_pre_hooks


def test_compiled_code_has_no_single_operations_and_says_so(
    capfd: pytest.CaptureFixture[str],
) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    x = torch.randn(2, 4)
    bare = model(x)
    with recording(operations=".", capture="parity") as sink:
        compiled = torch.compile(model, backend="eager")
        assert torch.equal(compiled(x), bare)
    torch._dynamo.reset()
    assert not any(row.tensor.startswith("op[") for row in sink.records) and sink.records
    assert capfd.readouterr().err.count("operations of compiled code are not recorded") == 1


def test_a_pattern_that_matches_nothing_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    with recording(operations="secnod"):
        run_two()
    assert (
        "OTEL_TORCH_OPERATIONS='secnod' matches none of the recorded modules; "
        "it has first, second; did you mean 'second'?" in capfd.readouterr().err
    )


def test_show_lists_operations_and_diff_passes_over_them(reference: Path) -> None:
    plain, _ = diff(reference, "reference.jsonl", "clean.jsonl")
    record(reference, "watched", "port", OTEL_TORCH_OPERATIONS=r"^blocks\.1\.attention$")
    report, _ = diff(reference, "reference.jsonl", "watched.jsonl")
    assert (report["verdict"], report["pairs"]) == ("match", plain["pairs"])
    words = ["watched.jsonl", "--module", r"^blocks\.1\.attention$", "--step", "0"]
    done = run_command("show", *words, cwd=reference)
    shown = [line.split() for line in done.stdout.splitlines() if "op[" in line]
    assert len(shown) == sum(
        row["tensor"].startswith("op[") and row["step"] == 0
        for row in lines(reference / "watched.jsonl")
    )
    assert any(".aten." in line[1] and "attention" in line[1] for line in shown)
    assert max(map(len, done.stdout.splitlines())) < 300


def test_isolation_and_operations_are_not_imported_unless_requested(tmp_path: Path) -> None:
    program = (
        PROGRAM.read_text()
        + "\nprint([name for name in sys.modules if name.endswith(('sources.operations', 'sources.isolation'))])\n"
    )
    done = run_python(tmp_path, program, "port", OTEL_TORCH_CAPTURE="parity")
    assert done.stdout.splitlines()[-1] == "[]"


# -- breakdown
# --------------------------------------------------------------------------------------------------


def test_breakdown_names_the_wrong_head(reference: Path) -> None:
    for dtype in ([], ["bf16"]):
        suffix = "".join(dtype)
        folders = [f"whole-{side}{suffix}" for side in ("reference", "port")]
        for side, folder, bugs in (
            ("reference", folders[0], dtype),
            ("port", folders[1], [*dtype, "head"]),
        ):
            record(reference, folder, side, *bugs, OTEL_TORCH_TENSORS=folder)
        report, done = diff(
            reference, *(f"{folder}.jsonl" for folder in folders), "--tensors", *folders
        )
        assert places(report)[0] == ("blocks.0.attention.to_out", "input", "value")
        assert "channels 16 to 23 of 32, part 3 of 4" in done.stdout
        assert "worst tokens:" in done.stdout and "worst channels:" in done.stdout


def numbers(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x, "the two tensors are equal"),
        (lambda x: x * 1.5, "the port's tensor is the reference's times 1.5"),
        (lambda x: -x, "with the other sign"),
        (lambda x: x + 2, "plus 2"),
        (lambda x: np.roll(x, 8, -1), "with the two halves of its channels swapped"),
        (lambda x: np.roll(x, 1, 1), "with its tokens shifted by 1"),
        (lambda x: x[:, ::-1], "with its tokens reversed"),
        (lambda x: np.swapaxes(x, 1, 2).reshape(x.shape), "with tokens and channels laid out in swapped order"),
        (lambda x: np.random.default_rng(1).permutation(x.ravel()).reshape(x.shape), "with its elements in another order"),
        (lambda x: set_at(x, np.s_[:, :, 8:], numbers(2, 6, 8)), "channels 8 to 15 of 16, the second half"),
        (lambda x: set_at(x, np.s_[:, 5], 0), "token 5 of 6"),
        (lambda x: set_at(x, np.s_[..., 1::2], 0), "the odd channels of 16"),
        (lambda x: set_at(x, np.s_[..., [3, 11]], 0), "2 of 16 channels (3, 11)"),
        (lambda x: x + 0.1 * numbers(3, 6, 16)[1:], "the error is spread over all batch entries and all tokens and all channels"),
        (lambda x: set_at(x, np.s_[1, 2, 3], np.nan), "1 of 192 elements are NaN or Inf on one side only, the first at [1, 2, 3]"),
    ],
)  # fmt: skip
def test_breakdown_describes_the_error(change: Any, message: str) -> None:
    reference = numbers(2, 6, 16)
    assert message in break_down(reference, change(reference)).sentence()


def set_at(array: Any, position: Any, value: Any) -> Any:
    changed = array.copy()
    changed[position] = value
    return changed


def test_breakdown_measures_along_each_axis() -> None:
    reference, port = np.ones((4, 8)), np.ones((4, 8))
    port[2, 5] = 3.0
    breakdown = break_down(reference, port)
    token, channel = breakdown.axes
    assert breakdown.error == pytest.approx(2 / np.sqrt(32))
    assert token.worst(1) == [(2, pytest.approx(2 / np.sqrt(8)))] and channel.worst(1) == [
        (5, pytest.approx(2 / np.sqrt(4)))
    ]
    assert token.share.sum() == pytest.approx(1) and channel.share[5] == pytest.approx(1)
    assert break_down(reference, port.reshape(8, 4)).error == breakdown.error
    with pytest.raises(ValueError, match=r"shape \(4, 8\) and the port's \(4, 7\)"):
        break_down(reference, port[:, :7])


def test_tensors_are_found_and_read_without_torch(tmp_path: Path) -> None:
    class Kinds(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x, x.bfloat16(), x.long(), x[:0], x > 0, x.half()

    x = torch.randn(3, 4) * 3
    with recording(tensors=str(tmp_path), run_id="mine"):
        outputs = Kinds()(x)
    folder = TensorFolder(tmp_path)
    for index, tensor in enumerate(outputs):
        stored = folder.find(0, 0, tensor_key("Kinds", "", f"out[{index}]", 0, "forward"))
        assert stored is not None
        loaded = stored.read()
        assert loaded is not None and np.array_equal(
            loaded, tensor.float().numpy() if tensor.is_floating_point() else tensor.numpy()
        )
    assert folder.find(0, 1, tensor_key("Kinds", "", "out[0]", 0, "forward")) is None


def test_a_folder_of_several_runs_asks_which(tmp_path: Path) -> None:
    for run in ("one", "two"):
        with recording(tensors=str(tmp_path), run_id=run):
            nn.Linear(2, 2)(torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"several processes \(one\.rank0, two\.rank0\); name one"):
        TensorFolder(tmp_path)
    assert TensorFolder(tmp_path / "one.rank0").folder.name == "one.rank0"
    with pytest.raises(ValueError, match="No such file"):
        TensorFolder(tmp_path / "three")
    (tmp_path / "one.rank0" / "loop0.step1.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="not readable as safetensors"):
        TensorFolder(tmp_path / "one.rank0").find(0, 1, "")
