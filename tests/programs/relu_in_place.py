"""Run as many forwards as the argument says; a ReLU changes a layer's output in place."""

import sys

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(3, 3), torch.nn.ReLU(inplace=True), torch.nn.Linear(3, 3).bfloat16().float()
)
with torch.no_grad():
    for step in range(int(sys.argv[1])):
        model(torch.ones(2, 3) * (step + 1))
