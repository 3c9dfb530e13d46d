"""The logits after a prompt of sixteen tokens, by `generate` of DeepSeek-V4.

It saves its weights in the folder deepseek.
"""

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

torch.manual_seed(0)
config = DeepseekV4Config(
    vocab_size=99,
    hidden_size=32,
    num_hidden_layers=1,
    layer_types=["compressed_sparse_attention"],
    mlp_layer_types=["moe"],
    num_attention_heads=4,
    head_dim=16,
    q_lora_rank=16,
    o_groups=2,
    o_lora_rank=16,
    index_n_heads=2,
    index_head_dim=16,
    moe_intermediate_size=32,
    n_routed_experts=4,
    num_experts_per_tok=2,
    initializer_range=0.3,
    pad_token_id=0,
    eos_token_id=2,
)
model = DeepseekV4ForCausalLM(config).eval()
model.save_pretrained("deepseek")
prompt = torch.arange(5, 21)[None]
generated = model.generate(
    prompt,
    attention_mask=torch.ones_like(prompt),
    max_new_tokens=1,
    do_sample=False,
    output_logits=True,
    return_dict_in_generate=True,
)
logits = generated.logits[0][0]
print(f"next token {logits.argmax():d}, logits of norm {logits.norm():.4f}")
