"""ModernBERT: padded rows with masks beside all words of a batch in one row without padding."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import Functional, shaken

VOCABULARY, WIDTH, HEADS, HIDDEN, LAYERS, NEAR, EVERY, PAD = 40, 32, 2, 48, 4, 6, 3, 0
DIM, GLOBAL_THETA, LOCAL_THETA = WIDTH // HEADS, 160000.0, 10000.0


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class ModernBertAttention(nn.Module):
    def __init__(self, layer_id):
        super().__init__()
        self.local = layer_id % EVERY != 0
        self.Wqkv, self.Wo = (
            nn.Linear(WIDTH, 3 * WIDTH, bias=False),
            nn.Linear(WIDTH, WIDTH, bias=False),
        )
        theta = LOCAL_THETA if self.local else GLOBAL_THETA
        inv_freq = 1.0 / (theta ** (torch.arange(0, DIM, 2) / DIM))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x, attention_mask, sliding_window_mask):
        qkv = self.Wqkv(x).view(*x.shape[:2], 3, HEADS, DIM)
        query, key, value = qkv.transpose(3, 1).unbind(dim=2)
        freqs = torch.arange(x.shape[1])[:, None] * self.inv_freq
        emb = torch.cat((freqs, freqs), dim=-1)
        query = query * emb.cos() + rotate_half(query) * emb.sin()
        key = key * emb.cos() + rotate_half(key) * emb.sin()
        weights = query @ key.transpose(2, 3) * DIM**-0.5
        weights = weights + (sliding_window_mask if self.local else attention_mask)
        x = F.softmax(weights, dim=-1) @ value
        return self.Wo(x.transpose(1, 2).flatten(2))


class ModernBertLayer(nn.Module):
    def __init__(self, layer_id):
        super().__init__()
        self.attn_norm = nn.LayerNorm(WIDTH, bias=False) if layer_id else nn.Identity()
        self.attn, self.mlp_norm = ModernBertAttention(layer_id), nn.LayerNorm(WIDTH, bias=False)
        self.Wi, self.mlp_Wo = (
            nn.Linear(WIDTH, 2 * HIDDEN, bias=False),
            nn.Linear(HIDDEN, WIDTH, bias=False),
        )

    def forward(self, x, attention_mask, sliding_window_mask):
        x = x + self.attn(self.attn_norm(x), attention_mask, sliding_window_mask)
        inputs, gate = self.Wi(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.mlp_Wo(F.gelu(inputs) * gate)


class ModernBertForMaskedLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings, self.norm = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.LayerNorm(WIDTH, bias=False),
        )
        self.layers = nn.ModuleList(map(ModernBertLayer, range(LAYERS)))
        self.final_norm, self.head_norm = (nn.LayerNorm(WIDTH, bias=False) for _ in range(2))
        self.dense, self.decoder_bias = (
            nn.Linear(WIDTH, WIDTH, bias=False),
            nn.Parameter(torch.zeros(VOCABULARY)),
        )

    def forward(self, input_ids, mask):
        attention_mask = (1.0 - mask[:, None, None, :].float()) * torch.finfo(torch.float32).min
        rows = torch.arange(input_ids.shape[1])
        far = (rows[None, :] - rows[:, None]).abs() > NEAR // 2
        sliding_window_mask = attention_mask.masked_fill(far, torch.finfo(torch.float32).min)
        x = self.norm(self.tok_embeddings(input_ids))
        for layer in self.layers:
            x = layer(x, attention_mask, sliding_window_mask)
        x = self.head_norm(F.gelu(self.dense(self.final_norm(x))))
        return F.linear(x, self.tok_embeddings.weight, self.decoder_bias)


class PackedBert(Functional):
    def norm(self, x, *name):
        return F.layer_norm(x, (WIDTH,), self.w(*name, "weight"))

    def attend(self, x, cos, sin, seen, *name):
        q, k, v = (x @ self.w(*name, "Wqkv.weight").T).view(-1, 3, HEADS, DIM).unbind(1)
        low, high = torch.stack([q, k]).chunk(2, -1)
        q, k = torch.cat([low * cos - high * sin, high * cos + low * sin], -1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / DIM**0.5
        share = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", share, v).flatten(1)
        return mixed @ self.w(*name, "Wo.weight").T

    def forward(self, words, starts):
        places = torch.arange(len(words))
        rows = torch.bucketize(places, starts[1:], right=True)
        same, steps = rows[:, None] == rows, places[:, None] - places
        close = same & (steps.abs() <= NEAR // 2)
        rates = torch.tensor([[GLOBAL_THETA], [LOCAL_THETA]]) ** -(
            torch.arange(DIM // 2) / (DIM // 2)
        )
        angles = (places - starts[rows])[:, None, None] * rates[:, None, None]
        cos, sin = angles.cos(), angles.sin()
        x = self.norm(F.embedding(words, self.tok_embeddings_weight), "norm")
        for i in range(LAYERS):
            local = int(i % EVERY > 0)
            y = self.norm(x, "layers", i, "attn_norm") if i else x
            seen = close if local else same
            x = x + self.attend(y, cos[local], sin[local], seen, "layers", i, "attn")
            wide = self.norm(x, "layers", i, "mlp_norm") @ self.w("layers", i, "Wi.weight").T
            value, gate = wide.tensor_split(2, 1)
            x = x + (gate * F.gelu(value)) @ self.w("layers", i, "mlp_Wo.weight").T
        x = F.gelu(self.norm(x, "final_norm") @ self.dense_weight.T)
        x = self.norm(x, "head_norm")
        return torch.addmm(self.decoder_bias, x, self.tok_embeddings_weight.T)


def build():
    reference, sizes = shaken(ModernBertForMaskedLM()), torch.tensor([13, 6, 10])
    port, mask = PackedBert(reference), torch.arange(13) < sizes[:, None]
    ids = torch.randint(1, VOCABULARY, mask.shape).masked_fill(~mask, PAD)
    starts = sizes.cumsum(0) - sizes
    return lambda: reference(ids, mask)[mask], lambda: port(ids[mask], starts)
