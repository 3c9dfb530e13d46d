"""The same logits by `generate`, with the weights of the folder roberta."""

import torch
from transformers import RobertaForCausalLM

model = RobertaForCausalLM.from_pretrained("roberta").eval()
tokens = torch.arange(5, 15)[None]
generated = model.generate(
    tokens,
    max_new_tokens=1,
    do_sample=False,
    output_logits=True,
    return_dict_in_generate=True,
)
logits = generated.logits[0]
print(f"next token {logits.argmax():d}, logits of norm {logits.norm():.4f}")
