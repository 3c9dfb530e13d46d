"""What the Triton kernel computes, by Triton's interpreter on a CPU. Run by `test_triton.py` in a
process of its own, for the interpreter has to be chosen before the kernel is imported.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from otel_torch.process import console
from otel_torch.statistics import cpu_kernel, gpu_kernel, triton_kernel
from otel_torch.statistics.cpu_kernel import HISTOGRAM, SKETCH
from otel_torch.statistics.histogram import histogram
from otel_torch.statistics.measure import _plan, _row_by_gpu_kernel, measure
from otel_torch.statistics.row_layout import COLUMNS, SCALARS
from otel_torch.statistics.sketch import FOLD, PIECE, sketch
from otel_torch.statistics.unwrap_tensor import Shard
from tests.statistics.test_cpu_kernel import check_sums, make

assert os.environ["TRITON_INTERPRET"] == "1"


@triton.jit
def turn(out, times):
    for _ in range(times):
        tl.store(out, 1)


try:
    turn[(1,)](torch.zeros(1), 1)
except Exception as error:
    pytest.skip(
        f"Triton {triton.__version__}'s interpreter has no loops beside this numpy: {error}",
        allow_module_level=True,
    )

CPU = torch.device("cpu")
ALL = cpu_kernel.SUMS | HISTOGRAM | SKETCH
CHOICES = (cpu_kernel.SUMS, cpu_kernel.SUMS | HISTOGRAM, cpu_kernel.SUMS | SKETCH, ALL)
TILE = 8 * 1024


def untested() -> gpu_kernel.GpuKernel:
    kernel = gpu_kernel.GpuKernel(CPU)
    for dtype in gpu_kernel.TRITON_TYPES:
        for wanted in CHOICES:
            kernel._launches[dtype, wanted] = triton_kernel.partial, triton_kernel.combine
    return kernel


@pytest.fixture(scope="module")
def kernel() -> gpu_kernel.GpuKernel:
    return untested()


def measured(
    kernel: gpu_kernel.GpuKernel, values: Tensor, wanted: int = ALL, start: int = 0
) -> list[float]:
    row = kernel.measure(values, wanted, start)
    assert (
        row is not None
        and row.shape == (gpu_kernel.row_size(wanted),)
        and row.dtype == torch.float64
    )
    return row.tolist()


def check(found: list[float], values: Tensor, wanted: int = ALL) -> None:
    """Against plain torch in fp64, and against the kernel of the CPU."""
    check_sums(found[:7], values)
    if wanted & HISTOGRAM:
        assert found[7:71] == histogram(values).tolist()
    if wanted & SKETCH:
        # a sum of signed numbers: of the size of its terms, not of its own, is its error
        limit = 1e-13 * float(values.double().abs().sum()) + 1e-300
        assert found[-64:] == pytest.approx(
            sketch(values).tolist(), rel=1e-12, abs=limit, nan_ok=True
        )
    if (cpu := cpu_kernel.load()) is not None:
        of_cpu = cpu.measure_memory(
            values.data_ptr(), values.numel(), cpu_kernel.CODES[values.dtype], wanted
        )
        assert found == pytest.approx(of_cpu, rel=1e-11, abs=1e-12 * of_cpu[4], nan_ok=True)


@pytest.mark.parametrize(
    "dtype, wanted",
    [
        *((torch.float32, wanted) for wanted in CHOICES),
        *((dtype, ALL) for dtype in gpu_kernel.TRITON_TYPES),
    ],
    ids=str,
)
def test_the_numbers_of_every_size_are_those_of_torch(kernel, dtype, wanted):
    for numel in (1, 1025, 8 * FOLD, 2 * TILE + 77):
        values = make(dtype, numel, seed=numel)
        check(measured(kernel, values, wanted), values, wanted)


def test_pieces_of_the_sketch_are_shifted_and_signed(kernel):
    values = make(torch.bfloat16, PIECE + 4321, seed=3)
    check(measured(kernel, values, cpu_kernel.SUMS | SKETCH), values, cpu_kernel.SUMS | SKETCH)


@pytest.mark.parametrize("wanted", (cpu_kernel.SUMS, ALL))
def test_programs_take_several_tiles_each(kernel, wanted, monkeypatch):
    monkeypatch.setattr(kernel, "_programs", 3)
    values = make(torch.float32, 7 * TILE + 5, seed=4)
    check(measured(kernel, values, wanted), values, wanted)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float64), ids=str)
@pytest.mark.parametrize(
    "special", ([math.nan], [-math.inf], [math.inf, -math.inf], [math.nan, math.inf])
)
@pytest.mark.parametrize("numel", (2, TILE + 5))
def test_what_is_not_finite_is_counted_and_seen(kernel, dtype, special, numel):
    values = torch.ones(numel, dtype=dtype)
    values[numel - len(special) :] = torch.tensor(special)
    found = measured(kernel, values)
    check_sums(found[:7], values)
    assert found[5] == len(special) and found[7:71] == histogram(values).tolist()
    assert not any(map(math.isfinite, found[71:]))


def test_denormal_huge_and_zero_values(kernel):
    tiny, huge = (
        [5e-324, -5e-324, 0.0, -0.0, 1e-310, 2.0**-40, 2.0**-41, 2.0**-39.9],
        [1e308, -1e308, 1.5e308, 2.0**20, 1e6],
    )
    for values in (
        *(torch.tensor(numbers, dtype=torch.float64) for numbers in (tiny, huge)),
        torch.tensor([1e-45, 1e-39, 3e38, 0, -(2.0**-126)]),
        torch.tensor([2.0**-24, -(2.0**-24), 65504, 0], dtype=torch.float16),
        torch.tensor(
            [2.0**-126, 3e38, 0], dtype=torch.bfloat16
        ),  # smaller ones are zero to the interpreter alone
        torch.zeros(TILE + 1),
    ):
        found = measured(kernel, values, cpu_kernel.SUMS | HISTOGRAM)
        check_sums(found[:7], values)
        assert found[7:] == histogram(values).tolist()


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_the_variance_survives_a_mean_ten_thousand_times_the_deviation(kernel, dtype):
    values = (
        torch.randn(30_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        + 10_000
    ).to(dtype)
    for wanted in (cpu_kernel.SUMS, ALL):
        _, _, total, squares, *_ = measured(kernel, values, wanted)
        variance = (squares - total * total / values.numel()) / (values.numel() - 1)
        assert math.sqrt(variance) == pytest.approx(float(values.double().std()), rel=1e-6)


@pytest.mark.parametrize(
    "start", (1, 1020, 1021, 8168, PIECE - 1, PIECE, 7 * PIECE + 12345, 500 * PIECE)
)
@pytest.mark.parametrize("numel", (1, 900, 9001))
def test_the_sketch_of_a_part_is_that_of_its_place(kernel, start, numel):
    values = make(torch.float32, numel, seed=5)
    found = measured(kernel, values, start=start)
    assert found[-64:] == pytest.approx(sketch(values, start).tolist(), rel=1e-12, abs=1e-9)
    check_sums(found[:7], values)


def test_the_same_tensor_has_the_same_bits_and_stays_as_it_is(kernel):
    values = make(torch.bfloat16, TILE + 3, seed=6)
    copy, random = values.clone(), torch.get_rng_state()
    assert measured(kernel, values) == measured(kernel, values)
    assert torch.equal(values, copy) and torch.equal(torch.get_rng_state(), random)


def test_memory_in_another_order_has_the_same_sums_and_no_sketch(kernel):
    values = make(torch.float32, 2 * 3 * 50 * 70, seed=7).view(2, 50, 70, 3).permute(0, 3, 1, 2)
    check_sums(measured(kernel, values, cpu_kernel.SUMS), values)
    assert kernel.measure(values, ALL) is None


def test_what_the_kernel_cannot_read_is_left_to_torch(kernel):
    for values in (
        torch.ones(9)[1:],  # begins in the middle of what is loaded at once
        torch.ones(20)[::2],
        torch.ones(1).expand(40),
        torch.ones(4, dtype=torch.int64),
        torch.ones(4, dtype=torch.complex64),
        torch._neg_view(torch.ones(4)),  # another sign than its memory's
    ):
        assert kernel.measure(values, cpu_kernel.SUMS) is None
    assert kernel.measure(torch.ones(4), ALL, start=2**31) is None
    assert (
        gpu_kernel.GpuKernel(CPU).measure(torch.ones(4), cpu_kernel.SUMS) is None
    )  # it has learnt nothing


def test_a_stream_beyond_the_workspaces_is_left_to_torch():
    kernel = untested()
    kernel._streams = {1 + number: number for number in range(gpu_kernel._STREAMS - 1)}
    assert measured(kernel, torch.ones(4), cpu_kernel.SUMS) == [1, 1, 4, 4, 4, 0, 0]
    kernel._streams = {1 + number: number for number in range(gpu_kernel._STREAMS)}
    assert kernel.measure(torch.ones(4), cpu_kernel.SUMS) is None


def test_what_is_learnt_is_tested_and_found_right():
    kernel = gpu_kernel.GpuKernel(CPU)
    kernel.compile_and_test(torch.bfloat16, cpu_kernel.SUMS | SKETCH)
    assert list(kernel._launches) == [(torch.bfloat16, cpu_kernel.SUMS | SKETCH)]


@pytest.mark.parametrize("column", (0, 3, 70, 134))
def test_a_kernel_that_computes_wrongly_is_refused(monkeypatch, column):
    right = gpu_kernel.GpuKernel.measure

    def wrong(
        self: gpu_kernel.GpuKernel, values: Tensor, wanted: int, start: int = 0
    ) -> Tensor | None:
        row = right(self, values, wanted, start)
        row[column] += 1
        return row

    monkeypatch.setattr(gpu_kernel.GpuKernel, "measure", wrong)
    with pytest.raises(
        gpu_kernel.KernelUnusable, match=r"computes wrong numbers for torch\.float32"
    ):
        gpu_kernel.GpuKernel(CPU).compile_and_test(torch.float32, ALL)


@pytest.fixture
def as_on_a_gpu(kernel, monkeypatch) -> Iterator[None]:
    """The CPU's tensors are taken for a GPU's."""
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(Tensor, "is_cpu", False)
    monkeypatch.setattr(cpu_kernel.CpuKernel, "measure_by_pointer", lambda *_: None)
    if (of_cpu := cpu_kernel.load()) is not None:
        monkeypatch.setattr(of_cpu, "measure_tensor", lambda *_: None)
    monkeypatch.setitem(gpu_kernel._kernels, CPU, untested())
    cpu_kernel.choose("triton")
    yield
    cpu_kernel.choose("auto")


def test_measure_uses_it_where_it_is_prepared(as_on_a_gpu):
    values = make(torch.float32, 3 * 3000, seed=8).view(3, -1)
    left_to_torch = {"row_sketch", "part_sketches", "rows", "hash"}
    primitives = tuple(name for name in COLUMNS if name not in left_to_torch)
    row = measure(values, primitives).row
    assert isinstance(row, Tensor) and row.tolist() == measured(untested(), values)
    beside = measure(values, ("sum",)).row
    assert (
        beside.untyped_storage().data_ptr() == row.untyped_storage().data_ptr()
        and beside.numel() == 7
    )
    assert measure(torch.empty(0)).row is None
    cpu_kernel.choose("native")
    assert gpu_kernel.measure(values, cpu_kernel.SUMS) is None
    assert gpu_kernel.describe() == "torch"


def test_a_shard_is_sketched_at_its_place(as_on_a_gpu):
    whole = make(torch.float32, 40 * 300, seed=9).view(40, 300)
    plan = _plan((*SCALARS, "sketch"))
    parts = [
        _row_by_gpu_kernel(whole[a:b], plan, Shard([40, 300], [a, 0], False))
        for a, b in ((0, 12), (12, 40))
    ]
    assert sum(part[7:] for part in parts).tolist() == pytest.approx(
        sketch(whole).tolist(), abs=1e-9
    )
    assert (
        _row_by_gpu_kernel(whole[:, :150].contiguous(), plan, Shard([40, 300], [0, 150], False))
        is None
    )


def test_one_that_fails_is_said_once_and_never_asked_again(as_on_a_gpu, monkeypatch, capsys):
    monkeypatch.setattr(console, "_printed", {})
    calls = []

    class Broken:
        def __getitem__(self, grid: object) -> object:
            calls.append(grid)
            raise RuntimeError("no such device\nand more")

    gpu_kernel._kernels[CPU]._launches[torch.float32, cpu_kernel.SUMS] = Broken(), Broken()
    for _ in range(2):
        check_sums(measure(torch.arange(8.0)).row.tolist(), torch.arange(8.0))
    assert (
        len(calls) == 1
        and gpu_kernel.describe() == "torch (no Triton kernel: RuntimeError: no such device)"
    )
    said = "otel_torch: statistics of tensors on cpu are by torch (no Triton kernel: RuntimeError: no such device)\n"
    assert capsys.readouterr().err == said
