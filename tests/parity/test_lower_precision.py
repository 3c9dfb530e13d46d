"""`diff` of a model and its quantized form: no finding, but a ranking of modules by the error that
each adds; and faults that quantization does not explain.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import otel_torch
from otel_torch.cli.main import main
from otel_torch.parity.lower_precision import rank_modules
from tests.parity.test_golden import Net
from tests.support import recording_to

Tensor = torch.Tensor


def rounded(weight: Tensor, levels: int = 127) -> Tensor:
    scale = weight.abs().amax(1, keepdim=True) / levels
    return (weight / scale).round() * scale


class Int8Linear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.data.abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight.data / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.float() * self.scale, self.bias)  # type: ignore[operator]


class Int8Tensor(Tensor):
    """A weight that says it is float32 and keeps int8, as torchao's do."""

    def __new__(cls, weight: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)

    def __init__(self, weight: Tensor) -> None:
        self.scale = weight.abs().amax(1, keepdim=True) / 127
        self.numbers = (weight / self.scale).round().to(torch.int8)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is nn.functional.linear:
            x, weight, bias = args
            return nn.functional.linear(x, weight.numbers.float() * weight.scale, bias)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(function)


def linears(net: nn.Module) -> list[tuple[str, nn.Linear]]:
    return [(name, layer) for name, layer in net.named_modules() if isinstance(layer, nn.Linear)]


def full(net: Net) -> None:
    pass


def bfloat16(net: Net) -> None:
    net.bfloat16()


def int8(net: Net) -> None:
    for name, layer in linears(net):
        parent, _, own_name = name.rpartition(".")
        setattr(net.get_submodule(parent), own_name, Int8Linear(layer))


def wrapped_int8(net: Net) -> None:
    for _, layer in linears(net):
        layer.weight = nn.Parameter(Int8Tensor(layer.weight.data))


def emulated_int8(net: Net) -> None:
    for _, layer in linears(net):
        layer.weight.data = rounded(layer.weight.data)


def emulated_fp8(net: Net) -> None:
    for _, layer in linears(net):
        layer.weight.data = layer.weight.data.to(torch.float8_e4m3fn).float()


def one_layer_with_4_bits(net: Any) -> None:
    emulated_int8(net)
    net.blocks[1].up.weight.data = rounded(net.blocks[1].up.weight.data, levels=3)


def one_other_weight(net: Any) -> None:
    net.blocks[1].up.weight.data *= 1.01


def another_activation(net: Any) -> None:
    int8(net)
    net.blocks[1].act = nn.ReLU()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[[Any], None]], Path]:
    """Return a function that records a form of the net, each once."""
    folder = tmp_path_factory.mktemp("quantized")
    torch.manual_seed(0)
    net, inputs = Net().eval(), torch.randn(4, 10, 32)

    def recorded(change: Callable[[Any], None]) -> Path:
        path = folder / f"{change.__name__}.jsonl"
        if not path.exists():
            model = copy.deepcopy(net)
            change(model)
            with recording_to(path):
                model(inputs.to(model.blocks[0].norm.weight.dtype))  # type: ignore[union-attr, arg-type]
        return path

    return recorded


@pytest.mark.parametrize(
    "form, quantized, dtype",
    [
        (bfloat16, False, "bfloat16"),
        (int8, False, "int8"),
        (wrapped_int8, False, "int8"),
        (emulated_int8, True, "quantized"),
        (emulated_fp8, True, "quantized"),
    ],
)
def test_a_form_of_lower_precision_matches_and_is_ranked(recorded, form, quantized, dtype):
    report = otel_torch.diff(recorded(full), recorded(form), quantized=quantized)
    assert (report.verdict, report.introduced) == ("match", [])
    precision = report.lower_precision
    assert (precision.side, precision.dtype, precision.measured) == ("port", dtype, False)
    assert 1e-4 < precision.end < 0.1
    added = {row.module: row.added for row in precision.modules}
    assert set(added) == {f"blocks.{i}.{name}" for i in range(3) for name in ("norm", "up", "act", "down")} | {"head"}  # fmt: skip
    assert list(added.values()) == sorted(added.values(), reverse=True)
    if form is not bfloat16:  # only weights were rounded
        assert {"up", "down", "head"} >= {name.split(".")[-1] for name in list(added)[:4]}
        assert max(added[f"blocks.{i}.norm"] for i in range(3)) < added["head"]


def test_the_reference_may_be_the_one_of_lower_precision(recorded):
    report = otel_torch.diff(recorded(bfloat16), recorded(full))
    assert (report.verdict, report.lower_precision.side) == ("match", "reference")


def test_equal_precision_has_no_ranking(recorded):
    assert otel_torch.diff(recorded(full), recorded(full)).lower_precision is None


def test_weights_that_no_type_calls_quantized_are_a_finding(recorded):
    report = otel_torch.diff(recorded(full), recorded(emulated_int8))
    assert (report.verdict, report.first.kind) == ("diverged", "weights")
    assert "7 weights are off by about as much as each other" in report.warnings[0]
    assert "--quantized" in report.warnings[0]
    report = otel_torch.diff(recorded(full), recorded(one_other_weight))
    assert (report.verdict, report.warnings) == ("diverged", [])


def test_a_layer_of_fewer_bits_than_the_others_is_named(recorded):
    report = otel_torch.diff(recorded(full), recorded(one_layer_with_4_bits), quantized=True)
    assert (report.verdict, report.first.module) == ("diverged", "blocks.1.up")
    assert report.lower_precision.modules[0].module == "blocks.1.up"


def test_a_fault_of_a_quantized_model_is_named(recorded):
    report = otel_torch.diff(recorded(full), recorded(another_activation))
    assert (report.verdict, report.first.module) == ("diverged", "blocks.1.act")
    assert "adds more than lower precision explains" in report.first.explanation or (
        report.first.cause is not None
    )


def test_from_right_inputs_the_output_error_is_what_a_module_adds(recorded):
    report = otel_torch.diff(recorded(full), recorded(int8))
    precision = rank_modules("port", {"int8"}, report.compared, measured=True)
    assert all(row.added == row.output_error for row in precision.modules)


def test_text_json_and_page_rank(recorded, tmp_path, capsys):
    page, answer = tmp_path / "page.html", tmp_path / "answer.json"
    arguments = ["diff", str(recorded(full)), str(recorded(int8))]
    assert main([*arguments, "--html", str(page), "--json", str(answer)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "The port is of lower precision (int8); its output is off by" in text
    assert "full precision is not measurable from two recordings" in text
    assert "What lower precision costs" in page.read_text()
    precision = json.loads(answer.read_text())["lower_precision"]
    assert (precision["side"], len(precision["modules"])) == ("port", 13)


def test_the_option_says_that_a_port_is_quantized(recorded, capsys):
    paths = [str(recorded(full)), str(recorded(emulated_int8))]
    assert main(["diff", *paths]) == 1
    assert main(["diff", *paths, "--quantized"]) == 0


def test_an_error_that_later_modules_even_out_is_no_match_without_a_word(tmp_path):
    """A norm removes the wrong scale that another norm has made, up to the rounding of bfloat16."""

    def recorded(name: str, eps: float, dtype: torch.dtype) -> Path:
        torch.manual_seed(0)
        layers = (nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64, bias=False))
        net = nn.Sequential(*layers, nn.LayerNorm(64)).to(dtype)
        net[1].eps = eps
        with recording_to(tmp_path / name):
            net(10 * torch.randn(4, 10, 64).to(dtype))
        return tmp_path / name

    reference = recorded("full.jsonl", 1e-5, torch.float32)
    clean = otel_torch.diff(reference, recorded("clean.jsonl", 1e-5, torch.bfloat16))
    assert (clean.verdict, clean.warnings) == ("match", [])
    report = otel_torch.diff(reference, recorded("fault.jsonl", 10.0, torch.bfloat16))
    assert report.verdict == "match"
    (warning,) = report.warnings
    assert warning.startswith("compare in float32: 1 adds an error of 0.")
    assert "bfloat16 does not explain" in warning
