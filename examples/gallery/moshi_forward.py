"""The logits of sixteen tokens by one forward of Moshi, whose window is eight tokens.

It saves its weights in the folder moshi.
"""

import torch
from transformers import MoshiConfig, MoshiForCausalLM

torch.manual_seed(0)
config = MoshiConfig(
    vocab_size=99,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    ffn_dim=64,
    sliding_window=8,
    initializer_range=0.3,
)
model = MoshiForCausalLM(config).eval()
model.save_pretrained("moshi")
tokens = torch.arange(5, 21)[None]
with torch.no_grad():
    logits = model(tokens, use_cache=False).logits[:, -1]
print(f"next token {logits.argmax():d}, logits of norm {logits.norm():.4f}")
