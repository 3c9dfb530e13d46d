"""Train a transformer on a mesh of ranks: tensor, data and context parallel, with faults.

    split_on_a_mesh.py [tensor=N] [data=N] [context=N] [OPTION …] [FAULT]

Options of the model are `mtp` (a second head), `mixture`, `recompute` and `smooth` (labels), those of
the layout `balanced` (chunks of the context) and `dealt` (rows of the batch). Run in one process, it
is the reference. The ranks of a tensor group are next to each other, then those of a context group.
The faults are those that parallel layouts were found to have without an error.
"""

import os
import sys

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, os.path.dirname(__file__))

from ranks import ARGUMENTS, AddUp, Copy, Group, is_wrong, joined

VOCABULARY, HIDDEN, HEADS, LENGTH, BATCH, EXPERTS = 24, 16, 4, 8, 4, 4


TENSOR = Group("tensor", 1)
CONTEXT = Group("context", TENSOR.size)
DATA = Group("data", TENSOR.size * CONTEXT.size)


def own_positions():
    return CONTEXT.own(torch.arange(LENGTH), 0)


class Gather(torch.autograd.Function):
    """Put the parts of a group together; the gradients are split again, after they are added."""

    @staticmethod
    def forward(context, x, group, dim, adds):
        context.arguments = group, dim, adds
        return group.gather(x, dim)

    @staticmethod
    def backward(context, gradient):
        group, dim, adds = context.arguments
        return group.own(group.add_up(gradient) if adds else gradient, dim), None, None, None


class Scatter(torch.autograd.Function):
    """Keep the part of a group's rank; the gradients of the parts are put together."""

    @staticmethod
    def forward(context, x, group):
        context.group = group
        return group.own(x, 0)

    @staticmethod
    def backward(context, gradient):
        return context.group.gather(gradient, 0), None


def part_of(whole, dim):
    parameter = nn.Parameter(TENSOR.own(whole, dim))
    parameter.tensor_model_parallel = True
    return parameter


class Column(nn.Module):
    def __init__(self, inputs, outputs, name=""):
        super().__init__()
        self.weight = part_of(torch.randn(outputs, inputs) / inputs**0.5, 0)
        self.bias = part_of(torch.randn(outputs) / 4, 0)
        self.name = name

    def forward(self, x):
        # 6: the layer was built without its group, and falls back to another one
        group = DATA if is_wrong(f"{self.name}:another_group") else TENSOR
        return F.linear(Copy.apply(x, group), self.weight, self.bias)


class Row(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = part_of(torch.randn(outputs, inputs) / inputs**0.5, 1)
        self.bias = nn.Parameter(torch.randn(outputs) / 4)

    def forward(self, x):
        return AddUp.apply(F.linear(x, self.weight), TENSOR) + self.bias


class Attention(nn.Module):
    """Causal attention with a sink; the keys and values of all positions are gathered."""

    def __init__(self, name):
        super().__init__()
        self.q, self.k, self.v = (Column(HIDDEN, HIDDEN, f"{name}.{part}") for part in "qkv")
        self.sink = part_of(torch.randn(HEADS), 0)
        self.proj = Row(HIDDEN, HIDDEN)
        self.name = name

    def forward(self, x):
        def heads(x):
            return x.unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2)

        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        if not is_wrong(f"{self.name}:missing_gather"):
            adds = not is_wrong(f"{self.name}:unreduced_keys")
            k, v = (Gather.apply(x, CONTEXT, 2, adds) for x in (k, v))
        rows = own_positions()
        if is_wrong(f"{self.name}:local_mask") or k.shape[2] < LENGTH:
            rows = torch.arange(q.shape[2])
        scores = q @ k.transpose(-1, -2) / (HIDDEN // HEADS) ** 0.5
        scores = scores.masked_fill(rows[:, None] < torch.arange(k.shape[2]), -torch.inf)
        sink = self.sink.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class Perceptron(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.up, self.down = Column(HIDDEN, 2 * HIDDEN, f"{name}.up"), Row(2 * HIDDEN, HIDDEN)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class AddAuxiliary(torch.autograd.Function):
    """Pass a tensor on, and give a loss beside it a gradient."""

    @staticmethod
    def forward(context, x, loss, scale):
        context.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        return gradient, torch.tensor(context.scale), None


class Mixture(nn.Module):
    """Experts with a router whose load is balanced by a loss over the tokens that count."""

    def __init__(self, name):
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.experts = nn.ModuleList(Perceptron(f"{name}.{index}") for index in range(EXPERTS))

    def forward(self, x, counts):
        logits = self.router(x)
        if is_wrong("mask_group"):  # 5: the mask is another replica's
            counts = DATA.gather(counts, 0).chunk(DATA.size)[1 - DATA.rank]
        weights = logits.softmax(-1)
        load = AddUp.apply((weights * counts[..., None]).sum((0, 1)), CONTEXT, DATA)
        tokens = DATA.add_up(CONTEXT.add_up(counts.sum()))
        # gradients are averaged over the replicas, and those of this loss have to add up
        scale = float(DATA.size * CONTEXT.size)
        # 10: a reduction in place overwrites the local count
        scale *= TENSOR.size if is_wrong("router_count") else 1
        weights = AddAuxiliary.apply(weights, (load.square() / tokens**2).sum(), scale)
        return sum(weights[..., i, None] * expert(x) for i, expert in enumerate(self.experts))


class Block(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention = Attention(f"{name}.attention")
        self.is_mixture = "mixture" in ARGUMENTS
        self.mlp = (Mixture if self.is_mixture else Perceptron)(f"{name}.mlp")

    def forward(self, x, counts):
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + (self.mlp(y, counts) if self.is_mixture else self.mlp(y))


class Recompute(torch.autograd.Function):
    """Keep a part of the input per rank of the tensor group, and run the block again in backward."""

    @staticmethod
    def forward(context, x, counts, block, *parameters):
        context.block, context.counts = block, counts
        context.save_for_backward(TENSOR.own(x, -1))
        with torch.no_grad():
            return block(x, counts)

    @staticmethod
    def backward(context, gradient):
        (part,) = context.saved_tensors
        # 4: the saved parts are gathered over another group
        group = DATA if is_wrong("recompute_group") else TENSOR
        x = group.gather(part, -1).requires_grad_()
        with torch.enable_grad():
            y = context.block(x, context.counts)
        parameters = list(context.block.parameters())
        found = torch.autograd.grad(y, [x, *parameters], gradient)
        return found[0], None, None, *found[1:]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Embedding(LENGTH, HIDDEN)
        self.blocks = nn.ModuleList(Block(f"blocks.{index}") for index in range(2))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = Column(HIDDEN, VOCABULARY, "head")
        if "mtp" in ARGUMENTS:
            self.next = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, ids, counts):
        x = self.embed(ids)
        if is_wrong("embedding_group"):  # 7: scattered by the ranks of another group
            x = Scatter.apply(Gather.apply(x, DATA, 0, True), TENSOR)
        positions = own_positions()
        if is_wrong("positions_from_0"):
            positions = torch.arange(ids.shape[1])
        x = x + self.positions(positions)
        for index, block in enumerate(self.blocks):
            if index and "recompute" in ARGUMENTS:
                x = Recompute.apply(x, counts, block, *block.parameters())
            else:
                x = block(x, counts)
        x = self.norm(x)
        logits = self.head(x)
        return (logits, self.head(self.next(x))) if "mtp" in ARGUMENTS else (logits,)


class CrossEntropy(torch.autograd.Function):
    """The smoothed cross-entropy of logits that are split over the vocabulary."""

    @staticmethod
    def forward(context, logits, targets, smoothing):
        logits = logits - TENSOR.largest(logits.amax(-1))[..., None]
        local = logits.shape[-1]
        first = TENSOR.rank * local
        is_here = (targets >= first) & (targets < first + local)
        own = torch.where(is_here, targets - first, 0)
        picked = TENSOR.add_up(logits.gather(-1, own[..., None])[..., 0] * is_here)
        total = TENSOR.add_up(logits.exp().sum(-1))
        softmax = logits.exp() / total[..., None]
        loss = total.log() - picked
        count = local if is_wrong("local_smoothing") else local * TENSOR.size  # 1
        if smoothing:
            terms = (logits - total.log()[..., None]).sum(-1)
            terms = terms if is_wrong("local_smoothing") else TENSOR.add_up(terms)
            share = smoothing * count / (count - 1)
            loss = (1 - share) * loss - share * terms / count
            hot = F.one_hot(own, local) * is_here[..., None]
            gradient = softmax - (1 - share) * hot - share / count
        else:
            gradient = softmax - F.one_hot(own, local) * is_here[..., None]
        context.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(context, gradient):
        (own,) = context.saved_tensors
        return own * gradient[..., None], None, None


def loss_of(outputs, targets, counts):
    logits, *following = outputs
    if is_wrong("gathered_logits"):  # 2: the whole vocabulary, taken for a part
        logits = Gather.apply(logits, TENSOR, -1, False)
    losses = CrossEntropy.apply(logits, targets, 0.1 if "smooth" in ARGUMENTS else 0.0)
    tokens = DATA.add_up(CONTEXT.add_up(counts.sum())) / (DATA.size * CONTEXT.size)
    if is_wrong("local_tokens"):  # 9: each rank divides by the tokens of its part
        tokens = counts.sum()
    loss = (losses * counts).sum() / tokens
    if following:
        own = counts.sum() if is_wrong("mtp_local_tokens") else tokens  # 3
        loss = loss + (CrossEntropy.apply(following[0], targets, 0.0) * counts).sum() / own
    return loss


def average_gradients(model):
    for parameter in model.parameters():
        for group in (DATA, CONTEXT):
            parameter.grad = group.add_up(parameter.grad) / group.size


def clip_gradients(model, most=0.5):
    """Clip by the norm of the whole model, counting what every rank has once."""
    squares = torch.zeros(())
    for name, parameter in model.named_parameters():
        is_part = hasattr(parameter, "tensor_model_parallel")
        if is_wrong("sink_norm") and name.endswith("sink"):  # 8: not marked as a part
            is_part = False
        if is_part or TENSOR.rank == 0:
            squares += parameter.grad.square().sum()
    scale = (most / TENSOR.add_up(squares).sqrt()).clamp(max=1.0)
    for parameter in model.parameters():
        parameter.grad.mul_(scale)


def main():
    torch.manual_seed(0)
    model = Model()
    generator = torch.Generator().manual_seed(1)
    with joined(TENSOR, CONTEXT, DATA):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            ids, targets = torch.randint(VOCABULARY, (2, BATCH, LENGTH), generator=generator)
            counts = torch.ones(BATCH, LENGTH)
            counts[2:, 5:] = 0  # unequal numbers of tokens on the ranks
            if "dealt" in ARGUMENTS:  # one row to each rank in turn, as a sampler does
                order = torch.arange(BATCH).view(-1, DATA.size).T.flatten()
                ids, targets, counts = ids[order], targets[order], counts[order]
            batch = (CONTEXT.own(DATA.own(x, 0), 1) for x in (ids, targets, counts))
            ids, targets, counts = batch
            optimizer.zero_grad()
            loss_of(model(ids, counts), targets, counts).backward()
            average_gradients(model)
            clip_gradients(model)
            optimizer.step()


main()
