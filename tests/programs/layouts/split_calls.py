"""Divide the calls of one process among ranks: microbatches of a training, or those of guidance.

    split_calls.py data=N [dealt | guidance] [FAULT]

One process accumulates the gradients of four microbatches. Each rank has as many of them as the
others: neighbors, or every N-th (`dealt`). With `guidance`, a sampler calls the model with a prompt
and without; each rank makes one of the calls, and gathers the other.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, os.path.dirname(__file__))

from ranks import ARGUMENTS, RANK, SIZE, is_wrong, joined

WIDTH, ROWS, MICROBATCHES, STEPS = 16, 4, 4, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.prompt = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x, prompt):
        x = x + self.prompt(prompt)
        return x + self.down(F.silu(self.up(self.norm(x))))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x, prompt):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, prompt)
        return self.head(x)


def draw(*shape):
    return torch.randn(*shape, generator=generator)


def sample():
    x, prompts = draw(ROWS, 6), [draw(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)]
    with torch.no_grad():
        for _ in range(3):
            if SIZE == 1:
                guided, free = (model(x, prompt) for prompt in prompts)
            else:
                own = model(x, prompts[RANK])
                both = [torch.empty_like(own) for _ in range(SIZE)]
                dist.all_gather(both, own)
                guided, free = reversed(both) if is_wrong("exchanged") else both
            if is_wrong("own_mixture") and RANK == 1:
                guided = 0.9 * guided
            x = x + 0.2 * (free + 3 * (guided - free))
            if is_wrong("other_weight") and RANK == 1:
                model.blocks[1].up.weight *= 1.05


def train():
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        batches = [(draw(ROWS, 6), draw(ROWS, WIDTH), draw(ROWS, 6)) for _ in range(MICROBATCHES)]
        count = MICROBATCHES // SIZE
        own = batches[RANK::SIZE] if "dealt" in ARGUMENTS else batches[RANK * count :][:count]
        if is_wrong("same_batch") and step == 1:
            own = own[:1] * count
        optimizer.zero_grad()
        for x, prompt, target in own:
            divisor = MICROBATCHES if is_wrong("divided_by_all") else count
            (F.mse_loss(model(x, prompt), target) / divisor).backward()
        for name, parameter in model.named_parameters():
            if SIZE > 1 and not (is_wrong("unreduced") and name == "blocks.1.up.weight"):
                dist.all_reduce(parameter.grad)
                parameter.grad /= SIZE
        optimizer.step()


torch.manual_seed(0)
generator = torch.Generator().manual_seed(1)
model = Denoiser()
with joined():
    sample() if "guidance" in ARGUMENTS else train()
