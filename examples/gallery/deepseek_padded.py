"""The same prompt in a batch with one of nineteen tokens, padded to the left."""

import torch
from transformers import DeepseekV4ForCausalLM

model = DeepseekV4ForCausalLM.from_pretrained("deepseek").eval()
prompts = torch.stack([torch.arange(60, 79), torch.arange(2, 21)])
prompts[1, :3] = 0
generated = model.generate(
    prompts,
    attention_mask=(prompts != 0).long(),
    max_new_tokens=1,
    do_sample=False,
    output_logits=True,
    return_dict_in_generate=True,
)
logits = generated.logits[0][1]
print(f"next token {logits.argmax():d}, logits of norm {logits.norm():.4f}")
