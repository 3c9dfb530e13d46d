"""Computes with a model that casts to float32 where it wants to, as many do.

Arguments: the type of the parameters, what to do (`evaluate`, `halve`, `train` or `raise`), and the type to
cast to where the program should compute in double precision by itself.
"""

import sys
from threading import Thread

import torch
from torch import nn
from torch.nn import functional as F

dtype = getattr(torch, sys.argv[1])
task = sys.argv[2]
FLOAT = getattr(torch, sys.argv[3]) if len(sys.argv) > 3 else torch.float32


@torch.library.custom_op("sample::halve", mutates_args=())
def halve(x: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.float64:
        raise RuntimeError("\"halve\" not implemented for 'Double'")
    return x / 2


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        y = x.to(FLOAT)
        return self.weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("cache", torch.zeros(2, 16, width), persistent=False)

    def forward(self, x):
        query, key, value = self.qkv(x).chunk(3, -1)
        length, width = x.shape[1:]
        self.cache[:, :length] = key.detach()
        angle = torch.arange(length, dtype=FLOAT)[:, None] * torch.ones(width // 2, dtype=FLOAT)
        turns = torch.polar(torch.ones_like(angle), angle)
        pairs = query.to(FLOAT).reshape(*query.shape[:-1], -1, 2)
        query = torch.view_as_real(torch.view_as_complex(pairs) * turns).flatten(-2).type_as(query)
        mask = torch.full((length, length), -1e9, dtype=query.dtype)
        keys = self.cache[:, :length] + 0 * key
        return self.out(F.scaled_dot_product_attention(query, keys, value, mask.triu(1)))


class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm, self.attention = Norm(width), Attention(width)
        self.dropout, self.head = nn.Dropout(0.25), nn.Linear(width, 4)

    def forward(self, x):
        if task == "raise":
            raise KeyError("a fault of the program")
        x = self.dropout(F.gelu(x + self.attention(self.norm(x))))
        return self.head(2 * halve(x) if task == "halve" else x)


torch.manual_seed(0)
net, x = Net().to(dtype), torch.randn(2, 8, 16).to(dtype)
if FLOAT is torch.float64:
    net, x = net.double(), x.double()
if task == "train":
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    for _ in range(10):
        loss = net(x).to(FLOAT).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item())
elif task == "raise":
    try:
        net(x)
    except KeyError:
        print(torch.ones(1).to(torch.float32).dtype)
else:
    net.eval()
    with torch.no_grad():
        print(*net(x).flatten().tolist())
        print(torch.ones(1).to(torch.float32).dtype)
        thread = Thread(target=lambda: print(*net(x[:1]).flatten().tolist()))
        thread.start()
        thread.join()
print(torch.rand(1).item())
