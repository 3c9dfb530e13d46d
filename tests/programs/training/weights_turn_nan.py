"""Run four forwards; the weights have a NaN from the third on."""

import torch

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
x = torch.ones(2, 4)
for step in range(4):
    if step == 2:
        with torch.no_grad():
            model[0].weight[0, 0] = float("nan")
    with torch.no_grad():
        model(x)
