"""The kernel for GPUs. Without a GPU, Triton's interpreter runs it and it is compiled ahead of
time; tests with the mark `gpu` need a device.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from otel_torch.cli.doctor import find_versions
from otel_torch.statistics import cpu_kernel, gpu_kernel
from otel_torch.statistics.cpu_kernel import HISTOGRAM, SKETCH
from otel_torch.statistics.measure import measure, prepare_devices
from otel_torch.statistics.read_rows import RowTransfer, read_rows
from otel_torch.statistics.row_layout import COLUMNS, SCALARS
from tests.support import environment, run_python

pytestmark = pytest.mark.usefixtures("chosen")
ROOT = Path(__file__).parents[2]
ALL = cpu_kernel.SUMS | HISTOGRAM | SKETCH
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.fixture
def chosen() -> Iterator[None]:
    cpu_kernel.choose("triton")
    yield
    cpu_kernel.choose("auto")


@pytest.fixture
def triton(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    actual = pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))
    return actual


@pytest.mark.scoreboard
def test_the_interpreter_finds_the_numbers_of_torch(triton, tmp_path):
    options = ["-q", "-o", "addopts=", "-p", "no:cacheprovider", "-W", "ignore", "-rs"]
    command = [sys.executable, "-m", "pytest", *options, "tests/statistics/triton_interpreted.py"]
    variables = environment(tmp_path, TRITON_INTERPRET="1", OTEL_TORCH_ENABLED="0")
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True)
    if reason := re.search(r"SKIPPED .*(Triton [\d.]+\S* interpreter .*)", done.stdout):
        pytest.skip(reason[1])
    assert done.returncode == 0, done.stdout + done.stderr


# -- what can be read in the compiled kernel


def compiled(triton: Any, capability: int, dtype: torch.dtype, wanted: int) -> tuple[Any, Any]:
    compiler = pytest.importorskip("triton.backends.compiler")
    return gpu_kernel.compile_kernels(
        gpu_kernel.TRITON_TYPES[dtype], wanted, compiler.GPUTarget("cuda", capability, 32)
    )


def loads(kernel: Any, dtype: torch.dtype) -> int:
    """Return how many loads of a tile's row of `dtype` the kernel has."""
    return len(
        re.findall(
            rf"tt\.load .*tensor<1024x!tt\.ptr<{gpu_kernel.TRITON_TYPES[dtype][1:].replace('fp', 'f')}>",
            kernel.asm["ttgir"],
        )
    )


def resources(triton: Any, kernel: Any, tmp_path: Path) -> dict[str, int]:
    """Return the registers, stack (spilled registers) and local memory of a thread."""
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not program.exists():
        pytest.skip("this Triton has no cuobjdump")
    (tmp_path / "kernel.cubin").write_bytes(kernel.asm["cubin"])
    output = subprocess.run(
        [program, "-res-usage", tmp_path / "kernel.cubin"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", output)}


@pytest.mark.parametrize("capability", (80, 90))
@pytest.mark.parametrize(
    "dtype, wanted",
    [
        *((torch.bfloat16, wanted) for wanted in (1, 3, 5, 7)),
        (torch.float16, 1),
        (torch.float32, 5),
        (torch.float64, 7),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_it_compiles_without_a_gpu_and_reads_the_tensor_once(
    triton, tmp_path, capability, dtype, wanted
):
    partial, combine = compiled(triton, capability, dtype, wanted)
    rows, forms = (
        8,
        2,
    )  # of a tile; of one that is whole and of one that is cut, of which each tile is one
    assert loads(partial, dtype) == rows * forms
    if (
        wanted == cpu_kernel.SUMS
    ):  # without tables nothing else is loaded: each thread has two of a row's 1024 elements
        widths = re.findall(r"ld\.global(?:\.v(\d))?\.b(\d+)", partial.asm["ptx"])
        bits = sum(int(vector or 1) * int(width) for vector, width in widths)
        assert bits == rows * forms * 2 * 8 * dtype.itemsize
        assert (
            max(int(vector or 1) * int(width) for vector, width in widths) == 16 * dtype.itemsize
        )  # both at once
    for kernel in (partial, combine):
        assert not re.search(
            r"\b(atom|red)\S*\.global", kernel.asm["ptx"]
        )  # which would add up in another order each time
        assert ".ftz" not in kernel.asm["ptx"]  # which would take what is small for zero
        assert "st.global.b64" in kernel.asm["ptx"] and ".f64" in kernel.asm["ptx"]
        assert kernel.metadata.global_scratch_size == 0 and kernel.metadata.shared <= 48 * 1024
        used = resources(triton, kernel, tmp_path)
        assert (
            used["STACK"] == used["LOCAL"] == 0
            and used["REG"] * 32 * kernel.metadata.num_warps <= 65536
        )


# -- choosing


def test_triton_is_not_imported_for_the_tensors_of_a_cpu(tmp_path):
    done = run_python(
        tmp_path,
        """
import sys, torch
model = torch.nn.Linear(4, 4)
model(torch.ones(2, 4))
from otel_torch.statistics import gpu_kernel, measure, cpu_kernel
cpu_kernel.choose("triton")
measure.prepare_devices(model.parameters(), ("sum", "sketch"))
assert not gpu_kernel._kernels and "triton" not in sys.modules and not torch.cuda.is_initialized()
""",
    )
    assert done.returncode == 0


def test_the_types_of_parameters_and_of_mixed_precision_are_prepared_for(monkeypatch):
    asked, tables = [], []
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("otel_torch.statistics.measure.is_capturing", lambda: False)
    monkeypatch.setattr("otel_torch.statistics.measure.prepare_tables", tables.append)
    monkeypatch.setattr(gpu_kernel, "prepare", lambda *request: asked.append(request))
    prepare_devices(torch.nn.Linear(2, 2).half().parameters(), ("sum", "sketch"))
    dtypes, devices = (
        {torch.float16, torch.float32, torch.bfloat16},
        {torch.device("cpu"), torch.device("cuda", 0)},
    )
    assert {device for device, *_ in asked} == set(tables) == devices
    assert all(request[1:] == (dtypes, [cpu_kernel.SUMS | SKETCH]) for request in asked)

    tables.clear()
    prepare_devices([], ("sum",))
    monkeypatch.setattr(
        "otel_torch.statistics.measure.is_capturing", lambda: True
    )  # to send tables would spoil the graph
    prepare_devices([], ("sum", "sketch"))
    assert not tables


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kernel, "_kernels", {})


def test_what_measures_on_a_gpu_is_named(no_kernels, monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    assert (
        re.fullmatch(r"triton [\d.]+\S*, not tested yet", gpu_kernel.describe())
        and not gpu_kernel.was_prepared()
    )
    if not torch.cuda.is_available():
        line = next(
            finding.text
            for finding in find_versions({"OTEL_TORCH_KERNEL": "triton"})
            if finding.text.startswith("statistics by")
        )
        assert line.endswith(f"; on a GPU: {gpu_kernel.describe()} (no GPU)")
    gpu_kernel._kernels[torch.device("cuda", 0)] = "it computes wrong numbers for torch.float32"
    assert (
        gpu_kernel.describe()
        == "torch (no Triton kernel: it computes wrong numbers for torch.float32)"
    )
    cpu_kernel.choose("native")
    assert gpu_kernel.describe() == "torch"


def test_without_triton_the_device_is_named_once_and_left_to_torch(no_kernels, monkeypatch, capsys):
    device = torch.device("cuda", 7)
    monkeypatch.setattr("otel_torch.process.console._printed", {})
    monkeypatch.setitem(sys.modules, "triton", None)  # as if there were none
    monkeypatch.delitem(sys.modules, "otel_torch.statistics.triton_kernel", raising=False)
    for _ in range(2):
        gpu_kernel.prepare(device, (torch.float32,), (cpu_kernel.SUMS,))
    output = capsys.readouterr().err
    assert (
        output.startswith(
            "otel_torch: statistics of tensors on cuda:7 are by torch (no Triton kernel: "
        )
        and output.count("\n") == 1
    )
    assert isinstance(gpu_kernel._kernels[device], str)


def test_nothing_is_prepared_while_a_graph_is_captured_nor_where_torch_was_chosen(
    no_kernels, monkeypatch
):
    monkeypatch.setattr(gpu_kernel, "is_capturing", lambda: True)
    gpu_kernel.prepare(torch.device("cuda", 0), (torch.float32,), (cpu_kernel.SUMS,))
    monkeypatch.setattr(gpu_kernel, "is_capturing", lambda: False)
    cpu_kernel.choose("native")
    gpu_kernel.prepare(torch.device("cuda", 0), (torch.float32,), (cpu_kernel.SUMS,))
    assert gpu_kernel._kernels == {}


# -- on a GPU


@pytest.fixture
def prepared() -> gpu_kernel.GpuKernel:
    device = torch.device("cuda", torch.cuda.current_device())
    prepare_devices(
        [torch.empty(0, dtype=dtype, device=device) for dtype in gpu_kernel.TRITON_TYPES],
        (*SCALARS, "histogram", "sketch"),
    )
    prepare_devices(
        [torch.empty(0, dtype=dtype, device=device) for dtype in gpu_kernel.TRITON_TYPES], SCALARS
    )
    kernel = gpu_kernel._kernels[device]
    assert isinstance(kernel, gpu_kernel.GpuKernel), kernel
    return kernel


def some(dtype: torch.dtype, numel: int) -> Tensor:
    return (torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * 3 - 0.5).to(dtype)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", gpu_kernel.TRITON_TYPES, ids=str)
@pytest.mark.parametrize("numel", (1, 1021, 8192, 8193, 130_688, 9_000_001))
def test_the_numbers_on_a_gpu_are_those_of_the_host(prepared, dtype, numel):
    values = some(dtype, numel)
    values[0] = 0
    left_to_torch = {"row_sketch", "part_sketches", "rows"}
    names = tuple(name for name in COLUMNS if name not in left_to_torch)
    for primitives in (SCALARS, names):
        row = measure(values.cuda(), primitives)
        actual, wanted = read_rows([row, measure(values, primitives)])
        assert (
            prepared.measure(values.cuda(), ALL).tolist()
            == prepared.measure(values.cuda(), ALL).tolist()
        )
        assert actual == pytest.approx(wanted, rel=1e-10, abs=1e-10 * wanted[4])


@pytest.mark.gpu
@on_gpu
def test_a_gpu_is_not_waited_for_and_nothing_is_allocated(prepared):
    values = some(torch.bfloat16, 100_000).cuda()
    measurements = [measure(values)]
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        measurements += [measure(values) for _ in range(100)]
        assert (
            torch.cuda.memory_stats()["allocation.all.allocated"] <= before + 1
        )  # a piece of memory for many rows
        reading = RowTransfer(measurements)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(set(map(tuple, reading.fetch()))) == 1


@pytest.mark.gpu
@on_gpu
def test_it_can_be_captured_in_a_graph(prepared):
    values, stream = some(torch.float32, 100_000).cuda(), torch.cuda.Stream()
    wanted = prepared.measure(values, ALL)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        row = prepared.measure(values, ALL)
        assert measure(values).row is None  # as nobody would read it
    expected = wanted.tolist()
    row.zero_()
    graph.replay()
    assert row.tolist() == expected
    values.zero_()
    graph.replay()
    assert row[:7].tolist() == [0, 0, 0, 0, 0, 0, 100_000]


@pytest.mark.gpu
@on_gpu
def test_threads_and_streams_do_not_mix_their_numbers(prepared):
    tensors = [torch.full((1_000_000,), float(number), device="cuda") for number in range(8)]
    torch.cuda.synchronize()
    actual: dict[int, set[tuple[float, ...]]] = {}

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream() if number % 2 else torch.cuda.default_stream()):
            rows = read_rows([measure(tensors[number]) for _ in range(100)])
        actual[number] = {tuple(row[:3]) for row in rows}

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert actual == {number: {(float(number), float(number), number * 1e6)} for number in range(8)}


@pytest.mark.gpu
@on_gpu
def test_random_numbers_of_the_device_are_untouched(prepared):
    before = torch.cuda.get_rng_state()
    gpu_kernel.GpuKernel(torch.device("cuda", torch.cuda.current_device())).compile_and_test(
        torch.float32, ALL
    )
    measure(torch.ones(100, device="cuda"))
    assert torch.equal(torch.cuda.get_rng_state(), before)
