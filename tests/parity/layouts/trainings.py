"""More layouts, clean and with faults: trainings over ranks by torch's own means, a llama whose
collectives are between its modules, and the same by Megatron-core and DeepSpeed.

Programs, options and expectations are as in `corpus.py`.
"""

from __future__ import annotations

from tests.parity.layouts.corpus import Expected

# program, options
CLEAN: tuple[tuple[str, str], ...] = (
    ("torch", "ddp"),
    ("torch", "fsdp1"),
    ("torch", "fsdp1_hybrid"),
    ("torch", "fsdp2_hybrid"),
    ("torch", "fsdp2_tensor"),
    ("torch", "loss_parallel"),
    ("torch", "gpipe"),
    ("torch", "1f1b"),
    ("torch", "interleaved"),
    ("llama", "tensor=2 gated"),
    ("llama", "tensor=2 tied clip"),
    ("llama", "tensor=4"),
    ("llama", "tensor=2 dropout"),
    ("llama", "tensor=2 context=2 ring"),
    ("llama", "tensor=2 data=2"),
    ("llama", "data=2 context=2 ring clip"),
)

_TERMS = "partial_sum"
_LAYER = "layers.1"
_ATTENTION, _MLP = f"{_LAYER}.self_attn", f"{_LAYER}.mlp"
_LOSS = "", "loss", "loss"
_GRADIENTS = "", "param_grad", "backward"
_UPDATE = "", "param", "update"

# program, options, fault -> what the first finding says
FAULTS: dict[tuple[str, str, str], Expected] = {
    ("torch", "ddp", "never_synchronized"): Expected(*_GRADIENTS, 0, _TERMS),
    ("torch", "ddp", "same_rows"): Expected("", "in[0]", "forward", 1, "another_ranks_part"),
    ("torch", "ddp", "local_tokens"): Expected(*_LOSS, 0, "mean_of_means"),
    ("torch", "ddp", "another_rate"): Expected(*_UPDATE, 1, "learning_rate"),
    ("torch", "fsdp1", "local_norm"): Expected(*_GRADIENTS, 0, "clipped_by_own_norm"),
    ("torch", "fsdp2_hybrid", "replicas_not_reduced"): Expected(*_UPDATE, None, "frozen", "place"),
    ("torch", "fsdp2_tensor", "same_rows"): Expected(
        "", "in[0]", "forward", None, "another_ranks_part", "place"
    ),
    ("torch", "fsdp2_tensor", "local_tokens"): Expected(*_LOSS, 0, None, "place"),
    ("torch", "fsdp2_tensor", "another_rate"): Expected(*_UPDATE, 3, "learning_rate"),
    ("torch", "1f1b", "layers_of_another_stage"): Expected(
        "layers.2.q", "param.weight", "forward", 1, "other_weight"
    ),
    ("torch", "interleaved", "layers_of_another_stage"): Expected(
        "layers.1.q", "param.weight", "forward", 1, "other_weight"
    ),
    ("torch", "gpipe", "targets_of_another_microbatch"): Expected(*_LOSS, 1, None),
    ("torch", "gpipe", "local_norm"): Expected(*_GRADIENTS, 0, "clipped_by_own_norm"),
    ("llama", "tensor=2", f"{_ATTENTION}.o_proj:mean"): Expected(
        _ATTENTION, "out", "forward", 0, "averaged_twice"
    ),
    ("llama", "tensor=2", f"{_MLP}.down_proj:missing"): Expected(
        f"{_MLP}.down_proj", "out", "forward", 0, _TERMS
    ),
    ("llama", "tensor=2 data=2", f"{_MLP}.down_proj:another_group"): Expected(
        _MLP, "out", "forward", 0, "another_group"
    ),
    ("llama", "tensor=2", f"{_MLP}:missing_backward"): Expected(
        f"{_LAYER}.post_attention_layernorm", "grad", "backward", 0, _TERMS
    ),
    ("llama", "tensor=2", f"{_MLP}:doubled"): Expected(_MLP, "out", "forward", 0, "reduced_twice"),
    ("llama", "tensor=2", f"{_MLP}:shard"): Expected(
        f"{_MLP}.up_proj", "param.weight", "forward", 1, "another_ranks_part"
    ),
    ("llama", "tensor=2", f"{_MLP}:swapped"): Expected(
        f"{_MLP}.down_proj", "param.weight", "forward", 0, "another_ranks_part"
    ),
    ("llama", "tensor=2 gated", f"{_MLP}:halves"): Expected(
        f"{_MLP}.dropout", "in[0]", "forward", None, None, "near"
    ),
    ("llama", "tensor=2 dropout", f"{_LAYER}.dropout:stream"): Expected(
        f"{_LAYER}.dropout", "out", "forward", 1, "random_stream"
    ),
    ("llama", "tensor=2 dropout", f"{_MLP}.dropout:equal_stream"): Expected(
        f"{_MLP}.dropout", "out", "forward", None, "random_stream", "place"
    ),
    ("llama", "tensor=2", "embedding_rows"): Expected(
        "embed_tokens", "param.weight", "forward", 0, "another_ranks_part"
    ),
    ("llama", "tensor=2", "unmasked_words"): Expected("layers.0", "in[0]", "forward", 0, None),
    ("llama", "tensor=2", "unmasked_targets"): Expected(*_LOSS, 0, None),
    ("llama", "tensor=2", "local_normalizer"): Expected(*_LOSS, 0, "ranks_differ"),
    ("llama", "context=2", f"{_ATTENTION}:local_positions"): Expected(
        f"{_ATTENTION}.o_proj", "in[0]", "forward", None, None, "place"
    ),
    ("llama", "context=2 ring", f"{_ATTENTION}:chunk_missing"): Expected(
        f"{_ATTENTION}.o_proj", "in[0]", "forward", 1, None
    ),
    ("llama", "context=2 ring", f"{_ATTENTION}:not_rescaled"): Expected(
        f"{_ATTENTION}.o_proj", "in[0]", "forward", None, None, "place"
    ),
    ("llama", "data=2", "padding_counted"): Expected(*_LOSS, None, None, "place"),
    ("llama", "data=2", "local_tokens"): Expected(*_LOSS, 0, "mean_of_means"),
    ("llama", "tensor=2 data=2", "world_size"): Expected(*_GRADIENTS, None, "scaled"),
    ("llama", "tensor=2 clip", "head_norms"): Expected(
        "layers.2.self_attn.k_norm", "param_grad.weight", "backward", 0, _TERMS
    ),
    ("llama", "tensor=4", "shared_heads"): Expected(
        "layers.2.self_attn.v_proj", "param_grad.weight", "backward", 0, _TERMS
    ),
    ("llama", "data=2 clip", "data_not_reduced"): Expected(*_GRADIENTS, 0, _TERMS),
    ("llama", "tensor=2 clip", "local_clip"): Expected(*_GRADIENTS, 0, "clipped_by_own_norm"),
    ("llama", "data=2", "decay_on_rank"): Expected(*_UPDATE, 1, "weight_decay"),
    ("llama", "data=2", "stale"): Expected(f"{_LAYER}.input_layernorm", "out", "forward", 1, None),
}

# of frameworks that `make test-frameworks` installs
FRAMEWORK_CLEAN: tuple[tuple[str, str], ...] = (
    ("megatron", "tensor=2"),
    ("megatron", "tensor=2 sequence swiglu"),
    ("megatron", "tensor=4 groups"),
    ("megatron", "data=2"),
    ("megatron", "pipeline=2 tied"),
    ("megatron", "pipeline=2 virtual=2"),
    ("megatron", "tensor=2 pipeline=2 tied"),
    ("deepspeed", "stage=1"),
    ("deepspeed", "stage=2"),
)
_DECODER = "decoder.layers"
FRAMEWORK_FAULTS: dict[tuple[str, str, str], Expected] = {
    ("megatron", "tensor=2", "missing_forward"): Expected(
        f"{_DECODER}.3.mlp.linear_fc2", "out[0]", "forward", 0, _TERMS
    ),
    ("megatron", "tensor=2", "backward_not_reduced"): Expected(
        f"{_DECODER}.2.mlp.linear_fc1", "grad_in[0]", "backward", 0, _TERMS
    ),
    ("megatron", "tensor=2", "shard"): Expected(
        f"{_DECODER}.3.mlp.linear_fc1", "out[0]", "forward", 0, "another_ranks_part"
    ),
    ("megatron", "tensor=2 sequence", "norms_not_reduced"): Expected(
        "decoder.final_layernorm", "param_grad.bias", "backward", 0, _TERMS
    ),
    ("megatron", "tensor=2", "unmasked_words"): Expected(
        "embedding.word_embeddings", "out", "forward", 0, None
    ),
    ("megatron", "data=2", "data_not_reduced"): Expected(
        "output_layer", "param_grad.weight", "backward", 0, _TERMS
    ),
    ("megatron", "pipeline=2", "layers_of_another_stage"): Expected(
        f"{_DECODER}.2.input_layernorm", "param.weight", "forward", 1, "other_weight"
    ),
    ("megatron", "pipeline=2", "stage_microbatch"): Expected(
        "", "in.labels", "forward", 1, "other_inputs"
    ),
    ("megatron", "pipeline=2 tied", "tied_not_added"): Expected(
        "embedding.word_embeddings", "param_grad.weight", "backward", 0, "untied"
    ),
    ("deepspeed", "stage=1", "same_rows"): Expected(
        "", "in[0]", "forward", 1, "another_ranks_part"
    ),
    ("deepspeed", "stage=2", "local_tokens"): Expected(*_LOSS, 0, "mean_of_means"),
}
