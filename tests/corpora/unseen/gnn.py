"""A graph convolution and graph attention: messages along edges beside a dense adjacency."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import shaken

NODES, WIDTH, HEADS = 14, 16, 2


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH)
        self.lin, self.readout = (
            nn.Linear(WIDTH, HEADS * WIDTH, bias=False),
            nn.Linear(HEADS * WIDTH, 5),
        )
        self.att_src, self.att_dst = (nn.Parameter(torch.randn(HEADS, WIDTH)) for _ in range(2))

    def forward(self, x, edges):
        loops = torch.arange(NODES)
        src, dst = torch.cat([edges[0], loops]), torch.cat([edges[1], loops])
        degree = torch.zeros(NODES).index_add_(0, dst, torch.ones(len(dst)))
        norm = degree[src].rsqrt() * degree[dst].rsqrt()
        messages = self.conv(x)[src] * norm[:, None]
        h = torch.zeros(NODES, WIDTH).index_add_(0, dst, messages)
        h = F.elu(self.norm(h))
        z = self.lin(h).view(NODES, HEADS, WIDTH)
        alpha = (z * self.att_src).sum(-1)[src] + (z * self.att_dst).sum(-1)[dst]
        alpha = F.leaky_relu(alpha, 0.2)
        peak = torch.full((NODES, HEADS), -1e9).scatter_reduce(
            0, dst[:, None].expand_as(alpha), alpha, "amax"
        )
        weight = torch.exp(alpha - peak[dst])
        total = torch.zeros(NODES, HEADS).index_add_(0, dst, weight)
        weight = weight / total[dst]
        out = torch.zeros(NODES, HEADS, WIDTH).index_add_(0, dst, z[src] * weight[..., None])
        return self.readout(out.flatten(1)).mean(0)


class DenseGraph(nn.Module):
    def __init__(self, reference):
        super().__init__()
        self.old = reference

    def forward(self, x, edges):
        old = self.old
        adjacency = torch.zeros(NODES, NODES)
        adjacency[edges[1], edges[0]] = 1
        adjacency = adjacency + torch.eye(NODES)
        degree = adjacency.sum(1)
        scale = degree.pow(-0.5)
        smooth = scale[:, None] * adjacency * scale[None, :]
        h = smooth @ F.linear(x, old.conv.weight, old.conv.bias)
        h = F.layer_norm(h, (WIDTH,), old.norm.weight, old.norm.bias)
        h = torch.where(h > 0, h, torch.expm1(h))
        z = old.lin(h).unflatten(-1, (HEADS, WIDTH)).transpose(0, 1)
        sent = torch.einsum("hnw,hw->hn", z, old.att_src)
        received = torch.einsum("hnw,hw->hn", z, old.att_dst)
        scores = F.leaky_relu(received[:, :, None] + sent[:, None, :], 0.2)
        scores = scores.masked_fill(adjacency == 0, float("-inf"))
        mixed = torch.softmax(scores, -1) @ z
        return old.readout(mixed.transpose(0, 1).flatten(1).mean(0))


def build():
    reference = shaken(Graph())
    pairs = torch.randperm(NODES * NODES)[:40]
    edges = torch.stack([pairs // NODES, pairs % NODES])
    edges = edges[:, edges[0] != edges[1]]
    port, x = DenseGraph(reference), torch.randn(NODES, 8)
    return lambda: reference(x, edges), lambda: port(x, edges)
