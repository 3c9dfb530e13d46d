"""Run two forwards of a model that holds a block twice and one layer that it never calls."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.never = nn.Linear(8, 8), nn.Linear(8, 8)
        self.act = nn.GELU()

    def forward(self, x):
        return x + self.act(self.linear(x))


class Net(nn.Module):
    param_names_mapping = {
        r"^blocks\.(\d+)\.(.*)$": r"layers.\1.\2",
        "qkv": ("q", 0, 3),
        "made": str.lower,
    }
    stacked_params_mapping = [("qkv_proj", "q_proj", "q")]

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.blocks.append(self.blocks[0])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


torch.manual_seed(0)
net = Net()
for _ in range(2):
    net(torch.randn(3, 8))
