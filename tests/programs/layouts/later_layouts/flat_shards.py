"""Train over data parallel ranks that keep parts of what the optimizer needs, written by hand.

    flat_shards.py [stage=1 | stage=2 | stage=3] [ranks=N] [fault=NAME]

Stage 1 gives every parameter an owner, which updates and broadcasts it. In stage 2 the gradients of
all parameters are one padded vector, of which a rank reduces, clips and updates a piece. Stage 3 keeps
a piece of the weights of each block, and gathers them when the block is called. Half of the batches are
accumulated.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, os.path.dirname(__file__))

from start import RANK, SIZE, WORDS, faulty, group_of_ranks

STAGE = next((int(word[6:]) for word in WORDS if word.startswith("stage=")), 0) if SIZE > 1 else 0
INPUTS, WIDTH, INNER, BLOCKS, ROWS, MICRO, STEPS = 5, 10, 21, 3, 8, 2, 3
RATE, MOMENTUM = 0.1, 0.9


class GatherPieces(torch.autograd.Function):
    """A vector from the ranks' pieces; its gradients are reduced, and each rank gets its piece."""

    @staticmethod
    def forward(ctx, piece):
        pieces = [torch.empty_like(piece) for _ in range(SIZE)]
        dist.all_gather(pieces, piece.contiguous())
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(SIZE)[RANK] / (1 if faulty("pieces_summed") else SIZE)


class ResidualBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln, self.fc_in = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER)
        self.fc_out = nn.Linear(INNER, WIDTH)

    def forward(self, x):
        return x + self.fc_out(F.gelu(self.fc_in(self.ln(x))))


class Sharded(nn.Module):
    """A block whose weights are a piece of a vector; the block itself has none between its calls."""

    def __init__(self, block, name):
        super().__init__()
        self.name, self.shapes = name, {n: p.shape for n, p in block.named_parameters()}
        flat = torch.cat([p.detach().flatten() for p in block.parameters()])
        flat = F.pad(flat, (0, -len(flat) % SIZE))
        rank = 0 if faulty("piece_of_rank_0") and name == "blocks.1" else RANK
        self.flat_param = nn.Parameter(flat.chunk(SIZE)[rank].clone())
        self.module = block.to("meta")
        for child in self.module.modules():
            for leaf in list(child._parameters):
                del child._parameters[leaf]
                setattr(child, leaf, None)

    def forward(self, x):
        flat, start = GatherPieces.apply(self.flat_param), 0
        if faulty("padding_in_front") and self.name == "blocks.2":
            start = 1
        for name, shape in self.shapes.items():
            owner, _, leaf = name.rpartition(".")
            setattr(
                self.module.get_submodule(owner), leaf, flat[start:][: shape.numel()].view(shape)
            )
            start += shape.numel()
        return self.module(x)


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(ResidualBlock() for _ in range(BLOCKS))
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, x):
        x = torch.tanh(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class OwnedParameters:
    """Stage 1: the n-th parameter is updated by one rank, and the others get it."""

    def __init__(self, model):
        self.parameters = list(model.parameters())
        own = self.parameters[RANK::SIZE]
        self.optimizer = torch.optim.SGD(own, lr=RATE, momentum=MOMENTUM)

    def step(self):
        for parameter in self.parameters:
            dist.all_reduce(parameter.grad)
            parameter.grad /= SIZE
        self.optimizer.step()
        for index, parameter in enumerate(self.parameters):
            if faulty("last_not_sent") and index == len(self.parameters) - 1:
                continue
            dist.broadcast(parameter.data, index % SIZE)


class FlatVector:
    """Stage 2: gradients and weights in one vector, of which each rank updates a piece."""

    def __init__(self, model):
        self.parameters = list(model.parameters())
        sizes = [p.numel() for p in self.parameters]
        padding = -sum(sizes) % SIZE
        flat = torch.cat([p.detach().flatten() for p in self.parameters])
        self.flat = F.pad(flat, (0, padding))
        self.sizes = [*sizes, padding]
        self.piece = self.flat.chunk(SIZE)[RANK].clone().requires_grad_()
        self.optimizer = torch.optim.SGD([self.piece], lr=RATE, momentum=MOMENTUM)

    def step(self):
        grads = torch.cat([p.grad.flatten() for p in self.parameters])
        grads = F.pad(grads, (0, self.sizes[-1]))
        dist.all_reduce(grads)
        rank = (RANK + 1) % SIZE if faulty("piece_of_next_rank") else RANK
        self.piece.grad = grads.chunk(SIZE)[rank] / SIZE
        self.optimizer.step()
        pieces = [torch.empty_like(self.piece) for _ in range(SIZE)]
        dist.all_gather(pieces, self.piece.detach())
        if faulty("pieces_out_of_turn"):
            pieces.reverse()
        views = torch.cat(pieces).split(self.sizes)
        for parameter, view in zip(self.parameters, views, strict=False):
            parameter.data.copy_(view.view_as(parameter))


def shard(model):
    for index, block in enumerate(model.blocks):
        model.blocks[index] = Sharded(block, f"blocks.{index}")


class ShardedWeights:
    """Stage 3: the pieces have reduced gradients already; the other parameters are on all ranks."""

    def __init__(self, model):
        self.whole = [p for n, p in model.named_parameters() if "flat_param" not in n]
        self.optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)

    def step(self):
        for parameter in self.whole:
            dist.all_reduce(parameter.grad)
            parameter.grad /= SIZE
        self.optimizer.step()


def main():
    torch.manual_seed(0)
    model = Regressor()
    if STAGE == 3:
        shard(model)
    if STAGE:
        trainer = (OwnedParameters, FlatVector, ShardedWeights)[STAGE - 1](model)
    else:
        trainer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    generator = torch.Generator().manual_seed(1)
    with group_of_ranks():
        for step in range(STEPS):
            for micro in range(MICRO):
                x = torch.randn(ROWS, INPUTS, generator=generator)
                target = torch.stack([x.prod(-1), x.sum(-1)], -1)
                own = slice(RANK, None, SIZE)
                if faulty("rows_of_one_rank") and step == 1 and micro == 1:
                    own = slice(0, None, SIZE)
                (F.mse_loss(model(x[own]), target[own]) / MICRO).backward()
            trainer.step()
            for parameter in model.parameters():
                parameter.grad = None


main()
