"""The logits of twelve tokens by one forward of Nemotron-H.

It saves its weights in the folder nemotron.
"""

import torch
from transformers import NemotronHConfig, NemotronHForCausalLM

torch.manual_seed(0)
config = NemotronHConfig(
    vocab_size=99,
    hidden_size=32,
    layers_block_type=["mamba", "attention"],
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=64,
    mamba_num_heads=4,
    mamba_head_dim=16,
    ssm_state_size=16,
    n_groups=2,
    initializer_range=0.3,
)
model = NemotronHForCausalLM(config).eval()
model.save_pretrained("nemotron")
tokens = torch.arange(5, 17)[None]
with torch.no_grad():
    logits = model(tokens, use_cache=False).logits[:, -1]
print(f"next token {logits.argmax():d}, logits of norm {logits.norm():.4f}")
