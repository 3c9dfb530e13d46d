"""Eight tokens by `generate` of a Longformer encoder-decoder.

It saves its weights in the folder led.
"""

import torch
from transformers import LEDConfig, LEDForConditionalGeneration

torch.manual_seed(0)
config = LEDConfig(
    vocab_size=99,
    d_model=32,
    encoder_layers=1,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    attention_window=6,
    max_encoder_position_embeddings=64,
    max_decoder_position_embeddings=64,
    init_std=0.3,
)
model = LEDForConditionalGeneration(config).eval()
model.save_pretrained("led")
tokens = torch.arange(5, 17)[None]
generated = model.generate(
    tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=8, do_sample=False, num_beams=1
)
print(f"tokens {generated[0].tolist()}")
