"""A causal video autoencoder: whole clips beside chunks with a cache of past frames."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import Functional, shaken

LOW, HIGH, LATENT, GROUPS, SCALING = 8, 16, 4, 4, 0.7


class CausalConv3d(nn.Module):
    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.conv, self.stride = nn.Conv3d(inputs, outputs, 3, stride=stride), stride

    def forward(self, x):
        first = x[:, :, :1].expand(-1, -1, 2, -1, -1)
        x = torch.cat([first, x], dim=2)
        before = 1 if self.stride == 1 else 0
        return self.conv(F.pad(x, (before, 1, before, 1)))


class FrameNorm(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, channels, eps=1e-6)

    def forward(self, x):
        frames = x.transpose(1, 2)
        normed = self.norm(frames.flatten(0, 1))
        return normed.unflatten(0, frames.shape[:2]).transpose(1, 2)


class ResBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm1, self.conv1 = FrameNorm(channels), CausalConv3d(channels, channels)
        self.norm2, self.conv2 = FrameNorm(channels), CausalConv3d(channels, channels)

    def forward(self, x):
        h = self.conv1(F.silu(self.norm1(x)))
        return x + self.conv2(F.silu(self.norm2(h)))


class TemporalAttention(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm = FrameNorm(channels)
        self.qkv, self.proj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, x):
        b, c, t, h, w = x.shape
        tokens = self.norm(x).permute(0, 3, 4, 2, 1).reshape(b * h * w, t, c)
        q, k, v = self.qkv(tokens).chunk(3, dim=-1)
        mixed = self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + mixed.reshape(b, h, w, t, c).permute(0, 4, 3, 1, 2)


class VideoVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_in, self.block = CausalConv3d(3, LOW), ResBlock(LOW)
        self.down, self.attn = CausalConv3d(LOW, HIGH, stride=2), TemporalAttention(HIGH)
        self.norm_out, self.conv_out = FrameNorm(HIGH), CausalConv3d(HIGH, 2 * LATENT)
        self.decoder_in, self.up = CausalConv3d(LATENT, HIGH), CausalConv3d(HIGH, LOW)
        self.decoder_block, self.decoder_norm = ResBlock(LOW), FrameNorm(LOW)
        self.decoder_out = CausalConv3d(LOW, 3)

    def decode(self, z):
        x = self.decoder_in(z)
        rest = F.interpolate(x[:, :, 1:], scale_factor=(2.0, 1.0, 1.0), mode="nearest")
        x = torch.cat([x[:, :, :1], rest], dim=2)
        x = self.up(F.interpolate(x, scale_factor=(1.0, 2.0, 2.0), mode="nearest"))
        return self.decoder_out(F.silu(self.decoder_norm(self.decoder_block(x))))

    def forward(self, video, noise):
        x = self.attn(self.down(self.block(self.conv_in(video))))
        mean, logvar = self.conv_out(F.silu(self.norm_out(x))).chunk(2, dim=1)
        logvar = logvar.clamp(-30.0, 20.0)
        std = torch.exp(0.5 * logvar)
        latents = (mean + std * noise) * SCALING
        kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
        return latents, self.decode(latents / SCALING), kl


class PortVideoVAE(Functional):
    """Frames first: every activation is (time, batch, channels, height, width)."""

    def causal(self, x, name, cache, stride=1):
        start = x[:1].expand(2, -1, -1, -1, -1)
        window = torch.cat([cache.get(name, start), x])
        cache[name] = window[stride - 3 :]
        side = 2 - stride
        padded = F.pad(window, (side, 1, side, 1))
        count, kernel = (len(window) - 3) // stride + 1, self.w(name, "conv.weight")
        total = self.w(name, "conv.bias")[:, None, None]
        for tap in range(3):
            frames = padded[tap : tap + stride * (count - 1) + 1 : stride].flatten(0, 1)
            total = total + F.conv2d(frames, kernel[:, :, tap], stride=stride)
        return total.unflatten(0, (count, -1))

    def normed(self, x, name):
        weight, bias = self.w(name, "norm.weight"), self.w(name, "norm.bias")
        flat = F.group_norm(x.flatten(0, 1), GROUPS, weight, bias, 1e-6)
        return flat.view_as(x)

    def block(self, x, name, cache):
        h = self.causal(F.silu(self.normed(x, name + ".norm1")), name + ".conv1", cache)
        return x + self.causal(F.silu(self.normed(h, name + ".norm2")), name + ".conv2", cache)

    def attention(self, x, name, cache):
        tokens = self.normed(x, name + ".norm").permute(1, 3, 4, 0, 2)
        qkv = F.linear(tokens, self.w(name, "qkv.weight"), self.w(name, "qkv.bias"))
        q, new = qkv.split([HIGH, 2 * HIGH], -1)
        past = cache.get(name, new[..., :0, :])
        cache[name] = torch.cat([past, new], -2)
        k, v = cache[name].chunk(2, -1)
        seen = torch.ones(len(x), k.shape[-2], dtype=torch.bool).tril(past.shape[-2])
        scores = (q @ k.mT * HIGH**-0.5).masked_fill(~seen, -torch.inf)
        mixed = scores.softmax(-1) @ v
        mixed = F.linear(mixed, self.w(name, "proj.weight"), self.w(name, "proj.bias"))
        return x + mixed.permute(3, 0, 4, 1, 2)

    def encode(self, x, cache):
        x = self.block(self.causal(x, "conv_in", cache), "block", cache)
        x = self.attention(self.causal(x, "down", cache, stride=2), "attn", cache)
        return self.causal(F.silu(self.normed(x, "norm_out")), "conv_out", cache)

    def decode(self, z, cache):
        x = self.causal(z, "decoder_in", cache).repeat_interleave(2, 0)[1:]
        x = x.repeat_interleave(2, -2).repeat_interleave(2, -1)
        x = self.block(self.causal(x, "up", cache), "decoder_block", cache)
        return self.causal(F.silu(self.normed(x, "decoder_norm")), "decoder_out", cache)

    def forward(self, video, noise):
        frames, cache = video.permute(2, 0, 1, 3, 4), {}
        moments = torch.cat([self.encode(part, cache) for part in frames.split([1, 4, 4])])
        mean, logvar = moments[:, :, :LATENT], moments[:, :, LATENT:].clamp(-30.0, 20.0)
        sample = torch.addcmul(mean, (logvar / 2).exp(), noise.permute(2, 0, 1, 3, 4))
        kl = (mean**2 + torch.expm1(logvar) - logvar).mean() / 2
        video = self.decode(sample, {}).permute(1, 2, 0, 3, 4)
        return sample.permute(1, 2, 0, 3, 4) * SCALING, video, kl


def build():
    reference = shaken(VideoVAE())
    port, video = PortVideoVAE(reference), torch.randn(2, 3, 9, 8, 8)
    noise = torch.randn(2, LATENT, 5, 4, 4)
    return lambda: reference(video, noise), lambda: port(video, noise)
