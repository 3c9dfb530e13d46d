"""A GRU encoder and a decoder with additive attention: torch's cells beside cells by hand."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import shaken

WIDTH = 16


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(30, WIDTH), nn.Embedding(30, WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.bridge, self.cell = nn.Linear(2 * WIDTH, WIDTH), nn.GRUCell(3 * WIDTH, WIDTH)
        self.wq, self.wk, self.v = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
            nn.Linear(WIDTH, 1, bias=False),
        )
        self.out = nn.Linear(3 * WIDTH, 30)

    def forward(self, source, target, mask):
        memory, final = self.encoder(self.source(source))
        hidden = torch.tanh(self.bridge(torch.cat([final[0], final[1]], -1)))
        keys, logits = self.wk(memory), []
        for t in range(target.shape[1]):
            score = self.v(torch.tanh(self.wq(hidden).unsqueeze(1) + keys)).squeeze(-1)
            score = score.masked_fill(~mask, -1e9)
            weights = F.softmax(score, -1)
            context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
            hidden = self.cell(torch.cat([self.target(target[:, t]), context], -1), hidden)
            logits.append(self.out(torch.cat([hidden, context], -1)))
        return torch.stack(logits, 1)


def gru_step(gates_x, h, weight, bias):
    """One step of a GRU; the input's part of all gates is computed before."""
    xr, xz, xn = gates_x.chunk(3, -1)
    hr, hz, hn = F.linear(h, weight, bias).chunk(3, -1)
    reset, update = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
    new = torch.tanh(xn + reset * hn)
    return update * h + (1 - update) * new


class PortSeq2Seq(nn.Module):
    def __init__(self, reference):
        super().__init__()
        self.old = reference

    def run(self, x, suffix, steps):
        gru = self.old.encoder
        w_ih, w_hh, b_ih, b_hh = (
            getattr(gru, f"{name}_l0{suffix}")
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        gates = F.linear(x, w_ih, b_ih)
        h, states = x.new_zeros(len(x), WIDTH), {}
        for t in steps:
            h = gru_step(gates[:, t], h, w_hh, b_hh)
            states[t] = h
        return torch.stack([states[t] for t in sorted(states)], 1)

    def forward(self, source, target, mask):
        old, count = self.old, source.shape[1]
        x = old.source.weight[source]
        forwards = self.run(x, "", range(count))
        backwards = self.run(x, "_reverse", reversed(range(count)))
        memory = torch.cat([forwards, backwards], -1)
        last = torch.cat([forwards[:, -1], backwards[:, 0]], -1)
        h = old.bridge(last).tanh()
        keys = F.linear(memory, old.wk.weight, old.wk.bias + old.wq.bias)
        words = F.embedding(target, old.target.weight)
        states = []
        for t in range(target.shape[1]):
            energy = torch.tanh(keys + F.linear(h, old.wq.weight)[:, None])
            energy = (energy * old.v.weight[0]).sum(-1)
            energy = energy.masked_fill(mask.logical_not(), float("-inf"))
            context = torch.einsum("bs,bsw->bw", energy.softmax(1), memory)
            gates = F.linear(
                torch.cat([words[:, t], context], -1), old.cell.weight_ih, old.cell.bias_ih
            )
            h = gru_step(gates, h, old.cell.weight_hh, old.cell.bias_hh)
            states.append(torch.cat([h, context], -1))
        return old.out(torch.stack(states, 1))


def build():
    reference = shaken(Seq2Seq())
    source, target = torch.randint(0, 30, (3, 9)), torch.randint(0, 30, (3, 5))
    mask = torch.arange(9) < torch.tensor([9, 7, 5])[:, None]
    port = PortSeq2Seq(reference)
    return lambda: reference(source, target, mask), lambda: port(source, target, mask)
