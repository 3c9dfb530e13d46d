"""PixArt under a stochastic DPM-Solver++: a scheduler with a memory beside tables made beforehand."""

import math
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import Functional, shaken

TRAINED, STEPS, GUIDANCE, LAYERS, WIDTH, HEADS, WORDS, WAVES = 1000, 5, 2.5, 2, 32, 4, 5, 16
ROWS, COLUMNS, CHANNELS, PATCH, BETAS = 3, 4, 4, 2, torch.linspace(0.0001, 0.006, TRAINED)


def get_2d_sincos_pos_embed():
    columns, rows = torch.arange(COLUMNS).float(), torch.arange(ROWS).float()
    grid = torch.meshgrid(columns, rows, indexing="xy")  # here w goes first
    omega = 1.0 / 10000 ** (torch.arange(WIDTH // 4) / (WIDTH / 4))
    halves = [torch.outer(axis.reshape(-1), omega) for axis in grid]
    return torch.cat([torch.cat([half.sin(), half.cos()], dim=1) for half in halves], dim=1)


def attention(q, k, v, mask=None):
    q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class PixArtBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale_shift_table = nn.Parameter(torch.randn(6, WIDTH) / 3)
        self.qkv, self.kv_linear = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.proj, self.q_linear, self.cross_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, y, mask, t):
        table = self.scale_shift_table + t.reshape(len(x), 6, WIDTH)
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = table.chunk(6, dim=1)
        h = F.layer_norm(x, (WIDTH,), eps=1e-6) * (1 + scale_msa) + shift_msa
        x = x + gate_msa * self.proj(attention(*self.qkv(h).chunk(3, dim=-1)))
        x = x + self.cross_proj(attention(self.q_linear(x), *self.kv_linear(y).chunk(2, -1), mask))
        h = F.layer_norm(x, (WIDTH,), eps=1e-6) * (1 + scale_mlp) + shift_mlp
        return x + gate_mlp * self.fc2(F.silu(self.fc1(h)))


class PixArt(nn.Module):
    def __init__(self):
        super().__init__()
        self.x_embedder = nn.Conv2d(CHANNELS, WIDTH, PATCH, stride=PATCH)
        layers = nn.Linear(WAVES, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH)
        self.t_block = nn.Sequential(*layers)
        self.blocks = nn.ModuleList(PixArtBlock() for _ in range(LAYERS))
        self.final = nn.Linear(WIDTH, PATCH * PATCH * 2 * CHANNELS)

    def forward(self, x, timestep, y, mask):
        x = self.x_embedder(x).flatten(2).transpose(1, 2) + get_2d_sincos_pos_embed()
        freqs = torch.exp(-math.log(10000) * torch.arange(WAVES // 2) / (WAVES // 2))
        args = timestep[:, None].float() * freqs
        t = self.t_block(torch.cat([args.cos(), args.sin()], dim=-1))
        for block in self.blocks:
            x = block(x, y, mask[:, None, None, :], t)
        x = self.final(F.layer_norm(x, (WIDTH,), eps=1e-6))
        x = x.reshape(len(x), ROWS, COLUMNS, PATCH, PATCH, 2 * CHANNELS)
        return torch.einsum("nhwpqc->nchpwq", x).flatten(4, 5).flatten(2, 3)


class DPMSolverMultistepScheduler:
    def __init__(self):
        self.timesteps = torch.linspace(0, TRAINED - 1, STEPS + 1).round().flip(0)[:-1].long()
        kept = torch.cat([torch.cumprod(1 - BETAS, dim=0)[self.timesteps], torch.ones(1)])
        self.alpha_t, self.sigma_t = kept.sqrt(), (1 - kept).sqrt()
        self.lambda_t, self.model_outputs = self.alpha_t.log() - self.sigma_t.log(), [None, None]

    def step(self, noise_pred, i, sample, noise):
        x0_pred = (sample - self.sigma_t[i] * noise_pred) / self.alpha_t[i]
        m1, m0 = self.model_outputs = [self.model_outputs[1], x0_pred]
        h = self.lambda_t[i + 1] - self.lambda_t[i]
        gain = self.alpha_t[i + 1] * (1 - torch.exp(-2.0 * h))
        x_t = (self.sigma_t[i + 1] / self.sigma_t[i] * torch.exp(-h)) * sample + gain * m0
        if 0 < i < STEPS - 1:
            r0 = (self.lambda_t[i] - self.lambda_t[i - 1]) / h
            x_t = x_t + 0.5 * gain * ((1.0 / r0) * (m0 - m1))
        return x_t + self.sigma_t[i + 1] * torch.sqrt(1.0 - torch.exp(-2 * h)) * noise


def sample(model, latents, noises, prompt, prompt_mask, negative, negative_mask):
    scheduler = DPMSolverMultistepScheduler()
    y, mask = torch.cat([negative, prompt]), torch.cat([negative_mask, prompt_mask])
    for i, t in enumerate(scheduler.timesteps):
        noise_pred = model(torch.cat([latents] * 2), t.expand(len(y)), y, mask).chunk(2, dim=1)[0]
        uncond, text = noise_pred.chunk(2)
        latents = scheduler.step(uncond + GUIDANCE * (text - uncond), i, latents, noises[i])
    return latents


def plan(kept):
    """What latents, noise, the last two guesses and fresh noise are multiplied with in each step."""
    rows, hop = [], 0.0
    for i, (now, then) in enumerate(pairwise([*kept, 1.0])):
        odds = now * (1 - then) / (1 - now) / then
        hop, before = -math.log(odds) / 2 if odds else math.inf, hop
        gain = then**0.5 * (1 - odds)
        lean = gain / 2 * hop / before if 0 < i < STEPS - 1 else 0.0
        keep, fresh = ((1 - then) / (1 - now) * odds) ** 0.5, ((1 - then) * (1 - odds)) ** 0.5
        rows.append((now**-0.5, (1 / now - 1) ** 0.5, keep, gain + lean, -lean, fresh))
    return rows


class Painter(Functional):
    def __init__(self, model):
        super().__init__(model)
        times = [round((TRAINED - 1) * (1 - i / STEPS)) for i in range(STEPS)]
        wave = torch.arange(COLUMNS)[:, None] * 1e-4 ** (torch.arange(0, WIDTH, 4) / WIDTH)
        wave = torch.cat([wave.sin(), wave.cos()], 1)
        down, along = wave[:ROWS, None].expand(-1, COLUMNS, -1), wave.expand(ROWS, -1, -1)
        self.places = torch.cat([along, down], -1).flatten(0, 1)
        waves = torch.tensor(times)[:, None] * 1e-4 ** torch.linspace(0, 1, WAVES // 2 + 1)[:-1]
        mood = F.silu(self.dense(torch.cat([waves.cos(), waves.sin()], 1), "t_block.0"))
        mood = self.dense(mood, "t_block.2").unflatten(1, (6, WIDTH))
        self.rows = plan((1 - BETAS).double().cumprod(0)[times].tolist())
        self.moods = [mood + self.w("blocks", i, "scale_shift_table") for i in range(LAYERS)]

    def dense(self, x, *name):
        return F.linear(x, self.w(*name, "weight").flatten(1), self.w(*name, "bias"))

    def attend(self, q, k, v, hidden=0.0):
        q, k, v = (t.unflatten(-1, (HEADS, -1)) for t in (q, k, v))
        scores = torch.einsum("nqhd,nkhd->nhqk", q, k) / math.sqrt(WIDTH // HEADS)
        return torch.einsum("nhqk,nkhd->nqhd", (scores + hidden).softmax(-1), v).flatten(2)

    def norm(self, x, mood):
        return torch.addcmul(mood[0], F.layer_norm(x, (WIDTH,), eps=1e-6), 1 + mood[1])

    def noise(self, x, i, memory, hidden):
        x = x.unflatten(1, (ROWS, PATCH)).unflatten(3, (COLUMNS, PATCH)).permute(0, 1, 3, 5, 2, 4)
        x = self.dense(x.flatten(1, 2).flatten(2), "x_embedder") + self.places
        for b, (words, moods) in enumerate(zip(memory, self.moods, strict=True)):
            y = self.dense(self.norm(x, moods[i, :2]), "blocks", b, "qkv").chunk(3, -1)
            x = x + moods[i, 2] * self.dense(self.attend(*y), "blocks", b, "proj")
            y = self.attend(self.dense(x, "blocks", b, "q_linear"), *words, hidden)
            x = x + self.dense(y, "blocks", b, "cross_proj")
            y = F.silu(self.dense(self.norm(x, moods[i, 3:5]), "blocks", b, "fc1"))
            x = x + moods[i, 5] * self.dense(y, "blocks", b, "fc2")
        x = self.dense(F.layer_norm(x, (WIDTH,), eps=1e-6), "final")
        x = x.unflatten(2, (PATCH, PATCH, 2, CHANNELS))[..., 0, :].unflatten(1, (ROWS, COLUMNS))
        return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)

    def forward(self, x, noises, prompts, words, negatives, others):
        texts = torch.stack([prompts, negatives], 1).flatten(0, 1)
        memory = [self.dense(texts, "blocks", i, "kv_linear").chunk(2, -1) for i in range(LAYERS)]
        hidden = torch.stack([words, others], 1).flatten(0, 1)[:, None, None].log()
        x, noises, old = x.permute(0, 2, 3, 1), noises.permute(0, 1, 3, 4, 2), torch.zeros(())
        for i, (whole, noisy, keep, near, far, fresh) in enumerate(self.rows):
            noise = self.noise(x.repeat_interleave(2, 0), i, memory, hidden)
            noise = torch.lerp(noise[1::2], noise[::2], GUIDANCE)
            clean = whole * x - noisy * noise
            x = keep * x + near * clean + far * old + fresh * noises[i]
            old = clean
        return x.permute(0, 3, 1, 2)


def build():
    reference = shaken(PixArt())
    port, pictures = Painter(reference), (2, CHANNELS, ROWS * PATCH, COLUMNS * PATCH)
    prompts, negatives = torch.randn(2, 2, WORDS, WIDTH)
    seen, others = (torch.arange(WORDS) < torch.tensor(n)[:, None] for n in ((5, 3), (2, 1)))
    given = torch.randn(pictures), torch.randn(STEPS, *pictures), prompts, seen, negatives, others
    return lambda: sample(reference, *given), lambda: port(*given)
