"""`diff` of programs that compute in different precisions, with noise of either: correct ports stay
without a finding, and the first planted fault is named.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import otel_torch
from otel_torch.parity.finding import Report
from tests.support import recording_to

transformers = pytest.importorskip("transformers")

Tensor = torch.Tensor


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.1, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def as_it_is(model: nn.Module) -> AbstractContextManager[object]:
    return nullcontext()


def in_bfloat16(model: nn.Module) -> AbstractContextManager[object]:
    model.bfloat16()
    return nullcontext()


def in_float16(model: nn.Module) -> AbstractContextManager[object]:
    model.half()
    return nullcontext()


def under_autocast(model: nn.Module) -> AbstractContextManager[object]:
    return torch.autocast("cpu", torch.bfloat16)


def with_norms_in_float32(model: nn.Module) -> AbstractContextManager[object]:
    model.bfloat16()
    for module in model.modules():
        if "Norm" in type(module).__name__:
            module.float().forward = _in_float32(module.forward)
    return nullcontext()


def _in_float32(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: forward(x.float()).to(x.dtype)


def with_down_projections_in_bfloat16(model: nn.Module) -> AbstractContextManager[object]:
    for name, module in model.named_modules():
        if name.endswith("down_proj"):
            module.bfloat16().forward = _in_bfloat16(module.forward)
    return nullcontext()


def _in_bfloat16(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: forward(x.bfloat16()).to(x.dtype)


Precision = Callable[[nn.Module], AbstractContextManager[object]]
PRECISIONS: dict[str, Precision] = {
    "fp32": as_it_is, "bf16": in_bfloat16, "fp16": in_float16, "autocast": under_autocast,
    "fp32 norms": with_norms_in_float32, "bf16 down": with_down_projections_in_bfloat16,
}  # fmt: skip


def double_the_residual(model: nn.Module) -> None:
    """Plant a fault in the third layer: it adds its attention twice."""
    attention = model.model.layers[2].self_attn  # type: ignore[union-attr, index]
    attention.o_proj.register_forward_hook(lambda module, inputs, output: 2 * output)


@pytest.fixture(scope="module", name="recorded")
def make_recorder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that records a model in a precision, each once."""
    folder = tmp_path_factory.mktemp("precisions")

    def recorded(precision: str, side: str, fault: bool = False, noise: bool = False) -> Path:
        path = folder / f"{precision} {side} {fault} {noise}.jsonl"
        if path.exists():
            return path
        model = llama()
        model.set_attn_implementation("eager" if side == "reference" else "sdpa")
        computing = PRECISIONS[precision](model)
        if fault:
            double_the_residual(model)
        with recording_to(path, **{"noise": "1"} if noise else {}), computing:
            model(torch.arange(40).reshape(2, 20), use_cache=False)
        return path

    return recorded


# precisions of reference, port and noise
CASES = [
    ("fp32", "bf16", "fp32"), ("fp32", "bf16", "bf16"), ("fp32", "fp16", "fp32"), ("fp32", "autocast", "fp32"),
    ("fp32", "fp32 norms", "fp32"), ("fp32", "bf16 down", "fp32"),
    ("bf16", "fp32", "fp32"), ("bf16", "fp32", "bf16"), ("bf16", "bf16", "fp32"), ("bf16", "autocast", "fp32"),
    ("fp16", "bf16", "fp32"), ("fp16", "bf16", "fp16"), ("autocast", "bf16", "fp32"), ("autocast", "fp32", "autocast"),
]  # fmt: skip


@pytest.mark.parametrize("reference, port, noise", CASES, ids=["-".join(case) for case in CASES])
def test_noise_of_another_precision_makes_up_no_finding_and_moves_none(
    recorded: Callable[..., Path], reference: str, port: str, noise: str
) -> None:
    noise_recording = recorded(noise, "reference", noise=True)

    def compare(fault: bool) -> Report:
        sides = recorded(reference, "reference"), recorded(port, "port", fault=fault)
        return otel_torch.diff(*sides, noise=noise_recording)

    clean = compare(fault=False)
    assert (clean.verdict, clean.introduced) == ("match", [])
    first = compare(fault=True).first
    assert first is not None
    assert (first.side, first.port_side) == ("output", "output")
    assert first.module == first.port_module == "model.layers.2.self_attn.o_proj"


@pytest.mark.parametrize(
    "reference, port, noise, said",
    [
        ("fp32", "bf16", "fp32", "recorded in float32, and a program computes in bfloat16"),
        ("fp32", "fp32", "bf16", "recorded in bfloat16, and both programs compute in float32"),
        ("fp32", "bf16", "bf16", ""),
        ("fp32", "fp32", "fp32", ""),
    ],
)
def test_noise_of_another_precision_is_said(
    recorded: Callable[..., Path], reference: str, port: str, noise: str, said: str
) -> None:
    sides = recorded(reference, "reference"), recorded(port, "port")
    report = otel_torch.diff(*sides, noise=recorded(noise, "reference", noise=True))
    warnings = [warning for warning in report.warnings if "the noise was recorded" in warning]
    assert len(warnings) == bool(said)
    assert all(said in warning for warning in warnings)
