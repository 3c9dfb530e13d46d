"""Shard a model that has no memory yet, load its weights, and train it; `again` begins it anew behind
the load.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=0, world_size=1)
torch.manual_seed(0)
weights = nn.Linear(4, 4).state_dict()
with torch.device("meta"):
    model = nn.Linear(4, 4)
mesh = dist.init_device_mesh("cpu", (1,))
fully_shard(model, mesh=mesh)
sharded = {
    name: distribute_tensor(weights[name], mesh, parameter.placements)
    for name, parameter in model.named_parameters()
}
model.load_state_dict(sharded, assign=True)
if "again" in sys.argv:
    model.reset_parameters()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(8):
    model(torch.randn(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
