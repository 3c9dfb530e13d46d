"""Encode a prompt and denoise, twice; `bug` changes one block."""

import sys

import torch
from torch import nn

import otel_torch


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.out = nn.Linear(8, 4)

    def forward(self, x, step):
        x = self.embed(x) + step / 20
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class TextEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, ids):
        return self.table(ids)


torch.manual_seed(0)
encoder, transformer = TextEncoder(), Transformer()
if "bug" in sys.argv:
    transformer.blocks[1].up.register_forward_hook(lambda module, args, output: output * 1.05)
with torch.no_grad():
    for video in range(2):
        torch.manual_seed(7 + video)
        x = torch.randn(5, 4) + encoder(torch.arange(5))
        for step in range(16):
            with otel_torch.trace_step(step):
                x = x - 0.1 * (transformer(x, step) + transformer(-x, step))
print(x.sum().item())
