"""Sets up FastVideo 0.2.1 so that its models run in one process without a GPU."""

import os
import socket

import torch

os.environ["FASTVIDEO_ATTENTION_BACKEND"] = "TORCH_SDPA"
os.environ["FASTVIDEO_LOGGING_LEVEL"] = "ERROR"
with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listener.getsockname()[1]),
    }

from fastvideo.distributed.parallel_state import (
    maybe_init_distributed_environment_and_model_parallel,
)
from fastvideo.forward_context import set_forward_context
from fastvideo.models.loader import utils
from fastvideo.platforms.cpu import CpuPlatform

# FastVideo has no attention backend for a CPU
CpuPlatform.get_attn_backend_cls = classmethod(
    lambda *_, **__: "fastvideo.attention.backends.sdpa.SDPABackend"
)
maybe_init_distributed_environment_and_model_parallel(1, 1)


def load(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Rename and fuse the weights as FastVideo's own loader does, and load all of them."""
    mapping = utils.get_param_names_mapping(model.param_names_mapping)
    ported, _ = utils.hf_to_custom_state_dict(weights, mapping)
    model.load_state_dict(ported, strict=False)


def forward_context():
    """Enter what FastVideo's pipelines set around a forward."""
    return set_forward_context(current_timestep=0, attn_metadata=None, forward_batch=None)
