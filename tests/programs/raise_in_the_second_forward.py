"""Run four forwards; a layer of the second raises."""

import torch


class Layer(torch.nn.Module):
    broken = False

    def forward(self, x):
        if self.broken:
            raise ValueError("mine")
        return x + 1


model = torch.nn.Sequential(Layer(), torch.nn.Sequential(Layer()), Layer())
for step in range(4):
    model[1][0].broken = step == 1
    try:
        print(model(torch.ones(2)).sum().item())
    except ValueError as error:
        print(error, error.__traceback__.tb_next is not None)
