"""Trains Megatron-core's GPT for two steps in one process, or over tensor and pipeline parallel ranks.

    megatron_layouts.py [tensor=N] [pipeline=N] [virtual=N] [OPTION …] [FAULT]

Options are `sequence` (parallel norms), `swiglu`, `groups` (of queries) and `tied` (embeddings).
Without ranks, the program is the reference. The weights follow from their names, so that a stage has
those of its layers, and a rank its parts. Faults replace what Megatron does.
"""

import os
import re
import sys
import zlib

import megatron_on_cpu
import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import torch_norm
from megatron.core.transformer.transformer_config import TransformerConfig

OPTIONS = set(sys.argv[1:])
SIZE, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
NUMBERS = dict(option.split("=") for option in OPTIONS if "=" in option) if SIZE > 1 else {}
TENSOR, PIPELINE, VIRTUAL = (
    int(NUMBERS.get(name, 1)) for name in ("tensor", "pipeline", "virtual")
)
LAYERS, HIDDEN, WORDS, LENGTH, ROWS, MICROBATCHES = 4, 16, 32, 8, 8, 4
DATA = SIZE // (TENSOR * PIPELINE)


def is_wrong(fault):
    return SIZE > 1 and fault in OPTIONS


def make_norm(cls, config, hidden_size, eps=1e-5, **kwargs):
    """Return torch's norm, whose gradients Megatron adds up where it has a part of the positions."""
    norm = torch.nn.LayerNorm(hidden_size, eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


torch_norm.WrappedTorchNorm.__new__ = make_norm


def start():
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.HashStore() if SIZE == 1 else None,
        rank=RANK,
        world_size=SIZE,
    )
    parallel_state.initialize_model_parallel(
        TENSOR,
        PIPELINE,
        VIRTUAL if VIRTUAL > 1 else None,
    )
    model_parallel_cuda_manual_seed(0)


def make_config():
    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_query_groups=2 if "groups" in OPTIONS else 4,
        ffn_hidden_size=32,
        gated_linear_unit="swiglu" in OPTIONS,
        tensor_model_parallel_size=TENSOR,
        pipeline_model_parallel_size=PIPELINE,
        virtual_pipeline_model_parallel_size=VIRTUAL if VIRTUAL > 1 else None,
        sequence_parallel="sequence" in OPTIONS and TENSOR > 1,
        pipeline_dtype=torch.float32,
        batch_p2p_comm=False,
        calculate_per_token_loss=False,
        **megatron_on_cpu.CONFIG,
    )


def make_models(config):
    """Return the chunks of this rank."""
    models = []
    for chunk in range(VIRTUAL):
        stage = {"vp_stage": chunk} if VIRTUAL > 1 else {}
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, **stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, **stage)
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=WORDS,
            max_sequence_length=LENGTH,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights="tied" in OPTIONS,
            **stage,
        )
        fill(model, config)
        models.append(DistributedDataParallel(config, DistributedDataParallelConfig(), model))
    return models


def fill(model, config):
    """Give each parameter the numbers that follow from its name in the whole model."""
    numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
    if is_wrong("layers_of_another_stage"):
        numbers = list(range(len(numbers)))
    rank = parallel_state.get_tensor_model_parallel_rank()
    with torch.no_grad():
        for name, parameter in model.named_parameters():

            def in_whole(match):
                return f"layers.{numbers[int(match[1])]}."

            whole = re.sub(r"layers\.(\d+)\.", in_whole, name)
            if "tied" in OPTIONS and whole == "output_layer.weight":
                whole = "embedding.word_embeddings.weight"
            generator = torch.Generator().manual_seed(zlib.crc32(whole.encode()))
            dim = getattr(parameter, "partition_dim", -1)
            shape = list(parameter.shape)
            is_part = getattr(parameter, "tensor_model_parallel", False) and dim >= 0
            if is_part:
                shape[dim] *= TENSOR
            numbers_of_whole = torch.randn(shape, generator=generator) / 5
            if name.endswith("norm.weight") or "layernorm.weight" in name:
                numbers_of_whole += 1
            if is_part:
                own = 1 - rank if is_wrong("shard") and "layers.3.mlp.linear_fc1" in whole else rank
                parts = 2 if config.gated_linear_unit and "linear_fc1" in name else 1
                pieces = numbers_of_whole.chunk(parts, dim)
                numbers_of_whole = torch.cat([x.chunk(TENSOR, dim)[own] for x in pieces], dim)
            parameter.copy_(numbers_of_whole)


def plant_faults(models):
    if is_wrong("missing_forward"):
        for model in models:
            for layer in model.module.decoder.layers:
                if layer.layer_number == 4:
                    layer.mlp.linear_fc2.explicit_expert_comm = True
    if is_wrong("norms_not_reduced"):
        for model in models:
            for name, parameter in model.module.named_parameters():
                if "layernorm" in name:
                    parameter.sequence_parallel = False
    if is_wrong("backward_not_reduced"):
        for model in models:
            for layer in model.module.decoder.layers:
                if layer.layer_number == 3:
                    layer.mlp.linear_fc1.allreduce_dgrad = False
                    layer.mlp.linear_fc1.disable_grad_reduce = True
    if is_wrong("unmasked_words"):
        embedding = models[0].module.embedding.word_embeddings

        def forward(ids):
            first = embedding.vocab_start_index
            x = embedding.weight[(ids - first).clamp(0, len(embedding.weight) - 1)]
            return mappings.reduce_from_tensor_model_parallel_region(x)

        embedding.forward = forward
    if is_wrong("data_not_reduced"):
        for model in models:
            model.finish_grad_sync = lambda *args, **kwargs: None
            model.start_grad_sync = lambda *args, **kwargs: None
            for group in model.bucket_groups:
                group.start_grad_sync = group.finish_grad_sync = lambda *args, **kwargs: None
                group.register_grad_ready = lambda *args, **kwargs: None
    if is_wrong("tied_not_added"):
        module = sys.modules["megatron.core.distributed.finalize_model_grads"]
        module._allreduce_word_embedding_grads = lambda *args, **kwargs: None


def main():
    start()
    config = make_config()
    models = make_models(config)
    plant_faults(models)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="sgd", lr=0.1, clip_grad=0.5, params_dtype=torch.float32), models
    )
    schedule = get_forward_backward_func()
    positions = torch.arange(LENGTH)[None]
    mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), diagonal=1)[None, None]
    generator = torch.Generator().manual_seed(1)
    data_rank = parallel_state.get_data_parallel_rank()
    for _ in range(2):
        ids, targets = torch.randint(WORDS, (2, ROWS, LENGTH), generator=generator)
        own = [x.chunk(MICROBATCHES) for x in (ids, targets)]
        microbatches = [
            tuple(x.chunk(DATA)[data_rank] for x in pair) for pair in zip(*own, strict=True)
        ]
        if is_wrong("stage_microbatch") and parallel_state.is_pipeline_last_stage():
            microbatches = microbatches[1:] + microbatches[:1]
        for model in models:
            model.zero_grad_buffer()
        optimizer.zero_grad()

        def forward_step(data, model):
            own_ids, own_targets = next(data)
            losses = model(own_ids, positions, mask, labels=own_targets)

            def loss_of(losses):
                loss = losses.float().mean()
                return loss, {"loss": loss.detach()}

            return losses, loss_of

        schedule(
            forward_step_func=forward_step,
            data_iterator=[iter(microbatches) for _ in models]
            if VIRTUAL > 1
            else iter(microbatches),
            model=models if VIRTUAL > 1 else models[0],
            num_microbatches=MICROBATCHES,
            seq_length=LENGTH,
            micro_batch_size=ROWS // MICROBATCHES // DATA,
            forward_only=False,
        )
        finalize_model_grads(models)
        optimizer.step()
    torch.distributed.destroy_process_group()


main()
