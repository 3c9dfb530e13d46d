"""Check on each of two ranks that the parts of a distributed tensor add up."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)

from otel_torch.statistics.measure import measure
from otel_torch.statistics.read_rows import read_rows
from otel_torch.statistics.row_layout import SCALARS
from otel_torch.statistics.sketch import row_sketch, sketch

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2,))


def parts(tensor):
    columns = ("sketch", "row_sketch")
    measured = measure(tensor, columns)
    row = read_rows([measured])[0]
    return measured, torch.zeros(128, dtype=torch.float64) if row is None else torch.tensor(
        row[len(SCALARS) :], dtype=torch.float64
    )


def assert_adds_up(tensor, whole, shard):
    measured, sketches = parts(tensor)
    assert measured.shard is not None and tuple(measured.shard) == shard, (measured.shard, shard)
    dist.all_reduce(sketches)
    wanted = torch.cat([sketch(whole), row_sketch(whole)])
    assert torch.allclose(sketches, wanted, rtol=1e-9, atol=1e-9), (sketches - wanted).abs().max()


for dtype in (torch.float32, torch.bfloat16, torch.complex64):
    whole = torch.randn(5, 7, 300, 2, generator=torch.Generator().manual_seed(0))
    whole = torch.view_as_complex(whole) if dtype.is_complex else whole[..., 0].to(dtype)
    assert_adds_up(
        distribute_tensor(whole, mesh, [Shard(0)]), whole, ([5, 7, 300], [3 * rank, 0, 0], False)
    )
    assert_adds_up(
        distribute_tensor(whole, mesh, [Shard(1)]), whole, ([5, 7, 300], [0, 4 * rank, 0], False)
    )
    assert_adds_up(
        distribute_tensor(whole, mesh, [Shard(2)]), whole, ([5, 7, 300], [0, 0, 150 * rank], False)
    )
one = distribute_tensor(torch.ones(1, 4), mesh, [Shard(0)])  # the second rank has nothing of it
assert_adds_up(one, torch.ones(1, 4), ([1, 4], [rank, 0], False))
local = torch.full((6, 3), 1.0 + rank)
assert_adds_up(
    DTensor.from_local(local, mesh, [Partial()]), torch.full((6, 3), 3.0), ([6, 3], [0, 0], True)
)
assert_adds_up(
    DTensor.from_local(local.sum(), mesh, [Partial()]), torch.tensor(54.0), ([], [], True)
)

measured, sketches = parts(distribute_tensor(whole, mesh, [Replicate()]))
assert measured.shard is None and torch.allclose(sketches[:64], sketch(whole))
measured, _ = parts(DTensor.from_local(local, mesh, [Partial("avg")]))
assert (
    measured.shard is None and measured.row is None and measured.columns == ()
)  # no sum of parts: no sketch

# one dimension of the mesh adds up, the other cuts
mesh = init_device_mesh("cpu", (1, 2))
mixed = DTensor.from_local(torch.full((3, 2), 1.0 + rank), mesh, [Partial(), Shard(0)])
whole = torch.cat([torch.full((3, 2), 1.0), torch.full((3, 2), 2.0)])
assert_adds_up(mixed, whole, ([6, 2], [3 * rank, 0], True))
dist.barrier()
dist.destroy_process_group()
