"""The logits of the next token by one forward of RoBERTa as a decoder.

It saves its weights in the folder roberta.
"""

import torch
from transformers import RobertaConfig, RobertaForCausalLM

torch.manual_seed(0)
config = RobertaConfig(
    vocab_size=99,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=66,
    initializer_range=0.3,
    is_decoder=True,
)
model = RobertaForCausalLM(config).eval()
model.save_pretrained("roberta")
tokens = torch.arange(5, 15)[None]
with torch.no_grad():
    logits = model(tokens).logits[:, -1]
print(f"next token {logits.argmax():d}, logits of norm {logits.norm():.4f}")
