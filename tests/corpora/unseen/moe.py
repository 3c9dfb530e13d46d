"""A mixture of experts with a shared one: a loop over the experts beside one product over all."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import shaken

WIDTH, INNER, EXPERTS, CHOSEN = 24, 32, 6, 2


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.w2 = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SparseMoe(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.shared, self.shared_gate = Expert(), nn.Linear(WIDTH, 1, bias=False)

    def forward(self, hidden):
        x = self.norm(hidden).flatten(0, 1)
        weights = F.softmax(self.gate(x), -1)
        weights, chosen = torch.topk(weights, CHOSEN, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            token, rank = torch.where(chosen == index)
            if len(token):
                result.index_add_(0, token, expert(x[token]) * weights[token, rank, None])
        result = result + torch.sigmoid(self.shared_gate(x)) * self.shared(x)
        return hidden + result.view_as(hidden)


class MoeStack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(SparseMoe() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class FusedMoe(nn.Module):
    def __init__(self, reference):
        super().__init__()
        stack = [torch.cat([e.w1.weight, e.w3.weight]) for e in reference.experts]
        self.w13 = nn.Parameter(torch.stack(stack), requires_grad=False)
        self.w2 = nn.Parameter(
            torch.stack([e.w2.weight for e in reference.experts]), requires_grad=False
        )
        self.ln, self.router = reference.norm, reference.gate
        self.shared, self.shared_gate = reference.shared, reference.shared_gate

    def combine(self, logits):
        """Return each expert's weight of each token, 0 where it was not chosen."""
        top, index = logits.topk(CHOSEN)
        top = top.softmax(-1)
        return torch.zeros_like(logits).scatter(-1, index, top)

    def forward(self, hidden):
        x = self.ln(hidden)
        gate, up = torch.einsum("btw,eiw->btei", x, self.w13).chunk(2, -1)
        down = torch.einsum("btei,ewi->btew", F.silu(gate) * up, self.w2)
        routed = (self.combine(self.router(x)).unsqueeze(-1) * down).sum(-2)
        scale = self.shared_gate(x).sigmoid()
        common = F.linear(x, torch.cat([self.shared.w1.weight, self.shared.w3.weight])).chunk(2, -1)
        common = self.shared.w2(F.silu(common[0]) * common[1])
        return hidden + routed + scale * common


class PortMoe(nn.Module):
    def __init__(self, reference):
        super().__init__()
        self.blocks = nn.Sequential(*map(FusedMoe, reference.layers))

    def forward(self, x):
        return self.blocks(x)


def build():
    reference = shaken(MoeStack())
    port, x = PortMoe(reference), torch.randn(2, 10, WIDTH)
    return lambda: reference(x), lambda: port(x)
