"""The same with a static cache."""

import torch
from transformers import LEDForConditionalGeneration

model = LEDForConditionalGeneration.from_pretrained("led").eval()
tokens = torch.arange(5, 17)[None]
generated = model.generate(
    tokens,
    attention_mask=torch.ones_like(tokens),
    max_new_tokens=8,
    do_sample=False,
    num_beams=1,
    cache_implementation="static",
    disable_compile=True,
)
print(f"tokens {generated[0].tolist()}")
