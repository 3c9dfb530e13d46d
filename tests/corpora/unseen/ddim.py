"""DDIM with guidance: two forwards a step beside one of a doubled batch."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import shaken

TRAINED, COUNT, GUIDANCE = 1000, 3, 4.0


class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.text = nn.Linear(16, 32), nn.Linear(12, 32)
        self.conv1, self.conv2 = nn.Conv2d(4, 32, 3, padding=1), nn.Conv2d(32, 4, 3, padding=1)

    def forward(self, x, t, context):
        angles = t[:, None].float() * 0.001 ** (torch.arange(8) / 8)
        emb = self.time(torch.cat([angles.sin(), angles.cos()], -1)) + self.text(context)
        return self.conv2(F.silu(self.conv1(x) + emb[:, :, None, None]))


def reference_sample(model, x, context, empty):
    betas = np.linspace(0.00085**0.5, 0.012**0.5, TRAINED, dtype=np.float64) ** 2
    alphas = np.cumprod(1.0 - betas)
    times = np.arange(0, TRAINED, TRAINED // COUNT)[:COUNT][::-1] + 1
    for i, t in enumerate(times):
        following = times[i + 1] if i + 1 < len(times) else 0
        a, a_next = float(alphas[t]), float(alphas[following])
        batch = torch.full((len(x),), int(t))
        uncond = model(x, batch, empty)
        cond = model(x, batch, context)
        eps = uncond + GUIDANCE * (cond - uncond)
        x0 = (x - (1 - a) ** 0.5 * eps) / a**0.5
        x0 = x0.clamp(-3, 3)
        x = a_next**0.5 * x0 + (1 - a_next) ** 0.5 * eps
    return x


class Scheduler:
    def __init__(self):
        betas = torch.linspace(0.00085**0.5, 0.012**0.5, TRAINED, dtype=torch.float64).square()
        self.cumulative = (1 - betas).cumprod(0)
        self.timesteps = torch.arange(COUNT).flip(0) * (TRAINED // COUNT) + 1

    def step(self, eps, index, sample):
        now = self.cumulative[self.timesteps[index]].item()
        later = self.cumulative[self.timesteps[index + 1] if index + 1 < COUNT else 0].item()
        original = sample / now**0.5 - eps * ((1 - now) / now) ** 0.5
        original = torch.clamp(original, min=-3, max=3)
        direction = (1 - later) ** 0.5 * eps
        return original.mul_(later**0.5).add_(direction)


def port_sample(model, latents, context, empty):
    scheduler, both = Scheduler(), torch.cat([empty, context])
    for index, t in enumerate(scheduler.timesteps):
        doubled = torch.cat([latents, latents])
        prediction = model(doubled, t.expand(len(doubled)), both)
        unconditional, conditional = prediction.chunk(2)
        guided = torch.lerp(unconditional, conditional, GUIDANCE)
        latents = scheduler.step(guided, index, latents)
    return latents


class Wrapped(nn.Module):
    """The port's network; its time embedding has cosines and sines of all frequencies at once."""

    def __init__(self, reference):
        super().__init__()
        self.inner = reference
        self.register_buffer("freqs", torch.exp(-torch.arange(8) / 8 * np.log(1000.0)))

    def forward(self, x, t, context):
        phase = torch.outer(t.float(), self.freqs)
        waves = torch.polar(torch.ones_like(phase), phase)
        emb = self.inner.time(torch.cat([waves.imag, waves.real], -1))
        emb = emb + self.inner.text(context)
        hidden = self.inner.conv1(x).add_(emb.unflatten(1, (-1, 1, 1)))
        return self.inner.conv2(hidden * hidden.sigmoid())


def build():
    reference = shaken(Noise())
    port, x = Wrapped(reference), torch.randn(2, 4, 6, 6)
    context, empty = torch.randn(2, 12), torch.zeros(2, 12) + 0.1
    return (
        lambda: reference_sample(reference, x, context, empty),
        lambda: port_sample(port, x, context, empty),
    )
