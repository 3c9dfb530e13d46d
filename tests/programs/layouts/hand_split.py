"""A transformer split by hand over the ranks of a gloo group, as Megatron does it, with faults.

    hand_split.py [sequence] [experts] [fused] [train] [FAULT]

Run in one process, it is the reference. Tensors are plain: nothing but `tensor_model_parallel` and
`partition_dim` on the parameters says that they are parts. `sequence` splits norms and residuals
over the positions, `experts` the experts of a mixture, `fused` projects queries, keys and
values together, each rank a part of each, and `train` adds two steps of SGD.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

OPTIONS = set(sys.argv[1:])
SIZE, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
VOCABULARY, HIDDEN, HEADS, LENGTH, BATCH = 40, 32, 4, 8, 3
SEQUENCE, EXPERTS, TRAIN = ({name} <= OPTIONS for name in ("sequence", "experts", "train"))


def is_wrong(fault: str) -> bool:
    return SIZE > 1 and fault in OPTIONS


class Reduce(torch.autograd.Function):
    """Add up the ranks' terms; the gradient passes."""

    @staticmethod
    def forward(context, x):
        x = x.clone()
        if SIZE > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(context, gradient):
        return gradient


class Copy(torch.autograd.Function):
    """Pass a tensor on; its gradients on the ranks add up."""

    @staticmethod
    def forward(context, x, skip=False):
        context.skip = skip
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.clone()
        if SIZE > 1 and not context.skip:
            dist.all_reduce(gradient)
        return gradient, None


def gather_positions(x):
    if SIZE == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(SIZE)]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def own_positions(x, rank=RANK):
    return x.chunk(SIZE)[rank].contiguous()


class Gather(torch.autograd.Function):
    """Put the positions of all ranks together; their gradients add up and are split again."""

    @staticmethod
    def forward(context, x):
        return gather_positions(x)

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.clone()
        if SIZE > 1:
            dist.all_reduce(gradient)
        return own_positions(gradient)


class ReduceScatter(torch.autograd.Function):
    """Add up the ranks' terms and keep the own positions."""

    @staticmethod
    def forward(context, x, rank=RANK):
        x = x.clone()
        if SIZE > 1:
            dist.all_reduce(x)
        return own_positions(x, rank)

    @staticmethod
    def backward(context, gradient):
        return gather_positions(gradient), None


def part_of(whole: torch.Tensor, dim: int, rank: int = RANK) -> nn.Parameter:
    parameter = nn.Parameter(whole.chunk(SIZE, dim)[rank].contiguous())
    parameter.tensor_model_parallel, parameter.partition_dim = True, dim
    return parameter


class Column(nn.Module):
    """A linear layer whose outputs are split."""

    def __init__(self, inputs, outputs, name=""):
        super().__init__()
        rank = 0 if is_wrong(f"{name}:shard") else RANK
        self.name = name
        self.weight = part_of(torch.randn(outputs, inputs) / inputs**0.5, 0, rank)
        self.bias = part_of(torch.randn(outputs) / 4, 0)

    def forward(self, x):
        x = Gather.apply(x) if SEQUENCE else Copy.apply(x, is_wrong(f"{self.name}:backward"))
        return F.linear(x, self.weight, self.bias)


class FusedColumn(nn.Module):
    """Three linear layers in one, each of them split."""

    def __init__(self, inputs, outputs):
        super().__init__()
        wholes = [torch.randn(outputs, inputs) / inputs**0.5 for _ in range(3)]
        self.weight = nn.Parameter(torch.cat([whole.chunk(SIZE)[RANK] for whole in wholes]))

    def forward(self, x):
        return F.linear(Copy.apply(x), self.weight)


class Row(nn.Module):
    """A linear layer whose inputs are split; the ranks' terms add up."""

    def __init__(self, inputs, outputs, name=""):
        super().__init__()
        self.name = name
        rank = 1 - RANK if is_wrong(f"{name}:shards_swapped") else RANK
        self.weight = part_of(torch.randn(outputs, inputs) / inputs**0.5, 1, rank)
        self.bias = nn.Parameter(torch.randn(outputs) / 4)

    def forward(self, x):
        x = F.linear(x, self.weight)
        if is_wrong(f"{self.name}:bias_before"):
            x = x + self.bias
        if SEQUENCE:
            x = ReduceScatter.apply(x, 1 - RANK if is_wrong(f"{self.name}:swapped") else RANK)
        elif not is_wrong(f"{self.name}:missing"):
            x = Reduce.apply(x)
        if is_wrong(f"{self.name}:doubled"):
            x = Reduce.apply(x)
        if is_wrong(f"{self.name}:bias_before"):
            return x
        return x + self.bias


class Embedding(nn.Module):
    """An embedding whose rows are split."""

    def __init__(self):
        super().__init__()
        self.weight = part_of(torch.randn(VOCABULARY, HIDDEN), 0)

    def forward(self, ids):
        rows = VOCABULARY // SIZE
        first = rows * (1 - RANK if is_wrong("embed:rows") else RANK)
        is_here = (ids >= first) & (ids < first + rows)
        x = F.embedding(torch.where(is_here, ids - first, 0), self.weight) * is_here[..., None]
        if SEQUENCE:
            return ReduceScatter.apply(x)
        return x if is_wrong("embed:missing") else Reduce.apply(x)


class Attention(nn.Module):
    def __init__(self, name):
        super().__init__()
        if "fused" in OPTIONS:
            self.qkv = FusedColumn(HIDDEN, HIDDEN)
        else:
            self.q, self.k, self.v = (Column(HIDDEN, HIDDEN, f"{name}.{part}") for part in "qkv")
        self.proj = Row(HIDDEN, HIDDEN, f"{name}.proj")

    def forward(self, x):
        def heads(x):
            return x.unflatten(-1, (HEADS // SIZE, -1)).permute(1, 2, 0, 3)

        fused = "fused" in OPTIONS
        parts = self.qkv(x).chunk(3, -1) if fused else (self.q(x), self.k(x), self.v(x))
        x = F.scaled_dot_product_attention(*map(heads, parts))
        return self.proj(x.permute(2, 0, 1, 3).flatten(2))


class Perceptron(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.up = Column(HIDDEN, 2 * HIDDEN, f"{name}.up")
        self.down = Row(2 * HIDDEN, HIDDEN, f"{name}.down")

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Mixture(nn.Module):
    """Four experts, of which each rank has its own; the router is on all ranks."""

    def __init__(self, name):
        super().__init__()
        self.router = nn.Linear(HIDDEN, 4)
        experts = [nn.Linear(HIDDEN, HIDDEN) for _ in range(4)]
        self.count = 4 // SIZE
        self.experts = nn.ModuleList(experts[RANK * self.count :][: self.count])

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        first = 0 if is_wrong("experts:offset") else RANK * self.count
        total = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            total = total + weights[..., first + index, None] * expert(Copy.apply(x))
        return Reduce.apply(total)


class Block(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention = Attention(f"{name}.attention")
        self.mlp = Mixture(name) if EXPERTS else Perceptron(f"{name}.mlp")
        self.dropout = nn.Dropout(0.1 if "dropout" in OPTIONS else 0.0)

    def forward(self, x):
        if is_wrong(f"{self.name}:stream"):
            torch.manual_seed(RANK)
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = Embedding()
        self.blocks = nn.ModuleList(Block(f"blocks.{index}") for index in range(2))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = Column(HIDDEN, VOCABULARY, "head")

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(logits, targets):
    """Return the cross-entropy of logits that are split over the vocabulary."""
    if SIZE > 1:
        logits = GatherVocabulary.apply(logits)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class GatherVocabulary(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        parts = [torch.empty_like(x) for _ in range(SIZE)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, -1)

    @staticmethod
    def backward(context, gradient):
        return gradient.chunk(SIZE, -1)[RANK].contiguous()


def main():
    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight += torch.randn(HIDDEN) / 8
                module.bias += torch.randn(HIDDEN) / 8
    torch.manual_seed(1)
    if SIZE > 1:
        dist.init_process_group("gloo")
    ids = torch.randint(VOCABULARY, (LENGTH, BATCH))
    targets = torch.randint(VOCABULARY, (LENGTH, BATCH))
    if not TRAIN:
        with torch.no_grad():
            model(ids)
            model(ids.flip(0))
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model(ids), targets).backward()
            if SEQUENCE and SIZE > 1:
                for name, parameter in model.named_parameters():
                    is_whole = not hasattr(parameter, "tensor_model_parallel")
                    if is_whole and not is_wrong(f"{name}:unreduced"):
                        dist.all_reduce(parameter.grad)
            optimizer.step()
    if SIZE > 1:
        dist.destroy_process_group()


main()
