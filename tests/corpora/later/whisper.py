"""Whisper: greedy decoding that reads everything again beside one with caches."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import Functional, shaken

MELS, FRAMES, WIDTH, HEADS, LAYERS, VOCAB, CONTEXT, STEPS = 8, 24, 32, 4, 2, 30, 12, 5
PROMPT, SUPPRESSED = (1, 4, 2), (0, 1, 5)


class MultiHeadAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, source=None, mask=0.0):
        source, scale = x if source is None else source, (WIDTH // HEADS) ** -0.25
        q = self.query(x).unflatten(2, (HEADS, -1)).permute(0, 2, 1, 3) * scale
        k = self.key(source).unflatten(2, (HEADS, -1)).permute(0, 2, 3, 1) * scale
        v = self.value(source).unflatten(2, (HEADS, -1)).permute(0, 2, 1, 3)
        weights = (q @ k + mask).softmax(-1)
        return self.out((weights @ v).permute(0, 2, 1, 3).flatten(2))


class ResidualBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.attn_ln = MultiHeadAttention(), nn.LayerNorm(WIDTH)
        self.cross_attn, self.cross_attn_ln = MultiHeadAttention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))
        self.mlp_ln = nn.LayerNorm(WIDTH)

    def forward(self, x, audio=None, mask=0.0):
        x = x + self.attn(self.attn_ln(x), mask=mask)
        if audio is not None:
            x = x + self.cross_attn(self.cross_attn_ln(x), audio)
        return x + self.mlp(self.mlp_ln(x))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(MELS, WIDTH, 3, padding=1)
        self.conv2 = nn.Conv1d(WIDTH, WIDTH, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(ResidualBlock() for _ in range(LAYERS))
        self.ln_post = nn.LayerNorm(WIDTH)

    def forward(self, mels):
        x = F.gelu(self.conv2(F.gelu(self.conv1(mels)))).permute(0, 2, 1)
        inverse = torch.exp(-torch.tensor(1e4).log() / (WIDTH // 2 - 1) * torch.arange(WIDTH // 2))
        times = torch.arange(x.shape[1])[:, None] * inverse
        x = x + torch.cat([times.sin(), times.cos()], 1)
        for block in self.blocks:
            x = block(x)
        return self.ln_post(x)


class Whisper(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.tokens = Encoder(), nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Parameter(torch.randn(CONTEXT, WIDTH))
        self.blocks = nn.ModuleList(ResidualBlock() for _ in range(LAYERS))
        self.ln = nn.LayerNorm(WIDTH)

    def decode(self, tokens, audio):
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)
        for block in self.blocks:
            x = block(x, audio, mask)
        return self.ln(x) @ self.tokens.weight.T

    def forward(self, mels):
        audio, tokens, rows = self.encoder(mels), torch.tensor([PROMPT] * len(mels)), []
        for _ in range(STEPS):
            logits = self.decode(tokens, audio)[:, -1]
            rows.append(logits.log_softmax(-1))
            logits[:, SUPPRESSED] = -torch.inf
            tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)
        return tokens, torch.stack(rows, 1)


class CachedWhisper(Functional):
    def dense(self, x, *name):
        return x @ self.w(*name, "weight").T + self.w(*name, "bias")

    def normed(self, x, *name):
        return F.layer_norm(x, (WIDTH,), self.w(*name, "weight"), self.w(*name, "bias"))

    def keys_values(self, source, *name):
        pair = source @ self.w(*name, "key.weight").T, self.dense(source, *name, "value")
        return [torch.stack(x.tensor_split(HEADS, -1)) for x in pair]

    def attend(self, x, keys, values, *name, causal=False):
        q = torch.stack(self.dense(x, *name, "query").tensor_split(HEADS, -1))
        mixed = F.scaled_dot_product_attention(q, keys, values, is_causal=causal)
        return self.dense(torch.cat(mixed.unbind(0), -1), *name, "out")

    def mlp(self, x, *name):
        hidden = F.gelu(self.dense(self.normed(x, *name, "mlp_ln"), *name, "mlp.0"))
        return x + self.dense(hidden, *name, "mlp.2")

    def convolve(self, x, stride, *name):
        windows, weight = F.pad(x, (0, 0, 1, 1)).unfold(1, 3, stride), self.w(*name, "weight")
        return F.gelu(windows.flatten(2) @ weight.flatten(1).T + self.w(*name, "bias"))

    def listen(self, mels):
        x = self.convolve(self.convolve(mels.mT, 1, "encoder.conv1"), 2, "encoder.conv2")
        times = torch.arange(x.shape[1]).outer(1e-4 ** torch.linspace(0, 1, WIDTH // 2))
        x[..., : WIDTH // 2] += times.sin()
        x[..., WIDTH // 2 :] += times.cos()
        for name in ("encoder.blocks.0", "encoder.blocks.1"):
            y = self.normed(x, name, "attn_ln")
            x = x + self.attend(y, *self.keys_values(y, name, "attn"), name, "attn")
            x = self.mlp(x, name)
        return self.normed(x, "encoder.ln_post")

    def forward(self, mels):
        audio = self.listen(mels)
        heard = [self.keys_values(audio, "blocks", i, "cross_attn") for i in range(LAYERS)]
        said, tokens, rows, offset = [[], []], [torch.tensor([PROMPT] * len(mels))], [], 0
        banned = torch.isin(torch.arange(VOCAB), torch.tensor(SUPPRESSED))
        while len(rows) < STEPS:
            x = self.tokens_weight[tokens[-1]]
            x = x + self.positions[offset : offset + x.shape[1]]
            offset += x.shape[1]
            for i in range(LAYERS):
                y = self.normed(x, "blocks", i, "attn_ln")
                new = self.keys_values(y, "blocks", i, "attn")
                said[i] = [torch.cat([a, b], 2) for a, b in zip(said[i], new)] or new
                x = x + self.attend(y, *said[i], "blocks", i, "attn", causal=not rows)
                y = self.normed(x, "blocks", i, "cross_attn_ln")
                x = x + self.attend(y, *heard[i], "blocks", i, "cross_attn")
                x = self.mlp(x, "blocks", i)
            logits = F.linear(self.normed(x[:, -1], "ln"), self.tokens_weight)
            rows.append(logits - logits.logsumexp(1, keepdim=True))
            tokens.append(logits.masked_fill(banned, -torch.inf).argmax(1, keepdim=True))
        return torch.cat(tokens, 1), torch.stack(rows, 1)


def build():
    reference = shaken(Whisper())
    for name, parameter in reference.named_parameters():
        if parameter.dim() > 1:
            parameter *= 2.5 if "encoder" in name or "blocks" in name else 0.3
    port, mels = CachedWhisper(reference), torch.randn(2, MELS, FRAMES)
    return lambda: reference(mels), lambda: port(mels)
