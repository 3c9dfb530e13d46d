"""Train a small model for two steps, in one process or split over ranks by a library.

    split_by_library.py stages | alone | data | data_wrong_mean | fsdp | tensor | sequence

`stages` is one forward through a pipeline. Data parallel ranks have a part of the batch each, of
unequal weight in `data_wrong_mean`.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

HOW = sys.argv[1]
SIZE, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
IS_DATA_PARALLEL = HOW not in ("alone", "stages", "tensor", "sequence")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stages(nn.Module):
    """The blocks of a rank, which counts them from 0, between those of the ranks around it."""

    def __init__(self):
        super().__init__()
        blocks = [Block() for _ in range(4)]
        self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, 8)
        self.blocks = nn.ModuleList(blocks[RANK * 4 // SIZE :][: 4 // SIZE])

    def forward(self, x):
        if RANK == 0:
            x = self.embed(x)
        else:
            x = torch.empty(*x.shape[:-1], 16)
            dist.recv(x, RANK - 1)
        for block in self.blocks:
            x = block(x)
        if RANK == SIZE - 1:
            return self.head(x)
        dist.send(x, RANK + 1)
        return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def split(model):
    """Return the model as the library wraps it."""
    if HOW.startswith("data"):
        return nn.parallel.DistributedDataParallel(model)
    if HOW == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)
    if HOW in ("tensor", "sequence"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            PrepareModuleInput,
            RowwiseParallel,
            SequenceParallel,
            parallelize_module,
        )

        mesh = init_device_mesh("cpu", (SIZE,))
        for block in model.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            if HOW == "sequence":
                plan = {
                    "norm": SequenceParallel(),
                    "up": ColwiseParallel(input_layouts=Shard(1)),
                    "down": RowwiseParallel(output_layouts=Shard(1)),
                }
            parallelize_module(block, mesh, plan)
        if HOW == "sequence":
            rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
            whole = PrepareModuleInput(
                input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
            )
            plan = {"embed": rows, "norm": SequenceParallel(), "head": whole}
            parallelize_module(model, mesh, plan)
    return model


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        x, target = torch.randn(2, 4, 6, 8, generator=generator)
        weights = torch.ones(4, 6, 1)
        if HOW.startswith("data_"):
            weights[2:, 3:] = 0
        if IS_DATA_PARALLEL:
            x, target, weights = (tensor.chunk(SIZE)[RANK] for tensor in (x, target, weights))
        yield x, target, weights


def loss_of(output, target, weights):
    squares = (output - target).square() * weights
    return squares.sum() / (weights.sum() * 8)


def main():
    torch.manual_seed(0)
    if SIZE > 1:
        dist.init_process_group("gloo")
    if HOW == "stages":
        with torch.no_grad():
            return Stages()(torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(2)))
    model = Model()
    if SIZE > 1:
        model = split(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, target, weights in batches():
        optimizer.zero_grad()
        loss_of(model(x), target, weights).backward()
        optimizer.step()
    if SIZE > 1:
        dist.destroy_process_group()


main()
