"""One forward of HunyuanVideo in diffusers: seven tokens of text, of which two are padding.

It saves its weights and inputs to hunyuan.pt.
"""

import torch
from diffusers import HunyuanVideoTransformer3DModel

torch.manual_seed(0)
settings = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "num_layers": 2,
    "num_single_layers": 2,
    "num_refiner_layers": 2,
    "patch_size": 2,
    "patch_size_t": 1,
    "text_embed_dim": 48,
    "pooled_projection_dim": 24,
    "rope_axes_dim": (8, 12, 12),
}
inputs = {
    "hidden_states": torch.randn(1, 4, 3, 8, 12),
    "timestep": torch.tensor([500]),
    "encoder_hidden_states": torch.randn(1, 7, 48),
    "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0]]),
    "pooled_projections": torch.randn(1, 24),
    "guidance": torch.tensor([6016.0]),
}
model = HunyuanVideoTransformer3DModel(**settings).eval()
torch.save({"settings": settings, "inputs": inputs, "weights": model.state_dict()}, "hunyuan.pt")
with torch.no_grad():
    output = model(**inputs).sample
print(f"a video of norm {output.norm():.4f}")
