"""One forward of Z-Image in diffusers, in fp16. One number of the embedded text is 300.

It saves its weights and inputs to zimage.pt.
"""

import torch
from diffusers import ZImageTransformer2DModel

torch.manual_seed(0)
settings = {
    "in_channels": 4,
    "dim": 64,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 2,
    "cap_feat_dim": 48,
    "axes_dims": (8, 12, 12),
    "axes_lens": (128, 32, 32),
}
latents, text = torch.randn(4, 1, 8, 12), torch.randn(7, 48)
text[0, 3] = 300
inputs = {"latents": latents.half(), "text": text.half(), "timestep": torch.tensor([0.5])}
model = ZImageTransformer2DModel(**settings).eval()
for token in (model.x_pad_token, model.cap_pad_token):
    torch.nn.init.normal_(token, std=0.02)
model.half()
torch.save({"settings": settings, "inputs": inputs, "weights": model.state_dict()}, "zimage.pt")
with torch.no_grad():
    (image,) = model([inputs["latents"]], inputs["timestep"], [inputs["text"]]).sample
print(f"an image of norm {image.norm():.4f}")
