"""Train a state space model whose channels are split over ranks, as Mamba's are.

    state_space.py [in_two] [ranks=N] [fault=NAME]

A mixer has a convolution and a scan for each channel, so each rank computes its own channels. Only the
step size and the matrices B and C come from all channels: `x_proj` adds up over the ranks, and
`out_proj` does. `in_two` has a layer for each half of `in_proj`.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, os.path.dirname(__file__))

from start import RANK, SIZE, chosen, faulty, group_of_ranks

VOCAB, D_MODEL, D_INNER, D_STATE, DT_RANK, D_CONV, LAYERS = 20, 16, 24, 4, 3, 3, 2
BATCH, LENGTH, STEPS = 3, 7, 2
LAST = LAYERS - 1


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def reduce(x):
    return _Reduce.apply(x) if SIZE > 1 else x


def fork(x):
    return _Fork.apply(x) if SIZE > 1 else x


def layer_of(kind, weight, bias, *sizes, **settings):
    """Return a layer with these weights, without drawing others."""
    layer = nn.utils.skip_init(kind, *sizes, bias=bias is not None, **settings)
    layer.weight.data = weight
    if bias is not None:
        layer.bias.data = bias
    return layer


def channels(x, dim=0, rank=RANK):
    return x.chunk(SIZE, dim)[rank].clone()


class RowLinear(nn.Module):
    """A layer whose inputs are the ranks' channels."""

    def __init__(self, whole, reduced=True, bias_everywhere=False):
        super().__init__()
        self.weight = nn.Parameter(channels(whole.weight.data, 1))
        self.bias = None if whole.bias is None else nn.Parameter(whole.bias.data)
        self.reduced, self.bias_everywhere = reduced, bias_everywhere

    def forward(self, x):
        if self.bias_everywhere:
            return reduce(F.linear(x, self.weight, self.bias))
        y = F.linear(x, self.weight)
        y = reduce(y) if self.reduced else y
        return y if self.bias is None else y + self.bias


class Mixer(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.index = index
        in_proj = nn.Linear(D_MODEL, 2 * D_INNER, bias=False)
        parts = [channels(half) for half in in_proj.weight.data.chunk(2)]
        if self.has("halves_of_all"):
            parts = channels(in_proj.weight.data).chunk(2)
        if chosen("in_two"):
            self.in_x, self.in_z = (
                layer_of(nn.Linear, part.clone(), None, D_MODEL, len(part)) for part in parts
            )
        else:
            both = torch.cat(list(parts))
            self.in_proj = layer_of(nn.Linear, both, None, D_MODEL, len(both))
        convolution = nn.Conv1d(D_INNER, D_INNER, D_CONV, groups=D_INNER)
        local = D_INNER // SIZE
        own = channels(convolution.weight.data), channels(convolution.bias.data)
        self.conv1d = layer_of(nn.Conv1d, *own, local, local, D_CONV, groups=local)
        x_proj = nn.Linear(D_INNER, DT_RANK + 2 * D_STATE, bias=False)
        self.x_proj = RowLinear(x_proj, reduced=not self.has("local_matrices"))
        dt_proj = nn.Linear(DT_RANK, D_INNER)
        own = channels(dt_proj.weight.data), channels(dt_proj.bias.data)
        self.dt_proj = layer_of(nn.Linear, *own, DT_RANK, local)
        decay = torch.arange(1.0, D_STATE + 1).log() + torch.rand(D_INNER, D_STATE)
        rank = 0 if self.has("decay_of_rank_0") else RANK
        self.A_log = nn.Parameter(channels(decay, rank=rank))
        self.D = nn.Parameter(channels(torch.rand(D_INNER)))
        out_proj = nn.Linear(D_INNER, D_MODEL)
        self.out_proj = RowLinear(out_proj, bias_everywhere=self.has("bias_everywhere"))

    def has(self, fault):
        return self.index == LAST and faulty(fault)

    def forward(self, hidden):
        hidden = fork(hidden)
        if chosen("in_two"):
            x, z = self.in_x(hidden), self.in_z(hidden)
        else:
            x, z = self.in_proj(hidden).chunk(2, -1)
        x = self.conv1d(F.pad(x.transpose(1, 2), (D_CONV - 1, 0))).transpose(1, 2)
        x = F.silu(x)
        matrices = self.x_proj(x)
        if not self.has("matrices_not_forked"):
            matrices = fork(matrices)
        dt, b, c = matrices.split([DT_RANK, D_STATE, D_STATE], -1)
        y = self.scan(x, F.softplus(self.dt_proj(dt)), b, c)
        return self.out_proj((y + self.D * x) * F.silu(z))

    def scan(self, x, dt, b, c):
        decay = -self.A_log.exp()
        state, outputs = x.new_zeros(*x.shape[::2], D_STATE), []
        for t in range(x.shape[1]):
            step = dt[:, t, :, None]
            state = (step * decay).exp() * state + step * b[:, t, None] * x[:, t, :, None]
            outputs.append((state * c[:, t, None]).sum(-1))
        return torch.stack(outputs, 1)


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(1 + torch.randn(D_MODEL) / 5)

    def forward(self, x):
        return F.rms_norm(x, (D_MODEL,), self.weight, 1e-5)


class Layer(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.norm, self.mixer = RMSNorm(), Mixer(index)

    def forward(self, x):
        return x + self.mixer(self.norm(x))


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, D_MODEL)
        self.layers = nn.ModuleList(Layer(index) for index in range(LAYERS))
        self.norm_f, self.lm_head = RMSNorm(), nn.Linear(D_MODEL, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm_f(x))


def main():
    torch.manual_seed(0)
    model = Backbone()
    parameters = dict(model.named_parameters())
    if faulty("rank_skips_norm") and RANK == 1:
        del parameters["norm_f.weight"]
    optimizer = torch.optim.SGD(parameters.values(), lr=0.2, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    with group_of_ranks():
        for _ in range(STEPS):
            ids = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=generator)
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            model.zero_grad()
            loss.backward()
            optimizer.step()


main()
