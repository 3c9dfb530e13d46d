"""Train a decoder with grouped queries over tensor, pipeline and data parallel ranks, with faults.

    split_a_decoder.py [tensor=N] [pipeline=N] [data=N] [OPTION …] [FAULT]

Options of the model are `fused` (queries, keys and values in one projection, head group by head
group), `tied` (the head has the embedding's weight), `clip` (gradients) and `padded` (the ranks have more rows of the
vocabulary than there are words). Run in one process, it is the reference. The ranks of a tensor
group are next to each other, then those of a pipeline. Each batch has two microbatches.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, os.path.dirname(__file__))

from ranks import ARGUMENTS, RANK, SIZE, AddUp, Copy, Group, is_wrong, joined

HIDDEN, HEADS, GROUPS, LENGTH, BATCH, LAYERS, MICROBATCHES = 32, 4, 2, 6, 8, 4, 2
HEAD = HIDDEN // HEADS
WORDS = 22 if "padded" in ARGUMENTS else 24
ROWS = 24 if SIZE > 1 else WORDS


TENSOR = Group("tensor", 1)
PIPELINE = Group("pipeline", TENSOR.size)
DATA = Group("data", TENSOR.size * PIPELINE.size)
IS_FIRST, IS_LAST = PIPELINE.rank == 0, PIPELINE.rank == PIPELINE.size - 1


def part_of(whole, dim, rank=None):
    parameter = nn.Parameter(TENSOR.own(whole, dim, rank))
    parameter.tensor_model_parallel = True
    return parameter


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(1 + torch.randn(HIDDEN) / 8)

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


class Column(nn.Module):
    """A linear layer whose outputs are split."""

    def __init__(self, weight, rank=None):
        super().__init__()
        self.weight = part_of(weight, 0, rank)

    def forward(self, x):
        return F.linear(Copy.apply(x, TENSOR), self.weight)


class SharedColumn(nn.Module):
    """A linear layer of one part for several ranks, whose gradients add up."""

    def __init__(self, weight, parts):
        super().__init__()
        self.is_shared = TENSOR.size > parts
        own = TENSOR.rank * parts // TENSOR.size if parts < TENSOR.size else TENSOR.rank
        if is_wrong("kv_heads"):  # dealt in turn, where neighbors share one
            own = TENSOR.rank % parts
        self.weight = nn.Parameter(weight.chunk(min(parts, TENSOR.size))[own].contiguous())
        self.weight.tensor_model_parallel = True
        self.own, self.parts = own, parts

    def forward(self, x):
        return F.linear(Copy.apply(x, TENSOR), self.weight)

    def reduce_gradient(self):
        """Add up the terms of the ranks with the same part."""
        if not self.is_shared:
            return
        slots = self.weight.grad.new_zeros(self.parts, *self.weight.shape)
        slots[self.own] = self.weight.grad
        self.weight.grad = TENSOR.add_up(slots)[self.own].contiguous()


class Row(nn.Module):
    """A linear layer whose inputs are split; the ranks' terms add up."""

    def __init__(self, weight, name):
        super().__init__()
        self.weight, self.name = part_of(weight, 1), name

    def forward(self, x):
        x = F.linear(x, self.weight)
        return x if is_wrong(f"{self.name}:missing") else AddUp.apply(x, TENSOR)


def random_weight(outputs, inputs):
    return torch.randn(outputs, inputs) / inputs**0.5


class Attention(nn.Module):
    """Causal attention; `GROUPS` heads of keys and values serve all heads of queries."""

    def __init__(self, name):
        super().__init__()
        per_group = HEADS // GROUPS
        q = random_weight(HIDDEN, HIDDEN).view(GROUPS, per_group * HEAD, HIDDEN)
        k, v = (random_weight(GROUPS * HEAD, HIDDEN).view(GROUPS, HEAD, HIDDEN) for _ in "kv")
        if "fused" in ARGUMENTS:
            if is_wrong("kv_exchanged") and TENSOR.rank == 1 and name == "blocks.1.attention":
                k, v = v, k
            weight = torch.cat([q, k, v], 1).flatten(0, 1)
            if is_wrong("qkv_blocks") and name == "blocks.1.attention":  # q0 q1 k0 k1 v0 v1
                weight = torch.cat([x.flatten(0, 1) for x in (q, k, v)])
            self.qkv = Column(weight)
        else:
            self.q = Column(q.flatten(0, 1))
            self.k, self.v = (SharedColumn(x.flatten(0, 1), GROUPS) for x in (k, v))
        self.proj = Row(random_weight(HIDDEN, HIDDEN), f"{name}.proj")

    def forward(self, x):
        def heads(x):
            return x.unflatten(-1, (-1, HEAD)).transpose(1, 2)

        if "fused" in ARGUMENTS:
            q, k, v = (
                part.flatten(2)
                for part in self.qkv(x)
                .unflatten(-1, (GROUPS // TENSOR.size, -1))
                .split([HIDDEN // GROUPS, HEAD, HEAD], -1)
            )
        else:
            q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = heads(q), heads(k), heads(v)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(x.transpose(1, 2).flatten(2))


class Perceptron(nn.Module):
    def __init__(self, name):
        super().__init__()
        exchanged = (
            1 - TENSOR.rank if is_wrong("gate_exchanged") and name == "blocks.2.mlp" else None
        )
        self.gate = Column(random_weight(2 * HIDDEN, HIDDEN), exchanged)
        self.up = Column(random_weight(2 * HIDDEN, HIDDEN))
        self.down = Row(random_weight(HIDDEN, 2 * HIDDEN), f"{name}.down")

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(), RMSNorm()
        self.attention = Attention(f"blocks.{index}.attention")
        self.mlp = Perceptron(f"blocks.{index}.mlp")

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Embedding(nn.Module):
    """An embedding whose rows are split."""

    def __init__(self, weight):
        super().__init__()
        self.weight = part_of(weight, 0)

    def forward(self, ids):
        rows = self.weight.shape[0]
        first = rows * ((TENSOR.rank + 1) % TENSOR.size if is_wrong("offset") else TENSOR.rank)
        is_here = (ids >= first) & (ids < first + rows)
        x = F.embedding(torch.where(is_here, ids - first, 0), self.weight) * is_here[..., None]
        return AddUp.apply(x, TENSOR)


class Decoder(nn.Module):
    """The layers of this stage, numbered from 0."""

    def __init__(self):
        super().__init__()
        words, head = (F.pad(torch.randn(WORDS, HIDDEN) / 4, (0, 0, 0, ROWS - WORDS)) for _ in "eh")
        blocks = [Block(index) for index in range(LAYERS)]
        if is_wrong("layers_swapped"):
            blocks[2], blocks[3] = blocks[3], blocks[2]
        count = LAYERS // PIPELINE.size
        first = 0 if is_wrong("layer_offset") else PIPELINE.rank * count
        first -= is_wrong("layer_overlap") and PIPELINE.rank  # the last layer of the stage before
        norm = RMSNorm()
        if IS_FIRST:
            self.embed = Embedding(words)
        self.blocks = nn.ModuleList(blocks[first : first + count])
        if IS_LAST:
            self.norm = norm
            self.head = Column(words if "tied" in ARGUMENTS else head)
            if IS_FIRST and "tied" in ARGUMENTS:
                self.head.weight = self.embed.weight

    def forward(self, x):
        if IS_FIRST:
            x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if IS_LAST else x


class CrossEntropy(torch.autograd.Function):
    """The cross-entropy of logits that are split over the vocabulary, a number for each token."""

    @staticmethod
    def forward(context, logits, targets):
        local = logits.shape[-1]
        first = TENSOR.rank * local
        if not is_wrong("padding"):  # rows that are no words
            logits = logits.masked_fill(torch.arange(first, first + local) >= WORDS, -torch.inf)
        logits = logits - TENSOR.largest(logits.amax(-1))[..., None]
        is_here = (targets >= first) & (targets < first + local)
        own = torch.where(is_here, targets - first, 0)
        picked = logits.gather(-1, own[..., None])[..., 0]
        picked = TENSOR.add_up(torch.where(is_here, picked, 0.0))
        total = TENSOR.add_up(logits.exp().sum(-1))
        hot = F.one_hot(own, local) * is_here[..., None]
        context.save_for_backward(logits.exp() / total[..., None] - hot)
        return total.log() - picked

    @staticmethod
    def backward(context, gradient):
        (own,) = context.saved_tensors
        return own * gradient[..., None], None


def run_microbatch(model, ids, targets):
    """Run a microbatch through the stages and back."""
    before, after = RANK - TENSOR.size, RANK + TENSOR.size
    x = ids
    if not IS_FIRST:
        x = torch.empty(*ids.shape, HIDDEN)
        dist.recv(x, before)
        x.requires_grad_()
    y = model(x)
    if IS_LAST:
        (CrossEntropy.apply(y, targets).mean() / MICROBATCHES).backward()
    else:
        dist.send(y.detach(), after)
        gradient = torch.empty_like(y)
        dist.recv(gradient, after)
        gradient *= 2 if is_wrong("gradient_doubled") else 1
        y.backward(gradient)
    if not IS_FIRST:
        dist.send(x.grad, before)


def reduce_gradients(model):
    for module in model.modules():
        if isinstance(module, SharedColumn):
            module.reduce_gradient()
    if "tied" in ARGUMENTS and PIPELINE.size > 1 and not is_wrong("tied_unreduced"):
        weight = model.embed.weight if IS_FIRST else model.head.weight if IS_LAST else None
        shape = (ROWS // TENSOR.size, HIDDEN)
        total = PIPELINE.add_up(torch.zeros(shape) if weight is None else weight.grad)
        if weight is not None:
            weight.grad = total
    for name, parameter in model.named_parameters():
        if is_wrong("unreduced") and name == "blocks.1.norm2.weight":
            continue
        group = TENSOR if is_wrong("another_group") else DATA
        divisor = 1 if is_wrong("undivided") else DATA.size
        parameter.grad = group.add_up(parameter.grad) / divisor


def clip_gradients(model, most=0.5):
    """Clip by the norm of the whole model, counting what several ranks have once."""
    squares = torch.zeros(())
    for name, parameter in model.named_parameters():
        is_part = hasattr(parameter, "tensor_model_parallel")
        copies = TENSOR.size // GROUPS if ".k." in name or ".v." in name else 1
        is_tied_copy = "tied" in ARGUMENTS and PIPELINE.size > 1 and name == "head.weight"
        if (is_part or TENSOR.rank == 0) and not is_tied_copy:
            squares += parameter.grad.square().sum() / max(copies, 1)
    if not is_wrong("local_clip"):
        squares = PIPELINE.add_up(TENSOR.add_up(squares))
    scale = (most / squares.sqrt()).clamp(max=1.0)
    for parameter in model.parameters():
        parameter.grad.mul_(scale)


def main():
    torch.manual_seed(0)
    model = Decoder()
    generator = torch.Generator().manual_seed(1)
    with joined(TENSOR, PIPELINE, DATA):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            ids, targets = torch.randint(WORDS, (2, BATCH, LENGTH), generator=generator)
            optimizer.zero_grad()
            for index in range(MICROBATCHES):
                if is_wrong("microbatch_twice"):
                    index = 0
                run_microbatch(
                    model, *(DATA.own(x.chunk(MICROBATCHES)[index], 0) for x in (ids, targets))
                )
            reduce_gradients(model)
            if "clip" in ARGUMENTS:
                clip_gradients(model)
            if is_wrong("stale_norm") and not step and TENSOR.rank == 1:
                model.blocks[1].norm1.weight.grad = None
            optimizer.step()


main()
