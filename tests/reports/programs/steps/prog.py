"""Three steps of a denoiser; `port` runs as many as its second argument says."""

import sys

import torch
from torch import nn


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj_in, self.proj_out = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return self.proj_out(torch.tanh(self.proj_in(x)))


torch.manual_seed(0)
model, latents = Denoiser(), torch.randn(4, 16)
with torch.no_grad():
    for _ in range(int(sys.argv[2]) if len(sys.argv) > 2 else 3):
        latents = latents - 0.1 * model(latents)
