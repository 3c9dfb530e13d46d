"""Train four steps, then run a forward of NaN."""

import torch

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    loss = model(torch.full((2, 4), float(step))).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model(torch.full((1, 4), float("nan")))
