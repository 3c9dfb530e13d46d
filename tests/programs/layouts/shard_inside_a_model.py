"""Run one forward on each of two ranks whose inner module gets a sharded tensor."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))


class Sharded(nn.Module):
    def forward(self, x):
        return x * 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Sharded()

    def forward(self, x):
        return self.inner(distribute_tensor(x, mesh, [Shard(0)])).to_local().sum()


Net()(torch.tensor([[1.0, 1.0], [5.0, 5.0]]))
dist.barrier()
dist.destroy_process_group()
