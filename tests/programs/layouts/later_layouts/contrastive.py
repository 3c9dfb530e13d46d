"""Train two towers with a contrastive loss over the pairs of all ranks, as CLIP does.

    contrastive.py [whole_loss] [ranks=N] [fault=NAME]

Each rank embeds its pairs and gathers the embeddings of all. It computes the rows of the loss that
are its own, or with `whole_loss` all of it. The picture tower has a batch norm over all ranks.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional as F

sys.path.insert(0, os.path.dirname(__file__))

from start import RANK, SIZE, chosen, faulty, group_of_ranks

PAIRS, PIXELS, VOCAB, LENGTH, WIDTH, EMBED, STEPS = 8, 12, 20, 5, 16, 8, 3
OWN = slice(RANK * PAIRS // SIZE, (RANK + 1) * PAIRS // SIZE)


class GatherRows(torch.autograd.Function):
    """The rows of all ranks; what the ranks' losses want of the own rows adds up."""

    @staticmethod
    def forward(ctx, rows):
        parts = [torch.empty_like(rows) for _ in range(SIZE)]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad[OWN]


def gather_rows(rows):
    if SIZE == 1:
        return rows
    if faulty("gathered_without_gradient"):
        parts = [torch.empty_like(rows) for _ in range(SIZE)]
        dist.all_gather(parts, rows.detach())
        parts[RANK] = rows
        return torch.cat(parts)
    return GatherRows.apply(rows)


class BatchNorm(nn.BatchNorm1d):
    def forward(self, x):
        count = torch.tensor(float(len(x)))
        sums = torch.stack([x.sum(0), x.square().sum(0)])
        if SIZE > 1 and not faulty("own_batch_norm"):
            sums, count = all_reduce(sums), count * SIZE
        mean, square = sums / count
        variance = square - mean.square()
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        return (x - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias


class Visual(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.bn = nn.Linear(PIXELS, WIDTH, bias=False), BatchNorm(WIDTH)
        self.fc2, self.proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EMBED, bias=False)

    def forward(self, pictures):
        x = F.relu(self.bn(self.fc1(pictures)))
        return self.proj(x + F.gelu(self.fc2(x)))


class Textual(nn.Module):
    def __init__(self):
        super().__init__()
        self.token_embedding, self.ln_final = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.text_projection = nn.Linear(WIDTH, EMBED, bias=False)

    def forward(self, tokens):
        x = self.token_embedding(tokens)
        x = x + self.mlp(x)
        return self.text_projection(self.ln_final(x).mean(1))


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual, self.textual = Visual(), Textual()
        self.logit_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, pictures, tokens):
        pictures, texts = self.visual(pictures), self.textual(tokens)
        return F.normalize(pictures, dim=-1), F.normalize(texts, dim=-1), self.logit_scale.exp()


def contrastive_loss(pictures, texts, scale):
    if faulty("own_negatives"):
        labels = torch.arange(len(pictures))
        logits = scale * pictures @ texts.T
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
    all_pictures, all_texts = gather_rows(pictures), gather_rows(texts)
    if chosen("whole_loss"):
        pictures, texts, labels = all_pictures, all_texts, torch.arange(PAIRS)
    else:
        labels = torch.arange(len(pictures))
        labels = labels if faulty("labels_from_zero") else labels + OWN.start
    by_picture = F.cross_entropy(scale * pictures @ all_texts.T, labels)
    by_text = F.cross_entropy(scale * texts @ all_pictures.T, labels)
    return (by_picture + by_text) / 2


def average_gradients(model):
    for name, parameter in model.named_parameters():
        if faulty("scale_not_reduced") and name == "logit_scale":
            continue
        dist.all_reduce(parameter.grad)
        if not faulty("summed"):
            parameter.grad /= SIZE


def main():
    torch.manual_seed(0)
    model = TwoTowers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    with group_of_ranks():
        for _ in range(STEPS):
            pictures = torch.randn(PAIRS, PIXELS, generator=generator)
            tokens = torch.randint(VOCAB, (PAIRS, LENGTH), generator=generator)
            loss = contrastive_loss(*model(pictures[OWN], tokens[OWN]))
            optimizer.zero_grad()
            loss.backward()
            if SIZE > 1:
                average_gradients(model)
            optimizer.step()


main()
