"""A U-Net with FiLM and attention: modules beside functions that run channels last."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import Functional, shaken


def timestep_embedding(t, dim):
    half = dim // 2
    freqs = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32) / half)
    args = t[:, None].float() * freqs[None]
    return torch.cat([torch.cos(args), torch.sin(args)], -1)


class ResBlock(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        self.norm_in, self.conv_in = nn.GroupNorm(4, inner), nn.Conv2d(inner, outer, 3, padding=1)
        self.emb, self.norm_out = nn.Linear(32, 2 * outer), nn.GroupNorm(4, outer)
        self.conv_out, self.skip = nn.Conv2d(outer, outer, 3, padding=1), nn.Conv2d(inner, outer, 1)

    def forward(self, x, emb):
        h = self.conv_in(F.silu(self.norm_in(x)))
        scale, shift = self.emb(F.silu(emb))[..., None, None].chunk(2, 1)
        h = self.norm_out(h) * (1 + scale) + shift
        return self.skip(x) + self.conv_out(F.silu(h))


class AttentionBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm, self.qkv = nn.GroupNorm(4, channels), nn.Conv1d(channels, 3 * channels, 1)
        self.proj_out = nn.Conv1d(channels, channels, 1)

    def forward(self, x):
        flat = x.flatten(2)
        q, k, v = self.qkv(self.norm(flat)).chunk(3, 1)
        scale = x.shape[1] ** -0.25
        weight = torch.einsum("bct,bcs->bts", q * scale, k * scale).softmax(-1)
        mixed = torch.einsum("bts,bcs->bct", weight, v)
        return x + self.proj_out(mixed).view_as(x)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.time0, self.time2 = nn.Linear(16, 32), nn.Linear(32, 32)
        self.conv_in, self.down0 = nn.Conv2d(3, 8, 3, padding=1), ResBlock(8, 8)
        self.pool, self.down1 = nn.Conv2d(8, 8, 3, stride=2), ResBlock(8, 16)
        self.mid0, self.attn, self.mid1 = ResBlock(16, 16), AttentionBlock(16), ResBlock(16, 16)
        self.up0, self.up1 = ResBlock(32, 16), ResBlock(24, 8)
        self.upconv, self.up2 = nn.Conv2d(16, 16, 3, padding=1), ResBlock(16, 8)
        self.norm, self.out = nn.GroupNorm(4, 8), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x, t):
        emb = self.time2(F.silu(self.time0(timestep_embedding(t, 16))))
        skips = [self.conv_in(x)]
        skips.append(self.down0(skips[-1], emb))
        h = self.pool(F.pad(skips[-1], (0, 1, 0, 1)))
        h = self.down1(h, emb)
        skips.append(h)
        h = self.mid1(self.attn(self.mid0(h, emb)), emb)
        h = self.up0(torch.cat([h, skips.pop()], 1), emb)
        h = self.upconv(F.interpolate(h, scale_factor=2.0, mode="nearest"))
        h = self.up1(torch.cat([h, skips.pop()], 1), emb)
        h = self.up2(torch.cat([h, skips.pop()], 1), emb)
        return self.out(F.silu(self.norm(h)))


class PortUNet(Functional):
    def conv(self, name, x, **how):
        return F.conv2d(x, self.w(name, "weight"), self.w(name, "bias"), **how)

    def norm_of(self, name, x, act=True):
        y = x.unflatten(1, (4, -1))
        mean, var = y.mean((2, 3, 4), keepdim=True), y.var((2, 3, 4), keepdim=True, unbiased=False)
        y = ((y - mean) / torch.sqrt(var + 1e-5)).flatten(1, 2)
        y = y * self.w(name, "weight").view(1, -1, 1, 1) + self.w(name, "bias").view(1, -1, 1, 1)
        return y * torch.sigmoid(y) if act else y

    def res(self, name, x, emb):
        h = self.conv(f"{name}.conv_in", self.norm_of(f"{name}.norm_in", x), padding=1)
        film = F.linear(emb, self.w(name, "emb.weight"), self.w(name, "emb.bias"))
        half = film.shape[1] // 2
        scale, shift = film[:, :half], film[:, half:]
        h = self.norm_of(f"{name}.norm_out", h, act=False)
        h = torch.addcmul(shift[:, :, None, None], h, scale[:, :, None, None] + 1)
        h = self.conv(f"{name}.conv_out", F.silu(h), padding=1)
        return h + self.conv(f"{name}.skip", x)

    def attend(self, x):
        tokens = self.norm_of("attn.norm", x, act=False).permute(0, 2, 3, 1).flatten(1, 2)
        weights, biases = (
            self.w("attn.qkv.weight")[..., 0].chunk(3),
            self.w("attn.qkv.bias").chunk(3),
        )
        q, k, v = (
            F.linear(tokens, weight, bias)[:, None]
            for weight, bias in zip(weights, biases, strict=True)
        )
        mixed = F.scaled_dot_product_attention(q, k, v)[:, 0]
        mixed = F.linear(
            mixed, self.w("attn.proj_out.weight")[..., 0], self.w("attn.proj_out.bias")
        )
        return x + mixed.transpose(1, 2).unflatten(2, x.shape[2:])

    def forward(self, sample, timestep):
        freqs = 10000 ** (-torch.arange(8).float() / 8)
        angles = timestep.float().outer(freqs)
        emb = torch.cat([angles.cos(), angles.sin()], 1)
        emb = F.linear(emb, self.time0_weight, self.time0_bias)
        emb = F.silu(F.linear(F.silu(emb), self.time2_weight, self.time2_bias))
        first = self.conv("conv_in", sample.to(memory_format=torch.channels_last), padding=1)
        second = self.res("down0", first, emb)
        x = self.conv("pool", F.pad(second, (0, 1, 0, 1)), stride=2)
        third = self.res("down1", x, emb)
        x = self.res("mid0", third, emb)
        x = self.res("mid1", self.attend(x), emb)
        x = self.res("up0", torch.cat((x, third), 1), emb)
        x = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
        x = self.conv("upconv", x, padding=1)
        x = self.res("up1", torch.cat((x, second), 1), emb)
        x = self.res("up2", torch.cat((x, first), 1), emb)
        return self.conv("out", self.norm_of("norm", x), padding=1)


def build():
    reference = shaken(UNet())
    port, x, t = PortUNet(reference), torch.randn(2, 3, 8, 8), torch.tensor([310, 77])
    return lambda: reference(x, t), lambda: port(x, t)
