"""The same forward in FastVideo, which loads cosmos.pt."""

import fastvideo_on_cpu
import torch
from fastvideo.configs.models.dits import CosmosVideoConfig
from fastvideo.models.dits.cosmos import CosmosTransformer3DModel

saved = torch.load("cosmos.pt")
config = CosmosVideoConfig()
config.update_model_arch(saved["settings"])
model = CosmosTransformer3DModel(config, {}).eval()
fastvideo_on_cpu.load(model, saved["weights"])
with torch.no_grad(), fastvideo_on_cpu.forward_context():
    (output,) = model(**saved["inputs"], return_dict=False)
print(f"a video of norm {output.norm():.4f}")
