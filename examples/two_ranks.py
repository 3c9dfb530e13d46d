"""Train a small network data-parallel over gloo: `torchrun --nproc-per-node 2
examples/two_ranks.py`.

An ordinary script without any tracing code.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 4


def main() -> float:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(rank)

    loss = torch.zeros(())
    for _ in range(STEPS):
        inputs = torch.randn(32, 8, generator=data)
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"rank {rank}: loss {loss.item():.4f}")
    dist.destroy_process_group()
    return loss.item()


if __name__ == "__main__":
    main()
