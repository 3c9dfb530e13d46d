"""Attention with a window and rotary embeddings that are computed on the way.

prog.py ref|port WINDOW
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F

window = int(sys.argv[2])


def rotate(x):
    size, positions = x.shape[-1], torch.arange(x.shape[-2])
    angles = positions[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
    cos, sin = (torch.cat([table, table], -1) for table in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(64, 32)
        self.o = nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = (m(x).unflatten(-1, (-1, 16)).transpose(1, 2) for m in (self.q, self.k, self.v))
        behind = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        mask = (behind >= 0) & (behind < window)
        out = F.scaled_dot_product_attention(
            rotate(q), rotate(k), v, attn_mask=mask, enable_gqa=True
        )
        return self.o(out.transpose(1, 2).flatten(2))


torch.manual_seed(0)
attention = Attention()
with torch.no_grad():
    for parameter in attention.parameters():
        nn.init.normal_(parameter, 0.0, 0.25)
    attention(torch.randn(2, 10, 64))
