"""The cost of caching every output of a model once: attach hooks, one forward, remove hooks.

The goal is the time of ten hand-written lines of hooks that keep copies. References alone are no
cache, because later operations may change the tensors in place; nnsight's cache keeps references.
Measured on a GPT-2 and a small diffusers UNet, with random weights.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import otel_torch
from tests.benchmarks.figures import Figure, Size, command
from tests.benchmarks.pairing import BARE, CONTROL, interleave, plainly
from tests.benchmarks.sides import one_thread

REFERENCES, COPIES, NNSIGHT = "own hooks, references", "own hooks, copies", "nnsight's cache"
CACHE, INTERLEAVE, ASKING = (
    "Cache",
    "interleave(…).cache",
    "interleave(…).cache and a body that asks",
)
Inputs = dict[str, Any]


def gpt2(size: Size) -> tuple[nn.Module, Inputs]:
    """Make the smallest GPT-2: 164 modules, 1 × 64 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=size.of(12, 2), n_embd=size.of(768, 24))
    tokens = torch.randint(config.vocab_size, (1, size.of(64, 4)))
    return GPT2LMHeadModel(config).eval(), {"input_ids": tokens, "use_cache": False}


def unet(size: Size) -> tuple[nn.Module, Inputs]:
    """Make a UNet with cross attention, for latents of 32 × 32."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=32, layers_per_block=size.of(2, 1), attention_head_dim=8, norm_num_groups=8,
        block_out_channels=[size.of(64, 16)] * 2, down_block_types=["CrossAttnDownBlock2D"] * 2, cross_attention_dim=64,
        up_block_types=["CrossAttnUpBlock2D"] * 2,
    ).eval()  # fmt: skip
    return model, {
        "sample": torch.randn(1, 4, 32, 32), "timestep": torch.tensor([500]), "encoder_hidden_states": torch.randn(1, 16, 64),
    }  # fmt: skip


def copied(value: Any) -> Any:
    """Copy tensors in the usual containers, as users write it."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(copied(item) for item in value)
    return value


def own_hooks(model: nn.Module, inputs: Inputs, change: Callable[[Any], Any]) -> dict[str, Any]:
    """Keep `change(output)` of every module with PyTorch hooks."""
    hooks: dict[str, Any] = {}

    def keep(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            hooks[name] = change(output)

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in model.named_modules()]
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    return hooks


def cached(model: nn.Module, inputs: Inputs) -> Any:
    """Keep the outputs with `Cache`."""
    with torch.no_grad(), otel_torch.Cache().attach(model) as cache:
        model(**inputs)
    return cache


def interleaved(model: nn.Module, inputs: Inputs, asked: str | None = None) -> Any:
    """Keep the outputs with `interleave`; the body asks for one module's output or for nothing."""
    beside = otel_torch.interleave(model)
    cache = beside.cache()
    with torch.no_grad(), beside.invoke(**inputs) as run:
        if asked is not None:
            assert run[asked].output is not None
    return cache


def traced_by_nnsight(model: nn.Module, inputs: Inputs) -> Callable[[], object]:
    """Keep the outputs with nnsight, on a copy, because it changes the model."""
    import nnsight

    wrapped = nnsight.NNsight(copy.deepcopy(model))

    def trace() -> object:
        with torch.no_grad(), wrapped.trace(**inputs) as tracer:
            cache = tracer.cache().save()
        return cache

    return trace


def compared(
    make: Callable[[Size], tuple[nn.Module, Inputs]], label: str, size: Size, times: int
) -> list[Figure]:
    """Compare all sides on one model with hooks that keep copies."""
    one_thread()
    model, inputs = make(size)
    called = list(cached(model, inputs))

    def bare() -> None:
        with torch.no_grad():
            model(**inputs)

    sides = {
        BARE: bare,
        CONTROL: bare,
        REFERENCES: lambda: own_hooks(model, inputs, lambda output: output),
        COPIES: lambda: own_hooks(model, inputs, copied),
        CACHE: lambda: cached(model, inputs),
        INTERLEAVE: lambda: interleaved(model, inputs),
        ASKING: lambda: interleaved(model, inputs, called[len(called) // 2]),
    }
    if importlib.util.find_spec("nnsight"):
        sides[NNSIGHT] = traced_by_nnsight(model, inputs)
    timings = interleave(
        {side: plainly(body) for side, body in sides.items()},
        rounds=size.count(15),
        times=size.of(times, 1),
    )
    modules = len(list(model.modules()))
    over = "; ".join(f"{side} {timings.cpu.overhead(side)}" for side in sides if side != BARE)

    def figure(side: str, goal: float | None, more: str = "") -> Figure:
        ratio = timings.cpu.ratio(side, COPIES)
        detail = f"{ratio}; on the wall {timings.wall.ratio(side, COPIES)}{more}"
        return Figure.estimated(
            f"all outputs of a {label}, {side}: time over own hooks with copies",
            ratio,
            goal,
            detail,
        )

    figures = [
        figure(CACHE, 1.0, f"; {modules} modules; over bare: {over}"),
        figure(INTERLEAVE, 1.0),
        figure(ASKING, None),
    ]
    if NNSIGHT in sides:
        figures.append(figure(NNSIGHT, None))
    return figures


def measure(size: Size) -> list[Figure]:
    """Measure both models."""
    return [*compared(gpt2, "GPT-2", size, 1), *compared(unet, "UNet", size, 2)]


def main(argv: Sequence[str]) -> int:
    """Measure and print the figures."""
    return command(__doc__, measure, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
