"""The same logits with a cache, as in generation: first eight tokens, then one by one."""

import torch
from transformers import NemotronHForCausalLM

model = NemotronHForCausalLM.from_pretrained("nemotron").eval()
tokens = torch.arange(5, 17)[None]
with torch.no_grad():
    output = model(tokens[:, :8], use_cache=True)
    for token in range(8, 12):
        output = model(tokens[:, token : token + 1], past_key_values=output.past_key_values)
logits = output.logits[:, -1]
print(f"next token {logits.argmax():d}, logits of norm {logits.norm():.4f}")
