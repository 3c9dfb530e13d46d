"""The original: a small diffusion transformer that denoises in four steps.

It saves its weights and the noise to original.pt.
"""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu

WIDTH, HEADS, DEPTH, STEPS = 64, 4, 3, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in (self.to_q, self.to_k, self.to_v)
        )
        return self.to_out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(WIDTH, 160),
            nn.Linear(WIDTH, 160),
            nn.Linear(160, WIDTH),
        )

    def forward(self, x):
        return self.down(silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.attn, self.ff = Attention(), FeedForward()

    def forward(self, x, time):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(silu(time)).chunk(6, -1)
        x = x + gate1 * self.attn(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.ff(self.norm2(x) * (1 + scale2) + shift2)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_in, self.patch_out = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 16)
        self.time = nn.Sequential(nn.Linear(32, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm_out = nn.LayerNorm(WIDTH)

    def forward(self, latents, time):
        angles = 1000 * time * torch.exp(torch.linspace(0, -8, 16))
        time = self.time(torch.cat([angles.cos(), angles.sin()]))
        x = self.patch_in(latents)
        for block in self.blocks:
            x = block(x, time)
        return self.patch_out(self.norm_out(x))


@torch.no_grad()
def main():
    torch.manual_seed(0)
    model, latents = Denoiser(), torch.randn(1, 24, 16)
    torch.save({"weights": model.state_dict(), "noise": latents}, "original.pt")
    for step in range(STEPS):
        latents = latents - model(latents, torch.tensor(1 - step / STEPS)) / STEPS
    print(f"the latents end with mean {latents.mean():.4f} and deviation {latents.std():.4f}")


if __name__ == "__main__":
    main()
