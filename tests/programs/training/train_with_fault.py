"""Train a model beside a frozen one for four steps: the reference, or with the named fault."""

import sys

import torch
from torch import nn

kind, optimizer = sys.argv[1:3]
steps, batches = 4, 2 if optimizer == "accumulation" else 1
torch.manual_seed(0)
step = 0


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return gradient * (gate if kind == "backward" else gate + x * gate * (1 - gate))


class Activation(nn.Module):
    def forward(self, x):
        return Gate.apply(x) * (1.01 if kind == "forward at step 0" else 1)


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.act = nn.Linear(8, 16), nn.Tanh()

    def forward(self, x):
        y = self.fc(x)
        return self.act(y * 1.1 if kind == "frozen at step 2" and step == 2 else y)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.act = nn.Linear(16, 32), Activation()
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.norm(self.act(self.embed(x))))


frozen, model = Frozen().requires_grad_(False), Model()
if optimizer == "none":
    optimize = None
elif optimizer == "sgd":
    optimize = torch.optim.SGD(model.parameters(), 0.2 if kind == "rate" else 0.1)
else:
    betas = (0.5, 0.9) if kind == "betas" else (0.9, 0.999)
    optimize = torch.optim.AdamW(model.parameters(), 1e-2, betas=betas)
data = torch.Generator().manual_seed(5 if kind == "data" else 1)
for number in range(steps):
    step = number  # read by `Frozen`
    for _ in range(batches):
        x = torch.randn(6, 8, generator=data)
        loss = (model(frozen(x)) - x[:, :4]).square().mean()
        if kind == "loss":
            loss = loss + model.head.weight.square().mean()
        loss.backward()
    if optimize is not None:
        optimize.step()
        optimize.zero_grad()
