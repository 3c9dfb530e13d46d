"""Wan: complex 3-D rotary and separate projections beside real rotary and fused projections."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import Functional, shaken

WIDTH, HEADS, HIDDEN, LATENT, WAVES, PAIRS = 32, 2, 48, 4, 16, (4, 2, 2)


def rope_apply(x, grid):
    places = torch.meshgrid(*map(torch.arange, grid), indexing="ij")
    angles = [p.reshape(-1, 1) * 10000 ** -(torch.arange(n) / n) for p, n in zip(places, PAIRS)]
    angles = torch.cat(angles, dim=-1)[:, None]
    x = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(x * torch.polar(torch.ones_like(angles), angles)).flatten(3)


class WanAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm_q, self.norm_k = nn.RMSNorm(WIDTH, eps=1e-6), nn.RMSNorm(WIDTH, eps=1e-6)

    def forward(self, x, context, grid=None):
        q, k = self.norm_q(self.q(x)), self.norm_k(self.k(context))
        q, k, v = (y.unflatten(2, (HEADS, -1)) for y in (q, k, self.v(context)))
        if grid is not None:
            q, k = rope_apply(q, grid), rope_apply(k, grid)
        scores = torch.einsum("bqnd,bknd->bnqk", q, k) * q.shape[-1] ** -0.5
        return self.o(torch.einsum("bnqk,bknd->bqnd", scores.softmax(dim=-1), v).flatten(2))


class WanBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, 1e-6, False) for _ in range(2))
        self.norm3, self.modulation = nn.LayerNorm(WIDTH), nn.Parameter(torch.randn(1, 6, WIDTH))
        self.self_attn, self.cross_attn = WanAttention(), WanAttention()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x, e0, context, grid):
        e = (self.modulation + e0).chunk(6, dim=1)
        y = self.norm1(x) * (1 + e[1]) + e[0]
        x = x + self.self_attn(y, y, grid) * e[2]
        x = x + self.cross_attn(self.norm3(x), context)
        y = self.up(self.norm2(x) * (1 + e[4]) + e[3])
        return x + self.down(F.gelu(y, approximate="tanh")) * e[5]


class WanModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv3d(LATENT, WIDTH, (1, 2, 2), stride=(1, 2, 2))
        self.time = nn.Sequential(nn.Linear(WAVES, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.time_proj, self.norm = nn.Linear(WIDTH, 6 * WIDTH), nn.LayerNorm(WIDTH, 1e-6, False)
        self.blocks = nn.ModuleList(WanBlock() for _ in range(2))
        self.head, self.modulation = nn.Linear(WIDTH, 16), nn.Parameter(torch.randn(1, 2, WIDTH))

    def forward(self, x, t, context):
        x = self.patch(x)
        f, h, w = grid = x.shape[2:]
        x = x.flatten(2).transpose(1, 2)
        angles = torch.outer(t, 10000 ** -(torch.arange(WAVES // 2) / (WAVES // 2)))
        e = self.time(torch.cat([torch.cos(angles), torch.sin(angles)], dim=1))
        e0 = self.time_proj(F.silu(e)).unflatten(1, (6, WIDTH))
        for block in self.blocks:
            x = block(x, e0, context, grid)
        shift, scale = (self.modulation + e.unsqueeze(1)).chunk(2, dim=1)
        x = self.head(self.norm(x) * (1 + scale) + shift).view(-1, f, h, w, 1, 2, 2, LATENT)
        return torch.einsum("bfhwpqrc->bcfphqwr", x).reshape(-1, LATENT, f, 2 * h, 2 * w)


class VideoDiT(Functional):
    def __init__(self, wan):
        super().__init__(wan)
        for i, leaf in ((0, "weight"), (0, "bias"), (1, "weight"), (1, "bias")):
            rows = torch.cat([self.w("blocks", i, "self_attn", part, leaf) for part in "qkv"])
            self.register_parameter(f"blocks_{i}_qkv_{leaf}", nn.Parameter(rows, False))

    def dense(self, x, *name):
        return F.linear(x, self.w(*name, "weight").flatten(1), self.w(*name, "bias"))

    def rms(self, x, *name):
        return F.rms_norm(x, (WIDTH,), self.w(*name, "weight"), 1e-6)

    def attend(self, *qkv):
        heads = (x.unflatten(2, (HEADS, -1)).transpose(1, 2) for x in qkv)
        return F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)

    def forward(self, x, t, text):
        frames, *shape = x.shape[2:]
        cells = F.unfold(x.transpose(1, 2).flatten(0, 1), 2, stride=2).mT
        x = self.dense(cells.reshape(len(t), -1, 4 * LATENT), "patch")
        places = torch.cartesian_prod(*map(torch.arange, (frames, shape[0] // 2, shape[1] // 2)))
        rates = torch.cat([1e-4 ** (torch.arange(pairs) / pairs) for pairs in PAIRS])
        angles = (places.repeat_interleave(torch.tensor(PAIRS), 1) * rates).repeat(1, HEADS)
        cos, sin = angles.cos(), angles.sin()
        waves = t[:, None] * 1e-4 ** torch.arange(0, 1, 2 / WAVES)
        vector = F.silu(self.dense(torch.cat([waves.cos(), waves.sin()], 1), "time.0"))
        vector = self.dense(vector, "time.2")
        clock = self.dense(F.silu(vector), "time_proj").unflatten(1, (6, -1))
        for name in ("blocks.0", "blocks.1"):
            own, cross = f"{name}.self_attn", f"{name}.cross_attn"
            shift, gain, gate, *late = (self.w(name, "modulation") + clock).split(1, 1)
            y = torch.addcmul(shift, F.layer_norm(x, (WIDTH,), eps=1e-6), 1 + gain)
            q, k, v = self.dense(y, name, "qkv").chunk(3, -1)
            qk = torch.stack([self.rms(q, own, "norm_q"), self.rms(k, own, "norm_k")])
            even, odd = qk.unflatten(3, (-1, 2)).unbind(-1)
            qk = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(3)
            x = x + gate * self.dense(self.attend(*qk, v), own, "o")
            y = F.layer_norm(x, (WIDTH,), self.w(name, "norm3.weight"), self.w(name, "norm3.bias"))
            q = self.rms(self.dense(y, cross, "q"), cross, "norm_q")
            k = self.rms(self.dense(text, cross, "k"), cross, "norm_k")
            x = x + self.dense(self.attend(q, k, self.dense(text, cross, "v")), cross, "o")
            y = torch.addcmul(late[0], F.layer_norm(x, (WIDTH,), eps=1e-6), 1 + late[1])
            y = F.gelu(self.dense(y, name, "up"), approximate="tanh")
            x = torch.addcmul(x, late[2], self.dense(y, name, "down"))
        shift, scale = (self.modulation + vector[:, None]).split(1, 1)
        y = torch.addcmul(shift, F.layer_norm(x, (WIDTH,), eps=1e-6), 1 + scale)
        colours = self.dense(y, "head").unflatten(2, (4, LATENT)).mT
        colours = colours.reshape(len(t) * frames, -1, 4 * LATENT).mT
        return F.fold(colours, shape, 2, stride=2).unflatten(0, (-1, frames)).transpose(1, 2)


def build():
    reference, t, text = shaken(WanModel()), torch.tensor([900, 25.0]), torch.randn(2, 7, WIDTH)
    port, inputs = VideoDiT(reference), (torch.randn(2, LATENT, 3, 8, 12), t, text)
    return lambda: reference(*inputs), lambda: port(*inputs)
