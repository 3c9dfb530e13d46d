"""Train two steps on each rank: `ddp`, `fsdp1` or `fsdp2`."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


dist.init_process_group("gloo")
torch.manual_seed(0)
net = Net()
if sys.argv[1] == "ddp":
    net = DistributedDataParallel(net)
elif sys.argv[1] == "fsdp1":
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    net = FullyShardedDataParallel(
        net, device_id=torch.device("cpu"), auto_wrap_policy=ModuleWrapPolicy({nn.Linear})
    )
else:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
