"""Run a model of ten thousand modules twice."""

import torch

model = torch.nn.Sequential(*(torch.nn.Identity() for _ in range(9_999)))
with torch.no_grad():
    for _ in range(2):
        result = model(torch.ones(2))
print(result.sum().item())
