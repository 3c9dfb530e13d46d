"""Sample from a diffusion transformer whose image tokens are split over ranks, as Ulysses does it.

    ulysses_dit.py [ragged] [fused] [ranks=N] [fault=NAME]

Each rank has some tokens and all heads. For self-attention an all-to-all gives it all tokens of some
heads, and another one brings the tokens back. `ragged` has 11 tokens, so that the last rank has
padding. `fused` projects queries, keys and values of the ranks together.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, os.path.dirname(__file__))

from start import RANK, SIZE, WORDS, chosen, faulty, group_of_ranks

BATCH, CHANNELS, DIM, HEADS, DEPTH, STEPS = 2, 6, 32, 4, 2, 3
TOKENS = 11 if "ragged" in WORDS else 12
PADDED = -(-TOKENS // SIZE) * SIZE
LOCAL = PADDED // SIZE


def scatter_heads(x):
    """[batch, own tokens, all heads, size] -> [batch, all tokens, own heads, size]"""
    if SIZE == 1:
        return x
    parts = torch.stack(x.chunk(SIZE, dim=2))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts)
    return torch.cat(tuple(received), dim=1)


def gather_heads(x, in_turn=True):
    """[batch, all tokens, own heads, size] -> [batch, own tokens, all heads, size]"""
    if SIZE == 1:
        return x
    parts = torch.stack(x.chunk(SIZE, dim=1))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts)
    return torch.cat(tuple(received) if in_turn else tuple(received)[::-1], dim=2)


class SelfAttention(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.index = index
        self.to_q, self.to_k, self.to_v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.to_out = nn.Linear(DIM, DIM)

    def fuse(self):
        self.to_qkv = nn.Linear(DIM, 3 * DIM)
        parts = self.to_q, self.to_k, self.to_v
        for name in ("weight", "bias"):
            whole = torch.cat([getattr(part, name).data for part in parts])
            setattr(self.to_qkv, name, nn.Parameter(whole))
        del self.to_q, self.to_k, self.to_v

    def forward(self, x):
        if hasattr(self, "to_qkv"):
            qkv = self.to_qkv(x).chunk(3, dim=-1)
        else:
            qkv = self.to_q(x), self.to_k(x), self.to_v(x)
        q, k, v = (scatter_heads(part.unflatten(-1, (HEADS, -1))).transpose(1, 2) for part in qkv)
        mask = (torch.arange(k.shape[2]) < TOKENS)[None]
        if faulty("padding_attended"):
            mask = torch.ones_like(mask)
        scale = q.shape[-1] ** -0.5
        if faulty("scale_of_local_heads") and self.index == 1:
            scale = (DIM / q.shape[1]) ** -0.5
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        in_turn = not (faulty("heads_out_of_turn") and self.index == 1)
        return self.to_out(gather_heads(y.transpose(1, 2), in_turn).flatten(2))


class CrossAttention(nn.Module):
    """The words of the prompt are on each rank, so that nothing is exchanged."""

    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.to_out = nn.Linear(DIM, DIM)

    def forward(self, x, words):
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in (self.to_q(x), self.to_k(words), self.to_v(words))
        )
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.modulation = nn.Linear(DIM, 6 * DIM)
        self.norm1, self.norm3 = (nn.LayerNorm(DIM, elementwise_affine=False) for _ in range(2))
        self.norm2 = nn.LayerNorm(DIM)
        self.attn1, self.attn2 = SelfAttention(index), CrossAttention()
        self.ff = nn.Sequential(
            nn.Linear(DIM, 2 * DIM), nn.GELU("tanh"), nn.Linear(2 * DIM, DIM)
        )  # fmt: skip

    def forward(self, x, words, time):
        shifts = self.modulation(F.silu(time))[:, None].chunk(6, dim=-1)
        x = x + shifts[2] * self.attn1(self.norm1(x) * (1 + shifts[0]) + shifts[1])
        x = x + self.attn2(self.norm2(x), words)
        return x + shifts[5] * self.ff(self.norm3(x) * (1 + shifts[3]) + shifts[4])


class DiffusionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed, self.pos_embed = nn.Linear(CHANNELS, DIM), nn.Embedding(16, DIM)
        self.time_embed = nn.Sequential(nn.Linear(8, DIM), nn.SiLU(), nn.Linear(DIM, DIM))
        self.transformer_blocks = nn.ModuleList(TransformerBlock(i) for i in range(DEPTH))
        self.norm_out, self.proj_out = nn.LayerNorm(DIM), nn.Linear(DIM, CHANNELS)

    def forward(self, latents, timestep, words):
        positions = torch.arange(LOCAL)
        if not faulty("positions_from_zero"):
            positions = positions + RANK * LOCAL
        x = self.patch_embed(latents) + self.pos_embed(positions)
        angles = timestep * 2.0 ** torch.arange(4)
        time = self.time_embed(torch.cat([angles.sin(), angles.cos()])[None])
        for block in self.transformer_blocks:
            x = block(x, words, time)
        return self.proj_out(self.norm_out(x))


@torch.no_grad()
def sample(model):
    generator = torch.Generator().manual_seed(3)
    words = torch.randn(BATCH, 5, DIM, generator=generator)
    if faulty("noise_of_own"):
        generator.manual_seed(3 + RANK)
        torch.randn(BATCH, 5, DIM, generator=generator)
    latents = torch.randn(BATCH, TOKENS, CHANNELS, generator=generator)
    latents = F.pad(latents, (0, 0, 0, PADDED - TOKENS)).chunk(SIZE, dim=1)[RANK]
    times = torch.linspace(1, 0, STEPS + 1)
    for index in range(STEPS):
        late = faulty("late_timestep") and RANK == SIZE - 1 and index > 0
        velocity = model(latents, times[index - 1 if late else index], words)
        latents = latents + (times[index + 1] - times[index]) * velocity
    return latents


def main():
    torch.manual_seed(0)
    model = DiffusionTransformer().eval()
    if chosen("fused"):
        for block in model.transformer_blocks:
            block.attn1.fuse()
    with group_of_ranks():
        sample(model)


main()
