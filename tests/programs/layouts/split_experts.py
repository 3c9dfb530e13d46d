"""Train a mixture whose experts are split over data parallel ranks, with faults.

    split_experts.py [expert=N] [shared] [capacity] [FAULT]

Each token goes to its two best experts, on whichever rank these are, and back. Options of the model
are `shared` (an expert for all tokens) and `capacity` (of tokens of a batch, by their order). Run in
one process, it is the reference.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, os.path.dirname(__file__))

from ranks import ARGUMENTS, RANK, SIZE, is_wrong, joined

WORDS, HIDDEN, EXPERTS, TOKENS, LAYERS, BEST = 24, 16, 4, 32, 2, 2
OWN = EXPERTS // SIZE
CAPACITY = 14


class Exchange(torch.autograd.Function):
    """Send rows to the ranks, so many to each, and receive those that they send."""

    @staticmethod
    def forward(context, x, sent, received):
        context.counts = sent, received
        return Exchange.exchange(x, sent, received)

    @staticmethod
    def backward(context, gradient):
        sent, received = context.counts
        return Exchange.exchange(gradient, received, sent), None, None

    @staticmethod
    def exchange(x, sent, received):
        if SIZE == 1:
            return x
        own = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(own, x.contiguous(), received, sent)
        return own


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Mixture(nn.Module):
    """A router of all ranks and the experts of this one, numbered from 0."""

    def __init__(self, name):
        super().__init__()
        self.router, self.name = nn.Linear(HIDDEN, EXPERTS), name
        experts = [Expert() for _ in range(EXPERTS)]
        if is_wrong("expert_weights") and name == "blocks.1.mixture":
            experts = experts[::-1]
        self.experts = nn.ModuleList(experts[RANK * OWN : (RANK + 1) * OWN])
        if "shared" in ARGUMENTS:
            self.shared = Expert()

    def is_wrong(self, fault):
        return is_wrong(fault) and self.name == "blocks.1.mixture"

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        weights, chosen = scores.topk(BEST)
        if not self.is_wrong("unnormalized"):
            weights = weights / weights.sum(-1, keepdim=True)
        experts, order = chosen.flatten().sort(stable=True)
        keeps = self.keeps(experts)
        experts, order = experts[keeps], order[keeps]
        tokens = order // BEST
        counts = torch.bincount(experts, minlength=EXPERTS)
        y = self.run_experts(x[tokens], counts)
        if self.is_wrong("tokens_dropped") and RANK:  # of the last expert
            y = torch.cat([y[:-3], torch.zeros_like(y[-3:])])
        if self.is_wrong("weights_of_ranks"):  # in the order in which they were sent
            y = y * weights.flatten()[: len(y), None]
        else:
            y = y * weights.flatten()[order, None]
        y = torch.zeros_like(x).index_add(0, tokens, y)
        if "shared" in ARGUMENTS:
            y = y + self.shared(x)
        # the share of the tokens of all ranks that an expert gets, and its mean score
        load, mean = F.one_hot(chosen, EXPERTS).sum((0, 1)).float(), scores.sum(0)
        if SIZE > 1 and not self.is_wrong("local_load"):
            load = load.clone()
            dist.all_reduce(load)
        scale = EXPERTS / (BEST * TOKENS * TOKENS)
        # gradients are averaged over the ranks
        loss = scale * (load * mean).sum() * SIZE
        return y, loss * SIZE if self.is_wrong("auxiliary_per_rank") else loss

    def keeps(self, experts):
        """Return which rows their experts have room for: the first ones of all ranks."""
        if "capacity" not in ARGUMENTS:
            return torch.ones_like(experts, dtype=torch.bool)
        counts = torch.bincount(experts, minlength=EXPERTS)
        before = torch.zeros_like(counts)
        if SIZE > 1:
            all_counts = [torch.empty_like(counts) for _ in range(SIZE)]
            dist.all_gather(all_counts, counts)
            before = sum(all_counts[:RANK], before)
        room = CAPACITY
        if self.is_wrong("local_capacity"):
            before, room = torch.zeros_like(counts), CAPACITY // SIZE
        first = counts.cumsum(0) - counts
        return torch.arange(len(experts)) - first[experts] + before[experts] < room

    def run_experts(self, x, counts):
        """Run rows that are sorted by their experts, on the ranks of these."""
        per_rank = counts.view(SIZE, OWN)
        received = per_rank
        if SIZE > 1:
            received = torch.empty_like(per_rank)
            dist.all_to_all_single(received, per_rank)
        sent_counts = per_rank.sum(1).tolist()
        received_counts = received.sum(1).tolist()
        x = Exchange.apply(x, sent_counts, received_counts)
        # rank by rank, expert by expert -> expert by expert, rank by rank
        numbers = torch.arange(OWN).repeat(SIZE).repeat_interleave(received.flatten())
        if self.is_wrong("expert_offset") and RANK:
            numbers = OWN - 1 - numbers
        order = numbers.argsort(stable=True)
        sizes = torch.bincount(numbers, minlength=OWN).tolist()
        parts = x[order].split(sizes)
        y = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        back = order if self.is_wrong("not_sorted_back") else order.argsort()
        return Exchange.apply(y[back], received_counts, sent_counts)


class Block(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.norm, self.mixture = nn.LayerNorm(HIDDEN), Mixture(f"{name}.mixture")

    def forward(self, x):
        y, loss = self.mixture(self.norm(x))
        return x + y, loss


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, HIDDEN)
        self.blocks = nn.ModuleList(Block(f"blocks.{index}") for index in range(LAYERS))
        self.head = nn.Linear(HIDDEN, WORDS)

    def forward(self, ids):
        x, losses = self.embed(ids), []
        for block in self.blocks:
            x, loss = block(x)
            losses.append(loss)
        return self.head(x), sum(losses)


def reduce_gradients(model):
    """Average the gradients of what all ranks have; an expert has those of all ranks' tokens."""
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        is_expert = ".experts." in name
        if is_wrong("router_unreduced") and name == "blocks.1.mixture.router.weight":
            parameter.grad /= SIZE
            continue
        if SIZE > 1 and (not is_expert or is_wrong("experts_averaged")):
            dist.all_reduce(parameter.grad)
        if not (is_expert and is_wrong("experts_undivided")):
            parameter.grad /= SIZE


def main():
    torch.manual_seed(0)
    model = Model()
    generator = torch.Generator().manual_seed(1)
    with joined():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            batch = torch.randint(WORDS, (2, TOKENS), generator=generator)
            ids, targets = (x.chunk(SIZE)[RANK] for x in batch)
            optimizer.zero_grad()
            logits, loss = model(ids)
            (F.cross_entropy(logits, targets) + 0.1 * loss).backward()
            reduce_gradients(model)
            optimizer.step()


main()
