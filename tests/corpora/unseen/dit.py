"""A DiT with AdaLN and a flow-matching sampler: blocks of modules beside functions."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import Functional, shaken

WIDTH, HEADS, SHIFT = 32, 4, 3.0


def sincos(positions, dim):
    omega = 1.0 / 10000 ** (torch.arange(dim // 2, dtype=torch.float64) / (dim / 2))
    out = torch.einsum("m,d->md", positions.double(), omega)
    return torch.cat([torch.sin(out), torch.cos(out)], 1).float()


def grid_embedding(h, w):
    ys, xs = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    return torch.cat([sincos(ys.reshape(-1), WIDTH // 2), sincos(xs.reshape(-1), WIDTH // 2)], 1)


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = (
            nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6) for _ in range(2)
        )
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2, self.ada = (
            nn.Linear(WIDTH, 64),
            nn.Linear(64, WIDTH),
            nn.Linear(WIDTH, 6 * WIDTH),
        )

    def attention(self, x):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        return self.proj((weights.softmax(-1) @ v).transpose(1, 2).reshape(b, n, -1))

    def forward(self, x, c):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.ada(F.silu(c)).chunk(6, 1)
        x = x + gate1.unsqueeze(1) * self.attention(modulate(self.norm1(x), shift1, scale1))
        y = modulate(self.norm2(x), shift2, scale2)
        return x + gate2.unsqueeze(1) * self.fc2(F.gelu(self.fc1(y), approximate="tanh"))


class DiT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch, self.label = nn.Conv2d(4, WIDTH, 2, 2), nn.Embedding(11, WIDTH)
        self.time1, self.time2 = nn.Linear(32, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
        self.final_ada, self.final = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 16)

    def forward(self, x, t, y):
        h, w = x.shape[2] // 2, x.shape[3] // 2
        x = self.patch(x).flatten(2).transpose(1, 2) + grid_embedding(h, w)
        args = t[:, None] * torch.exp(-math.log(10000) * torch.arange(16) / 16)
        c = self.time2(F.silu(self.time1(torch.cat([args.cos(), args.sin()], -1)))) + self.label(y)
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.final_ada(F.silu(c)).chunk(2, 1)
        x = self.final(modulate(self.norm(x), shift, scale))
        x = x.reshape(len(x), h, w, 2, 2, 4)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(len(x), 4, h * 2, w * 2)


def reference_sample(model, x, y):
    sigmas = torch.linspace(1, 1 / 4, 4)
    sigmas = SHIFT * sigmas / (1 + (SHIFT - 1) * sigmas)
    sigmas = torch.cat([sigmas, torch.zeros(1)])
    for i in range(2):
        velocity = model(x, (sigmas[i] * 1000).expand(len(x)), y)
        x = x + (sigmas[i + 1] - sigmas[i]) * velocity
    return x


class PortDiT(Functional):
    def positions(self, rows, columns):
        rates = 10000.0 ** (-torch.arange(8) / 8)
        down = torch.arange(rows)[:, None, None] * rates
        along = torch.arange(columns)[None, :, None] * rates
        parts = [
            f(p).expand(rows, columns, 8) for p in (down, along) for f in (torch.sin, torch.cos)
        ]
        return torch.cat(parts, -1).flatten(0, 1)

    def layer(self, i, x, mods):
        shift1, scale1, gate1, shift2, scale2, gate2 = (m[:, None] for m in mods[i].unbind(1))
        y = F.layer_norm(x, (WIDTH,), eps=1e-6)
        y = torch.addcmul(shift1, y, 1 + scale1)
        qkv = F.linear(y, self.w("blocks", i, "qkv.weight"), self.w("blocks", i, "qkv.bias"))
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in qkv.tensor_split(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        y = F.linear(y, self.w("blocks", i, "proj.weight"), self.w("blocks", i, "proj.bias"))
        x = torch.addcmul(x, gate1, y)
        y = F.layer_norm(x, (WIDTH,), eps=1e-6)
        y = torch.addcmul(shift2, y, 1 + scale2)
        y = F.linear(y, self.w("blocks", i, "fc1.weight"), self.w("blocks", i, "fc1.bias"))
        y = F.gelu(y, approximate="tanh")
        y = F.linear(y, self.w("blocks", i, "fc2.weight"), self.w("blocks", i, "fc2.bias"))
        return torch.addcmul(x, gate2, y)

    def forward(self, latents, timestep, labels):
        rows, columns = latents.shape[2] // 2, latents.shape[3] // 2
        patches = F.unfold(latents, 2, stride=2).transpose(1, 2)
        x = F.linear(patches, self.patch_weight.flatten(1), self.patch_bias)
        x = x + self.positions(rows, columns)
        angles = torch.outer(timestep, 10000.0 ** (-torch.arange(16) / 16))
        emb = F.linear(
            torch.cat([angles.cos(), angles.sin()], -1), self.time1_weight, self.time1_bias
        )
        emb = F.linear(F.silu(emb), self.time2_weight, self.time2_bias)
        emb = F.silu(emb + self.label_weight[labels])
        weight = torch.stack([self.w("blocks", i, "ada.weight") for i in range(2)])
        bias = torch.stack([self.w("blocks", i, "ada.bias") for i in range(2)])
        mods = (torch.einsum("bw,lmw->lbm", emb, weight) + bias[:, None]).unflatten(-1, (6, WIDTH))
        for i in range(2):
            x = self.layer(i, x, mods)
        ends = F.linear(emb, self.final_ada_weight, self.final_ada_bias)
        shift, scale = ends[:, None, :WIDTH], ends[:, None, WIDTH:]
        x = torch.addcmul(shift, F.layer_norm(x, (WIDTH,), eps=1e-6), 1 + scale)
        x = F.linear(x, self.final_weight, self.final_bias)
        x = x.unflatten(-1, (4, 4)).transpose(-1, -2).flatten(-2)
        return F.pixel_shuffle(x.transpose(1, 2).unflatten(2, (rows, columns)), 2)


def port_sample(model, latents, labels):
    times = [1 - i / 4 for i in range(4)] + [0.0]
    times = [SHIFT * t / (1 + (SHIFT - 1) * t) for t in times]
    for now, later in ((times[i], times[i + 1]) for i in range(2)):
        flow = model(latents, torch.full((len(latents),), now * 1000), labels)
        latents = latents - (now - later) * flow
    return latents


def build():
    reference = shaken(DiT())
    port, x, y = PortDiT(reference), torch.randn(2, 4, 6, 8), torch.tensor([3, 8])
    return lambda: reference_sample(reference, x, y), lambda: port_sample(port, x, y)
