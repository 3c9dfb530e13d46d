"""Lets Megatron-core run without a GPU: importing this replaces what it asks `torch.cuda` for."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import torch

_TYPES = ("FloatTensor", "HalfTensor", "BFloat16Tensor", "IntTensor", "LongTensor", "ByteTensor")
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange")
# of a TransformerConfig: without kernels of a GPU, and without random numbers
CONFIG = {
    "use_cpu_initialization": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
}


class _Stream(nullcontext):
    def wait_stream(self, stream: Any) -> None:
        pass


def _on_cpu(factory: Any) -> Any:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


def _type(original: Any) -> Any:
    """Call all tensors CUDA tensors, by which Megatron chooses how it trains them."""

    @functools.wraps(original)
    def type_of(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(tensor, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    return type_of


for name in _TYPES:
    setattr(torch.cuda, name, getattr(torch, name))
for name in _FACTORIES:
    setattr(torch, name, _on_cpu(getattr(torch, name)))
torch.Tensor.type = _type(torch.Tensor.type)
torch.Tensor.cuda = lambda self, *args, **kwargs: self
torch.nn.Module.cuda = lambda self, *args, **kwargs: self
# a function each: the compiler has a rule for every function of torch
torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.current_stream = lambda *args: _Stream()
torch.cuda.Stream = lambda *args, **kwargs: _Stream()
torch.cuda.stream = lambda stream: stream
torch.cuda.synchronize = lambda *args: None
torch.cuda.set_device = lambda device: None
torch.cuda.get_rng_state = lambda *args: torch.get_rng_state()
torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed)

from megatron.core.tensor_parallel import random  # noqa: E402 - after the replacements

random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
