"""Rectified flow: MMDiT called per guidance branch beside one batch that stays in patches."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import Functional, shaken

WIDTH, HEADS, PATCH, COLOURS, SIDE, TEXT = 16, 2, 2, 3, 8, 5
STEPS, SHIFT, GUIDANCE, RESCALE, GRID = 3, 2.0, 4.0, 0.7, SIDE // PATCH
FREQUENCIES = torch.exp(-math.log(10000) * torch.arange(WIDTH // 2) / (WIDTH // 2))


def modulate(x, shift, scale):
    return F.layer_norm(x, (WIDTH,), eps=1e-6) * (1 + scale[:, None]) + shift[:, None]


class Stream(nn.Module):
    def __init__(self):
        super().__init__()
        self.ada = nn.Linear(WIDTH, 6 * WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def before(self, x, condition):
        shift, scale, *rest = self.ada(F.silu(condition)).chunk(6, -1)
        qkv = self.qkv(modulate(x, shift, scale))
        return qkv.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4), rest

    def after(self, x, mixed, rest):
        gate, shift_mlp, scale_mlp, gate_mlp = rest
        x = x + gate[:, None] * self.proj(mixed)
        inner = self.up(modulate(x, shift_mlp, scale_mlp))
        return x + gate_mlp[:, None] * self.down(F.gelu(inner, approximate="tanh"))


class JointBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.text, self.image = Stream(), Stream()

    def forward(self, text, image, condition):
        heads_text, rest_text = self.text.before(text, condition)
        heads_image, rest_image = self.image.before(image, condition)
        q, k, v = (torch.cat(pair, 2) for pair in zip(heads_text, heads_image))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        image = self.image.after(image, mixed[:, text.shape[1] :], rest_image)
        return self.text.after(text, mixed[:, : text.shape[1]], rest_text), image


class MMDiT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(COLOURS, WIDTH, PATCH, stride=PATCH)
        self.positions = nn.Parameter(torch.randn(1, GRID * GRID, WIDTH))
        self.words, self.pooled = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.time = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(JointBlock() for _ in range(2))
        self.ada, self.final = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 4 * COLOURS)

    def forward(self, x, t, words):
        image = self.patch_embed(x).flatten(2).transpose(1, 2) + self.positions
        text = self.words(words)
        angles = 1000 * t[:, None] * FREQUENCIES
        embedded = torch.cat([angles.cos(), angles.sin()], -1)
        condition = self.time(embedded) + self.pooled(text.mean(1))
        for block in self.blocks:
            text, image = block(text, image, condition)
        shift, scale = self.ada(F.silu(condition)).chunk(2, -1)
        patches = self.final(modulate(image, shift, scale))
        patches = patches.view(-1, GRID, GRID, PATCH, PATCH, COLOURS)
        return torch.einsum("nhwpqc->nchpwq", patches).reshape(x.shape)


def guided_velocity(model, x, t, words):
    conditional = model(x, t.expand(len(x)), words)
    unconditional = model(x, t.expand(len(x)), torch.zeros_like(words))
    guided = unconditional + GUIDANCE * (conditional - unconditional)
    ratio = conditional.std((1, 2, 3), keepdim=True) / guided.std((1, 2, 3), keepdim=True)
    return RESCALE * guided * ratio + (1 - RESCALE) * guided


def sample(model, x, words, times):
    for now, later in zip(times[:-1], times[1:]):
        slope = guided_velocity(model, x, now, words)
        ahead = x + (later - now) * slope
        if later > 0:
            corrected = guided_velocity(model, ahead, later, words)
            ahead = x + (later - now) * (slope + corrected) / 2
        x = ahead
    return x


class PortMMDiT(Functional):
    def linear(self, x, *name):
        return x @ self.w(*name, "weight").T + self.w(*name, "bias")

    def clock(self, times):
        angles = torch.outer(1000 * times, FREQUENCIES)
        waves = torch.cat([torch.cos(angles), torch.sin(angles)], 1)
        return self.linear(waves, "time")

    def forward(self, patches, clock, words):
        image = F.linear(patches, self.patch_embed_weight.flatten(1), self.patch_embed_bias)
        streams = {"image": image.add_(self.positions), "text": self.words_weight[words]}
        active = F.silu(clock + self.linear(streams["text"].mean(1), "pooled"))[:, None]
        for i in range(2):
            parts, heads = {}, []
            for name, x in streams.items():
                chunks = self.linear(active, "blocks", i, name, "ada").chunk(6, -1)
                shift, scale, *parts[name] = chunks
                x = torch.addcmul(shift, F.layer_norm(x, (WIDTH,), eps=1e-6), 1 + scale)
                qkv = self.linear(x, "blocks", i, name, "qkv").unflatten(2, (3, HEADS, -1))
                heads.append(qkv.unbind(2))
            q, k, v = (torch.cat(pair, 1) for pair in zip(*heads))
            scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(WIDTH // HEADS)
            mixed = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)
            halves = {"image": mixed[:, : GRID * GRID], "text": mixed[:, GRID * GRID :]}
            for name, x in streams.items():
                gate, shift, scale, gate_mlp = parts[name]
                x = x + gate * self.linear(halves[name], "blocks", i, name, "proj")
                inner = F.layer_norm(x, (WIDTH,), eps=1e-6)
                inner = inner + inner * scale + shift
                inner = F.gelu(self.linear(inner, "blocks", i, name, "up"), approximate="tanh")
                streams[name] = x + gate_mlp * self.linear(inner, "blocks", i, name, "down")
        shift, scale = self.linear(active, "ada").chunk(2, -1)
        image = F.layer_norm(streams["image"], (WIDTH,), eps=1e-6) * (scale + 1) + shift
        rows = self.final_weight.view(PATCH, PATCH, COLOURS, WIDTH).permute(2, 0, 1, 3)
        return image @ rows.reshape(-1, WIDTH).T + self.final_bias.view(-1, COLOURS).T.flatten()


def port_sample(port, noise, words, times):
    clocks, both = port.clock(times), torch.cat([torch.zeros_like(words), words])

    def velocity(patches, index):
        without, given = port(patches.repeat(2, 1, 1), clocks[index], both).chunk(2)
        steered = GUIDANCE * given + (1 - GUIDANCE) * without
        ratio = given.std((1, 2), keepdim=True) / steered.std((1, 2), keepdim=True)
        return torch.lerp(steered, steered * ratio, RESCALE)

    patches = F.unfold(noise, PATCH, stride=PATCH).transpose(1, 2)
    for index in range(STEPS):
        size = times[index + 1] - times[index]
        slope = velocity(patches, index)
        if index < STEPS - 1:
            second = velocity(patches + size * slope, index + 1)
            slope = 0.5 * slope + 0.5 * second
        patches = torch.add(patches, size * slope)
    return F.fold(patches.transpose(1, 2), (SIDE, SIDE), PATCH, stride=PATCH)


def build():
    reference = shaken(MMDiT())
    port, words = PortMMDiT(reference), torch.randint(1, 20, (2, TEXT))
    times = torch.linspace(1, 0, STEPS + 1)
    inputs = torch.randn(2, COLOURS, SIDE, SIDE), words, times * SHIFT / (1 + (SHIFT - 1) * times)
    return lambda: sample(reference, *inputs), lambda: port_sample(port, *inputs)
