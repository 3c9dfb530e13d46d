"""`otel-torch import`: tensors that a program without torch dumped become a recording, which `diff`
compares with that of a port.
"""

from __future__ import annotations

import io
import json
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import otel_torch
from otel_torch.cli.main import main
from otel_torch.importing.importer import import_dump
from tests.programs import numpy_transformer as reference
from tests.support import lines, recording_to

Manifest = dict[str, Any] | list[Any]
WIDTH, HEADS = reference.WIDTH, reference.HEADS


# -- a port of the reference, with a fault


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.channels = WIDTH // HEADS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        weights = (q @ k.transpose(-1, -2) / self.channels**0.5).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.act, self.down = (
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.down(self.act(self.up(self.norm2(x))))


class Port(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(reference.LAYERS))
        self.lm_head = nn.Linear(WIDTH, reference.CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


# the reference's name of a layer -> the port's
LAYERS = {
    "ln_1": "norm1", "ln_2": "norm2", "mlp/wi": "up", "mlp/wo": "down", "attention/query": "attn.q",
    "attention/key": "attn.k", "attention/value": "attn.v", "attention/out": "attn.o",
}  # fmt: skip


def make_port() -> Port:
    port = Port()
    for name, arrays in reference.params.items():
        _, _, rest = name.partition("/")
        layer = port.lm_head
        if rest:
            layer = port.blocks[int(name.split("/")[0].split("_")[1])].get_submodule(LAYERS[rest])  # type: ignore[assignment]
        weight = arrays["kernel"].T if "kernel" in arrays else arrays["scale"]
        layer.weight.data = torch.tensor(weight.copy())
        layer.bias.data = torch.tensor(arrays["bias"])
    return port


def head_size(port: Any) -> None:
    for block in port.blocks:
        block.attn.channels = WIDTH


def later_head_size(port: Any) -> None:
    port.blocks[1].attn.channels = WIDTH


def epsilon(port: Any) -> None:
    port.blocks[1].norm2.eps = 1e-3


def gelu(port: Any) -> None:
    port.blocks[1].act.approximate = "tanh"


def kernel_not_transposed(port: Any) -> None:
    weight = port.blocks[2].attn.k.weight
    weight.data = weight.data.T.contiguous()


FAULTS: dict[Callable[[Any], None], tuple[str, str]] = {
    head_size: ("layers_0.attention.out", "blocks.0.attn.o"),
    later_head_size: ("layers_1.attention.out", "blocks.1.attn.o"),
    epsilon: ("layers_1.ln_2", "blocks.1.norm2"),
    gelu: ("layers_1.mlp.wo", "blocks.1.down"),
    kernel_not_transposed: ("layers_2.attention.key", "blocks.2.attn.k"),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that records the port with a fault, each once."""
    folder = tmp_path_factory.mktemp("ports")

    def recorded(fault: Callable[[Any], None] | None = None, calls: int = 1) -> Path:
        path = folder / f"{getattr(fault, '__name__', 'clean')}.{calls}.jsonl"
        if not path.exists():
            port = make_port()
            if fault is not None:
                fault(port)
            with recording_to(path):
                for call in range(calls):
                    port(torch.tensor(reference.inputs) + call)
        return path

    return recorded


# -- manifests of the reference


def names_in_order(tensors: dict[str, Any]) -> Manifest:
    return list(tensors)


def without_input_and_output(tensors: dict[str, Any]) -> Manifest:
    return [name for name in tensors if not name.startswith(":")]


def numbered(tensors: dict[str, Any]) -> Manifest:
    """Names that say nothing."""
    return [{"module": f"t{number}", "key": name} for number, name in enumerate(tensors)]


def with_parameters(tensors: dict[str, Any]) -> Manifest:
    """Kernels are transposed, as torch has them."""
    entries: list[Any] = []
    for name, arrays in reference.params.items():
        for kind, array in arrays.items():
            tensors[f"params/{name}/{kind}"] = array
            entry: dict[str, Any] = {"key": f"params/{name}/{kind}"}
            entry["module"] = name.replace("/", ".")
            entry["tensor"] = "param.bias" if kind == "bias" else "param.weight"
            if kind == "kernel":
                entry["permute"] = [1, 0]
            entries.append(entry)
    activations = [name for name in tensors if not name.startswith("params/")]
    return {"model": "Transformer", "tensors": [*entries, *activations]}


MANIFESTS = [names_in_order, without_input_and_output, numbered, with_parameters]


@pytest.fixture
def imported(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that imports the reference's tensors as a manifest lists them."""

    def imported(make_manifest: Callable[[dict[str, Any]], Manifest]) -> Path:
        tensors = reference.run()
        (tmp_path / "dump.json").write_text(json.dumps(make_manifest(tensors)))
        np.savez(tmp_path / "dump.npz", **tensors)
        return import_dump(tmp_path / "dump.json")[0]

    return imported


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda manifest: manifest.__name__)
def test_a_right_port_of_a_dump_matches(imported, recorded, manifest):
    report = otel_torch.diff(imported(manifest), recorded())
    assert (report.verdict, report.introduced) == ("match", [])
    assert report.pairs > 25


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda manifest: manifest.__name__)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_of_the_port_is_named(imported, recorded, manifest, fault):
    first = otel_torch.diff(imported(manifest), recorded(fault)).first
    module, port_module = FAULTS[fault]
    assert first is not None
    assert first.port_module == port_module
    if manifest is not numbered:
        assert first.module == module


class FusedAttention(nn.Module):
    """Has one projection where the reference has three, so that those have no counterpart."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        parts = (attention.q, attention.k, attention.v)
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), attention.o
        self.qkv.weight.data = torch.cat([part.weight.data for part in parts])
        self.qkv.bias.data = torch.cat([part.bias.data for part in parts])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        weights = (q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


def attention_as_a_whole(tensors: dict[str, Any]) -> Manifest:
    return [name for name in tensors if not name.endswith("attention/out")]


def no_bias(port: Any) -> None:
    port.blocks[1].attn.o.bias.data.zero_()


@pytest.mark.parametrize(
    ("fault", "module"),
    [
        (None, None), (epsilon, "layers_1.ln_2"), (no_bias, "layers_1.attention"),
        (gelu, "layers_1.mlp.wo"),
    ],
)  # fmt: skip
def test_what_has_no_counterpart_in_a_right_block_has_none_in_a_later_one(
    imported, tmp_path, fault, module
):
    port = make_port()
    for block in port.blocks:
        block.attn = FusedAttention(block.attn)  # type: ignore[union-attr]
    if fault is not None:
        fault(port)
    with recording_to(tmp_path / "port.jsonl"):
        port(torch.tensor(reference.inputs))
    first = otel_torch.diff(imported(attention_as_a_whole), tmp_path / "port.jsonl").first
    assert (first and first.module) == module


class Embedding(Port):
    """Makes the input of the first block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 2)


def outputs_of_layers(tensors: dict[str, Any]) -> Manifest:
    return [name for name in tensors if re.fullmatch(r"layers_\d+|head", name)]


@pytest.mark.parametrize(
    ("fault", "layer"),
    [(None, None), (head_size, 0), (later_head_size, 1), (epsilon, 1), (kernel_not_transposed, 2)],
)
def test_of_a_dump_of_layers_alone_the_layer_is_named(imported, tmp_path, fault, layer):
    """An input that the dump lacks is not blamed if the layer that receives it is right."""
    port = make_port()
    if fault is not None:
        fault(port)
    port.__class__ = Embedding
    with recording_to(tmp_path / "port.jsonl"):
        port(torch.tensor(reference.inputs) / 2)
    first = otel_torch.diff(imported(outputs_of_layers), tmp_path / "port.jsonl").first
    place = first and (first.module, first.port_module, first.port_tensor)
    assert place == (None if layer is None else (f"layers_{layer}", f"blocks.{layer}", "out"))


def test_a_fault_before_a_module_without_recorded_inputs_is_not_put_into_it(imported, recorded):
    from otel_torch.parity.report.text import render_text

    report = otel_torch.diff(imported(names_in_order), recorded(head_size))
    assert report.first.before == "unknown"
    text = " ".join(render_text(report, color=False).split())
    assert "Its input was not compared: the fault is in it or in the code before it." in text
    assert "Everything that enters the module matches" not in text


def test_an_archive_in_order_needs_no_manifest(tmp_path, recorded):
    np.savez_compressed(tmp_path / "dump.npz", **reference.run())
    path, count = import_dump(tmp_path / "dump.npz")
    assert (path, count) == (tmp_path / "dump.recording.jsonl", len(reference.run()))
    assert otel_torch.diff(path, recorded()).verdict == "match"


def test_several_forwards_are_paired_with_those_of_the_port(tmp_path, recorded):
    steps = [{"file": f"{step}.npz", "tensors": list(reference.run())} for step in range(2)]
    for step in range(2):
        np.savez(tmp_path / f"{step}.npz", **reference.run(reference.inputs + np.float32(step)))
    (tmp_path / "dump.json").write_text(json.dumps({"model": "Net", "steps": steps}))
    path, _ = import_dump(tmp_path / "dump.json")
    report = otel_torch.diff(path, recorded(calls=2))
    assert (report.verdict, report.introduced, report.warnings) == ("match", [], [])
    assert {pair.step for pair in report.compared} == {0, 1}


# -- the rows


def write(folder: Path, manifest: Any, **arrays: Any) -> Path:
    """Write dump.json and dump.npz."""
    (folder / "dump.json").write_text(
        manifest if isinstance(manifest, str) else json.dumps(manifest)
    )
    np.savez(folder / "dump.npz", **arrays)
    return folder / "dump.json"


def rows_of(manifest: Path) -> list[dict[str, Any]]:
    return lines(import_dump(manifest)[0])


def save_as_numpy(path: Path, tensor: torch.Tensor) -> dict[str, str]:
    """Save a tensor as `x`; return what a manifest has to say about it."""
    facts = {}
    if tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn):  # NumPy writes bytes without a type
        facts["dtype"] = str(tensor.dtype).removeprefix("torch.")
        size = tensor.dtype.itemsize
        array = tensor.view([torch.int8, torch.int16][size - 1]).numpy().view(f"V{size}")
    else:
        array = tensor.numpy()
    if path.suffix == ".npy":
        np.save(path, array)
    else:
        np.savez(path, x=array)
    return facts


DTYPES = [
    torch.float16, torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.int64, torch.uint8,
    torch.bool, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["npy", "npz", "safetensors"])
def test_statistics_are_those_of_a_run_of_torch(tmp_path, kind, dtype):
    from safetensors.torch import save_file

    tensor = (3 * torch.randn(4, 5, generator=torch.Generator().manual_seed(0))).to(dtype)
    with recording_to(tmp_path / "run.jsonl", grad=True):
        nn.Identity()(tensor)
    entry = {"module": "", "tensor": "in[0]", "key": "x", "file": f"x.{kind}"}
    if kind == "safetensors":
        save_file({"x": tensor}, tmp_path / "x.safetensors")
    else:
        entry |= save_as_numpy(tmp_path / f"x.{kind}", tensor)
    (tmp_path / "dump.json").write_text(json.dumps([entry]))
    (row,) = rows_of(tmp_path / "dump.json")
    expected = lines(tmp_path / "run.jsonl")[0]
    assert expected["tensor"] == "in[0]" and expected["dtype"] == row["dtype"] == str(dtype)
    statistics = {name: value for name, value in expected.items() if name not in _NOT_STATISTICS}
    assert {name: row.get(name) for name in statistics} == statistics
    assert {*row} - {*expected} <= {"argument"}


_NOT_STATISTICS = frozenset(
    {"module", "tensor", "model", "class", "argument", "order", "parent", "value", "storage"}
)


def test_a_row_is_that_of_a_parity_recording(tmp_path):
    manifest = write(tmp_path, {"model": "Net", "tensors": ["fc:in[0]", "fc"]}, **{
        "fc:in[0]": np.ones((2, 3), np.float32), "fc": np.zeros((2, 4), np.float32),
    })  # fmt: skip
    first, second = rows_of(manifest)
    assert {name: first[name] for name in list(first)[:7]} == {
        "module": "fc", "tensor": "in[0]", "step": 0, "call": 0, "loop": 0, "model": "Net",
        "phase": "forward",
    }  # fmt: skip
    assert (first["order"], first["parent"]) == (second["order"], second["parent"]) == ([1, 2], 0)
    assert (first["value"], second["value"]) == (0, 1)
    metadata = json.loads((tmp_path / "dump.recording.meta.json").read_text())
    assert metadata["models"]["Net"]["table"] == [
        {"module": "fc", "class": "", "called": True, "parameters": [], "aliases": []}
    ]
    assert metadata["ended_cleanly"] and metadata["records_written"] == 2


def test_calls_follow_from_names_and_order(tmp_path):
    names = ["embed", "layers.0.attn:in[0]", "layers.0.attn", "layers.0", "layers.1", ":out"]
    arrays = {name: np.arange(3.0) for name in names}
    rows = rows_of(write(tmp_path, names, **arrays))
    assert [(row["module"], row["order"], row["parent"]) for row in rows] == [
        ("embed", [1, 2], 0), ("layers.0.attn", [4, 5], 3), ("layers.0.attn", [4, 5], 3),
        ("layers.0", [3, 6], 0), ("layers.1", [7, 8], 0), ("", [0, 9], None),
    ]  # fmt: skip


def test_a_module_called_twice_is_two_calls(tmp_path):
    entries = [
        {"module": "block.norm", "key": "a"},
        {"module": "block", "key": "b"},
        {"module": "block.norm", "key": "a", "call": 1},
        {"module": "block", "key": "b", "call": 1},
    ]
    rows = rows_of(write(tmp_path, entries, a=np.ones(2), b=np.ones(2)))
    assert [(row["order"], row["parent"]) for row in rows] == [
        ([2, 3], 1), ([1, 4], 0), ([6, 7], 5), ([5, 8], 0),
    ]  # fmt: skip


LINES = """
{"model": "Net", "file": "dump.npz", "step": 3}
"a"
{"module": "b", "class": "Linear", "permute": [1, 0]}

{"step": 4}
{"module": "b", "tensor": "in.x", "argument": "x", "key": "b"}
"""


def test_json_lines_take_what_the_lines_without_a_tensor_say(tmp_path):
    write(tmp_path, "", a=np.ones(2), b=np.arange(6.0).reshape(2, 3))
    (tmp_path / "dump.jsonl").write_text(LINES)
    rows = rows_of(tmp_path / "dump.jsonl")
    fields = [
        tuple(row.get(name) for name in ("model", "module", "tensor", "step", "class", "shape"))
        for row in rows
    ]
    assert fields == [
        ("Net", "a", "out", 3, "", [2]), ("Net", "b", "out", 3, "Linear", [3, 2]),
        ("Net", "b", "in.x", 4, "", [2, 3]),
    ]  # fmt: skip
    assert rows[2]["argument"] == "x"


def test_steps_are_numbered_and_parameters_are_of_phase_attach(tmp_path):
    group = {"tensors": ["a"]}
    manifest = {
        "tensors": ["a:param.weight", "a:grad", {"steps": [group, group, {**group, "step": 9}]}]
    }
    write(tmp_path, manifest, **{name: np.ones(2) for name in ("a", "a:param.weight", "a:grad")})
    rows = rows_of(tmp_path / "dump.json")
    assert [(row["phase"], row["step"], row["order"][0]) for row in rows] == [
        ("attach", 0, None), ("backward", 0, None), ("forward", 0, 1), ("forward", 1, 5),
        ("forward", 9, 9),
    ]  # fmt: skip
    assert "row_sketch" in rows[0] and "row_sketch" not in rows[1]


def test_the_order_of_the_elements_is_that_of_torch(tmp_path):
    """NHWC becomes NCHW; Fortran's order and the other byte order are no other numbers."""
    image = np.random.default_rng(0).normal(size=(2, 4, 5, 3)).astype(np.float32)
    entries = [{"module": "a", "permute": [0, 3, 1, 2]}, "b", "c", "d"]
    arrays = {
        "a": image,
        "b": np.ascontiguousarray(image.transpose(0, 3, 1, 2)),
        "c": np.asfortranarray(image.transpose(0, 3, 1, 2)),
        "d": image.transpose(0, 3, 1, 2).astype(">f4"),
    }
    assert arrays["c"].flags.f_contiguous and not arrays["c"].flags.c_contiguous
    rows = rows_of(write(tmp_path, entries, **arrays))
    assert len({(row["sketch"], row["sum"], str(row["shape"]), row["dtype"]) for row in rows}) == 1


def test_a_dtype_says_what_the_program_computed_in(tmp_path):
    entries = [{"module": "a", "dtype": "bfloat16"}, {"module": "b", "dtype": "bfloat16"}]
    values = torch.tensor([0.5, 1.25, -3.0])
    bits = values.bfloat16().view(torch.int16).numpy().view(np.uint16)
    rows = rows_of(write(tmp_path, entries, a=values.numpy(), b=bits))
    assert [(row["dtype"], row["sum"]) for row in rows] == [("torch.bfloat16", -1.25)] * 2


def test_not_a_number_empty_and_single_elements_are_recorded(tmp_path):
    arrays = {"a": np.array([1, np.nan, np.inf]), "b": np.zeros((0, 3)), "c": np.float32(2)}
    rows = rows_of(write(tmp_path, list(arrays), **arrays))
    assert [(row["nonfinite"], row["shape"]) for row in rows] == [(2, [3]), (0, [0, 3]), (0, [])]
    assert rows[0]["max"] == "NaN"


def test_two_imports_write_the_same_bytes_and_keep_the_earlier_one(tmp_path, capsys):
    manifest = write(tmp_path, ["a"], a=np.ones(3))
    first = import_dump(manifest)[0].read_bytes()
    assert import_dump(manifest)[0].read_bytes() == first
    assert (tmp_path / "dump.recording.1.jsonl").read_bytes() == first
    assert "renamed to dump.recording.1.jsonl" in capsys.readouterr().err


def test_the_command_says_where_the_recording_is(tmp_path, capsys):
    manifest = write(tmp_path, ["a"], a=np.ones(3))
    assert main(["import", str(manifest), "--output", str(tmp_path / "out.jsonl")]) == 0
    assert f"1 records in {tmp_path / 'out.jsonl'}" in capsys.readouterr().err
    assert [row["module"] for row in otel_torch.read_recording(tmp_path / "out.jsonl")] == ["a"]


# -- bad input

BAD_MANIFESTS = {
    "not JSON": ('["a",\n "b" "c"]', r"dump.json: line 2: is not JSON"),
    "deep": ("[" * 100_000, r"dump.json: .*is not JSON|dump.json: Expected"),
    "not UTF-8": ('["\udcff"]', r"dump.json: line 1: is not JSON"),
    "number": ("3", r"dump.json: Expected .*, got `int`"),
    "nothing": ("[]", r"dump.json: lists no tensor"),
    "unknown field": ('[{"modul": "a"}]', r"unknown field `modul` - at `\$\[0\]`"),
    "no name": ('[{"step": 1}]', r"entry 1: names no tensor; give it a module or a key"),
    "wrong type": ('[{"module": "a", "step": -1}]', r"Expected `int` >= 0 - at `\$\[0\].step`"),
    "group's name": ('{"module": "a", "tensors": ["b"]}', r"a group has 'module'"),
    "bad tensor": ('["a:output"]', r"entry 1: 'output' is no tensor; use out, out\[0\]"),
    "duplicate": (
        '["a", {"module": "a", "key": "b"}]',
        r"entry 2 \(a, out\): is the same tensor .* as .*entry 1; tell them apart by step, call or loop",
    ),
    "missing key": ('["aa"]', r"entry 1 \(aa, out\): .*dump.npz: has no 'aa'; did you mean 'a'\?"),
    "missing file": ('[{"module": "a", "file": "x.npz"}]', r"entry 1 \(a, out\): .*x.npz: there is no such file"),
    "folder": ('[{"module": "a", "file": "."}]', r"Is a directory"),
    "unknown dtype": ('[{"module": "a", "dtype": "bf17"}]', r"entry 1 .*unknown dtype 'bf17'; choose from"),
    "dtype of other size": ('[{"module": "raw", "dtype": "float32"}]', r"elements have 2 bytes"),
    "no dtype": ('["raw"]', r"entry 1 .*have no type.*give it in the manifest: \"dtype\": \"bfloat16\""),
    "text": ('["text"]', r"elements are of type <U5, which are no numbers"),
    "permute": ('[{"module": "a", "permute": [0, 2]}]', r"permute \[0, 2\] is not an order of the axes"),
    "axes": ('[{"module": "a", "permute": [1, 0]}]', r"entry 1 .*permute has 2 axes, and 'a' 1"),
    "pickle": ('["objects"]', r"holds pickled Python objects, which are not loaded"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_MANIFESTS)
def test_a_bad_manifest_is_one_line_and_writes_nothing(tmp_path, capsys, case):
    text, message = BAD_MANIFESTS[case]
    (tmp_path / "dump.json").write_text(text, errors="surrogateescape")
    arrays = {
        "a": np.ones(3), "b": np.ones(3), "raw": np.ones(3, np.int16).view("V2"), "text": np.array(["words"]),
        "objects": np.array([Bomb()], dtype=object),
    }  # fmt: skip
    np.savez(tmp_path / "dump.npz", **arrays)
    assert main(["import", str(tmp_path / "dump.json")]) == 2
    assert_one_line(capsys.readouterr().err, message)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dump.json", "dump.npz"]


def assert_one_line(output: str, message: str) -> None:
    assert output.count("\n") == 1 and re.search(message, output), output


class Bomb:
    """Ends the test run where it is unpickled."""

    def __reduce__(self) -> Any:
        return exit, (3,)


def claimed(shape: tuple[int, ...], content: bytes = b"") -> bytes:
    """Return a .npy file that claims a shape."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": "<f4", "fortran_order": False, "shape": shape}
    )
    return file.getvalue() + content


def damaged(content: bytes) -> bytes:
    """Change a byte of the first member: behind its local header, which holds the time."""
    at = 30 + len("a.npy") + 60
    return content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]


def zipped(content: bytes, **changes: int) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", content)
        for name, value in changes.items():
            setattr(archive.filelist[0], name, value)
    return file.getvalue()


def of_safetensors(**entry: Any) -> bytes:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | entry})
    return struct.pack("<Q", len(header)) + header.encode() + bytes(8)


HOSTILE_FILES = {
    "cut off .npy": (claimed((4,), bytes(12)), r"shape \[4\] needs 16 bytes, it has 12"),
    "huge .npy": (claimed((2**60,), bytes(12)), r"needs 4611686018427387904 bytes, it has 12"),
    "negative shape": (claimed((-3,)), r"header is damaged"),
    "header of code": (b"\x93NUMPY\x01\x00\x10\x00__import__('os')", r"cannot be read"),
    "header of brackets": (b"\x93NUMPY\x01\x00\x00\x20" + b"(" * 8192, r"cannot be read"),
    "later version": (b"\x93NUMPY\x09\x00", r"cannot be read"),
    "huge member": (zipped(claimed((2**40,)), file_size=2**42 + 128), r"do not fit into memory"),
    "cut off .npz": (zipped(claimed((2,), bytes(8)))[:-10], r"is no complete .npz file"),
    "shape beyond member": (zipped(claimed((2**30,), bytes(100))), r"it has 100"),
    "damaged member": (damaged(zipped(claimed((99,), bytes(range(99)) * 4))), r"cannot be read"),
    "neither": (b"hello", r"is neither .npy nor .npz, and not readable as safetensors"),
    "empty": (b"", r"is neither .npy nor .npz, and not readable as safetensors"),
    "huge header": (struct.pack("<Q", 2**63) + b"{}", r"is neither"),
    "offsets": (of_safetensors(data_offsets=[0, 4]), r"needs 8 bytes, it has 4"),
    "offsets behind the end": (of_safetensors(data_offsets=[10**6, 10**6 + 8]), r"needs 8 bytes"),
    "negative offsets": (of_safetensors(data_offsets=[-80, -72]), r"is neither"),
    "negative sizes": (of_safetensors(shape=[-2, -1]), r"is neither"),
    "unknown type": (of_safetensors(dtype="F3"), r"unknown dtype F3"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE_FILES)
def test_a_hostile_file_is_one_line_and_writes_nothing(tmp_path, capsys, case):
    content, message = HOSTILE_FILES[case]
    (tmp_path / "dump.bin").write_bytes(content)
    (tmp_path / "dump.json").write_text('[{"module": "a", "file": "dump.bin"}]')
    assert main(["import", str(tmp_path / "dump.json")]) == 2
    assert_one_line(capsys.readouterr().err, message)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dump.bin", "dump.json"]


def test_a_member_that_is_damaged_further_on_leaves_no_recording(tmp_path, capsys):
    """The header is right, so that only reading the elements finds the damage."""
    content = bytearray(zipped(claimed((5000,), np.random.default_rng(0).bytes(20000))))
    content[10_000] ^= 0xFF
    (tmp_path / "dump.npz").write_bytes(content)
    (tmp_path / "dump.json").write_text('["a"]')
    assert main(["import", str(tmp_path / "dump.json")]) == 2
    assert_one_line(capsys.readouterr().err, r"entry 1 \(a, out\): .*'a' cannot be read")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dump.json", "dump.npz"]


@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
def test_a_file_without_an_order_asks_for_a_manifest(tmp_path, capsys, suffix):
    (tmp_path / f"x{suffix}").write_bytes(b"")
    assert main(["import", str(tmp_path / f"x{suffix}")]) == 2
    assert_one_line(capsys.readouterr().err, r"says nothing of the order.*in a manifest, x.json")


def test_what_is_read_is_not_overwritten(tmp_path, capsys):
    manifest = write(tmp_path, ["a"], a=np.ones(3))
    for name in ("dump.json", "dump.npz"):
        assert main(["import", str(manifest), "--output", str(tmp_path / name)]) == 2
        assert_one_line(capsys.readouterr().err, rf"{name}: the import reads this file")


def test_one_tensor_is_in_memory_at_a_time(tmp_path):
    """Forty tensors of 8 MB are imported in the memory of a few."""
    import tracemalloc

    entries = [{"module": f"layer_{number}", "key": "x"} for number in range(40)]
    manifest = write(tmp_path, entries, x=np.zeros(2**21, np.float32))
    tracemalloc.start()
    try:
        import_dump(manifest)
        assert tracemalloc.get_traced_memory()[1] < 40 * 2**20
    finally:
        tracemalloc.stop()
