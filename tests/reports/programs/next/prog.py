"""One fault of each kind, in a small codec whose stages are called from outside, too.

prog.py ref|port KIND
"""

import sys

import torch
from torch import nn

side, kind = sys.argv[1:]
is_wrong = side == "port"


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)

    def forward(self, x):
        hidden = self.act(self.first(x))
        if is_wrong and kind == "glue":
            hidden = hidden**2
        return self.last(hidden)


class Codec(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.scale, self.decoder = Stage(), nn.Softsign(), Stage()
        self.extra = nn.LayerNorm(16)

    def encode(self, x):
        return self.encoder(x) * 0.18

    def decode(self, z):
        return self.decoder(z if is_wrong and kind == "decode" else z / 0.18)

    def forward(self, x, time):
        x = self.extra(x) if not (is_wrong and kind == "missing") else x
        return self.decoder(self.scale(self.encoder(x * time)))


class Other(nn.Module):
    def forward(self, x):
        return torch.where(x > 0, x, x**3)


torch.manual_seed(0)
model, x = Codec(), torch.randn(4, 16)
with torch.no_grad():
    model.extra.weight.add_(0.5)
    if is_wrong and kind == "weights":
        model.decoder.last.weight.data = torch.randn(16, 32)
    if is_wrong and kind == "layout":
        weight = model.encoder.last.weight
        weight.data = weight.data.reshape(32, 16).T.contiguous()
    if is_wrong and kind == "act":
        model.scale = Other()
    if is_wrong and kind == "nonfinite":
        model.scale.forward = lambda x: x.log()
    if kind in ("encode", "decode"):
        for _ in range(2):
            if is_wrong and kind == "encode":
                model.decode(model.encode(x.abs()))
            else:
                model.decode(model.encode(x))
    else:
        if is_wrong and kind == "other":
            x = torch.randn(4, 16)
        if is_wrong and kind == "shape":
            x = x[:3]
        for step in range(3):
            time = torch.tensor(987.3 - 100 * step)
            if is_wrong and kind == "rounded":
                time = time.bfloat16().float()
            drift = torch.sin(x) if is_wrong and kind == "loop" and step else x
            x = x + 0.1 * model(drift, time / 1000)
