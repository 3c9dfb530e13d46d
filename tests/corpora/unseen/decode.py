"""A decoder in bfloat16 with norms in float32: every token anew beside a cache, and the next token."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import Functional, shaken

WIDTH, HEADS, KEYS, HEAD, VOCABULARY, NEW = 32, 4, 2, 8, 40, 4


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(
            x.dtype
        ) * self.weight


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = Norm(), Norm()
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, KEYS * HEAD, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, 64, bias=False) for _ in range(2))
        self.down = nn.Linear(64, WIDTH, bias=False)

    def forward(self, x, cos, sin):
        y = self.norm1(x)
        q, k, v = (p(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = k.repeat_interleave(HEADS // KEYS, 1), v.repeat_interleave(HEADS // KEYS, 1)
        scores = q @ k.transpose(-1, -2) * HEAD**-0.5
        scores = scores.masked_fill(
            torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf")
        )
        y = scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCABULARY, WIDTH), Norm()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, tokens):
        angles = torch.arange(tokens.shape[1])[:, None] * 10000 ** (
            -torch.arange(0, HEAD, 2) / HEAD
        )
        cos, sin = (
            angles.cos().to(self.embed.weight.dtype),
            angles.sin().to(self.embed.weight.dtype),
        )
        x = self.embed(tokens) * WIDTH**0.5
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(self.norm(x), self.embed.weight).float()


def reference_generate(model, tokens):
    scores = []
    for _ in range(NEW):
        logits = model(tokens)[:, -1]
        seen = torch.gather(logits, 1, tokens)
        seen = torch.where(seen < 0, seen * 1.3, seen / 1.3)
        logits = logits.scatter(1, tokens, seen) / 0.7
        ordered, index = torch.sort(logits, descending=False)
        total = ordered.softmax(-1).cumsum(-1)
        remove = total <= 1 - 0.9
        remove[..., -1:] = False
        logits = logits.masked_fill(remove.scatter(1, index, remove), float("-inf"))
        scores.append(logits.softmax(-1))
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)
    return tokens, torch.stack(scores, 1)


class CachedDecoder(Functional):
    def linear(self, i, name, x):
        return F.linear(x, self.w("layers", i, name, "weight"))

    def norm(self, x, weight):
        return F.rms_norm(x.float(), (WIDTH,), eps=1e-6).to(x.dtype) * weight

    def layer(self, i, x, cos, sin, cache):
        y = self.norm(x, self.w("layers", i, "norm1.weight"))
        q, k, v = (
            self.linear(i, name, y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for name in "qkv"
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if i in cache:
            k, v = torch.cat([cache[i][0], k], 2), torch.cat([cache[i][1], v], 2)
        cache[i] = k, v
        hidden = (
            torch.arange(k.shape[2]) > torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None]
        )
        grouped = q.unflatten(1, (KEYS, -1))
        scores = torch.einsum("bkgqd,bkjd->bkgqj", grouped, k) * HEAD**-0.5
        scores = torch.where(hidden, float("-inf"), scores)
        weights = scores.softmax(-1, dtype=torch.float32).to(v.dtype)
        y = torch.einsum("bkgqj,bkjd->bqkgd", weights, v).flatten(2)
        x = x + self.linear(i, "o", y)
        y = self.norm(x, self.w("layers", i, "norm2.weight"))
        return x + self.linear(
            i, "down", F.silu(self.linear(i, "gate", y)) * self.linear(i, "up", y)
        )

    def forward(self, tokens, start, cache):
        place = torch.arange(start, start + tokens.shape[1])
        angles = torch.outer(place.float(), 10000 ** (-torch.arange(0, HEAD, 2) / HEAD))
        cos, sin = angles.cos().to(self.norm_weight.dtype), angles.sin().to(self.norm_weight.dtype)
        x = self.embed_weight[tokens] * WIDTH**0.5
        for i in range(2):
            x = self.layer(i, x, cos, sin, cache)
        return F.linear(self.norm(x[:, -1], self.norm_weight), self.embed_weight).float()


def port_generate(model, tokens):
    cache, scores, fresh, start = {}, [], tokens, 0
    for _ in range(NEW):
        logits = model(fresh, start, cache)
        start += fresh.shape[1]
        used = torch.zeros_like(logits).scatter(1, tokens, 1.0).bool()
        punished = torch.where(logits > 0, logits / 1.3, logits * 1.3)
        logits = torch.where(used, punished, logits) / 0.7
        ordered, index = torch.sort(logits, descending=True)
        probability = ordered.softmax(-1)
        before = probability.cumsum(-1) - probability
        kept = torch.where(before < 0.9, ordered, float("-inf"))
        logits = torch.full_like(logits, float("-inf")).scatter(1, index, kept)
        scores.append(logits.softmax(-1))
        fresh = logits.argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, fresh], 1)
    return tokens, torch.stack(scores, 1)


def build(dtype=torch.bfloat16):
    reference = shaken(Decoder()).to(dtype)
    for (
        weight
    ) in reference.parameters():  # a sharp attention, and a next token that is not this one
        weight.mul_(0.2 if weight is reference.embed.weight else 3 if weight.dim() > 1 else 1)
    port, tokens = CachedDecoder(reference), torch.randint(0, VOCABULARY, (1, 6))
    return lambda: reference_generate(reference, tokens), lambda: port_generate(port, tokens)
