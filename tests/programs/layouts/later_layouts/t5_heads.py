"""Train an encoder and a decoder whose heads, words and inner dimensions are split over ranks.

    t5_heads.py [tied] [ranks=N] [gathered_logits] [fault=NAME]

As in T5, one embedding serves both, and the first block of each has a bias for each head and distance,
which all blocks use. The cross-entropy is that of the words that a rank has, or with
`gathered_logits` of all of them. `tied` takes the embedding as the head.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, os.path.dirname(__file__))

from start import RANK, SIZE, WORDS, chosen, faulty, group_of_ranks

VOCAB, D_MODEL, HEADS, D_KV, D_FF, BUCKETS, BLOCKS = 32, 16, 4, 4, 32, 6, 2
BATCH, SOURCE, TARGET, STEPS = 3, 7, 5, 2
FIRST_WORD = RANK * VOCAB // SIZE


def total(x, operation=dist.ReduceOp.SUM):
    if SIZE > 1:
        x = x.clone()
        dist.all_reduce(x, operation)
    return x


class CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return total(grad)


class ReduceFromRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return total(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class GatherWords(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(SIZE)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(SIZE, -1)[RANK]


class WordLoss(torch.autograd.Function):
    """The mean cross-entropy of logits of the rank's words."""

    @staticmethod
    def forward(ctx, logits, labels):
        logits = logits - total(logits.amax(-1, keepdim=True), dist.ReduceOp.MAX)
        first = 0 if faulty("labels_not_shifted") else FIRST_WORD
        own = F.one_hot(labels, VOCAB)[..., first : first + logits.shape[-1]]
        picked = total((logits * own).sum(-1))
        sums = total(logits.exp().sum(-1))
        ctx.save_for_backward((logits.exp() / sums[..., None] - own) / labels.numel())
        return (sums.log() - picked).mean()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


def part(outputs, inputs, dim):
    """Return a layer with the rank's rows or columns of a random weight."""
    whole = torch.randn(outputs, inputs) / inputs**0.5
    own = whole.chunk(SIZE, dim)[RANK].clone()
    layer = nn.utils.skip_init(nn.Linear, own.shape[1], own.shape[0], bias=False)
    layer.weight = nn.Parameter(own)
    return layer


class LayerNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(1 + torch.randn(D_MODEL) / 5)

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class RelativeBias(nn.Module):
    """The own columns of a table of heads."""

    def __init__(self, of_decoder):
        super().__init__()
        self.of_decoder = of_decoder
        table = torch.randn(BUCKETS, HEADS)
        rank = 0 if faulty("bias_of_rank_0") and of_decoder else RANK
        self.weight = nn.Parameter(table.chunk(SIZE, 1)[rank].clone())

    def forward(self, length):
        distance = torch.arange(length)[:, None] - torch.arange(length)
        bucket = distance.clamp(min=0) if self.of_decoder else distance.abs()
        return self.weight[bucket.clamp(max=BUCKETS - 1)].permute(2, 0, 1)


class Attention(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name
        self.q, self.k, self.v = (part(HEADS * D_KV, D_MODEL, 0) for _ in range(3))
        self.o = part(D_MODEL, HEADS * D_KV, 1)

    def forward(self, x, memory=None, bias=None):
        x = CopyToRanks.apply(x)
        if memory is None:
            memory = x
        elif not faulty("memory_gradient"):
            memory = CopyToRanks.apply(memory)
        q, k, v = (
            y.unflatten(-1, (-1, D_KV)).transpose(1, 2)
            for y in (self.q(x), self.k(memory), self.v(memory))
        )
        if faulty("heads_rolled") and self.name == "decoder.1.cross":
            k, v = k.roll(1, dims=1), v.roll(1, dims=1)
        scores = q @ k.transpose(2, 3)
        scores = scores if bias is None else scores + bias
        if self.name.startswith("decoder") and bias is not None:
            scores = scores.masked_fill(torch.ones(scores.shape[2:]).triu(1) > 0, -torch.inf)
        weights = scores.softmax(-1)
        y = self.o((weights @ v).transpose(1, 2).flatten(2))
        return y if faulty(f"{self.name}.not_reduced") else ReduceFromRanks.apply(y)


class FeedForward(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name
        self.wi_0, self.wi_1 = part(D_FF, D_MODEL, 0), part(D_FF, D_MODEL, 0)
        self.wo = part(D_MODEL, D_FF, 1)

    def forward(self, x):
        x = CopyToRanks.apply(x)
        y = ReduceFromRanks.apply(self.wo(F.gelu(self.wi_0(x)) * self.wi_1(x)))
        return y / SIZE if faulty(f"{self.name}.averaged") else y


class Block(nn.Module):
    def __init__(self, stack, index):
        super().__init__()
        self.SelfAttention, self.self_norm = Attention(f"{stack}.{index}.self"), LayerNorm()
        if stack == "decoder":
            self.EncDecAttention, self.cross_norm = Attention(f"{stack}.{index}.cross"), LayerNorm()
        self.DenseReluDense, self.ff_norm = FeedForward(f"{stack}.{index}.ff"), LayerNorm()

    def forward(self, x, bias, memory=None):
        x = x + self.SelfAttention(self.self_norm(x), bias=bias)
        if memory is not None:
            x = x + self.EncDecAttention(self.cross_norm(x), memory)
        return x + self.DenseReluDense(self.ff_norm(x))


class Stack(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.relative_attention_bias = RelativeBias(name == "decoder")
        self.block = nn.ModuleList(Block(name, index) for index in range(BLOCKS))
        self.final_layer_norm = LayerNorm()

    def forward(self, x, memory=None):
        bias = self.relative_attention_bias(x.shape[1])
        for block in self.block:
            x = block(x, bias, memory)
        return self.final_layer_norm(x)


class T5(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = part(VOCAB, D_MODEL, 0)
        self.encoder, self.decoder = Stack("encoder"), Stack("decoder")
        self.lm_head = part(VOCAB, D_MODEL, 0)
        if "tied" in WORDS:
            self.lm_head.weight = self.shared.weight

    def embed(self, ids):
        own = F.one_hot(ids, VOCAB)[..., FIRST_WORD : FIRST_WORD + VOCAB // SIZE].float()
        return ReduceFromRanks.apply(own @ self.shared.weight)

    def forward(self, source, target):
        x = self.decoder(self.embed(target), self.encoder(self.embed(source)))
        return self.lm_head(CopyToRanks.apply(x))


def main():
    torch.manual_seed(0)
    model = T5()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    with group_of_ranks():
        for _ in range(STEPS):
            source = torch.randint(VOCAB, (BATCH, SOURCE), generator=generator)
            target = torch.randint(VOCAB, (BATCH, TARGET + 1), generator=generator)
            logits = model(source, target[:, :-1])
            if chosen("gathered_logits"):
                logits = GatherWords.apply(logits)
                loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())
            else:
                loss = WordLoss.apply(logits, target[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


main()
