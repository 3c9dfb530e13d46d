"""The models that both programs compute: tiny, with random weights, and what is asked of them.

Heads have 32 channels, the fewest that vLLM's attention on a CPU takes. Attention scores, norms
and biases are as large as those of trained models, so that a fault in them shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

Prompts = Sequence[Sequence[int]]

CHUNK = 8  # tokens in one forward of the engine
NEW_TOKENS = 6
# 33 tokens with the new ones, of which the engine computes 30; the first prompt takes two chunks
PROMPTS: Prompts = ((3, 14, 15, 92, 65, 35, 89, 79, 32, 38), (46, 26, 43), (38, 32))
BLOCK = 32  # tokens in a block of the engine's cache, where it matters
# the beginning of both fills a block
_SHARED = tuple(range(40, 40 + BLOCK))
# each needs a second block while decoding, and there are too few for all
LONG_PROMPTS: Prompts = tuple(
    tuple((7 * index + 11 * request) % 200 + 20 for index in range(length))
    for request, length in enumerate((30, 29, 28))
)
PROMPTS_OF_ONE_PREFIX: Prompts = ((*_SHARED, 5, 6, 7), (*_SHARED, 8, 9))

_SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}


def forward_once(checkpoint: Path, dtype: str, tokens: list[list[int]]) -> None:
    """Compute the tokens in one forward of transformers, padded on the right."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=getattr(torch, dtype)
    ).eval()
    length = max(map(len, tokens))
    ids = torch.tensor([row + [0] * (length - len(row)) for row in tokens])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in tokens])
    with torch.no_grad():
        model(ids, attention_mask=mask)


def generate(checkpoint: Path, dtype: str, tokens: list[list[int]], **settings: Any) -> None:
    """Compute the prompts padded on the left, and then one token of each request at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=getattr(torch, dtype)
    ).eval()
    prompts = [row[:-NEW_TOKENS] for row in tokens]
    length = max(map(len, prompts))
    ids = torch.tensor([[0] * (length - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in prompts])
    lengths = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    model.generate(ids, attention_mask=mask, do_sample=False, **lengths, **settings)


def generate_with_static_cache(checkpoint: Path, dtype: str, tokens: list[list[int]]) -> None:
    """Compute as `generate`, with a cache of fixed size and a mask for each query."""
    generate(checkpoint, dtype, tokens, cache_implementation="static", disable_compile=True)


def forward_packed(checkpoint: Path, dtype: str, tokens: list[list[int]]) -> None:
    """Compute the tokens of all requests in one row, whose positions begin anew with each."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=getattr(torch, dtype)
    ).eval()
    ids = torch.tensor([[token for row in tokens for token in row]])
    positions = torch.tensor([[position for row in tokens for position in range(len(row))]])
    with torch.no_grad():
        model(ids, position_ids=positions, use_cache=False)


@dataclass(frozen=True)
class Family:
    """A model and the requests that it serves.

    Attributes:
        architecture: The prefix of its classes in transformers, such as `Llama`.
        settings: Of its configuration, beside the sizes.
        without: The sizes that its configuration does not take.
        engine: Arguments of vLLM's `LLM`.
        in_turn: Whether a request begins once the one before it has ended.
        chunk: How many tokens the engine computes in one forward.
        samples: How many answers to each prompt are sampled; one is the likeliest.
        reference: Has transformers compute tokens: (checkpoint, dtype, tokens of each request).
    """

    architecture: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    without: Sequence[str] = ()
    engine: Mapping[str, Any] = field(default_factory=dict)
    prompts: Prompts = PROMPTS
    in_turn: bool = False
    chunk: int = CHUNK
    samples: int = 1
    reference: Callable[[Path, str, list[list[int]]], None] = forward_once


FAMILIES = {
    "llama": Family("Llama"),
    "llama-tied": Family("Llama", {"tie_word_embeddings": True, "vocab_size": 250}),
    "llama-biases": Family("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-prefix": Family(
        "Llama",
        engine={"enable_prefix_caching": True, "block_size": BLOCK},
        prompts=PROMPTS_OF_ONE_PREFIX,
        in_turn=True,
    ),
    "mistral": Family("Mistral", {"sliding_window": 4}),
    "qwen2": Family("Qwen2"),
    "qwen3": Family("Qwen3", {"tie_word_embeddings": True}),
    "mixtral": Family("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": Family(
        "Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    ),
    "llama-generated": Family("Llama", reference=generate),
    "llama-static": Family("Llama", reference=generate_with_static_cache),
    # requests are preempted, and computed again
    "llama-preempted": Family(
        "Llama",
        engine={"num_gpu_blocks_override": 5, "block_size": BLOCK},
        prompts=LONG_PROMPTS,
        chunk=16,
    ),
    # one key head for all queries; hidden states as wide as the logits
    "llama-multi-query": Family(
        "Llama",
        {
            "hidden_size": 256,
            "intermediate_size": 320,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "mlp_bias": True,
        },
        chunk=16,
    ),
    "llama-fp8-cache": Family("Llama", engine={"kv_cache_dtype": "fp8"}),
    "llama-packed": Family("Llama", reference=forward_packed),
    "llama-samples": Family("Llama", samples=3),
    "llama-adapters": Family("Llama", engine={"enable_lora": True, "max_lora_rank": 8}),
    "gemma2": Family(
        "Gemma2",
        {
            "sliding_window": 4,
            "query_pre_attn_scalar": 40,
            "tie_word_embeddings": True,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma3": Family(
        "Gemma3Text",
        {
            "sliding_window": 5,
            "num_hidden_layers": 4,
            "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 40,
            "tie_word_embeddings": True,
        },
        chunk=6,
    ),
    "gemma4": Family(
        "Gemma4Text",
        {
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "global_head_dim": 64,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 256,
            "tie_word_embeddings": True,
        },
    ),
    "ernie45-moe": Family(
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 64,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
    ),
    "granite": Family(
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    "cohere": Family("Cohere", {"tie_word_embeddings": True, "logit_scale": 0.5}),
    "gpt2": Family(
        "GPT2", {"n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 128, "n_inner": 192}
    ),
    "opt": Family("OPT", {"ffn_dim": 192, "word_embed_proj_dim": 128, "pad_token_id": 1}),
    # heads of its fused projection are in another order in vLLM
    "bloom": Family("Bloom", {"n_layer": 3, "n_head": 4, "tie_word_embeddings": True}),
    # shared experts: inside the experts of vLLM, under another name; with their gate inside
    "glm4-moe": Family(
        "Glm4Moe",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
            "pad_token_id": 0,
        },
    ),
    "qwen2-moe": Family(
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 96,
            "num_key_value_heads": 1,
        },
        chunk=6,
    ),
    "gpt-oss": Family(
        "GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}
    ),
}


def save_checkpoint(family: Family, folder: Path) -> None:
    """Save a model of a family with random weights, in float32."""
    config = getattr(transformers, f"{family.architecture}Config")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config]
    sizes = {name: size for name, size in _SIZES.items() if name not in family.without}
    torch.manual_seed(0)
    model = model_class(config(**{**sizes, **family.settings}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def serve(family: Family, engine: Any) -> list[list[int]]:
    """Have the engine serve the prompts; return the tokens of each request, the new ones last."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0 if family.samples == 1 else 1.0,
        n=family.samples,
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
        detokenize=False,
    )
    batches = [[prompt] for prompt in family.prompts] if family.in_turn else [family.prompts]
    outputs = [
        output
        for batch in batches
        for output in engine.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in batch], params, use_tqdm=False
        )
    ]
    return [
        [*prompt, *answer.token_ids]
        for prompt, output in zip(family.prompts, outputs, strict=True)
        for answer in output.outputs
    ]


def load_engine(family: Family, checkpoint: Path, dtype: str, compiled: bool) -> Any:
    """Return vLLM with a checkpoint, in this process."""
    from vllm import LLM

    return LLM(
        model=str(checkpoint),
        dtype=dtype,
        enforce_eager=not compiled,
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=family.chunk,
        disable_log_stats=True,
        **{"enable_prefix_caching": False, **family.engine},
    )
