"""Trains a model that FSDP2 shards over two ranks, with activation checkpointing."""

import torch
import torch.distributed as dist
from checks import check, digest, exact, leave, logged
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in blocks)
        self.head = nn.Linear(8, 2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


model = Net()
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
for step in range(3):
    loss = model(inputs).square().mean()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()
    if dist.get_rank() == 0:
        logged("loss", step, loss)
        logged("lr[0]", step, optimizer.param_groups[0]["lr"])
        logged("grad_norm", step, norm)
    optimizer.step()
    optimizer.zero_grad()
    check(dist.get_rank(), step, exact(loss), exact(norm))
check("final", dist.get_rank(), digest(model))
dist.destroy_process_group()
leave()
