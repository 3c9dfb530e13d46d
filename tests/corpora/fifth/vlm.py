"""A picture and text decoder: padded rows read at once beside packed prompts and a cache."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import Functional, shaken

VOCAB, WIDTH, HEADS, KV, DIM, HIDDEN, PATCH, MERGE = 40, 32, 4, 2, 16, 40, 4, 2
SECTIONS, THETA, EPS, PAD, IMAGE, STEPS, MOST = (2, 3, 3), 1000.0, 1e-6, 0, 39, 4, 24


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.places, self.norm1 = nn.Parameter(torch.randn(2, 8, WIDTH) / 2), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2, self.project = nn.LayerNorm(4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, pixels):
        x = self.patch(pixels[None]).permute(0, 2, 3, 1)
        x = x + self.places[0, : x.shape[1], None] + self.places[1, : x.shape[2]]
        n, h, w, c = x.shape
        qkv = self.qkv(self.norm1(x)).view(h * w, 3, HEADS, -1).permute(1, 2, 0, 3)
        weights = (qkv[0] @ qkv[1].transpose(1, 2) * (WIDTH // HEADS) ** -0.5).softmax(dim=-1)
        x = x + self.proj((weights @ qkv[2]).transpose(0, 1).reshape(n, h, w, c))
        x = x.reshape(n, h, w // MERGE, c * MERGE).permute(0, 2, 1, 3)
        x = x.reshape(n, w // MERGE, h // MERGE, c * MERGE**2).permute(0, 2, 1, 3)
        return F.gelu(self.project(self.norm2(x))).reshape(-1, WIDTH)


def get_rope_index(input_ids, attention_mask, grids):
    position_ids = torch.zeros(3, *input_ids.shape)
    for i, (ids, (h, w)) in enumerate(zip(input_ids, grids, strict=True)):
        ids = ids[attention_mask[i]].tolist()
        start = ids.index(IMAGE)
        h_index = torch.arange(h).view(-1, 1).expand(h, w).flatten()
        w_index = torch.arange(w).view(1, -1).expand(h, w).flatten()
        image = torch.stack([torch.zeros(h * w), h_index, w_index]) + start
        text = torch.arange(len(ids) - start - h * w).expand(3, -1) + image.max() + 1
        parts = torch.arange(start).expand(3, -1), image, text
        position_ids[:, i, attention_mask[i]] = torch.cat(parts, dim=1)
    return position_ids


def apply_rope(x, cos, sin):
    return x * cos + torch.cat((-x[..., DIM // 2 :], x[..., : DIM // 2]), dim=-1) * sin


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(WIDTH, eps=EPS) for _ in range(2))
        sizes = HEADS * DIM, KV * DIM, KV * DIM, HIDDEN, HIDDEN
        self.q, self.k, self.v, self.gate, self.up = (nn.Linear(WIDTH, n, False) for n in sizes)
        self.o, self.down = nn.Linear(HEADS * DIM, WIDTH, False), nn.Linear(HIDDEN, WIDTH, False)

    def forward(self, x, cos, sin, mask):
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(2, (-1, DIM)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        k, v = (t.repeat_interleave(HEADS // KV, dim=1) for t in (k, v))
        weights = (q @ k.transpose(2, 3) * DIM**-0.5 + mask).softmax(dim=-1)
        x = x + self.o((weights @ v).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class VisionLanguage(nn.Module):
    def __init__(self):
        super().__init__()
        self.vision, self.embed = Vision(), nn.Embedding(VOCAB, WIDTH)
        self.layers, self.norm = nn.ModuleList([Layer(), Layer()]), nn.RMSNorm(WIDTH, eps=EPS)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, input_ids, pictures):
        x, real = self.embed(input_ids), input_ids != PAD
        features = torch.cat([self.vision(pixels) for pixels in pictures])
        x = x.masked_scatter((input_ids == IMAGE)[..., None], features)
        grids = [[n // PATCH // MERGE for n in pixels.shape[1:]] for pixels in pictures]
        positions = get_rope_index(input_ids, real, grids)
        freqs = positions[..., None] / THETA ** (torch.arange(0, DIM, 2) / DIM)
        freqs = [part[i] for i, part in enumerate(freqs.split(SECTIONS, dim=-1))]
        emb = torch.cat(freqs * 2, dim=-1)[:, None]
        seen = torch.ones(2 * input_ids.shape[1:], dtype=torch.bool).tril() & real[:, None, None]
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        for layer in self.layers:
            x = layer(x, emb.cos(), emb.sin(), mask)
        return self.lm_head(self.norm(x[:, -STEPS - 1 :]))


class Packed(Functional):
    """The prompts in one row, then a token of each at a time; the cache has MOST slots for each."""

    def dense(self, x, *name):
        return F.linear(x, self.w(*name, "weight").flatten(1), self.w(*name, "bias"))

    def norm(self, x, *name):
        return F.rms_norm(x, (WIDTH,), self.w(*name, "weight"), EPS)

    def look(self, pictures, sizes):
        """Read both pictures at once; the patches that are merged stand side by side."""
        patches, spots = [], []
        for pixels, (h, w) in zip(pictures, sizes.tolist(), strict=True):
            cells = pixels.view(3, h, MERGE, PATCH, w, MERGE, PATCH).permute(1, 4, 2, 5, 0, 3, 6)
            patches.append(cells.reshape(-1, 3 * PATCH**2))
            spots.append(torch.cartesian_prod(*map(torch.arange, (h, w, MERGE, MERGE))))
        down, along = (MERGE * torch.cat(spots)[:, :2] + torch.cat(spots)[:, 2:]).T
        x = self.dense(torch.cat(patches), "vision.patch")
        x = x + self.vision_places[0, down] + self.vision_places[1, along]
        y = F.layer_norm(x, (WIDTH,), self.vision_norm1_weight, self.vision_norm1_bias)
        qkv = self.dense(y, "vision.qkv").unflatten(1, (3, HEADS, -1)).permute(1, 2, 0, 3)
        owner = torch.arange(len(spots)).repeat_interleave(MERGE**2 * sizes.prod(1))
        y = F.scaled_dot_product_attention(*qkv, attn_mask=owner[:, None] == owner)
        x = x + self.dense(y.transpose(0, 1).flatten(1), "vision.proj")
        y = x.view(-1, MERGE**2 * WIDTH)
        y = F.layer_norm(y, y.shape[1:], self.vision_norm2_weight, self.vision_norm2_bias)
        return F.gelu(self.dense(y, "vision.project"))

    def read(self, x, places, owners, orders):
        angles = places.repeat_interleave(torch.tensor(SECTIONS), 0).T
        angles = angles * THETA ** -(torch.arange(DIM // 2) * 2 / DIM)
        turns, slots = torch.polar(torch.ones(()), angles)[:, None], torch.arange(2 * MOST)
        seen = (slots // MOST == owners[:, None]) & (slots % MOST <= orders[:, None])
        for i in (0, 1):
            rows = torch.cat([self.w("layers", i, part, "weight") for part in "qkv"])
            heads = (self.norm(x, "layers", i, "norm1") @ rows.T).unflatten(1, (-1, DIM))
            qk = torch.complex(*heads[:, :-KV].chunk(2, -1)) * turns
            q, k = torch.cat([qk.real, qk.imag], -1).split([HEADS, KV], 1)
            self.cache[i][:, owners * MOST + orders] = torch.stack([k, heads[:, -KV:]])
            keys, values = self.cache[i]
            scores = torch.einsum("nghd,sgd->nghs", q.unflatten(1, (KV, -1)), keys) / DIM**0.5
            shares = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
            mixed = torch.einsum("nghs,sgd->nghd", shares, values).flatten(1)
            x = x + mixed @ self.w("layers", i, "o.weight").T
            rows = torch.cat([self.w("layers", i, part, "weight") for part in ("gate", "up")])
            gate, up = (self.norm(x, "layers", i, "norm2") @ rows.T).chunk(2, -1)
            x = x + (F.silu(gate) * up) @ self.w("layers", i, "down.weight").T
        return self.norm(x, "norm") @ self.lm_head_weight.T

    def forward(self, texts, pictures):
        self.cache = torch.zeros(2, 2, 2 * MOST, KV, DIM)
        prompts = [text[:-STEPS] for text in texts]
        tokens, counts = torch.cat(prompts), torch.tensor([*map(len, prompts)])
        sizes = torch.tensor([p.shape[1:] for p in pictures]) // (PATCH * MERGE)
        extents, areas, everyone = sizes.amax(1), sizes.prod(1), torch.arange(len(texts))
        owners, inside = everyone.repeat_interleave(counts), tokens == IMAGE
        orders = torch.arange(len(tokens)) - (counts.cumsum(0) - counts)[owners]
        passed = inside.cumsum(0) - inside.long() - (areas.cumsum(0) - areas)[owners]
        across = sizes[owners, 1]
        places = orders - passed + extents[owners] * (passed == areas[owners])
        places = places + inside * torch.stack([0 * passed, passed // across, passed % across])
        x = self.embed_weight[tokens]
        x = x.index_copy(0, inside.nonzero()[:, 0], self.look(pictures, sizes))
        said = [self.read(x, places, owners, orders)[counts.cumsum(0) - 1]]
        for step in range(STEPS):
            x = self.embed_weight[torch.stack([text[step - STEPS] for text in texts])]
            places = (counts + step + extents - areas).expand(3, -1)
            said.append(self.read(x, places, everyone, counts + step))
        return torch.stack(said, 1)


def build():
    reference, pictures = shaken(VisionLanguage()), (torch.randn(3, 16, 24), torch.randn(3, 16, 16))
    texts = []
    for before, area, after in ((3, 6, 8), (5, 4, 6)):
        words = torch.randint(1, IMAGE, (before + after,))
        texts.append(torch.cat([words[:before], torch.full((area,), IMAGE), words[before:]]))
    padded = nn.utils.rnn.pad_sequence(texts, True, PAD, padding_side="left")
    port = Packed(reference)
    return lambda: reference(padded, pictures), lambda: port(texts, pictures)
