"""Denoise a video whose frames are divided among ranks.

    video_frames.py [gathered] [ranks=N] [fault=NAME]

Space is attended to frame by frame. For attention over time an all-to-all exchanges frames for places,
or with `gathered` every rank has the keys and values of all frames. A causal convolution over time needs
the last two frames of the rank before.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, os.path.dirname(__file__))

from start import RANK, SIZE, chosen, faulty, group_of_ranks

FRAMES, PLACES, CHANNELS, WIDTH, HEADS, STEPS = 8, 8, 4, 16, 2, 2
OWN = FRAMES // SIZE


def frames_to_places(x):
    """[own frames, places, width] -> [frames, own places, width]"""
    if SIZE == 1:
        return x
    sent = [part.contiguous() for part in x.chunk(SIZE, 1)]
    received = [torch.empty_like(part) for part in sent]
    dist.all_to_all(received, sent)
    return torch.cat(received)


def places_to_frames(x):
    """[frames, own places, width] -> [own frames, places, width]"""
    if SIZE == 1:
        return x
    sent = [part.contiguous() for part in x.chunk(SIZE)]
    received = [torch.empty_like(part) for part in sent]
    dist.all_to_all(received, sent)
    return torch.cat(received, 1)


def all_frames(x):
    parts = [torch.empty_like(x) for _ in range(SIZE)]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def frames_before(x, count):
    """Return the last frames of the rank before; before the first one the first frame, repeated."""
    first = x[:1].expand(count, *x.shape[1:]).contiguous()
    if SIZE == 1:
        return first
    tails = [torch.empty_like(first) for _ in range(SIZE)]
    dist.all_gather(tails, x[-count:].contiguous())
    if RANK == 0 or faulty("own_first_frame"):
        return first
    return tails[RANK].contiguous() if faulty("own_tail") else tails[RANK - 1]


def attend(q, k, v, mask=None):
    q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class SpatialAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.out(attend(*self.qkv(x).chunk(3, -1)))


class TemporalAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        queries = torch.arange(FRAMES)
        if faulty("own_frames"):
            mask = torch.ones(OWN, OWN, dtype=torch.bool).tril()
            y = attend(*(part.transpose(0, 1) for part in (q, k, v)), mask).transpose(0, 1)
        elif chosen("gathered"):
            queries = queries[:OWN] if faulty("mask_from_zero") else queries[RANK * OWN :][:OWN]
            mask = queries[:, None] >= torch.arange(FRAMES)
            parts = (q, all_frames(k), all_frames(v))
            y = attend(*(part.transpose(0, 1) for part in parts), mask).transpose(0, 1)
        else:
            mask = queries[:, None] >= queries
            parts = [frames_to_places(part) for part in (q, k, v)]
            if faulty("values_kept") and RANK == 0:
                parts[2] = parts[2].roll(OWN, 0)
            y = attend(*(part.transpose(0, 1) for part in parts), mask)
            y = places_to_frames(y.transpose(0, 1))
        return self.out(y)


class TemporalConvolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, groups=2)

    def forward(self, x):
        x = torch.cat([frames_before(x, 2), x])
        return self.conv(F.silu(x).permute(1, 2, 0)).permute(2, 0, 1)


class VideoBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_s, self.spatial = nn.LayerNorm(WIDTH), SpatialAttention()
        self.norm_t, self.temporal = nn.LayerNorm(WIDTH), TemporalAttention()
        self.conv_t = TemporalConvolution()
        self.norm_m, self.mlp = nn.LayerNorm(WIDTH), nn.Sequential(
            nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)
        )  # fmt: skip

    def forward(self, x):
        x = x + self.spatial(self.norm_s(x))
        x = x + self.temporal(self.norm_t(x))
        x = x + self.conv_t(x)
        return x + self.mlp(self.norm_m(x))


class VideoDenoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_tokens, self.to_pixels = nn.Linear(CHANNELS, WIDTH), nn.Linear(WIDTH, CHANNELS)
        self.frame_embed, self.level = nn.Embedding(FRAMES, WIDTH), nn.Linear(1, WIDTH)
        self.places = nn.Parameter(torch.randn(PLACES, WIDTH) / 2)
        self.layers = nn.ModuleList(VideoBlock() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, video, level):
        first = RANK * OWN
        if faulty("late_by_one") and RANK > 0:
            first -= 1
        index = torch.arange(first, first + OWN)
        x = self.to_tokens(video) + self.places + self.frame_embed(index)[:, None]
        x = x + self.level(level)
        for layer in self.layers:
            x = layer(x)
        return self.to_pixels(self.norm(x))


class Sampler(nn.Module):
    """Every rank has the whole video between two steps, and denoises its own frames."""

    def __init__(self):
        super().__init__()
        self.denoiser = VideoDenoiser()

    def forward(self, video):
        for step in range(STEPS):
            level = torch.tensor([1 - step / STEPS])
            own = video[RANK * OWN :][:OWN]
            noise = self.denoiser(own, level)
            if SIZE > 1:
                noise = all_frames(noise)
            if faulty("first_guess_kept") and RANK == 1 and step > 0:
                noise = self.last
            video, self.last = video - noise / STEPS, noise
        return video


def main():
    torch.manual_seed(0)
    sampler = Sampler().eval()
    video = torch.randn(FRAMES, PLACES, CHANNELS, generator=torch.Generator().manual_seed(1))
    with group_of_ranks(), torch.inference_mode():
        sampler(video)


main()
