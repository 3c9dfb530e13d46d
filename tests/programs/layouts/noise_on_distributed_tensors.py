"""Check on each of two ranks what noise adds to distributed tensors."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
whole = torch.linspace(1, 2, 15).reshape(5, 3)
for placement in (Shard(0), Shard(1), Replicate()):
    found = nn.Identity()(distribute_tensor(whole, mesh, [placement]))
    assert (
        isinstance(found, DTensor)
        and found.placements == (placement,)
        and found.shape == whole.shape
    )
    moved = (found.full_tensor() - whole).abs() / whole
    assert 0 < moved.max() < 1.2e-7, (placement, moved)
    if placement == Replicate():
        mine = found.to_local()
        both = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(both, mine)
        assert torch.equal(*both)
part = DTensor.from_local(whole, mesh, [Partial()])
assert torch.equal(nn.Identity()(part).to_local(), whole)
print("fine", flush=True)
dist.barrier()
dist.destroy_process_group()
