"""Delete a layer after the first forward and the model after the second."""

import gc

import torch

model = torch.nn.Sequential(*(torch.nn.ReLU() for _ in range(3)))
hooked = model[1]
for step in range(3):
    print(model(torch.ones(2)).sum().item())
    if step == 0:
        del model[1], hooked
        gc.collect()
    if step == 1:
        del model
        gc.collect()
        model = torch.nn.Sequential(torch.nn.ReLU())
