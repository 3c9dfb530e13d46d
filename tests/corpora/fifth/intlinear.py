"""Quantised linear layers: weights and activations turned back to floats beside integer products."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import shaken

WIDTH, HIDDEN, GROUP, NIBBLES, TOP, EPS = 32, 48, 8, 8, 448.0, 1e-6
FP8 = torch.float8_e4m3fn
SHIFTS = torch.arange(0, 4 * NIBBLES, 4)


def pack(codes):
    """Pack eight four-bit codes of the last dimension into one integer, the first lowest."""
    return (codes.unflatten(-1, (-1, NIBBLES)) << SHIFTS).sum(-1).to(torch.int32)


def unpack(packed):
    return ((packed[..., None] >> SHIFTS.int()) & 15).flatten(-2)


class Layer(nn.Module):
    def __init__(self, outputs, **buffers):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(outputs))
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)


class W8A8Linear(Layer):
    """A scale of each output; inputs smoothed, with a fixed scale and zero point."""

    def __init__(self, inputs, outputs):
        weight = torch.randn(outputs, inputs) / inputs**0.5
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        super().__init__(outputs, weight=(weight / scale).round().char(), weight_scale=scale)
        self.register_buffer("smooth", 0.5 + torch.rand(inputs))
        self.input_scale, self.input_zero_point = 0.025, 112

    def forward(self, x):
        codes = torch.round(x / self.smooth / self.input_scale) + self.input_zero_point
        x = (codes.clamp(0, 255) - self.input_zero_point) * self.input_scale
        return F.linear(x, self.weight.float() * self.weight_scale, self.bias)


class GPTQLinear(Layer):
    """Four bits: a scale and a zero point, kept less one, of each group of inputs."""

    def __init__(self, inputs, outputs):
        packed, groups = pack(torch.randint(0, 16, (outputs, inputs))).T, inputs // GROUP
        zeros = pack(torch.randint(4, 11, (groups, outputs)))
        super().__init__(outputs, qweight=packed, qzeros=zeros)
        self.register_buffer("scales", (0.5 + torch.rand(groups, outputs)) * 0.2 / inputs**0.5)
        self.register_buffer("g_idx", torch.randperm(inputs) // GROUP)

    def forward(self, x):
        step = x.abs().amax(dim=-1, keepdim=True) / 127
        x = torch.round(x / step) * step
        zeros, codes = unpack(self.qzeros) + 1, unpack(self.qweight.T).T
        weight = self.scales[self.g_idx] * (codes - zeros[self.g_idx])
        return x @ weight + self.bias


class FP8Linear(Layer):
    def __init__(self, inputs, outputs):
        weight = torch.randn(outputs, inputs)
        scale = weight.abs().amax(dim=1, keepdim=True) / TOP
        super().__init__(outputs, weight=(weight / scale).to(FP8), weight_scale=scale)

    def forward(self, x):
        scale = x.abs().amax(dim=-1, keepdim=True) / TOP
        x = (x / scale).to(FP8).float() * scale
        return x @ (self.weight.float() * self.weight_scale).T + self.bias


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up_proj = nn.RMSNorm(WIDTH, eps=EPS), W8A8Linear(WIDTH, HIDDEN)
        self.gate_proj, self.down_proj = GPTQLinear(WIDTH, HIDDEN), GPTQLinear(HIDDEN, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class Grouped:
    """Groups one after another, two codes a byte: those of a group's first half are the low ones."""

    def __init__(self, layer):
        self.order, shape = layer.g_idx.argsort(stable=True), (-1, GROUP, len(layer.bias))
        low, high = unpack(layer.qweight.T).T[self.order].view(shape).chunk(2, 1)
        self.bytes, self.zeros = (low | high << 4).to(torch.uint8), unpack(layer.qzeros) + 1
        self.scales, self.bias = layer.scales, layer.bias

    def __call__(self, x):
        step = x.abs().amax(1, keepdim=True) / 127
        x = (x / step).round().int()[:, self.order]
        codes = torch.cat([self.bytes & 15, self.bytes >> 4], 1).int()
        x = x.unflatten(1, (-1, GROUP)).transpose(0, 1)
        sums = torch.bmm(x, codes) - x.sum(2, keepdim=True) * self.zeros[:, None]
        return torch.einsum("gno,go->no", sums.float(), self.scales) * step + self.bias


class Engine:
    def __init__(self, reference):
        *self.blocks, self.norm, self.head = reference
        self.grouped = [[Grouped(b.gate_proj), Grouped(b.down_proj)] for b in self.blocks]
        self.columns = self.head.weight.float().T.contiguous()
        # the inputs are smoothed by the norm before them
        self.gains = [b.norm.weight / b.up_proj.smooth for b in self.blocks]

    def wide(self, x, layer):
        zero = layer.input_zero_point - 128
        codes = (x / layer.input_scale).round() + zero
        codes, weight = codes.clamp(-128, 127).to(torch.int8), layer.weight
        sums = codes.int() @ weight.T.int() - zero * weight.sum(1, dtype=torch.int32)
        return sums * (layer.input_scale * layer.weight_scale[:, 0]) + layer.bias

    def __call__(self, tokens):
        x = tokens.flatten(0, 1)
        for block, (gate, down), gain in zip(self.blocks, self.grouped, self.gains, strict=True):
            y = F.rms_norm(x, (WIDTH,), gain, EPS)
            x = x + down(F.silu(gate(y * block.up_proj.smooth)) * self.wide(y, block.up_proj))
        y = F.rms_norm(x, (WIDTH,), self.norm.weight, EPS)
        step = y.abs().amax(1, keepdim=True) / TOP
        sums = (y / step).to(FP8).float() @ self.columns
        y = sums * step * self.head.weight_scale[:, 0] + self.head.bias
        return y.unflatten(0, tokens.shape[:2])


def build():
    layers = Block(), Block(), nn.RMSNorm(WIDTH, eps=EPS), FP8Linear(WIDTH, 20)
    reference, tokens = shaken(nn.Sequential(*layers)), torch.randn(2, 5, WIDTH)
    port = Engine(reference)
    return lambda: reference(tokens), lambda: port(tokens)
