"""The port: other names, fused projections (q, k and v; gate and up), and no modules for attention
and feed-forward.

It has a bug; `--fixed` runs it without. Run original.py first: the port reads weights and noise
from original.pt.
"""

import math
import sys

import torch
from torch import nn
from torch.nn import functional as F

FIXED = "--fixed" in sys.argv


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ada = nn.Linear(dim, 6 * dim)
        self.ln_a, self.ln_b = (nn.LayerNorm(dim, elementwise_affine=False) for _ in range(2))
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.gate_up, self.down = nn.Linear(dim, 320), nn.Linear(160, dim)

    def forward(self, hidden, cond):
        a_shift, a_scale, a_gate, *rest = self.ada(F.silu(cond)).chunk(6, dim=-1)
        # the bug: shift and scale are swapped
        b_shift, b_scale, b_gate = rest if FIXED else (rest[1], rest[0], rest[2])

        batch, tokens, dim = hidden.shape
        qkv = self.qkv(torch.addcmul(a_shift, self.ln_a(hidden), 1 + a_scale))
        q, k, v = qkv.view(batch, tokens, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.mT / math.sqrt(dim // self.heads), dim=-1)
        hidden = hidden + a_gate * self.proj(
            (weights @ v).permute(0, 2, 1, 3).reshape(batch, tokens, dim)
        )

        gate, up = self.gate_up(torch.addcmul(b_shift, self.ln_b(hidden), 1 + b_scale)).chunk(
            2, dim=-1
        )
        return hidden + b_gate * self.down(F.silu(gate) * up)


class TinyDiT(nn.Module):
    def __init__(self, dim=64, heads=4, depth=3):
        super().__init__()
        self.embed, self.head = nn.Linear(16, dim), nn.Linear(dim, 16)
        self.cond_1, self.cond_2 = nn.Linear(32, dim), nn.Linear(dim, dim)
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(depth))
        self.final_norm = nn.LayerNorm(dim)

    def forward(self, latents, timestep):
        phase = timestep * 1000 * torch.exp(torch.linspace(0, -8, 16))
        cond = self.cond_2(F.silu(self.cond_1(torch.cat([phase.cos(), phase.sin()]))))
        hidden = self.embed(latents)
        for layer in self.layers:
            hidden = layer(hidden, cond)
        return self.head(self.final_norm(hidden))


RENAMED = {
    "patch_in": "embed", "patch_out": "head", "time.0": "cond_1", "time.2": "cond_2",
    "norm_out": "final_norm", "blocks": "layers", "modulation": "ada", "attn.to_out": "proj",
    "ff.down": "down",
}  # fmt: skip
FUSED = {"qkv": ["attn.to_q", "attn.to_k", "attn.to_v"], "gate_up": ["ff.gate", "ff.up"]}


def convert(weights):
    """Return the original's weights under the port's names."""
    converted, remaining = {}, dict(weights)
    for name in weights:
        prefix, _, kind = name.rpartition(".")
        for fused, parts in FUSED.items():
            if prefix.endswith(parts[0]):
                parent = prefix.removesuffix(parts[0])
                tensors = [remaining.pop(f"{parent}{part}.{kind}") for part in parts]
                converted[f"{parent}{fused}.{kind}"] = torch.cat(tensors)
    converted |= remaining
    for old, new in RENAMED.items():
        converted = {name.replace(old, new): value for name, value in converted.items()}
    return converted


@torch.inference_mode()
def main():
    saved = torch.load("original.pt")
    model, latents = TinyDiT(), saved["noise"]
    model.load_state_dict(convert(saved["weights"]))
    steps = 4
    for timestep in torch.linspace(1, 0, steps + 1)[:-1]:
        latents = latents.sub(model(latents, timestep), alpha=1 / steps)
    print(f"the latents end with mean {latents.mean():.4f} and deviation {latents.std():.4f}")


if __name__ == "__main__":
    main()
