"""A diffusion policy under DPM-Solver++: a scheduler with a memory beside tables of weights."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import Functional, shaken

TRAINED, LAST, STEPS, ACTIONS, WIDTH, SEEN, WAVES, GROUPS, CLIP = 100, 60, 5, 4, 24, 7, 12, 4, 2.0


def sinusoidal_pos_emb(x):
    rates = torch.exp(torch.arange(WAVES // 2) * -(math.log(10000) / (WAVES // 2 - 1)))
    emb = x[:, None] * rates
    return torch.cat((emb.sin(), emb.cos()), dim=-1)


def conv1d_block(inputs):
    conv = nn.Conv1d(inputs, WIDTH, 5, padding=2)
    return nn.Sequential(conv, nn.GroupNorm(GROUPS, WIDTH), nn.Mish())


class ConditionalResidualBlock1D(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.blocks = nn.ModuleList(map(conv1d_block, (inputs, WIDTH)))
        self.cond_encoder = nn.Sequential(nn.Mish(), nn.Linear(WAVES + SEEN, 2 * WIDTH))
        self.residual_conv = nn.Conv1d(inputs, WIDTH, 1) if inputs != WIDTH else nn.Identity()

    def forward(self, x, cond):
        embed = self.cond_encoder(cond).reshape(len(x), 2, WIDTH, 1)
        out = embed[:, 0] * self.blocks[0](x) + embed[:, 1]
        return self.blocks[1](out) + self.residual_conv(x)


class ConditionalUnet1D(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WAVES, 20), nn.Mish(), nn.Linear(20, WAVES))
        self.layers = nn.ModuleList(map(ConditionalResidualBlock1D, (ACTIONS, WIDTH)))
        self.final_conv = nn.Sequential(conv1d_block(WIDTH), nn.Conv1d(WIDTH, ACTIONS, 1))

    def forward(self, sample, timestep, global_cond):
        x, t = sample.moveaxis(-1, -2), timestep.expand(len(sample))
        cond = torch.cat([self.encoder(sinusoidal_pos_emb(t)), global_cond], dim=-1)
        for layer in self.layers:
            x = layer(x, cond)
        return self.final_conv(x).moveaxis(-1, -2)


class DPMSolverMultistepScheduler:
    def __init__(self):
        turns = ((i / TRAINED + 0.008) / 1.008 for i in range(TRAINED + 1))
        bars = [math.cos(turn * math.pi / 2) ** 2 for turn in turns]
        betas = torch.tensor([min(1 - bars[i + 1] / bars[i], 0.999) for i in range(TRAINED)])
        self.timesteps = torch.linspace(LAST, 0, STEPS + 1).round().long()
        kept = torch.cumprod(1.0 - betas, dim=0)[self.timesteps]
        self.alpha_t, self.sigma_t = kept**0.5, (1 - kept) ** 0.5
        self.lambda_t, self.model_outputs = self.alpha_t.log() - self.sigma_t.log(), [None, None]

    def step(self, model_output, i, sample):
        x0_pred = (sample - self.sigma_t[i] * model_output) / self.alpha_t[i]
        m1, m0 = self.model_outputs = [self.model_outputs[1], x0_pred.clamp(-CLIP, CLIP)]
        h = self.lambda_t[i + 1] - self.lambda_t[i]
        gain = self.alpha_t[i + 1] * (torch.exp(-h) - 1.0)
        x_t = (self.sigma_t[i + 1] / self.sigma_t[i]) * sample - gain * m0
        if 0 < i < STEPS - 1:
            r0 = (self.lambda_t[i] - self.lambda_t[i - 1]) / h
            x_t = x_t - 0.5 * gain * ((1.0 / r0) * (m0 - m1))
        return x_t


def predict_action(model, noise, obs):
    scheduler, trajectory = DPMSolverMultistepScheduler(), noise
    for i, t in enumerate(scheduler.timesteps[:-1]):
        trajectory = scheduler.step(model(trajectory, t, obs), i, trajectory)
    return trajectory


class Planner(Functional):
    def __init__(self, unet):
        super().__init__(unet)
        self.times = range(LAST, -1, -LAST // STEPS)
        angles = (torch.arange(TRAINED + 1).double() / TRAINED + 0.008) * (math.pi / 2 / 1.008)
        shares = (angles.cos()[1:] / angles.cos()[:-1]).square().clamp(min=0.001)
        kept = shares.cumprod(0)[[*self.times]]
        self.alphas, self.sigmas = kept.sqrt().tolist(), (1 - kept).sqrt().tolist()
        self.odds = (kept / (1 - kept)).sqrt().tolist()

    def dense(self, x, *name):
        return F.linear(x, self.w(*name, "weight").flatten(1), self.w(*name, "bias"))

    def block(self, x, *name):
        x = self.dense(F.pad(x, (0, 0, 2, 2)).unfold(1, 5, 1).flatten(2), *name, 0)
        groups = x.unflatten(2, (GROUPS, -1))
        variance, mean = torch.var_mean(groups, (1, 3), correction=0, keepdim=True)
        x = ((groups - mean) / (variance + 1e-5).sqrt()).flatten(2)
        x = x * self.w(*name, 1, "weight") + self.w(*name, 1, "bias")
        return x * F.softplus(x).tanh()

    def noise(self, x, time, seen):
        phases = time * 1e-4 ** torch.linspace(0, 1, WAVES // 2)
        mood = self.dense(torch.cat([phases.sin(), phases.cos()]), "encoder.0")
        mood = self.dense(F.mish(mood), "encoder.2").expand(len(seen), -1)
        mood = F.mish(torch.cat([mood, seen], 1))[:, None]
        for i in range(2):
            scale, shift = self.dense(mood, "layers", i, "cond_encoder.1").chunk(2, -1)
            y = torch.addcmul(shift, scale, self.block(x, "layers", i, "blocks.0"))
            y = self.block(y, "layers", i, "blocks.1")
            x = y + (x if i else self.dense(x, "layers.0.residual_conv"))
        return self.dense(self.block(x, "final_conv.0"), "final_conv.1")

    def forward(self, x, seen, before=None):
        for i, (time, odds) in enumerate(zip(self.times[:-1], self.odds, strict=False)):
            clean = (x - self.sigmas[i] * self.noise(x, time, seen)) / self.alphas[i]
            aim = clean = clean.clamp(-CLIP, CLIP)
            if 0 < i < STEPS - 1:
                pace = math.log(self.odds[i + 1] / odds) / math.log(odds / self.odds[i - 1])
                aim = torch.lerp(before, clean, 1 + pace / 2)
            before, share = clean, self.alphas[i + 1] * (1 - odds / self.odds[i + 1])
            x = self.sigmas[i + 1] / self.sigmas[i] * x + share * aim
        return x


def build():
    reference = shaken(ConditionalUnet1D())
    port, noise, seen = Planner(reference), torch.randn(3, 16, ACTIONS), torch.randn(3, SEEN)
    return lambda: predict_action(reference, noise, seen), lambda: port(noise, seen)
