"""Train a mixture of experts whose tokens are dispatched in buffers of fixed capacity, as in GShard.

    gshard.py [ranks=N] [gathered] [fault=NAME]

Each sequence is a group of its own: an expert takes three of its tokens, and the others are dropped.
The ranks divide the sequences and the experts, which an all-to-all brings together; with `gathered`
each rank gathers all buffers instead, and the experts' results are reduced and scattered.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.nn.functional import _AlltoAllSingle, all_gather
from torch.nn import functional as F

sys.path.insert(0, os.path.dirname(__file__))

from start import RANK, SIZE, chosen, faulty, group_of_ranks

VOCAB, MODEL, HIDDEN, EXPERTS, CAPACITY, LAYERS = 24, 16, 24, 4, 3, 2
SEQUENCES, LENGTH, STEPS, AUXILIARY = 4, 8, 3, 0.05
LOCAL = EXPERTS // SIZE


class AllReduce(torch.autograd.Function):
    """Add up over the ranks; so do the gradients."""

    @staticmethod
    def forward(ctx, x):
        return funcol.all_reduce(x, "sum", dist.group.WORLD).clone()

    @staticmethod
    def backward(ctx, grad):
        return funcol.all_reduce(grad.contiguous(), "sum", dist.group.WORLD).clone()


def exchange(x):
    """Send the n-th part of the first dimension to rank n."""
    x = x.contiguous()
    return _AlltoAllSingle.apply(dist.group.WORLD, torch.empty_like(x), None, None, x)


def to_experts(x):
    """[experts, own sequences, places, model] -> [own experts, all sequences, places, model]"""
    if SIZE == 1:
        return x
    if chosen("gathered"):
        return torch.cat(all_gather(x.contiguous()), dim=1)[RANK * LOCAL : (RANK + 1) * LOCAL]
    return torch.cat(exchange(x).chunk(SIZE), dim=1)


def from_experts(x, mixed_up):
    """[own experts, all sequences, places, model] -> [experts, own sequences, places, model]"""
    if SIZE == 1:
        return x
    if chosen("gathered"):
        whole = F.pad(x, (0, 0) * 3 + (RANK * LOCAL, EXPERTS - (RANK + 1) * LOCAL))
        return AllReduce.apply(whole).chunk(SIZE, dim=1)[RANK]
    received = exchange(torch.cat(x.chunk(SIZE, dim=1)))
    if mixed_up:  # as if the ranks were the inner dimension of the experts
        received = received.unflatten(0, (SIZE, LOCAL)).transpose(0, 1).flatten(0, 1)
    return received


class ExpertBank(nn.Module):
    def __init__(self, index):
        super().__init__()
        wi = torch.randn(EXPERTS, MODEL, HIDDEN) / MODEL**0.5
        wo = torch.randn(EXPERTS, HIDDEN, MODEL) / HIDDEN**0.5
        rank = 0 if faulty("same_experts") and index == 1 else RANK
        self.wi = nn.Parameter(wi.chunk(SIZE)[rank].clone())
        self.wo = nn.Parameter(wo.chunk(SIZE)[rank].clone())

    def forward(self, x):
        x = F.silu(torch.einsum("egcm,emh->egch", x, self.wi))
        return torch.einsum("egch,ehm->egcm", x, self.wo)


class MoELayer(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.index = index
        self.wg, self.bank = nn.Linear(MODEL, EXPERTS, bias=False), ExpertBank(index)

    def forward(self, x):
        gates = self.wg(x).softmax(-1)
        value, expert = gates.max(-1)
        one_hot = F.one_hot(expert, EXPERTS)
        place = (one_hot.cumsum(1) * one_hot).sum(-1) - 1
        if faulty("late_tokens_first") and RANK == 1 and self.index == 0:
            place = (one_hot.flip(1).cumsum(1).flip(1) * one_hot).sum(-1) - 1
        slots = F.one_hot(place.clamp(max=CAPACITY), CAPACITY + 1)[..., :CAPACITY]
        dispatch = (one_hot[..., None] * slots[..., None, :]).float()
        buffers = torch.einsum("gsec,gsm->egcm", dispatch, x)
        results = from_experts(
            self.bank(to_experts(buffers)), faulty("experts_mixed_up") and self.index == 1
        )
        balance = EXPERTS * (one_hot.float().mean(1) * gates.mean(1)).sum(-1).mean()
        return torch.einsum("gsec,egcm->gsm", dispatch * value[..., None, None], results), balance


class SwitchBlock(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.pre_norm, self.mixer = nn.LayerNorm(MODEL), nn.GRU(MODEL, MODEL, batch_first=True)
        self.ffn_norm, self.moe = nn.LayerNorm(MODEL), MoELayer(index)

    def forward(self, x):
        x = x + self.mixer(self.pre_norm(x))[0]
        y, balance = self.moe(self.ffn_norm(x))
        return x + y, balance


class SwitchModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, MODEL)
        self.h = nn.ModuleList(SwitchBlock(index) for index in range(LAYERS))
        self.ln_f, self.unembed = nn.LayerNorm(MODEL), nn.Linear(MODEL, VOCAB)

    def forward(self, tokens):
        x, balances = self.wte(tokens), []
        for block in self.h:
            x, balance = block(x)
            balances.append(balance)
        return self.unembed(self.ln_f(x)), sum(balances)


def reduce_gradients(model):
    for name, parameter in model.named_parameters():
        if ".bank." not in name:
            if not (faulty("gate_not_reduced") and name == "h.1.moe.wg.weight"):
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(SIZE)
        elif faulty("experts_reduced") and name == "h.1.moe.bank.wo":
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(SIZE)
        elif not faulty("experts_summed"):
            parameter.grad.div_(SIZE)  # the tokens of all ranks are in it, and each rank's mean


def main():
    torch.manual_seed(0)
    model = SwitchModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    with group_of_ranks():
        for _ in range(STEPS):
            data = torch.randint(VOCAB, (SEQUENCES, LENGTH + 1), generator=generator)
            data = data.chunk(SIZE)[RANK]
            logits, balance = model(data[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), data[:, 1:].flatten())
            if not (faulty("no_balance_loss") and RANK == 1):
                loss = loss + AUXILIARY * balance
            optimizer.zero_grad()
            loss.backward()
            if SIZE > 1:
                reduce_gradients(model)
            optimizer.step()


main()
