"""Decode latents with a convolutional decoder, each rank a strip of the picture.

    vae_strips.py [columns] [uneven] [ranks=N] [fault=NAME]

A convolution needs the rows of its neighbors next to its own, a group norm the moments of all strips,
and the attention in the middle the keys of all pixels. The strips are rows of the picture or
`columns`; `uneven` strips have five rows of eight, and three.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, os.path.dirname(__file__))

from start import RANK, SIZE, chosen, faulty, group_of_ranks

LATENT, WIDE, GROUPS, SIDE = 4, 8, 2, 8
ALONG = 3 if chosen("columns") else 2
STRIPS = [5, 3] if chosen("uneven") else [SIDE // SIZE] * SIZE


def swap_edges(x, wrong_edges=False):
    """Return the rows of the neighbors that touch the own strip; beyond the picture is nothing."""
    ends = x.narrow(ALONG, 0, 1), x.narrow(ALONG, x.shape[ALONG] - 1, 1)
    first, last = (end.contiguous() for end in (ends[::-1] if wrong_edges else ends))
    above, below, transfers = torch.zeros_like(first), torch.zeros_like(last), []
    if RANK > 0:
        transfers += [dist.P2POp(dist.isend, first, RANK - 1)]
        transfers += [dist.P2POp(dist.irecv, above, RANK - 1)]
    if RANK < SIZE - 1:
        transfers += [dist.P2POp(dist.isend, last, RANK + 1)]
        transfers += [dist.P2POp(dist.irecv, below, RANK + 1)]
    for transfer in dist.batch_isend_irecv(transfers) if transfers else ():
        transfer.wait()
    return above, below


def gather_strips(x, in_turn=True):
    if SIZE == 1:
        return x
    scale = x.shape[ALONG] // STRIPS[RANK]
    length = max(STRIPS) * scale
    padding = [0, 0, 0, 0]
    padding[2 * (3 - ALONG) + 1] = length - x.shape[ALONG]
    padded = F.pad(x, padding)
    parts = [torch.empty_like(padded) for _ in range(SIZE)]
    dist.all_gather(parts, padded)
    parts = [p.narrow(ALONG, 0, rows * scale) for p, rows in zip(parts, STRIPS, strict=True)]
    return torch.cat(parts if in_turn else parts[::-1], ALONG)


class Conv3x3(nn.Conv2d):
    def __init__(self, inputs, outputs, halo="right"):
        super().__init__(inputs, outputs, 3)
        self.halo = halo

    def forward(self, x):
        above, below = swap_edges(x, self.halo == "other edges")
        if self.halo == "none":
            above, below = torch.zeros_like(above), torch.zeros_like(below)
        x = torch.cat([above, x, below], ALONG)
        across = (1, 1, 0, 0) if ALONG == 2 else (0, 0, 1, 1)
        return F.conv2d(F.pad(x, across), self.weight, self.bias)


class GroupNorm(nn.GroupNorm):
    def __init__(self, channels, moments="of all"):
        super().__init__(GROUPS, channels)
        self.moments = moments
        nn.init.normal_(self.weight, 1, 0.2)
        nn.init.normal_(self.bias, 0, 0.2)

    def forward(self, x):
        if SIZE == 1:
            return super().forward(x)
        groups = x.unflatten(1, (GROUPS, -1)).flatten(2)
        if self.moments == "averaged":
            means = torch.stack([groups.mean(-1), groups.square().mean(-1)])
            dist.all_reduce(means)
            mean, square = means / SIZE
        else:
            sums = torch.stack([groups.sum(-1), groups.square().sum(-1)])
            count = torch.tensor(float(groups.shape[-1]))
            if self.moments != "own":
                dist.all_reduce(sums)
                dist.all_reduce(count)
            mean, square = sums / count
        deviation = (square - mean.square() + self.eps).sqrt()
        normal = (groups - mean[..., None]) / deviation[..., None]
        return normal.view_as(x) * self.weight[:, None, None] + self.bias[:, None, None]


class ResnetBlock(nn.Module):
    def __init__(self, halo="right", moments="of all"):
        super().__init__()
        self.norm1, self.conv1 = GroupNorm(WIDE), Conv3x3(WIDE, WIDE, halo)
        self.norm2, self.conv2 = GroupNorm(WIDE, moments), Conv3x3(WIDE, WIDE)

    def forward(self, x):
        y = self.conv1(F.silu(self.norm1(x)))
        return x + self.conv2(F.silu(self.norm2(y)))


class AttentionBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = GroupNorm(WIDE)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(WIDE, WIDE, 1) for _ in range(4))

    def forward(self, x):
        y = self.norm(x)
        k, v = self.k(y), self.v(y)
        if not faulty("own_pixels"):
            k, v = gather_strips(k), gather_strips(v)
        q, k, v = (part.flatten(2).transpose(1, 2) for part in (self.q(y), k, v))
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.proj_out(y.transpose(1, 2).reshape(x.shape))


class UpBlock(nn.Module):
    def __init__(self, halo="right", moments="of all", upsampled="right"):
        super().__init__()
        self.resnet, self.upsample = ResnetBlock(halo, moments), Conv3x3(WIDE, WIDE, upsampled)

    def forward(self, x):
        return self.upsample(F.interpolate(self.resnet(x), scale_factor=2.0))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_in = Conv3x3(LATENT, WIDE)
        self.mid = nn.Sequential(ResnetBlock(), AttentionBlock(), ResnetBlock())
        self.up = nn.ModuleList([
            UpBlock(halo="none" if faulty("no_halo") else "right"),
            UpBlock(
                moments="own" if faulty("own_moments")
                else "averaged" if faulty("averaged_moments") else "of all",
                upsampled="other edges" if faulty("other_edges") else "right",
            ),
        ])  # fmt: skip
        self.norm_out, self.conv_out = GroupNorm(WIDE), Conv3x3(WIDE, 3)

    def forward(self, latents):
        x = self.conv_in(latents.split(STRIPS, ALONG)[RANK])
        x = self.mid(x)
        for block in self.up:
            x = block(x)
        x = self.conv_out(F.silu(self.norm_out(x)))
        return gather_strips(x, not faulty("strips_out_of_turn")).clamp(-3, 3)


def main():
    torch.manual_seed(0)
    decoder = Decoder()
    latents = torch.randn(2, LATENT, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    with group_of_ranks(), torch.no_grad():
        for latent in latents.split(1):
            decoder(latent)


main()
