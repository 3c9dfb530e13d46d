"""The compiled kernel gives the same numbers as torch in fp64 for every dtype and any number of
threads.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
import shlex
import shutil
import subprocess
import sys
import threading
import zipfile
from array import array
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from otel_torch.statistics import cpu_kernel, native_functions
from otel_torch.statistics.cpu_kernel import (
    CODES,
    HISTOGRAM,
    SKETCH,
    SUMS,
    CpuKernel,
    KernelUnusable,
)
from otel_torch.statistics.histogram import histogram
from otel_torch.statistics.measure import measure
from otel_torch.statistics.sketch import PIECE, sketch
from tests.support import run_python

ROOT = Path(__file__).parents[2]
CHUNK = 4 * 1021
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
needs_exchange = pytest.mark.skipif(
    not hasattr(Tensor, "__dlpack_c_exchange_api__"), reason="torch before 2.10"
)
AVX2, AVX512 = "avx2", "avx512f"
# how to build the kernel for a processor that has less than this one
WITHOUT_AVX512, WITHOUT_VECTORS = ("-DWITHOUT_AVX512",), ("-DONE_TARGET",)


def needs_processor(*features: str) -> pytest.MarkDecorator:
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    missing = [feature for feature in features if f" {feature} " not in flags]
    return pytest.mark.skipif(bool(missing), reason=f"the processor has no {', '.join(missing)}")


needs_kernel = pytest.mark.skipif(cpu_kernel.load() is None, reason=cpu_kernel.describe())


def builder() -> ModuleType:
    """Import the build hook, which is not in the package."""
    pytest.importorskip("hatchling", reason="hatchling builds the kernel")
    spec = importlib.util.spec_from_file_location(
        "build_kernel", ROOT / "packaging" / "build_kernel.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def needs_compiler() -> ModuleType:
    module = builder()
    if module.compiler() is None:
        pytest.skip("there is no C compiler")
    return module


def build_wheel(folder: Path, **variables: str) -> tuple[Path, str]:
    """Build a wheel of the current sources; return its path and the output."""
    pytest.importorskip("hatch_vcs", reason="hatch-vcs names the version of a wheel")
    code = f"from hatchling.build import build_wheel; print(build_wheel({str(folder)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return folder / done.stdout.split()[-1], done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the installed library; compile one if that is missing or not up to date."""
    build_kernel, folder = needs_compiler(), tmp_path_factory.mktemp("kernel")
    library = folder / build_kernel.KERNEL.name
    with suppress(FileNotFoundError):
        shutil.copy(ROOT / build_kernel.KERNEL.path, library)
    assert build_kernel.build(cpu_kernel.FOLDER, library) is None
    return library


# a compiler that optimizes less, which takes a tenth of the time
QUICK_COMPILER = """#!/bin/sh
for word; do shift; [ "$word" = -O3 ] || set -- "$@" "$word"; done
exec {command} -O1 "$@"
"""


def quick_compiler(folder: Path) -> Path:
    path = folder / "quick-compiler"
    path.write_text(QUICK_COMPILER.format(command=shlex.join(needs_compiler().compiler())))
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def kernel(built: Path) -> CpuKernel:
    return CpuKernel(built)


def sources(folder: Path, changed: str, old: str, new: str) -> Path:
    """Return a folder with the kernel's sources, one of them changed."""
    for name in cpu_kernel.SOURCES:
        text = (cpu_kernel.FOLDER / name).read_text()
        folder.joinpath(name).write_text(text.replace(old, new) if name == changed else text)
    return folder


def measured(
    kernel: CpuKernel, values: Tensor, wanted: int, start: int = 0, threads: int = 1
) -> list[float]:
    assert values.is_contiguous()
    return kernel.measure_memory(
        values.data_ptr(), values.numel(), CODES[values.dtype], wanted, start, threads
    )


def expected_sums(values: Tensor) -> list[float]:
    wide = values.to(torch.float64).flatten()
    finite = (wide.abs() < math.inf).sum()
    low, high = torch.aminmax(wide)
    zeros = (wide == 0).sum()
    return [
        float(n)
        for n in (
            low,
            high,
            wide.sum(),
            wide.square().sum(),
            wide.abs().sum(),
            wide.numel() - finite,
            zeros,
        )
    ]


def check_sums(actual: list[float], values: Tensor) -> None:
    expected = expected_sums(values)
    assert actual[:2] == pytest.approx(expected[:2], rel=0, abs=0, nan_ok=True)
    assert actual[5:7] == expected[5:]
    scale = expected[4] if math.isfinite(expected[4]) else 0.0
    assert actual[2] == pytest.approx(expected[2], rel=1e-13, abs=1e-13 * scale, nan_ok=True)
    assert actual[3:5] == pytest.approx(expected[3:5], rel=1e-13, nan_ok=True)


def make(dtype: torch.dtype, numel: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, (numel,), generator=generator).to(dtype)
    if dtype.itemsize == 1 or dtype.is_floating_point:
        if dtype.is_floating_point and dtype.itemsize > 1:
            values = torch.randn(numel, generator=generator, dtype=torch.float64) * 3 - 0.5
            return values.masked_fill(torch.rand(numel, generator=generator) < 0.01, 0).to(dtype)
        bytes_ = torch.randint(0, 256, (numel,), generator=generator).to(torch.uint8).view(dtype)
        # a float8 holds NaN and Inf too: those have a test of their own
        return (
            torch.where(bytes_.float().isfinite(), bytes_.float(), 1.0).to(dtype)
            if dtype.is_floating_point
            else bytes_
        )
    low, high = (0, 2**15) if "uint" in str(dtype) else (-(2**15), 2**15)
    return torch.randint(low, high, (numel,), generator=generator).to(dtype)


def test_every_real_dtype_of_torch_has_a_code():
    sizes = {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not dtype.is_complex
    }
    supported = {str(dtype).removeprefix("torch.") for dtype in sizes} & {
        *cpu_kernel._WIDE_DTYPES,
        *cpu_kernel._BYTE_DTYPES,
    }
    assert (
        supported == {str(dtype).removeprefix("torch.") for dtype in CODES}
        and len(set(CODES.values())) == len(CODES) >= 16
    )


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_the_numbers_of_every_dtype_are_those_of_torch(kernel, dtype):
    for numel in (1, 7, 16, 1000, CHUNK + 3, PIECE + CHUNK + 1):
        values = make(dtype, numel)
        actual = measured(kernel, values, SUMS | HISTOGRAM | SKETCH)
        check_sums(actual, values)
        assert actual[7:71] == histogram(values).tolist()
        assert torch.allclose(
            torch.tensor(actual[71:], dtype=torch.float64),
            sketch(values),
            rtol=1e-12,
            atol=1e-9 * actual[4] / numel,
        )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums_are_right_for_every_size_from_1_on(kernel, dtype):
    values = make(dtype, 5000, seed=1)
    for numel in [*range(1, 200), *range(200, 5000, 37), CHUNK - 1, CHUNK, CHUNK + 1]:
        check_sums(measured(kernel, values[:numel], SUMS), values[:numel])


@pytest.mark.parametrize(
    "numel",
    (1, 1020, 1021, 1022, CHUNK - 1, CHUNK, CHUNK + 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE),
)
def test_what_is_wanted_changes_no_number(kernel, numel):
    values = make(torch.bfloat16, numel, seed=2)
    everything = measured(kernel, values, SUMS | HISTOGRAM | SKETCH)
    parts = {SUMS: everything[:7], HISTOGRAM: everything[7:71], SKETCH: everything[71:]}
    assert [len(numbers) for numbers in parts.values()] == [7, 64, 64]
    for wanted in range(1, 8):
        assert measured(kernel, values, wanted) == [
            n for want, numbers in parts.items() if want & wanted for n in numbers
        ]


@pytest.mark.parametrize("dtype", (*FLOATS, torch.float8_e5m2), ids=str)
@pytest.mark.parametrize(
    "special", ([math.nan], [math.inf], [-math.inf], [math.inf, -math.inf], [math.nan, math.inf])
)
@pytest.mark.parametrize("numel", (2, 40, CHUNK + 5))
def test_what_is_not_finite_is_counted_and_seen(kernel, dtype, special, numel):
    values = torch.ones(numel).to(dtype)
    values[numel - len(special) :] = torch.tensor(special).to(dtype)
    actual = measured(kernel, values, SUMS | HISTOGRAM | SKETCH)
    check_sums(actual, values)
    assert actual[5] == len(special) and actual[7:71] == histogram(values).tolist()
    assert not any(map(math.isfinite, actual[71:]))


@pytest.mark.parametrize("dtype", [dtype for dtype in CODES if dtype.itemsize <= 2], ids=str)
def test_every_value_of_a_short_dtype_is_read_as_torch_reads_it(kernel, dtype):
    every = torch.arange(256**dtype.itemsize).to(
        torch.uint8 if dtype.itemsize == 1 else torch.int32
    )
    every = (
        every != 0
        if dtype is torch.bool
        else every.view(dtype)
        if dtype.itemsize == 1
        else every.to(torch.int16).view(dtype)
    )
    for value in every.split(1) if dtype.itemsize == 1 else every.split(64):
        check_sums(measured(kernel, value, SUMS), value)
        assert measured(kernel, value, HISTOGRAM) == histogram(value).tolist()


def test_denormal_huge_and_zero_values(kernel):
    tiny, huge = (
        torch.tensor([5e-324, -5e-324, 0.0, -0.0, 1e-310, 2.0**-40, 2.0**-41]),
        torch.tensor([1e308, -1e308, 1.5e308]),
    )
    for values in (
        tiny.double(),
        huge.double(),
        tiny.float(),
        torch.tensor([1e-45, 1e-39, 3e38, 0]),
        torch.zeros(3000),
    ):
        check_sums(measured(kernel, values, SUMS), values)
        assert measured(kernel, values, HISTOGRAM) == histogram(values).tolist()


@pytest.mark.parametrize(
    "start", (1, 1020, 1021, 5000, PIECE - 1, PIECE, 7 * PIECE + 12345, 500 * PIECE)
)
@pytest.mark.parametrize("numel", (1, 900, 1021, 9000, 2 * PIECE + 77))
def test_the_sketch_of_a_part_is_that_of_its_place(kernel, start, numel):
    values = make(torch.float32, numel, seed=3)
    actual = torch.tensor(measured(kernel, values, SKETCH, start), dtype=torch.float64)
    assert torch.allclose(actual, sketch(values, start), rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_threads_change_no_bit(kernel, dtype):
    values = make(dtype, 70 * PIECE + 4321, seed=5)  # more pieces than shares
    single = measured(kernel, values, SUMS | HISTOGRAM | SKETCH)
    assert [
        measured(kernel, values, SUMS | HISTOGRAM | SKETCH, threads=count) for count in (2, 4)
    ] == [single, single]
    check_sums(single, values)


def test_the_threads_of_torch_do_the_work(built, tmp_path):
    code = f"""
import os, pathlib, torch
from otel_torch.statistics.cpu_kernel import CpuKernel, SUMS
torch.set_num_threads(1)  # to make the values starts no thread
values, kernel = torch.ones(8 * 130688), CpuKernel(pathlib.Path({str(built)!r}))
before = len(os.listdir("/proc/self/task"))
kernel.measure_memory(values.data_ptr(), values.numel(), 0, SUMS, 0, 3)
print(len(os.listdir("/proc/self/task")) - before)
"""
    library = (
        ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
        if sys.platform == "linux"
        else None
    )
    if not hasattr(library, "GOMP_parallel"):
        pytest.skip("this torch has no OpenMP that can be called")
    done = run_python(tmp_path, code, OTEL_TORCH_ENABLED="0")
    assert done.stdout.strip() == "2"


def test_threads_of_python_do_not_mix_their_numbers(kernel):
    tensors = [torch.full((300_000 if n % 2 else 50,), float(n)) for n in range(8)]
    actual: dict[int, set[tuple[float, ...]]] = {}

    def work(n: int) -> None:
        actual[n] = {tuple(measured(kernel, tensors[n], SUMS)) for _ in range(200)}

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {n: {numbers[:3] for numbers in each} for n, each in actual.items()} == {
        n: {(float(n), float(n), float(n * tensors[n].numel()))} for n in range(8)
    }


@needs_kernel
def test_the_installed_kernel_is_found_and_named():
    kernel = cpu_kernel.load()
    assert kernel is cpu_kernel.load() and cpu_kernel.describe() == f"native ({kernel.processor})"
    check_sums(measured(kernel, torch.arange(9.0), SUMS), torch.arange(9.0))


def test_torch_can_be_chosen():
    cpu_kernel.choose("torch")
    try:
        assert cpu_kernel.load() is None and cpu_kernel.describe() == "torch (as chosen)"
        assert measure(torch.ones(3)).row == pytest.approx([1, 1, 3, 3, 3, 0, 0])
    finally:
        cpu_kernel.choose("auto")


def test_without_a_library_there_is_no_kernel_and_a_reason(monkeypatch, tmp_path):
    missing = tmp_path / "kernel.so"
    monkeypatch.setattr(cpu_kernel, "LIBRARY", missing)
    monkeypatch.setattr(CpuKernel.__init__, "__defaults__", (missing, cpu_kernel.FOLDER))
    monkeypatch.setattr(cpu_kernel, "_kernel", None)
    assert cpu_kernel.load() is None
    assert (
        cpu_kernel.describe()
        == "torch, 4 to 30 times slower (no compiled kernel: kernel.so was not built; install again with a C compiler)"
    )


def test_threads_that_measure_first_at_once_load_one_kernel(monkeypatch):
    monkeypatch.setattr(cpu_kernel, "_kernel", None)
    everybody = threading.Barrier(8)

    def load(_: int) -> CpuKernel | None:
        everybody.wait()
        return cpu_kernel.load()

    with ThreadPoolExecutor(8) as threads:
        kernels = set(threads.map(load, range(8)))
    assert kernels == {cpu_kernel.load()}


def test_a_library_of_another_source_or_none_at_all_is_refused(built, tmp_path):
    for changed in cpu_kernel.SOURCES:
        with pytest.raises(KernelUnusable, match="of another version"):
            CpuKernel(built, sources(tmp_path, changed, "\n", ""))
    garbage = tmp_path / "kernel.so"
    garbage.write_text("no library")
    with pytest.raises(KernelUnusable, match="cannot be loaded"):
        CpuKernel(garbage)


@pytest.mark.parametrize(
    ("source", "right", "wrong", "variant"),
    [
        ("kernel.c", "sums->sum += sum[0]", "sums->sum += 2 * sum[0]", ()),
        pytest.param(
            "avx2.c", "_mm256_min_ps", "_mm256_max_ps", WITHOUT_AVX512, marks=needs_processor(AVX2)
        ),
        pytest.param(
            "avx512.c", "_mm512_min_ps", "_mm512_max_ps", (), marks=needs_processor(AVX512)
        ),
        pytest.param(
            "tensor.c",
            "tensor->data + tensor->offset",
            "tensor->data + 8",
            (),
            marks=needs_exchange,
        ),
    ],
)
def test_a_kernel_that_computes_wrongly_is_refused(
    tmp_path, monkeypatch, source, right, wrong, variant
):
    folder = sources(tmp_path, source, right, wrong)
    build_kernel = needs_compiler()
    monkeypatch.setattr(build_kernel, "FLAGS", ["-std=gnu11", "-O0", "-fPIC", "-shared"])
    monkeypatch.setattr(build_kernel, "VARIANTS", (variant,))
    assert build_kernel.build(folder, tmp_path / "kernel.so") is None
    with pytest.raises(KernelUnusable, match="computes wrong numbers"):
        CpuKernel(tmp_path / "kernel.so", folder)


def extremes_that_tie(dtype: torch.dtype) -> Tensor:
    """Return values whose least one is a zero of either sign, in an order that a lane must keep."""
    values = make(dtype, 3 * CHUNK + 7, seed=8).abs()
    values[::3] = -0.0
    values[5::7] = 0.0
    return values


def with_nonfinite(dtype: torch.dtype) -> Tensor:
    values = make(dtype, CHUNK + 40, seed=9)
    values[3], values[CHUNK + 1], values[17::50] = torch.inf, -torch.inf, torch.nan
    return values


@pytest.fixture(
    scope="module",
    params=[pytest.param(WITHOUT_AVX512, marks=needs_processor(AVX2, AVX512)), WITHOUT_VECTORS],
)
def narrower(request, tmp_path_factory) -> CpuKernel:
    """The kernel of a processor with narrower vectors."""
    build_kernel, library = needs_compiler(), tmp_path_factory.mktemp("narrower") / "kernel.so"
    build_kernel.VARIANTS = (request.param,)
    if request.param == WITHOUT_AVX512:  # its vectors are written by hand: nothing is to optimize
        build_kernel.FLAGS = [flag.replace("-O3", "-O1") for flag in build_kernel.FLAGS]
    assert build_kernel.build(cpu_kernel.FOLDER, library) is None
    return CpuKernel(library)


def bits(numbers: list[float]) -> bytes:
    """Return the bits of numbers, in which 0.0 differs from -0.0; of NaN not the sign, which is a
    compiler's choice.
    """
    return array("d", (math.nan if math.isnan(number) else number for number in numbers)).tobytes()


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64])
def test_processors_with_narrower_vectors_compute_the_same_bits(kernel, narrower, dtype):
    # whole and partial groups of 32 and 16 elements, chunks and pieces
    sizes = [1, 15, 16, 33, 63, 1021, CHUNK - 1, CHUNK, CHUNK + 48, PIECE + 999]
    tensors = [make(dtype, size, seed=size) for size in sizes]
    if dtype.is_floating_point:
        tensors += [
            extremes_that_tie(dtype),
            with_nonfinite(dtype),
            torch.zeros(CHUNK, dtype=dtype),
        ]
    for values in tensors:
        for wanted in (SUMS, SUMS | SKETCH, SUMS | HISTOGRAM | SKETCH):
            results = [bits(measured(side, values, wanted)) for side in (narrower, kernel)]
            assert results[0] == results[1], (len(values), wanted)


def test_a_missing_or_failing_compiler_is_one_line(monkeypatch, tmp_path):
    build_kernel = builder()
    monkeypatch.setenv("CC", "no-such-compiler")
    assert (
        build_kernel.build(cpu_kernel.FOLDER, tmp_path / "kernel.so")
        == "no C compiler (no-such-compiler)"
    )
    failing = shutil.which("false")
    monkeypatch.setenv("CC", failing)
    assert build_kernel.build(cpu_kernel.FOLDER, tmp_path / "kernel.so") == f"{failing}: it failed"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("compiler", ("", "no-such-compiler"), ids=("with a compiler", "without"))
def test_the_wheel_holds_the_kernel_or_is_of_python_alone(tmp_path, compiler):
    build_kernel = needs_compiler()
    path, output = build_wheel(tmp_path, CC=compiler or str(quick_compiler(tmp_path)))
    with zipfile.ZipFile(path) as wheel:
        inside = set(wheel.namelist())
        library = f"{build_kernel.KERNEL.path}"
        assert (library in inside) == (not compiler) and {
            f"{build_kernel.KERNEL.folder}/{name}" for name in cpu_kernel.SOURCES
        } <= inside
        wheel.extractall(tmp_path / "installed")
    if compiler:
        assert path.name.endswith("-py3-none-any.whl") and "no compiled kernel" in output
    else:
        assert "-py3-none-" in path.name and not path.name.endswith("-any.whl")
        folder = tmp_path / "installed" / build_kernel.KERNEL.folder
        check_sums(
            measured(CpuKernel(folder / build_kernel.KERNEL.name, folder), torch.ones(5), SUMS),
            torch.ones(5),
        )


# -- tensors that are handed over as they are


@needs_exchange
@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_a_tensor_that_is_handed_over_has_the_numbers_that_its_memory_has(kernel, dtype):
    for numel in (1, 7, 1000, 2 * PIECE + 5):
        values = make(dtype, numel, seed=7).view(-1, 1, 1 if numel % 2 else 2)
        for wanted in range(1, 8):
            expected = kernel.measure_by_pointer(values, wanted)
            actual = kernel.measure_tensor(values, wanted)
            assert actual == expected if str(dtype).count("float8") == 0 else actual is None
        assert expected[1:] == (values.numel(), list(values.shape), str(dtype))


@needs_exchange
def test_before_the_tables_of_a_sketch_are_there_it_is_left_to_python(built):
    fresh, values = CpuKernel(built), torch.ones(5)
    fresh._library.tensor_set_shifts(None)
    assert (
        fresh.measure_tensor(values, SKETCH) is None
        and fresh.measure_tensor(values, SUMS) is not None
    )
    expected = fresh.measure_by_pointer(values, SKETCH)
    assert fresh.measure_tensor(values, SKETCH) == expected


@needs_exchange
@pytest.mark.parametrize("inference", (False, True), ids=("program", "inference mode"))
def test_ordinary_tensors_are_handed_over(kernel, inference):
    with torch.inference_mode(inference):
        weight = torch.nn.Parameter(torch.randn(3, 4))
        ordinary = [
            weight,
            weight * 2,
            weight[1:2],
            weight.detach()[0, 1:],
            torch.ones(()),
            torch.randn(4, 1).t(),
        ]
        assert [kernel.measure_tensor(tensor, SUMS) for tensor in ordinary] == [
            kernel.measure_by_pointer(tensor, SUMS) for tensor in ordinary
        ]
        assert all(kernel.measure_tensor(tensor, SUMS) for tensor in ordinary)


@needs_exchange
def test_sums_of_dense_memory_need_no_order(kernel):
    values = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    for order in ((3, 2, 1, 0), (0, 2, 1, 3), (1, 0, 3, 2)):
        view = values.permute(order)
        row, numel, shape, _ = kernel.measure_tensor(view, SUMS | HISTOGRAM)
        assert row == kernel.measure_by_pointer(values, SUMS | HISTOGRAM)[0] and (numel, shape) == (
            120,
            list(view.shape),
        )
        assert (
            kernel.measure_tensor(view, SKETCH) is None
            and kernel.measure_tensor(view[:, :, 1:], SUMS) is None
        )
    assert kernel.measure_tensor(values[:, :1].permute(1, 2, 3, 0)[..., :1], SUMS)[1] == 20


def other_tensors() -> dict[str, object]:
    class Own(Tensor):
        pass

    ones = torch.ones(3)
    return {
        "gaps": torch.ones(4, 4)[:, 1],
        "one element many times": torch.ones(1).expand(3),
        "memory that is shared": torch.ones(4).as_strided((2, 2), (1, 1)),
        "one element of another sign": torch.randn(1, dtype=torch.complex64).conj().imag,
        "another sign": torch._neg_view(ones),
        "complex": ones.to(torch.complex64),
        "empty": torch.empty(0),
        "without numbers": torch.ones(3, device="meta"),
        "zeros that are nowhere": torch._efficientzerotensor(3),
        "sparse": ones.to_sparse(),
        "compressed": torch.eye(3).to_sparse_csr(),
        "opaque": ones.to_mkldnn() if torch.backends.mkldnn.is_available() else ones[::2],
        "of a subclass": ones.as_subclass(Own),
        "large": torch.ones(cpu_kernel._HOLD_GIL_MAX + 1),
        "no tensor": 5,
    }


@pytest.mark.parametrize("kind", other_tensors())
def test_what_is_not_ordinary_is_left_to_python_and_raises_nothing(kernel, kind):
    assert kernel.measure_tensor(other_tensors()[kind], SUMS) is None


@needs_exchange
def test_inside_transforms_a_tensor_is_left_to_python(kernel):
    actual = []

    def function(values: Tensor) -> Tensor:
        actual.append(kernel.measure_tensor(values, SUMS))
        return values.sum()

    torch.func.vmap(function)(torch.ones(2, 3))
    torch.func.grad(function)(torch.ones(3))
    assert actual == [None, None]


@needs_exchange
def test_what_is_handed_over_is_let_go_of(kernel):
    values, name = torch.ones(3), cpu_kernel._DTYPE_NAMES[torch.float32]

    def counts() -> list[int]:
        return [sys.getrefcount(kept) for kept in (values, name, None)]

    before = counts()
    for _ in range(1000):
        assert (
            kernel.measure_tensor(values, SUMS)
            and kernel.measure_tensor(values[1:], SUMS)
            and not kernel.measure_tensor(values[::2], SUMS)
        )
    # what Python itself holds of None changes as it likes
    assert [abs(now - then) < 50 for now, then in zip(counts(), before, strict=True)] == [True] * 3
    row, _, shape, _ = kernel.measure_tensor(values, SUMS)
    assert sys.getrefcount(row) == sys.getrefcount(shape) == 2


def test_where_python_lacks_a_function_tensors_are_asked_by_python(built, monkeypatch):
    functions = (*native_functions._PYTHON_FUNCTIONS, "no_function_of_python")
    monkeypatch.setattr(native_functions, "_PYTHON_FUNCTIONS", functions)
    kernel = CpuKernel(built)
    assert (
        kernel.measure_tensor(torch.ones(3), SUMS) is None
        and kernel.measure_by_pointer(torch.ones(3), SUMS) is not None
    )
