"""A preconditioned denoiser under a second order sampler beside tables and a form of ratios."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import shaken

COLOURS, WIDTH, GROUPS, BLOCKS, EMB, CLASSES, SIDE = 3, 16, 4, 2, 24, 5, 8
STEPS, LOW, HIGH, RHO, SIGMA_DATA, EPS = 5, 0.05, 8.0, 7.0, 0.5, 1e-5


class UNetBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm0, self.norm1 = (nn.GroupNorm(GROUPS, WIDTH, eps=EPS) for _ in range(2))
        self.conv0, self.conv1 = (nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(2))
        self.affine = nn.Linear(EMB, 2 * WIDTH)

    def forward(self, x, emb):
        orig, x = x, self.conv0(F.silu(self.norm0(x)))
        scale, shift = self.affine(emb)[:, :, None, None].chunk(2, dim=1)
        x = F.silu(torch.addcmul(shift, self.norm1(x), scale + 1))
        return (self.conv1(x) + orig) * math.sqrt(0.5)


class SongNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("freqs", torch.randn(EMB // 2))
        self.map_label = nn.Linear(CLASSES, EMB, bias=False)
        self.map_layer0, self.map_layer1 = nn.Linear(EMB, EMB), nn.Linear(EMB, EMB)
        self.conv_in = nn.Conv2d(COLOURS, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList(UNetBlock() for _ in range(BLOCKS))
        self.norm_out = nn.GroupNorm(GROUPS, WIDTH, eps=EPS)
        self.conv_out = nn.Conv2d(WIDTH, COLOURS, 3, padding=1)

    def forward(self, x, noise_labels, class_labels):
        angles = noise_labels.outer(2 * math.pi * self.freqs)
        emb = torch.cat([angles.cos(), angles.sin()], dim=1)
        emb = emb + self.map_label(class_labels * math.sqrt(CLASSES))
        emb = F.silu(self.map_layer1(F.silu(self.map_layer0(emb))))
        x = self.conv_in(x)
        for block in self.blocks:
            x = block(x, emb)
        return self.conv_out(F.silu(self.norm_out(x)))


def precondition(model, x, sigma, class_labels):
    c_skip = SIGMA_DATA**2 / (sigma**2 + SIGMA_DATA**2)
    c_out = sigma * SIGMA_DATA / (sigma**2 + SIGMA_DATA**2).sqrt()
    c_in = 1 / (SIGMA_DATA**2 + sigma**2).sqrt()
    c_noise = sigma.log() / 4
    return c_skip * x + c_out * model(c_in * x, c_noise.reshape(1), class_labels)


def edm_sampler(net, latents, class_labels):
    ramp, low, high = torch.arange(STEPS) / (STEPS - 1), LOW ** (1 / RHO), HIGH ** (1 / RHO)
    t_steps = (high + ramp * (low - high)) ** RHO
    t_steps = torch.cat([t_steps, torch.zeros_like(t_steps[:1])])
    x_next = latents * t_steps[0]
    for i, (t_cur, t_next) in enumerate(zip(t_steps[:-1], t_steps[1:])):
        x_cur = x_next
        d_cur = (x_cur - precondition(net, x_cur, t_cur, class_labels)) / t_cur
        x_next = x_cur + (t_next - t_cur) * d_cur
        if i < STEPS - 1:
            d_prime = (x_next - precondition(net, x_next, t_next, class_labels)) / t_next
            x_next = x_cur + (t_next - t_cur) * (0.5 * d_cur + 0.5 * d_prime)
    return x_next


class TabledSampler:
    def __init__(self, reference):
        self.state = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
        kernels = {name: tensor for name, tensor in self.state.items() if tensor.dim() == 4}
        self.taps = {name: w.permute(2, 3, 1, 0).flatten(0, 2) for name, w in kernels.items()}
        self.levels = torch.linspace(HIGH ** (1 / RHO), LOW ** (1 / RHO), STEPS).pow(RHO)
        spread = torch.hypot(self.levels, torch.tensor(SIGMA_DATA))
        self.gain_in, self.keep = 1 / spread, (SIGMA_DATA / spread) ** 2
        self.gain_out = self.levels * SIGMA_DATA / spread
        phases = 0.5 * math.pi * self.levels.log()[:, None] * self.state["freqs"]
        self.waves = torch.cat([phases.cos(), phases.sin()], 1)
        self.labels = math.sqrt(CLASSES) * self.state["map_label.weight"].T

    def dense(self, x, name):
        return torch.addmm(self.state[f"{name}.bias"], x, self.state[f"{name}.weight"].T)

    def convolve(self, x, name):
        height, width = x.shape[1:3]
        padded = F.pad(x, (0, 0, 1, 1, 1, 1))
        near = [padded[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
        return torch.cat(near, -1) @ self.taps[f"{name}.weight"] + self.state[f"{name}.bias"]

    def normed(self, x, name):
        parts = x.unflatten(-1, (GROUPS, -1))
        variance, mean = torch.var_mean(parts, (1, 2, 4), correction=0, keepdim=True)
        flat = ((parts - mean) * (variance + EPS).rsqrt()).flatten(-2)
        return flat * self.state[f"{name}.weight"] + self.state[f"{name}.bias"]

    def denoise(self, x, level, classes):
        mood = self.dense(self.waves[level] + self.labels[classes], "map_layer0")
        mood = F.silu(self.dense(F.silu(mood), "map_layer1"))
        y = self.convolve(self.gain_in[level] * x, "conv_in")
        for i in range(BLOCKS):
            z = self.convolve(F.silu(self.normed(y, f"blocks.{i}.norm0")), f"blocks.{i}.conv0")
            scale, shift = self.dense(mood, f"blocks.{i}.affine")[:, None, None].chunk(2, -1)
            z = self.normed(z, f"blocks.{i}.norm1")
            z = self.convolve(F.silu(z + z * scale + shift), f"blocks.{i}.conv1")
            y = (y + z) / math.sqrt(2)
        y = self.convolve(F.silu(self.normed(y, "norm_out")), "conv_out")
        return self.keep[level] * x + self.gain_out[level] * y

    def __call__(self, noise, classes):
        x = self.levels[0] * noise.permute(0, 2, 3, 1)
        for level in range(STEPS - 1):
            ratio = self.levels[level + 1] / self.levels[level]
            clean = self.denoise(x, level, classes)
            ahead = self.denoise(torch.lerp(clean, x, ratio), level + 1, classes)
            clean = clean + (ahead - clean) / (2 * ratio)
            x = ratio * x + (1 - ratio) * clean
        return self.denoise(x, STEPS - 1, classes).permute(0, 3, 1, 2)


def build():
    reference = shaken(SongNet())
    noise, classes = torch.randn(2, COLOURS, SIDE, SIDE), torch.randint(0, CLASSES, (2,))
    port, labels = TabledSampler(reference), F.one_hot(classes, CLASSES).float()
    return lambda: edm_sampler(reference, noise, labels), lambda: port(noise, classes)
