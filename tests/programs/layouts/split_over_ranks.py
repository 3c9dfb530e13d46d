"""Run three forwards: `alone`, or on ranks `sharded`, `wrong` or `replicated`."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(48, 16)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


torch.manual_seed(0)
model, x = Model(), torch.randn(2, 5, 8)
rank = int(os.environ.get("RANK", 0))
if sys.argv[1] == "wrong":
    with torch.no_grad():
        model.blocks[1].up.weight[30:40] *= 1.3
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    if sys.argv[1] == "replicated":
        if rank == 1:
            model.blocks[1].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 1.1,))
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
        split = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        for block in model.blocks:
            parallelize_module(
                block, mesh, {"up": split, "down": RowwiseParallel(input_layouts=Shard(-1))}
            )
with torch.no_grad():
    for _ in range(3):
        x = x - 0.1 * model(x)
if dist.is_initialized():
    dist.destroy_process_group()
