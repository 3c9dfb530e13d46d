"""FastSpeech: padded batches with masks beside one utterance after another, channels last."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import Functional, shaken

PHONES, WIDTH, HEADS, DIM, WIDE, MELS, FRAMES, EPS = 20, 24, 2, 12, 32, 10, 40, 1e-5
LENGTHS = (9, 6, 4)


def get_sinusoid_encoding_table(positions):
    hid = torch.arange(WIDTH)
    table = torch.arange(positions)[:, None] / 10000.0 ** (2 * (hid // 2) / WIDTH)
    return torch.where(hid % 2 == 0, table.sin(), table.cos())


class FFTBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.w_qs, self.w_ks, self.w_vs = (nn.Linear(WIDTH, HEADS * DIM) for _ in "qkv")
        self.fc, self.attn_norm = nn.Linear(HEADS * DIM, WIDTH), nn.LayerNorm(WIDTH)
        self.w_1, self.w_2 = nn.Conv1d(WIDTH, WIDE, 5, padding=2), nn.Conv1d(WIDE, WIDTH, 1)
        self.ffn_norm = nn.LayerNorm(WIDTH)

    def forward(self, x, mask):
        heads = (w(x).unflatten(2, (HEADS, DIM)) for w in (self.w_qs, self.w_ks, self.w_vs))
        q, k, v = (t.permute(2, 0, 1, 3).flatten(0, 1) for t in heads)
        attn = torch.bmm(q, k.transpose(1, 2)) / DIM**0.5
        attn = attn.masked_fill(mask[:, None].repeat(HEADS, 1, 1), -torch.inf).softmax(dim=2)
        output = torch.bmm(attn, v).unflatten(0, (HEADS, -1)).permute(1, 2, 0, 3).flatten(2)
        x = self.attn_norm(self.fc(output) + x).masked_fill(mask[..., None], 0)
        output = self.w_2(F.relu(self.w_1(x.transpose(1, 2)))).transpose(1, 2)
        return self.ffn_norm(output + x).masked_fill(mask[..., None], 0)


class VariancePredictor(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, 1)

    def forward(self, x, mask):
        x = self.norm(F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2))
        return self.linear(x).squeeze(-1).masked_fill(mask, 0.0)


class FastSpeech(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.mel_linear = nn.Embedding(PHONES, WIDTH), nn.Linear(WIDTH, MELS)
        self.encoder, self.decoder = FFTBlock(), FFTBlock()
        self.duration, self.pitch = VariancePredictor(), VariancePredictor()
        self.pitch_emb = nn.Conv1d(1, WIDTH, 3, padding=1)
        sizes = (MELS, WIDE), (WIDE, MELS)
        self.post_convs = nn.ModuleList(nn.Conv1d(*size, 5, padding=2) for size in sizes)
        self.post_bns = nn.ModuleList(nn.BatchNorm1d(size[1]) for size in sizes)

    def forward(self, phones, lengths):
        src_mask = torch.arange(phones.shape[1]) >= lengths[:, None]
        x = self.emb(phones) + get_sinusoid_encoding_table(phones.shape[1])
        x = self.encoder(x, src_mask)
        log_d, pitch = self.duration(x, src_mask), self.pitch(x, src_mask)
        x = x + self.pitch_emb(pitch[:, None]).transpose(1, 2)
        duration = torch.clamp(torch.round(torch.exp(log_d) - 1), min=0).long()
        x = [row.repeat_interleave(d, dim=0)[:FRAMES] for row, d in zip(x, duration, strict=True)]
        mel_mask = torch.arange(FRAMES) >= torch.tensor([len(row) for row in x])[:, None]
        x = torch.stack([F.pad(row, (0, 0, 0, FRAMES - len(row))) for row in x])
        x = self.decoder(x + get_sinusoid_encoding_table(FRAMES), mel_mask)
        mel = self.mel_linear(x).masked_fill(mel_mask[..., None], 0)
        y = torch.tanh(self.post_bns[0](self.post_convs[0](mel.transpose(1, 2))))
        y = self.post_bns[1](self.post_convs[1](y.masked_fill(mel_mask[:, None], 0)))
        return log_d, pitch, mel, mel + y.transpose(1, 2).masked_fill(mel_mask[..., None], 0)


class Voice(Functional):
    def __init__(self, model):
        super().__init__(model)
        self.post = []
        for conv, bn in zip(model.post_convs, model.post_bns, strict=True):
            scale = bn.weight / (bn.running_var + EPS).sqrt()
            shift = bn.bias + (conv.bias - bn.running_mean) * scale
            self.post.append((conv.weight * scale[:, None, None], shift))

    def norm(self, x, name):
        return F.layer_norm(x, (WIDTH,), self.w(name, "weight"), self.w(name, "bias"), EPS)

    def filter(self, x, kernel, bias):
        taps = F.pad(x, (0, 0, kernel.shape[2] // 2, kernel.shape[2] // 2))
        return taps.unfold(0, kernel.shape[2], 1).flatten(1) @ kernel.flatten(1).T + bias

    def dense(self, x, name):
        return self.filter(x, self.w(name, "weight")[..., None].flatten(2), self.w(name, "bias"))

    def block(self, x, name):
        phases = torch.arange(len(x))[:, None] * 1e-4 ** (torch.arange(0, WIDTH, 2) / WIDTH)
        x = x + torch.stack([phases.sin(), phases.cos()], -1).flatten(1)
        rows = ([self.w(name, f"w_{p}s", kind) for p in "qkv"] for kind in ("weight", "bias"))
        q, k, v = F.linear(x, *map(torch.cat, rows)).unflatten(1, (3, HEADS, DIM)).unbind(1)
        share = (torch.einsum("qhd,khd->hqk", q, k) * DIM**-0.5).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", share, v).flatten(1)
        x = self.norm(x + self.dense(mixed, f"{name}.fc"), f"{name}.attn_norm")
        y = self.dense(self.dense(x, f"{name}.w_1").relu(), f"{name}.w_2")
        return self.norm(x + y, f"{name}.ffn_norm")

    def guess(self, x, part):
        x = self.norm(self.dense(x, f"{part}.conv").relu(), f"{part}.norm")
        return self.dense(x, f"{part}.linear")

    def forward(self, phones):
        said = self.block(self.emb_weight[phones], "encoder")
        spans, pitch = self.guess(said, "duration"), self.guess(said, "pitch")
        said = said + self.dense(pitch, "pitch_emb")
        ends = spans[:, 0].expm1().round().clamp(min=0).cumsum(0)
        frames = torch.arange(min(ends[-1], FRAMES), dtype=ends.dtype)
        x = self.block(said[torch.searchsorted(ends, frames, right=True)], "decoder")
        mel = self.dense(x, "mel_linear")
        better = mel + self.filter(self.filter(mel, *self.post[0]).tanh(), *self.post[1])
        return spans, pitch, mel, better


def speak(voice, phones):
    said = zip(*(voice(words[:n]) for words, n in zip(phones, LENGTHS, strict=True)), strict=True)
    sizes = max(LENGTHS), max(LENGTHS), FRAMES, FRAMES
    padded = zip(said, sizes, strict=True)
    padded = [torch.stack([F.pad(x, (0, 0, 0, n - len(x))) for x in each]) for each, n in padded]
    return padded[0][..., 0], padded[1][..., 0], *padded[2:]


def build():
    reference = shaken(FastSpeech())
    reference.duration.linear.bias += 1.2
    for bn in reference.post_bns:
        bn.running_mean.normal_(0, 0.3)
        bn.running_var.uniform_(0.3, 2)
    port, phones = Voice(reference), torch.randint(0, PHONES, (len(LENGTHS), max(LENGTHS)))
    return lambda: reference(phones, torch.tensor(LENGTHS)), lambda: speak(port, phones)
