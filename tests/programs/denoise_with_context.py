"""Run two denoise steps: the reference, or the port with the named fault."""

import sys

import torch
from torch import nn

kind = sys.argv[1]
names = ("norm", "up", "down") if kind == "reference" else ("layer_norm", "fc1", "fc2")


class Activation(nn.Module):
    wrong = False

    def forward(self, x):
        return nn.functional.silu(x) if self.wrong else nn.functional.gelu(x)


class Block(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.add_module(names[0], nn.LayerNorm(16))
        self.add_module(names[1], nn.Linear(16, 48))
        self.add_module("act", Activation())
        self.add_module(names[2], nn.Linear(48, 16))

    def forward(self, x):
        norm, up, down = (getattr(self, name) for name in names)
        if kind == "reference":
            return x + down(self.act(up(norm(x))))
        return (down(self.act(up(norm(x)))).double() * (1 + 2e-8) + x.double()).float()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.context = nn.Linear(6, 16)
        self.blocks = nn.ModuleList(Block(number) for number in range(3))
        self.head = nn.Linear(16, 8)

    def forward(self, x, context):
        x = self.embed(x) + self.context(context)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


torch.manual_seed(0)
model = Model()
x, context = torch.randn(2, 5, 8), torch.randn(2, 1, 6)
if kind == "dummy":
    x, context = torch.randn(2, 5, 8), torch.randn(2, 1, 6)
with torch.no_grad():
    for step in range(2):
        model.blocks[1].act.wrong = kind == "wrong" and step == 1
        x = x - 0.1 * model(x, context)
