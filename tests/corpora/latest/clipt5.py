"""Two text encoders: T5 and tokens-first library attention beside fused batch-first ports."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import Functional, shaken

WIDTH, HEADS, HIDDEN, BUCKETS, FAR, WORDS, VOCAB, EOS = 24, 3, 32, 8, 16, 9, 20, 19
CLIP, CLIP_HEADS, LENGTH, EDGES = 16, 2, 8, torch.tensor([1, 2, 2 * math.sqrt(FAR / 2)])


class T5Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.wi_0, self.wi_1 = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.wo = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.norm_0, self.norm_1 = (nn.RMSNorm(WIDTH, eps=1e-6) for _ in range(2))

    def forward(self, x, position_bias):
        y = self.norm_0(x)
        q, k, v = (p(y).unflatten(2, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        weights = (q @ k.transpose(2, 3) + position_bias).softmax(dim=-1)
        x = x + self.o((weights @ v).transpose(1, 2).flatten(2))
        y = self.norm_1(x)
        return x + self.wo(F.gelu(self.wi_0(y), approximate="tanh") * self.wi_1(y))


class CLIPBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(CLIP, CLIP_HEADS)
        self.ln_1, self.ln_2 = nn.LayerNorm(CLIP), nn.LayerNorm(CLIP)
        self.c_fc, self.c_proj = nn.Linear(CLIP, 48), nn.Linear(48, CLIP)

    def forward(self, x, mask):
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False, attn_mask=mask)[0]
        y = self.c_fc(self.ln_2(x))
        return x + self.c_proj(y * torch.sigmoid(1.702 * y))


class TextEncoders(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(VOCAB, WIDTH, _weight=torch.randn(VOCAB, WIDTH) / 50)
        self.t5, self.t5_norm = nn.ModuleList([T5Block(), T5Block()]), nn.RMSNorm(WIDTH, eps=1e-6)
        self.tokens, self.relative = nn.Embedding(VOCAB, CLIP), nn.Embedding(BUCKETS, HEADS)
        self.ln_final, self.positions = nn.LayerNorm(CLIP), nn.Parameter(torch.randn(LENGTH, CLIP))
        self.clip = nn.ModuleList([CLIPBlock(), CLIPBlock()])
        self.projection, self.context = nn.Linear(CLIP, WIDTH, bias=False), nn.Linear(WIDTH, 20)

    def encode_t5(self, ids, mask):
        relative = torch.arange(WORDS)[None, :] - torch.arange(WORDS)[:, None]
        half, exact, distance = BUCKETS // 2, BUCKETS // 4, relative.abs()
        ratio = torch.log(distance.clamp(min=1) / exact) / math.log(FAR / exact)
        large = (exact + (ratio * (half - exact)).long()).clamp(max=half - 1)
        buckets = (relative > 0) * half + torch.where(distance < exact, distance, large)
        padding = (1.0 - mask.float())[:, None, None, :] * torch.finfo(torch.float32).min
        x, bias = self.shared(ids), self.relative(buckets).permute(2, 0, 1) + padding
        for block in self.t5:
            x = block(x, bias)
        return self.t5_norm(x)

    def forward(self, t5_ids, t5_mask, clip_ids):
        mask = torch.full((LENGTH, LENGTH), float("-inf")).triu_(1)
        x = (self.tokens(clip_ids) + self.positions).permute(1, 0, 2)
        for block in self.clip:
            x = block(x, mask)
        x = self.ln_final(x.permute(1, 0, 2))
        pooled = self.projection(x[torch.arange(len(x)), clip_ids.argmax(dim=-1)])
        x = torch.cat([F.pad(x, (0, WIDTH - CLIP)), self.encode_t5(t5_ids, t5_mask)], dim=1)
        return self.context(x), pooled


class PortEncoders(Functional):
    def __init__(self, reference):
        super().__init__(reference)
        for i, block in enumerate(reference.t5):
            qkv, pair = (block.q, block.k, block.v), (block.wi_0, block.wi_1)
            for name, norm, parts in (("qkv", block.norm_0, qkv), ("up", block.norm_1, pair)):
                rows = torch.cat([part.weight for part in parts]) * norm.weight
                self.register_parameter(f"t5_{i}_{name}", nn.Parameter(rows, False))
        steps = torch.arange(WORDS) - torch.arange(WORDS)[:, None]
        buckets = torch.bucketize(steps.abs(), EDGES, right=True) + BUCKETS // 2 * (steps > 0)
        self.bias = nn.Parameter(reference.relative.weight[buckets].permute(2, 0, 1), False)

    def dense(self, x, *name):
        return x @ self.w(*name, "weight").T + self.w(*name, "bias")

    def normed(self, x, *name):
        return F.layer_norm(x, (CLIP,), self.w(*name, "weight"), self.w(*name, "bias"))

    def forward(self, words, real, tokens):
        x, bias = self.shared_weight[words], self.bias.masked_fill(~real[:, None, None], -1e9)
        for name in ("t5.0", "t5.1"):
            qkv = F.linear(F.rms_norm(x, (WIDTH,), eps=1e-6), self.w(name, "qkv"))
            q, k, v = qkv.unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
            x = x + F.linear(mixed.transpose(1, 2).flatten(2), self.w(name, "o.weight"))
            pair = F.linear(F.rms_norm(x, (WIDTH,), eps=1e-6), self.w(name, "up"))
            hidden = F.gelu(pair[..., :HIDDEN], approximate="tanh") * pair[..., HIDDEN:]
            x = x + F.linear(hidden, self.w(name, "wo.weight"))
        long = F.rms_norm(x, (WIDTH,), self.t5_norm_weight, 1e-6)
        x = self.tokens_weight[tokens] + self.positions
        seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        for name in ("clip.0", "clip.1"):
            qkv = self.dense(self.normed(x, name, "ln_1"), name, "attn.in_proj")
            q, k, v = qkv.unflatten(2, (3, CLIP_HEADS, -1)).unbind(2)
            scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(CLIP // CLIP_HEADS)
            share = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            mixed = torch.einsum("bhqk,bkhd->bqhd", share, v).flatten(2)
            x = x + self.dense(mixed, name, "attn.out_proj")
            hidden = self.dense(self.normed(x, name, "ln_2"), name, "c_fc")
            x = x + self.dense(F.silu(1.702 * hidden) / 1.702, name, "c_proj")
        short = self.normed(x, "ln_final")
        pooled = short[range(len(short)), (tokens != EOS).sum(1)] @ self.projection_weight.T
        both = torch.cat([short @ self.context_weight[:, :CLIP].T, long @ self.context_weight.T], 1)
        return both + self.context_bias, pooled


def build():
    reference, place = shaken(TextEncoders()), torch.arange(WORDS)
    real, kept = place < torch.tensor([[WORDS], [6]]), place[:LENGTH] < torch.tensor([[5], [3]])
    tokens = torch.randint(EOS, (2, LENGTH)).where(kept, EOS)
    port, inputs = PortEncoders(reference), (torch.randint(VOCAB, (2, WORDS)), real, tokens)
    return lambda: reference(*inputs), lambda: port(*inputs)
