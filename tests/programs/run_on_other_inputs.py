"""Run one small language model: the reference, or on inputs that the name describes."""

import sys

import torch
from torch import nn

kind = sys.argv[1]
torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(50, 16), nn.LayerNorm(16), nn.Linear(16, 50)

    def forward(self, ids):
        return self.head(self.norm(self.embed(ids)).cumsum(1))


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 4)

    def forward(self, image):
        return self.head(self.patches(image).flatten(2).mean(2))


model, vision = Model(), Vision()
ids, pad = torch.randint(1, 50, (2, 6)), nn.functional.pad
forwards = {
    "reference": lambda: model(ids),
    "batch": lambda: model(ids[:1]),
    "right padding": lambda: model(pad(ids, (0, 2))),
    "left padding": lambda: model(pad(ids, (2, 0))),
    "prompt": lambda: model(torch.randint(1, 50, (2, 6))),
    "prefill and decode": lambda: (model(ids[:, :5]), model(ids[:, 5:])),
    "image": lambda: vision(torch.rand(1, 3, 16, 16)),
    "image of another size": lambda: vision(torch.rand(1, 3, 16, 24)),
}
with torch.no_grad():
    forwards[kind]()
