"""Measure distributed tensors in a group of one, and check that nothing is communicated."""

import os

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.tensor import DTensor, Partial, Shard, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from otel_torch.statistics.measure import measure
from otel_torch.statistics.read_rows import read_rows

dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))

for placement in (Shard(0), Partial()):
    tensor = DTensor.from_local(torch.ones(3, 2, requires_grad=True), mesh, [placement])
    with CommDebugMode() as communication:
        measured = measure(tensor)
    assert communication.get_total_counts() == 0
    assert measured.shape == [3, 2] and read_rows([measured])[0][2] == 6.0, measured

assert read_rows([measure(all_reduce(torch.ones(5), "sum", mesh.get_group()))])[0][2] == 5.0
dist.destroy_process_group()
