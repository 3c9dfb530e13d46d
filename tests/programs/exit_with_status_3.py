"""Run ten forwards, print a result and exit with status 3: neither may change."""

import sys

import torch

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
torch.nn.init.ones_(model[0].weight)
torch.nn.init.ones_(model[0].bias)
for step in range(10):
    result = model(torch.full((2, 4), float(step)))
print(result.sum().item())
sys.exit(3)
