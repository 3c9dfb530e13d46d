"""Run two models and print what they computed, then the next random numbers."""

import random

import numpy as np
import torch
from torch import nn

torch.manual_seed(0), random.seed(0), np.random.seed(0)
encoder = nn.Sequential(nn.Linear(8, 8), nn.Tanh())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.2), nn.LayerNorm(8))

    def forward(self, x):
        return self.blocks(x)


net = Net()
for _ in range(3):
    print(net(encoder(torch.randn(4, 8))).sum().item())
print(torch.rand(1).item(), random.random(), np.random.rand())
