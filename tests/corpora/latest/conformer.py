"""A speech encoder with relative positions beside folded norms and a gathered shift."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import Functional, shaken

MELS, CHANNELS, BANDS, WIDTH, HEADS, DIM, HIDDEN, KERNEL, VOCAB = 20, 6, 4, 24, 3, 8, 32, 5, 12


class ConformerLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.pos = nn.Linear(WIDTH, WIDTH, bias=False)
        self.bias_u, self.bias_v = (nn.Parameter(2 * torch.randn(HEADS, DIM)) for _ in range(2))
        self.ff1_up, self.ff2_up = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.ff1_down, self.ff2_down = nn.Linear(HIDDEN, WIDTH), nn.Linear(HIDDEN, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(5))
        self.depthwise = nn.Conv1d(WIDTH, WIDTH, KERNEL, padding=KERNEL // 2, groups=WIDTH)
        self.pointwise1, self.pointwise2 = (nn.Conv1d(WIDTH, n * WIDTH, 1) for n in (2, 1))
        self.bn = nn.BatchNorm1d(WIDTH)
        self.bn.running_mean.normal_(0.0, 0.3), self.bn.running_var.uniform_(0.02, 0.3)

    def attention(self, x, pos_emb, mask):
        projected = self.q(x), self.k(x), self.v(x), self.pos(pos_emb)
        q, k, v, p = (t.unflatten(-1, (HEADS, DIM)).transpose(-3, -2) for t in projected)
        matrix_ac = (q + self.bias_u[:, None]) @ k.transpose(-2, -1)
        matrix_bd = F.pad((q + self.bias_v[:, None]) @ p.transpose(-2, -1), (1, 0))
        shifted = matrix_bd.view(*q.shape[:2], -1, q.shape[2])[:, :, 1:]
        shifted = shifted.reshape(*q.shape[:3], -1)[..., : q.shape[2]]
        scores = (matrix_ac + shifted) / DIM**0.5
        attn = scores.masked_fill(~mask[:, None, None], -torch.inf).softmax(dim=-1)
        return self.out((attn @ v).transpose(1, 2).flatten(2))

    def forward(self, x, pos_emb, mask):
        x = x + 0.5 * self.ff1_down(F.silu(self.ff1_up(self.norms[0](x))))
        x = x + self.attention(self.norms[1](x), pos_emb, mask)
        y = F.glu(self.pointwise1(self.norms[2](x).transpose(1, 2)), dim=1)
        y = self.depthwise(y.masked_fill(~mask[:, None], 0.0))
        x = x + self.pointwise2(F.silu(self.bn(y))).transpose(1, 2)
        x = x + 0.5 * self.ff2_down(F.silu(self.ff2_up(self.norms[3](x))))
        return self.norms[4](x)


class Conformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(n, CHANNELS, 3, 2) for n in (1, CHANNELS))
        self.out, self.ctc = nn.Linear(CHANNELS * BANDS, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList([ConformerLayer(), ConformerLayer()])

    def forward(self, mels, mask):
        x = F.relu(self.conv2(F.relu(self.conv1(mels.unsqueeze(1)))))
        x = self.out(x.transpose(1, 2).flatten(2)) * WIDTH**0.5
        position = torch.arange(x.size(1) - 1, -x.size(1), -1.0).unsqueeze(1)
        angles = position / torch.pow(100.0, torch.arange(0, WIDTH, 2) / WIDTH)
        pos_emb = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)
        for layer in self.layers:
            x = layer(x, pos_emb, mask[:, 2::2][:, 2::2])
        return F.log_softmax(self.ctc(x), dim=-1)


class FoldedConformer(Functional):
    def __init__(self, reference):
        super().__init__(reference)
        self.packs = []
        for layer in reference.layers:
            bn, gain = layer.bn, layer.bn.weight * (layer.bn.running_var + 1e-5).rsqrt()
            taps = layer.depthwise.weight[:, 0].T * gain
            offset = (layer.depthwise.bias - bn.running_mean) * gain + bn.bias
            halves = [(m.weight / 2, m.bias / 2) for m in (layer.ff1_down, layer.ff2_down)]
            self.packs.append((taps, offset, halves))
        rows = reference.out.weight.view(WIDTH, CHANNELS, BANDS).transpose(1, 2)
        self.entry = rows.flatten(1) * WIDTH**0.5, reference.out.bias * WIDTH**0.5

    def dense(self, x, *name):
        return F.linear(x, self.w(*name, "weight").flatten(1), self.w(*name, "bias"))

    def normed(self, x, i, j):
        weight, bias = (self.w("layers", i, "norms", j, name) for name in ("weight", "bias"))
        return F.layer_norm(x, (WIDTH,), weight, bias)

    def attend(self, x, i, waves, away, valid):
        heads = (self.dense(x, "layers", i, name) for name in "qkv")
        q, k, v = (t.unflatten(-1, (HEADS, DIM)) for t in heads)
        places = self.w("layers", i, "pos.weight").view(HEADS, DIM, WIDTH) @ waves
        far = torch.einsum("bqhd,hdr->bhqr", q + self.w("layers", i, "bias_v"), places)
        common = torch.einsum("hd,bkhd->bhk", self.w("layers", i, "bias_u"), k)[:, :, None]
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) + common
        scores = scores + far.gather(-1, away.expand_as(scores))
        scores = torch.where(valid[:, None, None], scores * DIM**-0.5, -torch.inf)
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)
        return self.dense(mixed, "layers", i, "out")

    def convolve(self, x, i, valid):
        value, gate = self.dense(x, "layers", i, "pointwise1").chunk(2, -1)
        x = value * gate.sigmoid() * valid[..., None]
        windows = F.pad(x, (0, 0, KERNEL // 2, KERNEL // 2)).unfold(1, KERNEL, 1)
        x = torch.einsum("btck,kc->btc", windows, self.packs[i][0]) + self.packs[i][1]
        return self.dense(F.silu(x), "layers", i, "pointwise2")

    def feed(self, x, i, j):
        return F.linear(F.silu(self.dense(x, "layers", i, f"ff{j + 1}_up")), *self.packs[i][2][j])

    def forward(self, mels, frames):
        x = mels.mT[:, None]
        for name in ("conv1", "conv2"):
            x = F.conv2d(x, self.w(name, "weight").mT, self.w(name, "bias"), 2).relu()
        x = F.linear(x.permute(0, 3, 2, 1).flatten(2), *self.entry)
        steps = torch.arange(x.shape[1])
        valid = 4 * steps + 6 < frames[:, None]
        away = steps[:, None] - steps + len(steps) - 1
        rates = 100.0 ** -torch.linspace(0, 1 - 2 / WIDTH, WIDTH // 2)[:, None]
        angles = rates * torch.arange(1 - len(steps), len(steps))
        waves = torch.stack([angles.sin(), angles.cos()], 1).flatten(0, 1)
        for i in range(len(self.packs)):
            x = x + self.feed(self.normed(x, i, 0), i, 0)
            x = x + self.attend(self.normed(x, i, 1), i, waves, away, valid)
            x = x + self.convolve(self.normed(x, i, 2), i, valid)
            x = self.normed(x + self.feed(self.normed(x, i, 3), i, 1), i, 4)
        return self.dense(x, "ctc").log_softmax(-1)


def build():
    reference = shaken(Conformer())
    mels, frames = torch.randn(2, 43, MELS), torch.tensor([43, 30])
    mask, port = torch.arange(43) < frames[:, None], FoldedConformer(reference)
    return lambda: reference(mels, mask), lambda: port(mels, frames)
