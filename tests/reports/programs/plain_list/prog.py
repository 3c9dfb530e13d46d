"""Runs a model that holds its first steps in an object that is no module."""

import sys

import torch
from torch import nn


class Double(nn.Module):
    def forward(self, x):
        return nn.functional.interpolate(x, scale_factor=2)


class Center(nn.Module):
    def __init__(self, mean):
        super().__init__()
        self.mean = mean

    def forward(self, x):
        return x - self.mean


class Chain:
    def __init__(self, *steps):
        self.steps = steps

    def __call__(self, x):
        for step in self.steps:
            x = step(x)
        return x


class Net(nn.Module):
    def __init__(self, mean):
        super().__init__()
        self.prepare = Chain(Double(), Center(mean))
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.conv(self.prepare(x))


torch.manual_seed(0)
net = Net(0.25 if sys.argv[1:] == ["port"] else 0.5)
with torch.no_grad():
    net(torch.rand(1, 3, 8, 8))
