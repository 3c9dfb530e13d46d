"""Latent attention: keys and values of all heads beside absorbed projections and a cache."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import shaken

WIDTH, HEADS, NOPE, ROPE, VALUE, Q_RANK, KV_RANK, HIDDEN = 32, 4, 8, 4, 8, 12, 10, 24
LAYERS, VOCAB, PREFIX = 2, 40, 4


def rotate(x, positions):
    frequencies = 100.0 ** (-torch.arange(0, ROPE, 2).float() / ROPE)
    angles = torch.outer(positions.float(), frequencies)
    turns = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], ROPE // 2, 2).contiguous())
    return torch.view_as_real(pairs * turns).flatten(-2)


class LatentAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_a_proj = nn.Linear(WIDTH, Q_RANK, bias=False)
        self.q_a_norm = nn.RMSNorm(Q_RANK, 1e-6)
        self.q_b_proj = nn.Linear(Q_RANK, HEADS * (NOPE + ROPE), bias=False)
        self.kv_a_proj = nn.Linear(WIDTH, KV_RANK + ROPE, bias=False)
        self.kv_a_norm = nn.RMSNorm(KV_RANK, 1e-6)
        self.kv_b_proj = nn.Linear(KV_RANK, HEADS * (NOPE + VALUE), bias=False)
        self.o_proj = nn.Linear(HEADS * VALUE, WIDTH, bias=False)

    def forward(self, x, positions, mask):
        batch, length, _ = x.shape
        q = self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))
        q = q.view(batch, length, HEADS, NOPE + ROPE).transpose(1, 2)
        q_nope, q_rope = q.split([NOPE, ROPE], -1)
        latent, k_rope = self.kv_a_proj(x).split([KV_RANK, ROPE], -1)
        kv = self.kv_b_proj(self.kv_a_norm(latent))
        kv = kv.view(batch, length, HEADS, NOPE + VALUE).transpose(1, 2)
        k_nope, value = kv.split([NOPE, VALUE], -1)
        k_rope = rotate(k_rope[:, None], positions).expand(-1, HEADS, -1, -1)
        query = torch.cat([q_nope, rotate(q_rope, positions)], -1)
        key = torch.cat([k_nope, k_rope], -1)
        scores = query @ key.transpose(-1, -2) * (NOPE + ROPE) ** -0.5
        weights = (scores + mask).softmax(-1)
        return self.o_proj((weights @ value).transpose(1, 2).flatten(2))


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_norm, self.post_norm = nn.RMSNorm(WIDTH, 1e-6), nn.RMSNorm(WIDTH, 1e-6)
        self.attention = LatentAttention()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x, positions, mask):
        x = x + self.attention(self.input_norm(x), positions, mask)
        y = self.post_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(LAYERS))
        self.norm, self.lm_head = nn.RMSNorm(WIDTH, 1e-6), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        length = tokens.shape[1]
        positions = torch.arange(length)
        mask = torch.full((length, length), -torch.inf).triu(1)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, positions, mask)
        return self.lm_head(self.norm(x))


class AbsorbedLayer(nn.Module):
    """It keeps one latent and one rotary key a token; rotary rows are sorted evens first."""

    def __init__(self, layer):
        super().__init__()
        attention = layer.attention
        order = torch.cat([torch.arange(0, ROPE, 2), torch.arange(1, ROPE, 2)])
        self.norms = [layer.input_norm.weight, layer.post_norm.weight]
        self.q_norm, self.kv_norm = attention.q_a_norm.weight, attention.kv_a_norm.weight
        self.down = torch.cat([attention.q_a_proj.weight, attention.kv_a_proj.weight]).T.clone()
        self.down[:, -ROPE:] = self.down[:, -ROPE:][:, order]
        q_up = attention.q_b_proj.weight.view(HEADS, NOPE + ROPE, Q_RANK)
        k_up, v_up = attention.kv_b_proj.weight.view(HEADS, -1, KV_RANK).split([NOPE, VALUE], 1)
        self.q_latent = torch.einsum("hnq,hnk->hqk", q_up[:, :NOPE], k_up)
        self.q_turned = q_up[:, NOPE:][:, order].transpose(1, 2)
        out = attention.o_proj.weight.view(WIDTH, HEADS, VALUE)
        self.out = torch.einsum("hvk,whv->hkw", v_up, out)
        self.gate_up = torch.cat([layer.gate_proj.weight, layer.up_proj.weight])
        self.shrink, self.scale = layer.down_proj.weight, (NOPE + ROPE) ** -0.5

    def forward(self, x, start, cos, sin, latents, keys):
        stop = start + x.shape[1]
        joint = F.rms_norm(x, (WIDTH,), self.norms[0], 1e-6) @ self.down
        rank, latent, key = joint.tensor_split([Q_RANK, Q_RANK + KV_RANK], -1)
        rank = F.rms_norm(rank, (Q_RANK,), self.q_norm, 1e-6)
        latents[:, start:stop] = F.rms_norm(latent, (KV_RANK,), self.kv_norm, 1e-6)
        keys[:, start:stop] = key * cos + torch.cat([-key[..., 2:], key[..., :2]], -1) * sin
        turned = torch.einsum("blq,hqr->bhlr", rank, self.q_turned)
        turned = turned * cos + torch.cat([-turned[..., 2:], turned[..., :2]], -1) * sin
        content = torch.einsum("blq,hqk->bhlk", rank, self.q_latent)
        scores = torch.einsum("bhlk,bmk->bhlm", content, latents[:, :stop])
        scores = scores + torch.einsum("bhlr,bmr->bhlm", turned, keys[:, :stop])
        future = torch.arange(stop) > torch.arange(start, stop)[:, None]
        shares = F.softmax((self.scale * scores).masked_fill(future, -torch.inf), -1)
        read = torch.einsum("bhlm,bmk->bhlk", shares, latents[:, :stop])
        x = x + torch.einsum("bhlk,hkw->blw", read, self.out)
        gate, up = F.linear(F.rms_norm(x, (WIDTH,), self.norms[1], 1e-6), self.gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.shrink)


class CachedDecoder(nn.Module):
    def __init__(self, reference):
        super().__init__()
        self.layers = nn.ModuleList(AbsorbedLayer(layer) for layer in reference.layers)
        self.table, self.gain = reference.embed.weight, reference.norm.weight
        self.head = reference.lm_head.weight.T

    def forward(self, tokens):
        batch, length = tokens.shape
        latents = [torch.zeros(batch, length, KV_RANK) for _ in self.layers]
        keys = [torch.zeros(batch, length, ROPE) for _ in self.layers]
        logits = torch.empty(batch, length, VOCAB)
        start = 0
        for stop in range(PREFIX, length + 1):
            x = self.table[tokens[:, start:stop]]
            where = torch.arange(start, stop)[:, None]
            angles = where / 100.0 ** (torch.arange(0, ROPE, 2) / ROPE)
            cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
            for layer, latent, key in zip(self.layers, latents, keys):
                x = layer(x, start, cos, sin, latent, key)
            logits[:, start:stop] = F.rms_norm(x, (WIDTH,), self.gain, 1e-6) @ self.head
            start = stop
        return logits


def build():
    reference = shaken(Decoder())
    for parameter in reference.layers.parameters():
        parameter *= 2.0 if parameter.dim() == 2 else 1.0
    port, tokens = CachedDecoder(reference), torch.randint(0, VOCAB, (2, 11))
    return lambda: reference(tokens), lambda: port(tokens)
