"""Train a small model: the reference, or a port with the fault that KIND names."""

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
port, kind = sys.argv[1] == "port", os.environ["KIND"]
data = torch.Generator().manual_seed(3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.down(self.norm(torch.tanh(self.up(x))))


class Scoring(Net):
    """A model that computes its loss itself."""

    def forward(self, x, labels):
        scores = super().forward(x)
        return F.cross_entropy(scores, labels), scores


class Gained(Net):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([0.31 if port else 0.7]))

    def forward(self, x):
        return super().forward(x) * self.gain


class Block(nn.Module):
    """A module whose code applies dropout by a function."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self._mlp(x)

    def _mlp(self, x):
        return self.down(F.dropout(torch.relu(self.up(x)), 0.2, self.training))


def batch():
    return torch.randn(10, 6, generator=data), torch.randint(0, 3, (10,), generator=data)


def replace_parameters(net, names):
    for name in names:
        module, _, key = name.rpartition(".")
        owner = net.get_submodule(module)
        setattr(owner, key, nn.Parameter(getattr(owner, key).detach().clone()))


def train(net, optimizer, steps=3, loss_of=F.cross_entropy):
    for step in range(steps):
        prepare(step, net, optimizer)
        x, y = batch()
        net.zero_grad()
        loss_of(net(x), y).backward()
        optimizer.step()


def prepare(step, net, optimizer):
    if not port:
        return
    if kind == "steps counted anew" and step == 2:
        for state in optimizer.state.values():
            state["step"] = torch.zeros_like(state["step"])
    if kind == "eval from step 2 on" and step == 2:
        net.eval()


def detached(scores, y):
    return F.cross_entropy(scores.detach().requires_grad_() if port else scores, y)


if kind == "labels":
    net = Scoring()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        x, y = batch()
        optimizer.zero_grad()
        net(x, labels=y.flip(0) if port else y)[0].backward()
        optimizer.step()
elif kind == "masters":
    net = Net().bfloat16()
    live = list(net.parameters())
    masters = live if port else [p.detach().float().clone() for p in live]
    optimizer = torch.optim.SGD(masters, 1e-4)
    for _ in range(3):
        x, y = batch()
        net.zero_grad()
        F.cross_entropy(net(x.bfloat16()).float(), y).backward()
        if not port:
            for master, p in zip(masters, live, strict=True):
                master.grad = p.grad.float()
        optimizer.step()
        if not port:
            for master, p in zip(masters, live, strict=True):
                p.data.copy_(master)
elif kind in ("accumulation", "clipping"):
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for index in range(8):
        x, y = batch()
        (F.cross_entropy(net(x), y) / 4).backward()
        is_last = index % 4 == 3
        if kind == "clipping" and (port or is_last):
            nn.utils.clip_grad_norm_(net.parameters(), 0.02)
        if is_last or (port and kind == "accumulation"):
            optimizer.step()
            optimizer.zero_grad()
elif kind == "dropout":
    net = nn.Sequential(Block(), nn.Linear(3, 3)).train(port)
    with torch.no_grad():
        net(batch()[0])
elif kind == "plain list":

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            layers = [nn.Linear(6, 6) for _ in range(2)]
            self.layers = layers if port else nn.ModuleList(layers)
            self.head = nn.Linear(6, 3)

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return self.head(x)

    net = Stack()
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(3):
        x, y = batch()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
else:
    net = Gained() if kind == "one number" else Net()
    if kind == "eval" and port:
        net.eval()
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3)
    if kind == "stale optimizer" and port:
        replace_parameters(net, [name for name, _ in net.named_parameters()])
    if kind == "one stale parameter" and port:
        replace_parameters(net, ["up.weight"])
    train(net, optimizer, loss_of=detached if kind == "detached" else F.cross_entropy)
