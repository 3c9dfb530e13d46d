"""Hyena: FFT convolutions with implicit filters beside a Toeplitz matrix and a flipped conv1d."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import Functional, shaken

WIDTH, LENGTH, ORDER, HIDDEN, BANDS, KERNEL, SHIFT = 16, 20, 2, 12, 3, 3, 0.05


class Sine(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.freq = nn.Parameter(torch.full((width,), 2.0))

    def forward(self, x):
        return torch.sin(self.freq * x)


class HyenaFilter(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(2 * BANDS + 1, HIDDEN),
            Sine(HIDDEN),
            nn.Linear(HIDDEN, HIDDEN),
            Sine(HIDDEN),
            nn.Linear(HIDDEN, ORDER * WIDTH, bias=False),
        )
        self.deltas = nn.Parameter(torch.linspace(1.0, 6.0, ORDER * WIDTH))
        self.bias = nn.Parameter(torch.randn(ORDER, WIDTH))

    def forward(self, length):
        t = torch.linspace(0, 1, length)[:, None]
        omega = 2 * math.pi * torch.arange(length)[:, None] / length
        angles = omega * torch.linspace(1e-4, BANDS - 1, BANDS)
        h = self.mlp(torch.cat([t, angles.cos(), -angles.sin()], -1))
        h = h * (torch.exp(-t * self.deltas.abs()) + SHIFT)
        return h.view(length, ORDER, WIDTH).permute(1, 2, 0)


def fft_conv(u, k, d):
    n = 2 * u.shape[-1]
    spectrum = torch.fft.rfft(u, n=n) * torch.fft.rfft(k, n=n)
    y = torch.fft.irfft(spectrum, n=n)[..., : u.shape[-1]]
    return y + u * d[:, None]


class HyenaOperator(nn.Module):
    def __init__(self):
        super().__init__()
        inner = (ORDER + 1) * WIDTH
        self.in_proj, self.out_proj = nn.Linear(WIDTH, inner), nn.Linear(WIDTH, WIDTH)
        self.short_filter = nn.Conv1d(inner, inner, KERNEL, groups=inner, padding=KERNEL - 1)
        self.filter = HyenaFilter()

    def forward(self, x):
        u = self.in_proj(x).transpose(1, 2)
        u = self.short_filter(u)[..., : x.shape[1]]
        v, *gates = u.split(WIDTH, 1)
        k = self.filter(x.shape[1])
        for n, gate in enumerate(gates):
            v = fft_conv(v, k[n], self.filter.bias[n])
            v = v * gate
        return self.out_proj(v.transpose(1, 2))


class Hyena(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(40, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(5))
        self.mixers = nn.ModuleList(HyenaOperator() for _ in range(2))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(2)
        )

    def forward(self, tokens):
        x = self.embedding(tokens)
        for i in range(2):
            x = x + self.mixers[i](self.norms[2 * i](x))
            x = x + self.mlps[i](self.norms[2 * i + 1](x))
        return F.linear(self.norms[4](x), self.embedding.weight)


class PortHyena(Functional):
    def normed(self, i, x):
        return F.layer_norm(x, (WIDTH,), self.w("norms", i, "weight"), self.w("norms", i, "bias"))

    def taps(self, i, length):
        def w(*name):
            return self.w("mixers", i, "filter", *name)

        steps = torch.arange(length, dtype=torch.float32)
        position = steps / (length - 1)
        bands = torch.linspace(1e-4, BANDS - 1, BANDS)
        angles = torch.outer(bands, steps) * (2 * math.pi / length)
        first = w("mlp.0.weight")
        h = first[:, :1] * position + first[:, 1 : BANDS + 1] @ angles.cos()
        h = h - first[:, BANDS + 1 :] @ angles.sin() + w("mlp.0.bias")[:, None]
        h = torch.sin(w("mlp.1.freq")[:, None] * h)
        h = torch.addmm(w("mlp.2.bias")[:, None], w("mlp.2.weight"), h)
        h = w("mlp.4.weight") @ torch.sin(w("mlp.3.freq")[:, None] * h)
        window = torch.exp(-torch.outer(w("deltas").abs(), position))
        taps = torch.addcmul(SHIFT * h, h, window)
        return taps.unflatten(0, (ORDER, WIDTH))

    def mixer(self, i, x):
        batch, length, _ = x.shape
        u = F.linear(x, self.w("mixers", i, "in_proj.weight"), self.w("mixers", i, "in_proj.bias"))
        padded = F.pad(u, (0, 0, KERNEL - 1, 0))
        short = self.w("mixers", i, "short_filter.weight")[:, 0]
        u = self.w("mixers", i, "short_filter.bias").expand_as(u).clone()
        for j in range(KERNEL):
            u += padded[:, j : j + length] * short[:, j]
        v, gate_1, gate_2 = u[..., :WIDTH], u[..., WIDTH : 2 * WIDTH], u[..., 2 * WIDTH :]
        taps, skip = self.taps(i, length), self.w("mixers", i, "filter.bias")
        lag = torch.arange(length)[:, None] - torch.arange(length)
        toeplitz = taps[0][:, lag.clamp(min=0)] * (lag >= 0)
        long = torch.einsum("cts,bsc->btc", toeplitz, v)
        v = (long + skip[0] * v) * gate_1
        kernel = taps[1].flip(-1)[:, None]
        channels = F.pad(v.transpose(1, 2), (length - 1, 0))
        long = F.conv1d(channels, kernel, groups=WIDTH).transpose(1, 2)
        v = gate_2 * long + gate_2 * (skip[1] * v)
        out = v.reshape(-1, WIDTH) @ self.w("mixers", i, "out_proj.weight").T
        return out.view(batch, length, WIDTH) + self.w("mixers", i, "out_proj.bias")

    def forward(self, ids):
        stream = self.embedding_weight[ids]
        for i in range(2):
            stream = stream + self.mixer(i, self.normed(2 * i, stream))
            inner = self.normed(2 * i + 1, stream) @ self.w("mlps", i, "0.weight").T
            inner = F.gelu(inner + self.w("mlps", i, "0.bias"))
            stream = stream + self.w("mlps", i, "2.bias")
            stream = stream + torch.einsum("bli,wi->blw", inner, self.w("mlps", i, "2.weight"))
        return torch.einsum("blw,vw->blv", self.normed(4, stream), self.embedding_weight)


def build():
    reference = shaken(Hyena())
    port, tokens = PortHyena(reference), torch.randint(0, 40, (2, LENGTH))
    return lambda: reference(tokens), lambda: port(tokens)
