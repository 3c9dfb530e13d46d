"""The same logits with a cache, as in generation: first six tokens, then one by one."""

import torch
from transformers import MoshiForCausalLM

model = MoshiForCausalLM.from_pretrained("moshi").eval()
tokens = torch.arange(5, 21)[None]
with torch.no_grad():
    output = model(tokens[:, :6], use_cache=True)
    for token in range(6, 16):
        output = model(tokens[:, token : token + 1], past_key_values=output.past_key_values)
logits = output.logits[:, -1]
print(f"next token {logits.argmax():d}, logits of norm {logits.norm():.4f}")
