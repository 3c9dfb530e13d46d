"""Train a language model that returns its loss, over tensor or data parallel ranks, with faults.

    split_fused_weights.py [tensor=N | data=N] [flat] [FAULT]

Run in one process, it is the reference. The weights of a mixer are fused: queries, keys and values,
with a bias, cut part by part, and a projection that keeps some rows on every rank. Its gates are
its own parameter, and its norm is over the channels of all ranks. The head has the embedding's
weight. With `flat`, each rank's optimizer has a part of all parameters (ZeRO, by hand).
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, os.path.dirname(__file__))

from ranks import ARGUMENTS, RANK, SIZE, is_wrong, joined

WORDS, HIDDEN, HEADS, STATE, LENGTH, ROWS = 20, 16, 4, 4, 6, 4
IS_SPLIT, IS_DATA = (SIZE > 1 and f"{name}={SIZE}" in ARGUMENTS for name in ("tensor", "data"))
PARTS = SIZE if IS_SPLIT else 1


def add_up(x):
    x = x.clone()
    if IS_SPLIT:
        dist.all_reduce(x)
    return x


class Reduce(torch.autograd.Function):
    """Add up the terms of the ranks; the gradient passes, or adds up, too."""

    @staticmethod
    def forward(context, x, adds_gradients):
        context.adds = adds_gradients
        return add_up(x)

    @staticmethod
    def backward(context, gradient):
        return (add_up(gradient) if context.adds else gradient), None


class Copy(torch.autograd.Function):
    """Pass a tensor on to all ranks; the gradients add up."""

    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        return add_up(gradient)


def own(x, rank=RANK):
    return x.chunk(PARTS)[rank if IS_SPLIT else 0].clone()


def linear(weight, bias=None):
    """Return a layer without drawing the random numbers of an initialization."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.clone())
    if bias is not None:
        layer.bias = nn.Parameter(bias.clone())
    return layer


class SplitNorm(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.weight, self.name = nn.Parameter(own(1 + torch.randn(HIDDEN) / 8)), name

    def forward(self, x):
        if is_wrong("local_variance") and self.name == "blocks.1":
            mean = x.square().mean(-1, keepdim=True)
        else:
            mean = Reduce.apply(x.square().sum(-1, keepdim=True), True) / HIDDEN
        return x * (mean + 1e-5).rsqrt() * self.weight


class Mixer(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name
        parts, biases = torch.randn(3, HIDDEN, HIDDEN) / 4, torch.randn(3, HIDDEN) / 4
        self.joined = linear(torch.cat([*map(own, parts)]), torch.cat([*map(own, biases)]))
        values, shared = torch.randn(HIDDEN, HIDDEN) / 4, torch.randn(STATE, HIDDEN) / 4
        self.scan = linear(torch.cat([own(values), shared]))
        rank = 0 if is_wrong("gates") and name == "blocks.1" else RANK
        self.gates = nn.Parameter(own(torch.rand(HEADS), rank))
        self.norm = SplitNorm(name)
        self.out = linear(own((torch.randn(HIDDEN, HIDDEN) / 4).T).T)

    def forward(self, x):
        if not (is_wrong("not_copied") and self.name == "blocks.1"):
            x = Copy.apply(x)
        q, k, v = (
            part.unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2)
            for part in self.joined(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = (y * self.gates[:, None, None]).transpose(1, 2).flatten(2)
        values, state = self.scan(x).split([HIDDEN // PARTS, STATE], -1)
        return Reduce.apply(self.out(self.norm(y + values * state.mean(-1, keepdim=True))), False)


class Block(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(HIDDEN), Mixer(name)

    def forward(self, x):
        return x + self.mixer(self.norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, HIDDEN)
        self.blocks = nn.ModuleList(Block(f"blocks.{index}") for index in range(2))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, targets):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten()), "logits": logits}


def reduce_gradients(model):
    for parameter in model.parameters() if IS_DATA else ():
        dist.all_reduce(parameter.grad)
        parameter.grad /= SIZE
    for block in model.blocks:  # rows that every rank has
        shared = block.mixer.scan.weight.grad[HIDDEN // PARTS :]
        shared.copy_(add_up(shared))


class FlatOptimizer:
    """Updates a part of all parameters on each rank, from gradients that it reduces itself."""

    def __init__(self, parameters):
        self.parameters = list(parameters)
        self.part = nn.Parameter(self.own(parameter.data for parameter in self.parameters))
        self.optimizer = torch.optim.AdamW([self.part], lr=0.01)

    def own(self, tensors):
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        return F.pad(flat, (0, -len(flat) % SIZE)).chunk(SIZE)[RANK].clone()

    def step(self):
        gradients = []
        for parameter in self.parameters:
            gradient = parameter.grad.clone()
            dist.all_reduce(gradient)
            gradients.append(gradient / SIZE)
        self.part.grad = self.own(gradients)
        self.optimizer.step()
        parts = [torch.empty_like(self.part.data) for _ in range(SIZE)]
        dist.all_gather(parts, self.part.data)
        flat = torch.cat(parts)
        for parameter in self.parameters:
            parameter.data.copy_(flat[: parameter.numel()].view_as(parameter))
            flat = flat[parameter.numel() :]


def main():
    torch.manual_seed(0)
    model = Model()
    generator = torch.Generator().manual_seed(1)
    with joined():
        is_flat = SIZE > 1 and "flat" in ARGUMENTS
        optimizer = (
            FlatOptimizer(model.parameters())
            if is_flat
            else torch.optim.AdamW(model.parameters(), lr=0.01)
        )
        for step in range(2):
            ids, targets = torch.randint(WORDS, (2, ROWS, LENGTH), generator=generator)
            if IS_DATA:
                ids, targets = (x.chunk(SIZE)[RANK] for x in (ids, targets))
            if is_wrong("flipped") and RANK and step:
                ids = ids.flip(-1)
            for parameter in model.parameters():
                parameter.grad = None
            model(ids, targets)["loss"].backward()
            if not is_flat:
                reduce_gradients(model)
            if is_wrong("frozen_norm") and RANK:
                model.blocks[1].norm.weight.grad = None
            if not (is_wrong("skipped_update") and RANK and not step):
                optimizer.step()


main()
