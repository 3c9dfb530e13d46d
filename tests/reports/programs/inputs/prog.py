"""What enters a model, or a part of it, is prepared otherwise by the port.

prog.py ref|port KIND
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F

side, kind = sys.argv[1:]
is_wrong = side == "port"


class Waves(nn.Module):
    def forward(self, time):
        angles = time[:, None] * 10000.0 ** (-torch.arange(8) / 8)
        return torch.cat([angles.cos(), angles.sin()], -1)


class Pool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(8, 1), nn.Linear(8, 8)

    def forward(self, x, mask=None):
        scores = self.key(x)
        if mask is not None:
            scores = scores.masked_fill(~mask[..., None], -1e9)
        return (scores.softmax(1) * self.value(x)).sum(1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.waves, self.time, self.inner = Waves(), nn.Linear(16, 8), nn.Linear(8, 8)
        self.pool, self.head = Pool(), nn.Linear(8, 4)

    def encode(self, image):
        return self.inner(image if is_wrong and kind == "range" else image * 2 - 1)

    def forward(self, x, time, mask):
        if is_wrong and kind == "inside":
            time = time.bfloat16().float()
        hidden = self.inner(x) + self.time(self.waves(time))[:, None]
        if is_wrong and kind == "mask":
            return self.head(self.pool(hidden))
        return self.head(self.pool(hidden, mask=mask))


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 32), nn.Linear(32, 6)

    def forward(self, x):
        hidden = F.relu(self.first(x))
        if is_wrong:
            hidden[3] = hidden[3] * 0.5
        return self.last(hidden)


torch.manual_seed(0)
model, x = Net(), torch.rand(2, 6, 8)
mask = torch.arange(6)[None] < torch.tensor([[4], [2]])
with torch.no_grad():
    if kind == "rows":
        Rows()(torch.randn(5, 12))
    elif kind == "range":
        model.encode(x)
    else:
        for sigma in (0.9873, 0.5117):
            time = torch.tensor([sigma, sigma])
            if is_wrong and kind == "sigma":
                time = time.bfloat16().float()
            if is_wrong and kind == "schedule":
                time = time - 0.01
            model(x, time * 1000, mask)
