"""Text and video attend: masks over lists of tokens beside channels-last maps that are cut up."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import Functional, shaken

WIDTH, HEADS, DIM, WORDS, TRAINED_FPS = 32, 2, 16, 7, 24
AXES, WINDOW, THETA = (4, 6, 6), (2, 3), 1000.0


def apply_rotary(x, grid, fps):
    steps, out = (TRAINED_FPS / fps, 1.0, 1.0), []
    places = torch.meshgrid(*(torch.arange(n).float() for n in grid), indexing="ij")
    for part, place, step in zip(x.split(AXES, dim=-1), places, steps, strict=True):
        freqs = 1.0 / THETA ** (torch.arange(0, part.shape[-1], 2) / part.shape[-1])
        angles = step * place.reshape(-1, 1) * freqs.repeat(2)
        first, second = part.chunk(2, dim=-1)
        out.append(part * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin())
    return torch.cat(out, dim=-1)


def attention(q, k, v, mask):
    scores = (q @ k.transpose(-1, -2)) * DIM**-0.5
    return scores.masked_fill(~mask, float("-inf")).softmax(dim=-1) @ v


class Projections(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, False) for _ in range(4))
        self.norm_q, self.norm_k = (nn.RMSNorm(DIM, eps=1e-6) for _ in range(2))

    def heads(self, x, *rotary):
        q, k, v = (f(x).unflatten(-1, (HEADS, DIM)) for f in (self.q, self.k, self.v))
        q, k, v = (t.transpose(1, 2) for t in (self.norm_q(q), self.norm_k(k), v))
        return (apply_rotary(q, *rotary), apply_rotary(k, *rotary), v) if rotary else (q, k, v)

    def out(self, x):
        return self.o(x.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.video, self.text, self.spatial, self.temporal = (Projections() for _ in range(4))
        self.scale_shift_table = nn.Parameter(torch.randn(6, WIDTH) / 2)

    def forward(self, x, c, vec, rotary, joint_mask, window_mask, past_mask):
        m = (self.scale_shift_table + vec).chunk(6, dim=1)
        video = self.video.heads(F.layer_norm(x, (WIDTH,)) * (1 + m[1]) + m[0], *rotary)
        text = self.text.heads(F.layer_norm(c, (WIDTH,)) * (1 + m[4]) + m[3])
        q, k, v = (torch.cat(pair, dim=2) for pair in zip(text, video, strict=True))
        mixed = attention(q, k, v, joint_mask)
        c = c + m[5] * self.text.out(mixed[:, :, :WORDS])
        x = x + m[2] * self.video.out(mixed[:, :, WORDS:])
        near = self.spatial.heads(F.layer_norm(x, (WIDTH,)), *rotary)
        x = x + self.spatial.out(attention(*near, window_mask))
        past = self.temporal.heads(F.layer_norm(x, (WIDTH,)), *rotary)
        return x + self.temporal.out(attention(*past, past_mask)), c


class VideoTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x, vec, text, known, fps):
        grid, x = x.shape[2:], x.flatten(2).transpose(1, 2)
        f, h, w = (p.flatten() for p in torch.meshgrid(*map(torch.arange, grid), indexing="ij"))
        cell, pixel = torch.stack([f, h // WINDOW[0], w // WINDOW[1]]), torch.stack([h, w])
        window_mask = (cell[:, :, None] == cell[:, None, :]).all(0)
        past_mask = (pixel[:, :, None] == pixel[:, None, :]).all(0) & (f[:, None] >= f)
        joint_mask = F.pad(known, (0, x.shape[1]), value=True)[:, None, None]
        for block in self.blocks:
            x, text = block(x, text, vec, (grid, fps), joint_mask, window_mask, past_mask)
        return x.transpose(1, 2).unflatten(2, grid)


class Maps(Functional):
    """Queries and keys are sorted: of all axes the first halves, then the second ones."""

    def __init__(self, reference):
        super().__init__(reference)
        halves = [part.chunk(2) for part in torch.arange(DIM).split(AXES)]
        self.order = torch.cat([half[i] for i in (0, 1) for half in halves])
        places = torch.arange(3 * HEADS)[:, None] * DIM + self.order
        self.rows = torch.cat([places[: 2 * HEADS].flatten(), torch.arange(2 * WIDTH, 3 * WIDTH)])

    def out(self, x, name):
        return x @ self.w(name, "o.weight").T

    def heads(self, x, name, turns=1.0):
        weight = torch.cat([self.w(name, part, "weight") for part in "qkv"])[self.rows]
        gains = torch.stack([self.w(name, f"norm_{part}.weight") for part in "qk"])
        qk, v = (x @ weight.T).unflatten(-1, (3, HEADS, DIM)).split([2, 1], -3)
        qk = F.rms_norm(qk, (DIM,), eps=1e-6) * gains[:, None, self.order]
        qk = torch.complex(*qk.chunk(2, -1)) * turns
        return torch.cat([torch.cat([qk.real, qk.imag], -1), v], -3)

    def forward(self, x, vec, text, known, fps):
        x, (frames, *size) = x.movedim(1, -1), x.shape[2:]
        steps = TRAINED_FPS / fps * torch.arange(frames), *(torch.arange(n) / 1 for n in size)
        rates = torch.cat([THETA ** -(torch.arange(n // 2) * 2 / n) for n in AXES])
        angles = torch.cartesian_prod(*steps).repeat_interleave(torch.tensor(AXES) // 2, 1) * rates
        turns = torch.polar(torch.ones(()), angles).view(frames, *size, 1, 1, -1)
        seen = F.pad(known, (len(angles), 0), value=True)[:, None, None]
        for name in ("blocks.0", "blocks.1"):
            mood = vec + self.w(name, "scale_shift_table")
            shift, gain, gate, *late = mood.split(1, 1)
            y = torch.addcmul(shift, F.layer_norm(x.flatten(1, 3), (WIDTH,)), 1 + gain).view_as(x)
            words = torch.addcmul(late[0], F.layer_norm(text, (WIDTH,)), 1 + late[1])
            y = self.heads(y, f"{name}.video", turns).flatten(1, 3)
            y = torch.cat([y, self.heads(words, f"{name}.text")], 1).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(*y, attn_mask=seen).transpose(1, 2).flatten(2)
            text = torch.addcmul(text, late[2], self.out(y[:, -WORDS:], f"{name}.text"))
            x = x + (gate * self.out(y[:, :-WORDS], f"{name}.video")).view_as(x)
            y = self.heads(F.layer_norm(x, (WIDTH,)), f"{name}.spatial", turns)
            y = y.unflatten(3, (-1, WINDOW[1])).unflatten(2, (-1, WINDOW[0]))
            y = y.permute(6, 0, 1, 2, 4, 7, 3, 5, 8).flatten(6, 7)
            y = F.scaled_dot_product_attention(*y).unflatten(-2, WINDOW)
            y = y.permute(0, 1, 2, 5, 3, 6, 4, 7).reshape(x.shape)
            x = x + self.out(y, f"{name}.spatial")
            y = self.heads(F.layer_norm(x, (WIDTH,)), f"{name}.temporal", turns)
            y = F.scaled_dot_product_attention(*y.permute(4, 0, 2, 3, 5, 1, 6), is_causal=True)
            x = x + self.out(y.permute(0, 4, 1, 2, 3, 5).flatten(4), f"{name}.temporal")
        return x.movedim(-1, 1)


def build():
    reference, x = shaken(VideoTransformer()), torch.randn(2, WIDTH, 4, 4, 6)
    port, known = Maps(reference), torch.arange(WORDS) < torch.tensor([[4], [WORDS]])
    inputs = x, torch.randn(2, 6, WIDTH) / 2, torch.randn(2, WORDS, WIDTH), known, 16
    return lambda: reference(*inputs), lambda: port(*inputs)
