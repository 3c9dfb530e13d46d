"""A model and its port, called one after the other on the same inputs; `bugs` names the port's."""

import sys

import torch
from torch import nn

bugs = sys.argv[1:]
D = 16


class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Linear(4, D), nn.LayerNorm(D)
        self.query, self.key, self.value = (nn.Linear(D, D) for _ in range(3))
        self.act, self.head = nn.GELU(), nn.Linear(D, 4)

    def forward(self, x):
        x = self.embed(x)
        h = self.norm(x)
        mixed = (self.query(h) @ self.key(h).mT / D**0.5).softmax(-1) @ self.value(h)
        return self.head(self.act(x + mixed))


class Port(nn.Module):
    def __init__(self, teacher):
        super().__init__()
        self.stem, self.ln = teacher.embed, nn.LayerNorm(D)  # the stem is the teacher's own
        self.qkv, self.fn, self.out = nn.Linear(D, 3 * D), nn.GELU(), nn.Linear(D, 4)
        self.ln.load_state_dict(teacher.norm.state_dict())
        self.out.load_state_dict(teacher.head.state_dict())
        parts = teacher.query, teacher.key, teacher.value
        self.qkv.weight = nn.Parameter(torch.cat([part.weight.detach() for part in parts]))
        self.qkv.bias = nn.Parameter(torch.cat([part.bias.detach() for part in parts]))
        if "bias" in bugs:
            self.out.bias = None
        if "act" in bugs:
            self.fn = nn.SiLU()

    def forward(self, x):
        x = self.stem(x)
        q, k, v = self.qkv(self.ln(x)).chunk(3, -1)
        weights = q @ k.mT / (D if "scale" in bugs else D**0.5)
        return self.out(self.fn(x + weights.softmax(-1) @ v))


torch.manual_seed(0)
teacher = Teacher()
nn.init.normal_(teacher.norm.weight, 1, 0.1)
port = Port(teacher)
with torch.no_grad():
    for _ in range(2):
        x = torch.randn(2, 5, 4)
        teacher(x), port(x)
