"""One forward of Cosmos-Predict2 in diffusers, of a video with 24 frames a second.

It saves its weights and inputs to cosmos.pt.
"""

import torch
from diffusers import CosmosTransformer3DModel

torch.manual_seed(0)
settings = {
    "in_channels": 5,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "num_layers": 2,
    "text_embed_dim": 48,
    "adaln_lora_dim": 16,
    "max_size": (8, 16, 16),
    "rope_scale": (1.0, 3.0, 3.0),
    "extra_pos_embed_type": None,
}
inputs = {
    "hidden_states": torch.randn(1, 4, 3, 8, 12),
    "timestep": torch.tensor([500]),
    "encoder_hidden_states": torch.randn(1, 7, 48),
    "fps": 24,
    "condition_mask": torch.zeros(1, 1, 3, 8, 12),
    "padding_mask": torch.zeros(1, 1, 8, 12),
}
model = CosmosTransformer3DModel(**settings).eval()
torch.save({"settings": settings, "inputs": inputs, "weights": model.state_dict()}, "cosmos.pt")
with torch.no_grad():
    output = model(**inputs).sample
print(f"a video of norm {output.norm():.4f}")
