"""A decoder with local and global attention beside fused projections and grouped products."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import shaken

VOCAB, WIDTH, HIDDEN, LAYERS, KV, GROUP, DIM = 48, 32, 40, 4, 2, 2, 8
WINDOW, QUERY_SCALAR, SCORE_CAP, LOGIT_CAP, EPS = 4, 12.0, 4.0, 6.0, 1e-6


class GemmaRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * (1.0 + self.weight)


def apply_rope(x, cos, sin):
    return x * cos + torch.cat((-x[..., DIM // 2 :], x[..., : DIM // 2]), dim=-1) * sin


class GemmaAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, KV * DIM, bias=False) for _ in range(2))

    def forward(self, x, cos, sin, mask):
        projected = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (t.unflatten(-1, (-1, DIM)).transpose(1, 2) for t in projected)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        k, v = k.repeat_interleave(GROUP, dim=1), v.repeat_interleave(GROUP, dim=1)
        scores = torch.matmul(q, k.transpose(2, 3)) * QUERY_SCALAR**-0.5
        scores = torch.tanh(scores / SCORE_CAP) * SCORE_CAP
        return self.o_proj((F.softmax(scores + mask, dim=-1) @ v).transpose(1, 2).flatten(2))


class GemmaLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.norms = GemmaAttention(), nn.ModuleList()
        self.norms.extend(GemmaRMSNorm() for _ in range(4))
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x, cos, sin, mask):
        x = x + self.norms[1](self.self_attn(self.norms[0](x), cos, sin, mask))
        y = self.norms[2](x)
        y = self.down_proj(F.gelu(self.gate_proj(y), approximate="tanh") * self.up_proj(y))
        return x + self.norms[3](y)


class Gemma(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(GemmaLayer() for _ in range(LAYERS))
        self.norm = GemmaRMSNorm()

    def forward(self, input_ids):
        n = input_ids.shape[1]
        inv_freq = 1.0 / (1000.0 ** (torch.arange(0, DIM, 2).float() / DIM))
        emb = torch.outer(torch.arange(n).float(), inv_freq).repeat(1, 2)
        causal = torch.full((n, n), float("-inf")).triu(1)
        local = causal + torch.full((n, n), float("-inf")).tril(-WINDOW)
        x = self.embed_tokens(input_ids) * WIDTH**0.5
        for i, layer in enumerate(self.layers):
            x = layer(x, emb.cos(), emb.sin(), causal if i % 2 else local)
        logits = F.linear(self.norm(x), self.embed_tokens.weight)
        return LOGIT_CAP * torch.tanh(logits / LOGIT_CAP)


class PackedBlock:
    def __init__(self, layer, index):
        attn = layer.self_attn
        queries = attn.q_proj.weight.view(KV, GROUP, DIM, WIDTH) * QUERY_SCALAR**-0.5
        keys, values = (m.weight.view(KV, 1, DIM, WIDTH) for m in (attn.k_proj, attn.v_proj))
        self.qkv = torch.cat([queries, keys, values], 1).flatten(0, 2).T.contiguous()
        self.wo = attn.o_proj.weight.view(WIDTH, KV, GROUP, DIM)
        self.up_gate = torch.cat([layer.up_proj.weight, layer.gate_proj.weight])
        self.w_down, self.is_global = layer.down_proj.weight, index % 2
        self.gains = [1 + norm.weight for norm in layer.norms]

    def norm(self, x, i):
        return F.rms_norm(x, (WIDTH,), self.gains[i], EPS)

    def run(self, h, turns, blocked):
        heads = (self.norm(h, 0) @ self.qkv).unflatten(-1, (KV, GROUP + 2, DIM))
        turned = torch.complex(*heads[..., : GROUP + 1, :].chunk(2, -1)) * turns
        turned = torch.cat([turned.real, turned.imag], -1)
        q, k, v = turned[..., :GROUP, :], turned[..., GROUP, :], heads[..., GROUP + 1, :]
        scores = torch.einsum("blkgd,bmkd->bkglm", q, k)
        scores = SCORE_CAP * (scores / SCORE_CAP).tanh()
        scores = scores.masked_fill(blocked[self.is_global], -torch.inf)
        mixed = torch.einsum("bkglm,bmkd->blkgd", scores.softmax(-1), v)
        h = h + self.norm(torch.einsum("blkgd,wkgd->blw", mixed, self.wo), 1)
        up, gate = F.linear(self.norm(h, 2), self.up_gate).split(HIDDEN, -1)
        return h + self.norm(F.linear(up * F.gelu(gate, approximate="tanh"), self.w_down), 3)


class PackedModel:
    def __init__(self, reference, limit):
        self.blocks = [PackedBlock(layer, i) for i, layer in enumerate(reference.layers)]
        self.head = reference.embed_tokens.weight
        self.table, self.gain = WIDTH**0.5 * self.head, 1 + reference.norm.weight
        angles = torch.arange(limit)[:, None] * 1000.0 ** (-torch.arange(DIM // 2) * 2 / DIM)
        self.turns = torch.polar(torch.ones_like(angles), angles)

    def __call__(self, tokens):
        places = torch.arange(tokens.shape[1])
        distance = places[:, None] - places
        reach = torch.tensor([WINDOW, len(places)])[:, None, None]
        blocked = (distance < 0) | (distance >= reach)
        h = self.table[tokens]
        for block in self.blocks:
            h = block.run(h, self.turns[places, None, None], blocked)
        logits = F.rms_norm(h, (WIDTH,), self.gain, EPS) @ self.head.T
        return LOGIT_CAP * (logits / LOGIT_CAP).tanh()


def build():
    reference = shaken(Gemma())
    for layer in reference.layers:
        layer.self_attn.q_proj.weight *= 5.0
    port, tokens = PackedModel(reference, 16), torch.randint(0, VOCAB, (2, 12))
    return lambda: reference(tokens), lambda: port(tokens)
