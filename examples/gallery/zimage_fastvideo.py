"""The same forward in FastVideo, which loads zimage.pt."""

import fastvideo_on_cpu
import torch
from fastvideo.configs.models.dits.zimage import ZImageDiTConfig
from fastvideo.models.dits.zimage import ZImageTransformer2DModel

saved = torch.load("zimage.pt")
config = ZImageDiTConfig()
config.update_model_arch(saved["settings"])
model = ZImageTransformer2DModel(config, {}).eval().half()
fastvideo_on_cpu.load(model, saved["weights"])
inputs = saved["inputs"]
with torch.no_grad(), fastvideo_on_cpu.forward_context():
    (image,) = model([inputs["latents"]], [inputs["text"]], inputs["timestep"])[0]
print(f"an image of norm {image.norm():.4f}")
