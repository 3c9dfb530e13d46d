"""A decoder with a sliding window and sinks: padded rows beside packed tokens and a paged cache."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import Functional, shaken

VOCAB, WIDTH, HEADS, KV, DIM, WIDE, LAYERS, EPS, THETA = 50, 32, 4, 2, 8, 48, 2, 1e-6, 1000.0
WINDOW, BLOCK, BLOCKS, PROMPT, LENGTHS = 6, 4, 12, 7, (13, 9, 11)


def apply_rotary(x, freqs):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * freqs.cos() - x2 * freqs.sin(), x2 * freqs.cos() + x1 * freqs.sin()), -1)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(map(nn.RMSNorm, [WIDTH] * 2))
        self.q_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in "qo")
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, KV * DIM, bias=False) for _ in "kv")
        self.q_norm, self.k_norm = nn.RMSNorm(DIM, eps=EPS), nn.RMSNorm(DIM, eps=EPS)
        self.sinks = nn.Parameter(torch.randn(HEADS))
        self.gate_up_proj = nn.Linear(WIDTH, 2 * WIDE, bias=False)
        self.down_proj = nn.Linear(WIDE, WIDTH, bias=False)

    def attention(self, x, freqs, mask):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (t.unflatten(-1, (-1, DIM)).transpose(1, 2) for t in (q, k, v))
        q, k = apply_rotary(self.q_norm(q), freqs), apply_rotary(self.k_norm(k), freqs)
        k, v = (t.repeat_interleave(HEADS // KV, dim=1) for t in (k, v))
        scores = (q @ k.transpose(-1, -2) * DIM**-0.5).masked_fill(~mask, -torch.inf)
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(len(x), -1, x.shape[1], 1)
        probs = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
        return self.o_proj((probs @ v).transpose(1, 2).flatten(2))

    def forward(self, x, freqs, mask):
        x = x + self.attention(self.norms[0](x), freqs, mask)
        gate, up = self.gate_up_proj(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down_proj(F.silu(gate) * up)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, input_ids, attention_mask):
        position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        freqs = position_ids[:, None, :, None] / THETA ** (torch.arange(0, DIM, 2) / DIM)
        rows = torch.arange(input_ids.shape[1])
        distance = rows[:, None] - rows[None, :]
        mask = (distance >= 0) & (distance < WINDOW) & attention_mask[:, None, None, :]
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, freqs, mask)
        return F.linear(x, self.embed_tokens.weight)


class Server(Functional):
    """Rotates neighbours and not halves, for which rows of the weights change places."""

    def __init__(self, decoder):
        super().__init__(decoder)
        order, self.layers = torch.arange(DIM).view(2, -1).T.flatten(), []
        for name in (f"layers.{i}" for i in range(LAYERS)):
            q, k, v = (self.w(name, f"{part}_proj.weight") for part in "qkv")
            q, k = (rows.view(-1, DIM, WIDTH)[:, order].flatten(0, 1) for rows in (q, k))
            scales = [self.w(name, f"{part}_norm.weight")[order] for part in "qk"]
            scales = torch.stack([scales[0]] * HEADS + [scales[1]] * KV)
            self.layers.append((torch.cat([q, k, v]).T, scales))

    def norm(self, x, *name):
        return x * (x.square().mean(-1, keepdim=True) + torch.finfo().eps).rsqrt() * self.w(*name)

    def attend(self, q, keys, values, own, sink):
        group, gap = torch.arange(HEADS) // (HEADS // KV), own[:, None] - torch.arange(len(keys))
        scores = torch.einsum("qhd,khd->hqk", q, keys[:, group]) / DIM**0.5
        scores = scores.masked_fill((gap < 0) | (gap >= WINDOW), -torch.inf)
        top = scores.amax(-1, keepdim=True).maximum(sink)
        share = (scores - top).exp()
        share = share / (share.sum(-1, keepdim=True) + (sink - top).exp())
        return torch.einsum("hqk,khd->qhd", share, values[:, group]).flatten(1)

    def forward(self, tokens, places, slots, requests, pool):
        x, sizes = self.w("embed_tokens.weight")[tokens], [len(own) for own, _ in requests]
        angles = places[:, None, None] * THETA ** -torch.linspace(0, 1, DIM // 2 + 1)[:-1]
        turn = torch.polar(torch.ones_like(angles), angles)
        for i, (qkv, scales) in enumerate(self.layers):
            sink = self.w("layers", i, "sinks")[:, None, None]
            y = (self.norm(x, "layers", i, "norms.0.weight") @ qkv).unflatten(1, (-1, DIM))
            heads = F.rms_norm(y[:, : HEADS + KV], (DIM,), eps=EPS) * scales
            heads = torch.view_as_complex(heads.unflatten(2, (-1, 2))) * turn
            q, k = torch.view_as_real(heads).flatten(2).split([HEADS, KV], 1)
            pool[i].flatten(1, 2)[:, slots] = torch.stack([k, y[:, HEADS + KV :]])
            said = [
                self.attend(rows, *pool[i][:, table].flatten(1, 2), own, sink)
                for rows, (own, table) in zip(q.split(sizes), requests, strict=True)
            ]
            x = x + torch.cat(said) @ self.w("layers", i, "o_proj.weight").T
            wide = self.norm(x, "layers", i, "norms.1.weight")
            wide = (wide @ self.w("layers", i, "gate_up_proj.weight").T).unflatten(1, (2, WIDE))
            wide = wide[:, 0] * wide[:, 0].sigmoid() * wide[:, 1]
            x = x + wide @ self.w("layers", i, "down_proj.weight").T
        return (x @ self.w("embed_tokens.weight").T).split(sizes)


def serve(server, texts):
    pool, free = torch.zeros(LAYERS, 2, BLOCKS, BLOCK, KV, DIM), list(range(BLOCKS))
    tables, logits, passed, read = [[], [], []], [[], [], []], [0, 0, 0], [0, 0, 0]
    while running := [r for r, text in enumerate(texts) if read[r] < len(text)]:
        tokens, places, slots, requests = [], [], [], []
        for r in running:
            start, stop = read[r], min(read[r] + (1 if read[r] else PROMPT), len(texts[r]))
            while (passed[r] + 1) * BLOCK <= start - WINDOW + 1:
                free.append(tables[r].pop(0))
                passed[r] += 1
            while (passed[r] + len(tables[r])) * BLOCK < stop:
                tables[r].append(free.pop())
            own, table = torch.arange(start, stop) - passed[r] * BLOCK, torch.tensor(tables[r])
            tokens.append(texts[r][start:stop])
            places.append(own + passed[r] * BLOCK)
            slots.append(table[own // BLOCK] * BLOCK + own % BLOCK)
            requests.append((own, table))
            read[r] = stop
        out = server(*map(torch.cat, (tokens, places, slots)), requests, pool)
        for r, rows in zip(running, out, strict=True):
            logits[r].append(rows)
    return torch.cat([torch.cat(rows) for rows in logits])


def build():
    reference = shaken(Decoder())
    port, texts = Server(reference), [torch.randint(0, VOCAB, (n,)) for n in LENGTHS]
    ids = torch.stack([F.pad(text, (max(LENGTHS) - len(text), 0)) for text in texts])
    mask = torch.arange(max(LENGTHS)) >= max(LENGTHS) - torch.tensor(LENGTHS)[:, None]
    return lambda: reference(ids, mask)[mask], lambda: serve(port, texts)
