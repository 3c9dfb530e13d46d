"""T5's encoder: relative buckets of all pairs beside a table of distances, heads as a list."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import shaken

WIDTH, HEADS, HEAD, BUCKETS, FAR = 32, 4, 8, 8, 16


class T5Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + 1e-6))


class T5Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x, bias):
        q, k, v = (
            p(x).view(len(x), -1, HEADS, HEAD).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        scores = torch.matmul(q, k.transpose(3, 2))
        scores = scores + bias
        attended = torch.matmul(F.softmax(scores.float(), -1), v)
        return self.o(attended.transpose(1, 2).contiguous().view(len(x), -1, WIDTH))


class T5Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention, self.norm2 = T5Norm(), T5Attention(), T5Norm()
        self.wi_0, self.wi_1, self.wo = (
            nn.Linear(WIDTH, 48, bias=False),
            nn.Linear(WIDTH, 48, bias=False),
            nn.Linear(48, WIDTH, bias=False),
        )

    def forward(self, x, bias):
        x = x + self.attention(self.norm1(x), bias)
        y = self.norm2(x)
        return x + self.wo(F.gelu(self.wi_0(y), approximate="tanh") * self.wi_1(y))


class T5Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, self.relative = nn.Embedding(60, WIDTH), nn.Embedding(BUCKETS, HEADS)
        self.layers, self.final = nn.ModuleList(T5Layer() for _ in range(2)), T5Norm()

    def bucket(self, relative):
        half = BUCKETS // 2
        result = (relative > 0).long() * half
        n = relative.abs()
        exact = half // 2
        large = (
            exact + (torch.log(n.float() / exact) / math.log(FAR / exact) * (half - exact)).long()
        )
        large = torch.min(large, torch.full_like(large, half - 1))
        return result + torch.where(n < exact, n, large)

    def forward(self, tokens, mask):
        count = tokens.shape[1]
        relative = torch.arange(count)[None, :] - torch.arange(count)[:, None]
        bias = self.relative(self.bucket(relative)).permute(2, 0, 1)[None]
        bias = bias + (1 - mask[:, None, None, :].float()) * torch.finfo(torch.float32).min
        x = self.shared(tokens)
        for layer in self.layers:
            x = layer(x, bias)
        return self.final(x) * mask[..., None]


def rms(x, weight):
    return F.rms_norm(x, (WIDTH,), weight, 1e-6)


def slot(distance):
    """Return the bucket of one distance, key minus query."""
    half, exact = BUCKETS // 2, BUCKETS // 4
    size = abs(distance)
    if size >= exact:
        size = exact + int(math.log(size / exact) / math.log(FAR / exact) * (half - exact))
    return min(size, half - 1) + (half if distance > 0 else 0)


class PortT5(nn.Module):
    def __init__(self, reference):
        super().__init__()
        self.embed, self.table = reference.shared, reference.relative
        self.stack, self.out_norm = reference.layers, reference.final

    def attend(self, layer, x, biases, hidden):
        w = layer.attention
        outputs = []
        for head in range(HEADS):
            rows = slice(head * HEAD, (head + 1) * HEAD)
            q, k, v = (F.linear(x, part.weight[rows]) for part in (w.q, w.k, w.v))
            logits = torch.baddbmm(biases[head].expand(len(x), -1, -1), q, k.mT)
            logits = logits.masked_fill(hidden[:, None, :], -1e9)
            outputs.append(logits.softmax(-1) @ v)
        return F.linear(torch.cat(outputs, -1), w.o.weight)

    def forward(self, ids, mask):
        count = ids.shape[1]
        slots = torch.tensor([slot(d) for d in range(1 - count, count)])
        line = self.table.weight[slots].T
        biases = line.unfold(1, count, 1).flip(1)
        stream = self.embed.weight[ids]
        for layer in self.stack:
            y = rms(stream, layer.norm1.weight)
            stream = stream + self.attend(layer, y, biases, mask == 0)
            y = rms(stream, layer.norm2.weight)
            gate, up = F.linear(y, layer.wi_0.weight), F.linear(y, layer.wi_1.weight)
            gate = F.gelu(gate, approximate="tanh")
            stream = stream + F.linear(gate * up, layer.wo.weight)
        return rms(stream, self.out_norm.weight).masked_fill((mask == 0)[..., None], 0)


def build():
    reference = shaken(T5Encoder())
    tokens, mask = torch.randint(0, 60, (2, 20)), torch.ones(2, 20, dtype=torch.long)
    mask[1, 14:] = 0
    port = PortT5(reference)
    return lambda: reference(tokens, mask), lambda: port(tokens, mask)
