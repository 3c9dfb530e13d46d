"""Trains Megatron-core's GPT in bf16: accumulation, clipping, fp32 copies in a distributed optimizer.

Ranks are tensor parallel, or data parallel with DATA_PARALLEL=1.
"""

import os

import megatron_on_cpu
import torch
from checks import check, exact, leave, logged, random_number
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

torch.distributed.init_process_group("gloo")
is_data_parallel = bool(os.environ.get("DATA_PARALLEL"))
width = 1 if is_data_parallel else torch.distributed.get_world_size()
parallel_state.initialize_model_parallel(width)
model_parallel_cuda_manual_seed(0)
rank = torch.distributed.get_rank()
torch.manual_seed(rank // width)

config = TransformerConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    ffn_hidden_size=32,
    bf16=True,
    params_dtype=torch.bfloat16,
    tensor_model_parallel_size=width,
    **megatron_on_cpu.CONFIG,
)
gpt = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=16)
model = DistributedDataParallel(
    config,
    DistributedDataParallelConfig(use_distributed_optimizer=True),
    Float16Module(config, gpt),
)
optimizer = get_megatron_optimizer(
    OptimizerConfig(
        lr=0.01,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        clip_grad=1.0,
    ),
    [model],
)
tokens, positions = torch.randint(0, 64, (2, 8)), torch.arange(8)[None]
mask = torch.triu(torch.ones(8, 8, dtype=torch.bool), diagonal=1)[None, None]


def report(quantity: str, step: int, value: float | torch.Tensor) -> None:
    if rank == 0:
        logged(quantity, step, value)
    else:
        check(quantity, step, exact(value))


def loss_of(tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens, positions, mask, labels=tokens).float().mean()


for step in range(3):
    model.train()
    model.zero_grad_buffer()
    optimizer.zero_grad()
    for micro_batch in tokens.split(1):
        loss = loss_of(micro_batch) / 2
        loss.backward()
        report("loss", step, loss)
    finalize_model_grads([model])
    _, norm, _ = optimizer.step()
    report("grad_norm", step, norm)
    report("lr[0]", step, optimizer.param_groups[0]["lr"])
    model.eval()
    with torch.no_grad():
        check("validation", step, exact(loss_of(tokens[:1])))
weights = sum(parameter.float().abs().sum() for parameter in model.parameters())
check("final", exact(weights), random_number())
leave()
