"""The same forward in FastVideo, which loads hunyuan.pt."""

import fastvideo_on_cpu
import torch
from fastvideo.configs.models.dits import HunyuanVideoConfig
from fastvideo.models.dits.hunyuanvideo import HunyuanVideoTransformer3DModel

saved = torch.load("hunyuan.pt")
config = HunyuanVideoConfig()
config.update_model_arch(saved["settings"])
model = HunyuanVideoTransformer3DModel(config, {}).eval()
fastvideo_on_cpu.load(model, saved["weights"])
inputs = saved["inputs"]
with torch.no_grad(), fastvideo_on_cpu.forward_context():
    output = model(
        inputs["hidden_states"],
        [inputs["encoder_hidden_states"], inputs["pooled_projections"]],
        inputs["timestep"],
        guidance=inputs["guidance"],
        encoder_attention_mask=inputs["encoder_attention_mask"],
    )
print(f"a video of norm {output.norm():.4f}")
