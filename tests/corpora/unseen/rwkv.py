"""RWKV-4: a recurrence that keeps its largest exponent beside a softmax over all pairs of tokens."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import shaken

WIDTH = 24


class TimeMix(nn.Module):
    def __init__(self):
        super().__init__()
        self.decay, self.first = (
            nn.Parameter(torch.randn(WIDTH) - 1),
            nn.Parameter(torch.randn(WIDTH) / 2),
        )
        self.mix_k, self.mix_v, self.mix_r = (nn.Parameter(torch.rand(WIDTH)) for _ in range(3))
        self.key, self.value, self.receptance, self.output = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def forward(self, x):
        shifted = F.pad(x, (0, 0, 1, -1))
        k = self.key(x * self.mix_k + shifted * (1 - self.mix_k))
        v = self.value(x * self.mix_v + shifted * (1 - self.mix_v))
        r = torch.sigmoid(self.receptance(x * self.mix_r + shifted * (1 - self.mix_r)))
        decay, outputs = -torch.exp(self.decay), []
        num, den = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0])
        largest = torch.full_like(num, -1e38)
        for t in range(x.shape[1]):
            kt, vt = k[:, t], v[:, t]
            top = torch.maximum(largest, self.first + kt)
            e1, e2 = torch.exp(largest - top), torch.exp(self.first + kt - top)
            outputs.append((e1 * num + e2 * vt) / (e1 * den + e2))
            top = torch.maximum(largest + decay, kt)
            e1, e2 = torch.exp(largest + decay - top), torch.exp(kt - top)
            num, den, largest = e1 * num + e2 * vt, e1 * den + e2, top
        return self.output(r * torch.stack(outputs, 1))


class ChannelMix(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix_k, self.mix_r = (nn.Parameter(torch.rand(WIDTH)) for _ in range(2))
        self.key, self.value = nn.Linear(WIDTH, 48, bias=False), nn.Linear(48, WIDTH, bias=False)
        self.receptance = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        before = F.pad(x, (0, 0, 1, -1))
        k = self.key(x * self.mix_k + before * (1 - self.mix_k))
        r = torch.sigmoid(self.receptance(x * self.mix_r + before * (1 - self.mix_r)))
        return r * self.value(torch.relu(k) ** 2)


class Rwkv(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.att, self.ffn = TimeMix(), ChannelMix()

    def forward(self, x):
        x = x + self.att(self.ln1(x))
        return x + self.ffn(self.ln2(x))


def wkv(w, u, k, v):
    """Each channel attends to the past with weights that fall with the distance."""
    count = k.shape[1]
    t = torch.arange(count)
    distance = (t[:, None] - t[None, :] - 1).float()
    logits = k.transpose(1, 2)[:, :, None, :] - torch.exp(w)[:, None, None] * distance
    present = k.transpose(1, 2) + u[:, None]
    logits = torch.where(torch.eye(count, dtype=torch.bool), present[..., None], logits)
    logits = logits.masked_fill(t[None, :] > t[:, None], float("-inf"))
    return torch.einsum("bcts,bsc->btc", torch.softmax(logits, -1), v)


class PortRwkv(nn.Module):
    def __init__(self, reference):
        super().__init__()
        self.parts = nn.ModuleList([reference.ln1, reference.att, reference.ln2, reference.ffn])

    def forward(self, x):
        norm, att, norm2, ffn = self.parts
        y = norm(x)
        previous = torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], 1)
        k, v, r = (
            F.linear(torch.lerp(previous, y, mix), layer.weight)
            for mix, layer in (
                (att.mix_k, att.key),
                (att.mix_v, att.value),
                (att.mix_r, att.receptance),
            )
        )
        mixed = wkv(att.decay, att.first, k, v)
        x = x + F.linear(r.sigmoid() * mixed, att.output.weight)
        y = norm2(x)
        earlier = torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], 1)
        k = F.linear(earlier + ffn.mix_k * (y - earlier), ffn.key.weight)
        k = k.clamp(min=0).square()
        r = F.linear(earlier + ffn.mix_r * (y - earlier), ffn.receptance.weight)
        return x.add_(torch.sigmoid(r) * F.linear(k, ffn.value.weight))


def build():
    reference = shaken(Rwkv())
    port, x = PortRwkv(reference), torch.randn(2, 11, WIDTH)
    return lambda: reference(x), lambda: port(x)
