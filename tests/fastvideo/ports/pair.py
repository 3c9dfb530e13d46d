"""A pair: one model by its authors (the reference) and by FastVideo (the port), and how to call
both with one input.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tests.e2e.ports import free_port
from tests.fastvideo.ports.weights import State, normal

Inputs = dict[str, Any]
Settings = dict[str, Any]  # what the checkpoint's `config.json` would hold


@dataclass(frozen=True)
class Draw:
    """Random inputs of one pair under one seed: `draw("text", 2, 7, 48)`."""

    pair: str
    seed: int

    def __call__(self, name: str, *shape: int) -> Tensor:
        return normal(self.seed, f"{self.pair}: {name}", *shape)


@dataclass(frozen=True)
class Pair:
    reference: Callable[[], nn.Module]
    port: Callable[[], nn.Module]
    inputs: Callable[[Draw], Inputs]
    call_reference: Callable[[nn.Module, Inputs], Tensor]
    call_port: Callable[[nn.Module, Inputs], Tensor]
    load: Callable[[nn.Module, State], None]  # by FastVideo's own means
    exact: tuple[str, ...] = ()  # inputs that stay fp32 in every run: positions
    keep_fp32: tuple[str, ...] = ()  # modules of the port that its own loader leaves in fp32
    limit: float = 2e-6  # largest relative L2 error of the output in fp32; where it is wider, `note` says why that is legal
    note: str = ""


def prepare_fastvideo() -> None:
    """One process, no GPU, attention by torch: what FastVideo must be told before its models can be
    built.
    """
    os.environ.setdefault("FASTVIDEO_ATTENTION_BACKEND", "TORCH_SDPA")
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("LOCAL_RANK", "0"),
        ("MASTER_ADDR", "127.0.0.1"),
    ):
        os.environ.setdefault(name, value)
    if "MASTER_PORT" not in os.environ:
        os.environ["MASTER_PORT"] = str(free_port())
    from fastvideo.distributed.parallel_state import (
        maybe_init_distributed_environment_and_model_parallel,
    )
    from fastvideo.layers import rotary_embedding
    from fastvideo.platforms.cpu import CpuPlatform

    # FastVideo knows no attention backend for a CPU
    CpuPlatform.get_attn_backend_cls = classmethod(
        lambda *_, **__: "fastvideo.attention.backends.sdpa.SDPABackend"
    )
    maybe_init_distributed_environment_and_model_parallel(1, 1)
    # rotary embeddings are shared by all models of a process: one that was broken would outlive its
    # model
    rotary_embedding._ROPE_DICT.clear()


@contextmanager
def forward_context() -> Iterator[None]:
    """What FastVideo's pipelines set around a forward and its attention layers ask for."""
    from fastvideo.forward_context import set_forward_context

    with set_forward_context(current_timestep=0, attn_metadata=None, forward_batch=None):
        yield


def configured(config: Any, settings: dict[str, Any]) -> Any:
    """FastVideo's model configuration with the architecture of this checkpoint, as its loaders fill
    it in.
    """
    config.update_model_arch(settings)
    return config


class DoesNotFit(Exception):
    """The checkpoint and the port disagree about a name or a shape."""


def load_by_mapping(
    model: nn.Module, state: State, mapping: Any = None, left_out: tuple[str, ...] = ()
) -> None:
    """As FastVideo's loaders of transformers do: rename and fuse by the model's own
    `param_names_mapping`, then be strict.
    """
    from fastvideo.models.loader import utils

    mapping = model.param_names_mapping if mapping is None else mapping
    ported, _ = utils.hf_to_custom_state_dict(dict(state), utils.get_param_names_mapping(mapping))
    load_by_name(model, ported, left_out)


def load_by_name(model: nn.Module, state: State, left_out: tuple[str, ...] = ()) -> None:
    """Names as they are, strictly; `left_out` are parts of names that the port has and a checkpoint
    has not.
    """
    own = model.state_dict()
    learned = {name for name, _ in model.named_parameters()}
    unknown = sorted(set(state) - set(own))
    missing = sorted(
        name for name in learned - set(state) if not any(part in name for part in left_out)
    )
    if unknown or missing:
        raise DoesNotFit(f"not in the port: {unknown[:8]}, not in the checkpoint: {missing[:8]}")
    for name, tensor in state.items():
        if own[name].shape != tensor.shape:
            raise DoesNotFit(
                f"{name}: {tuple(own[name].shape)} in the port, {tuple(tensor.shape)} in the checkpoint"
            )
        own[name].copy_(tensor)


def renamed(state: State, rules: dict[str, str]) -> State:
    """The checkpoint under the names that the port's authors published it with; each name by the
    rules that match, in order.
    """

    def rename(name: str) -> str:
        for pattern, replacement in rules.items():
            name = re.sub(pattern, replacement, name)
        return name

    return {rename(name): tensor for name, tensor in state.items()}


def load_by_method(model: nn.Module, state: State, prefix: str = "") -> None:
    """As FastVideo's loader of text encoders does: the model fuses and loads by itself. `prefix` is
    a component that checkpoints carry and that transformers no longer has in its own names.
    """
    loaded = model.load_weights((prefix + name, tensor.clone()) for name, tensor in state.items())
    missing = sorted(name for name, _ in model.named_parameters() if name not in loaded)
    if missing:
        raise DoesNotFit(f"not loaded: {missing[:8]}")
