"""Compiles, tests and launches the Triton kernel: one or two launches for a tensor on a GPU.

Torch's operators need some fifteen launches for the scalar columns alone. Triton comes with torch's
CUDA builds. It is imported only when a model on a GPU is prepared; what is slow or waits for the
device is done then: compilation, the sketch's tables, and a comparison with torch's operators. A
forward pass only launches, into memory that exists already. Where Triton is missing or fails, and
for tensors it was not prepared for, torch's operators are used.
"""

from __future__ import annotations

import functools
import importlib
import math
import threading
from array import array
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from otel_torch.process.console import say_once
from otel_torch.statistics import cpu_kernel
from otel_torch.statistics.cpu_kernel import HISTOGRAM, SKETCH, KernelUnusable
from otel_torch.statistics.device_rows import allocate_row
from otel_torch.statistics.graph_capture import is_capturing
from otel_torch.statistics.histogram import histogram
from otel_torch.statistics.reduce import reduce_scalars
from otel_torch.statistics.row_layout import BINS, SCALARS
from otel_torch.statistics.sketch import FOLD, PIECE, bits, shift, sketch
from otel_torch.statistics.sketch_format import SIZE
from otel_torch.torch_private import current_raw_stream, unobserved

# Triton's name of each dtype that the kernel reads
TRITON_TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
}
# size of the table of shifts; its flat positions fit into 32 bits
_SHIFT_TABLE_SIZE = 2**14
# streams that get a workspace, half a megabyte each; few streams measure, and torch's operators
# serve the others
_STREAMS = 8


def row_size(wanted: int) -> int:
    """Return how many numbers the row of a choice of flags has."""
    return len(SCALARS) + (BINS if wanted & HISTOGRAM else 0) + (SIZE if wanted & SKETCH else 0)


def _constants(wanted: int) -> dict[str, bool]:
    return {"HISTOGRAM": bool(wanted & HISTOGRAM), "SKETCH": bool(wanted & SKETCH)}


def _triton_kernel() -> Any:
    """Import the Triton source, which may fail and takes half a second the first time."""
    return importlib.import_module("otel_torch.statistics.triton_kernel")


def compile_kernels(triton_type: str, wanted: int, target: Any = None) -> tuple[Any, Any]:
    """Compile `partial` and `combine` of triton_kernel.py for one dtype and choice of flags.

    Args:
        triton_type: a value of `TRITON_TYPES`.
        target: a GPUTarget of Triton; by default the current device. Only that needs a driver.
    """
    kernel = _triton_kernel()
    compiler: Any = importlib.import_module("triton.compiler")

    def compiled(
        function: Any, types: dict[str, str], constants: Mapping[str, int], warps: int
    ) -> Any:
        types = types | dict.fromkeys(constants, "constexpr")
        source = compiler.ASTSource(function, types, constants, {(0,): [["tt.divisibility", 16]]})
        return compiler.compile(source, target=target, options={"num_warps": warps})

    tables = {"signs": "*u8", "turns": "*i32", "projection": "*i64"}
    partial_types = {"data": triton_type, "out": "*fp64", "start": "i32", "end": "i32", **tables}
    combine_types = {"partials": "*fp64", "row": "*fp64", "programs": "i32"}
    return (
        compiled(kernel.partial, partial_types, _constants(wanted), 16),
        compiled(kernel.combine, combine_types, {"SIZE": row_size(wanted)}, 4),
    )


class GpuKernel:
    """The Triton kernel on one device, for the dtypes and flags that it was compiled for."""

    def __init__(self, device: torch.device) -> None:
        self._kernel = _triton_kernel()
        self._device = device
        # -1: Triton's interpreter, which works on CPU memory
        self._index = device.index if device.type == "cuda" else -1
        self._launches: dict[tuple[torch.dtype, int], tuple[Any, Any]] = {}
        self._programs: int = self._kernel.PROGRAMS.value
        self._tables = [table.to(device) for table in _tables()]
        # all that will be needed: memory allocated in a forward may end up in a graph's pool
        size = self._programs * row_size(HISTOGRAM | SKETCH)
        self._workspaces = torch.empty(_STREAMS, size, dtype=torch.float64, device=device).unbind()
        self._streams: dict[int, int] = {}  # stream -> index of its workspace
        # two threads may use one stream and take turns at its workspace
        self._lock = threading.Lock()

    def compile_and_test(self, dtype: torch.dtype, wanted: int) -> None:
        """Compile the kernel for a dtype and flags, and compare it with torch.

        Waits for the device.

        Raises:
            KernelUnusable: its numbers are wrong.
        """
        if (dtype, wanted) in self._launches:
            return
        with torch.cuda.device(self._index):
            if self._index < 0:
                launches = self._kernel.partial, self._kernel.combine
            else:
                launches = compile_kernels(TRITON_TYPES[dtype], wanted)
            self._launches[dtype, wanted] = launches
        for count, special in ((5, 0.0), (PIECE + 999, 0.0), (PIECE + 999, math.nan)):
            # integers that every dtype represents, whose sums are exact in any order
            integers = torch.arange(count, dtype=torch.int32, device=self._device)
            values = integers.remainder_(509).sub_(254).to(dtype)
            values[count // 2] = special
            parts = [reduce_scalars(values, SCALARS)]
            if wanted & HISTOGRAM:
                parts.append(histogram(values))
            if wanted & SKETCH:
                parts.append(sketch(values))
            expected, row = torch.cat(parts), self.measure(values, wanted)
            if row is None or not torch.allclose(
                row, expected, rtol=1e-9, atol=1e-6, equal_nan=True
            ):
                raise KernelUnusable(f"it computes wrong numbers for {dtype}")

    def measure(self, values: Tensor, wanted: int, start: int = 0) -> Tensor | None:
        """Measure a tensor, without waiting for the device.

        Returns:
            the row, as `CpuKernel.measure_memory` lays it out, in memory from `allocate_row`. None
            if the kernel cannot read the tensor: a dtype or flags it was not compiled for, memory
            with gaps or, for a sketch, in another order, more than about 2^31 elements, or a stream
            beyond the first few.
        """
        launches = self._launches.get((values.dtype, wanted))
        if not wanted & SKETCH and not values.is_contiguous():
            strides = values.stride()
            values = values.permute(sorted(range(values.dim()), key=lambda dim: -strides[dim]))
        end = start + values.numel()
        readable = values.is_contiguous() and not values.is_neg() and values.data_ptr() % 16 == 0
        if launches is None or not readable or end > _SHIFT_TABLE_SIZE * PIECE:
            return None
        width = FOLD if wanted & SKETCH else self._kernel.LANES.value
        tile: int = self._kernel.ROWS.value * width
        programs = min(-(-end // tile) - start // tile, self._programs)
        with torch.cuda.device(self._index), self._lock:
            partials = self._workspace()
            if partials is None:
                return None
            size = row_size(wanted)
            row = allocate_row(size, torch.float64, self._device)
            partial, combine = launches
            out = partials if programs > 1 else row
            constants = _constants(wanted).values()
            partial[(programs, 1, 1)](values, out, start, end, *self._tables, *constants)
            if programs > 1:
                grid = (-(-size // self._kernel.COMBINED.value), 1, 1)
                combine[grid](partials, row, programs, size)
        return row

    def _workspace(self) -> Tensor | None:
        """Return the current stream's memory for partial rows; None if all are taken."""
        unused = len(self._streams)
        handle = current_raw_stream(self._index) if self._index >= 0 else 0
        index = self._streams.setdefault(handle, unused)
        if index >= _STREAMS:
            return None
        if index == unused and self._index >= 0:
            self._workspaces[index].record_stream(torch.cuda.current_stream(self._index))
        return self._workspaces[index]


@functools.cache
def _tables() -> tuple[Tensor, Tensor, Tensor]:
    """Return signs, turns and projection, as triton_kernel.py describes them, on the CPU."""
    kernel = _triton_kernel()
    lanes, rows = kernel.LANES.value, kernel.ROWS.value

    def is_negative(purpose: str, count: int) -> Tensor:
        """1 where a sign is negative, in rows of FOLD padded to a row of lanes."""
        positive = torch.frombuffer(bytearray(bits(purpose, count)), dtype=torch.uint8)
        return torch.nn.functional.pad(1 - positive.view(-1, FOLD), (0, lanes - FOLD)).long()

    def packed(signs: Tensor) -> Tensor:
        """Pack the last dimension but one into bits."""
        return (signs << torch.arange(signs.shape[-2], device="cpu")[:, None]).sum(-2)

    signs = packed(is_negative("signs", PIECE).view(-1, rows, lanes)).to(torch.uint8)
    shifts = map(shift, range(_SHIFT_TABLE_SIZE))
    turns = array("i", [2 * places + (sign > 0) for places, sign in shifts])
    projection = packed(is_negative("projection", SIZE * FOLD))
    return signs, torch.frombuffer(turns, dtype=torch.int32), projection


# by device, the kernel or the reason why it is not used
_kernels: dict[torch.device, GpuKernel | str] = {}


def is_chosen() -> bool:
    """Return whether this process wants Triton where it works: it has chosen nothing else."""
    return cpu_kernel.current_choice() in ("auto", "triton")


@unobserved
def prepare(device: torch.device, dtypes: Iterable[torch.dtype], choices: Iterable[int]) -> None:
    """Compile and test the kernel for a device, before a forward pass. Waits for it; never raises.

    Does nothing while a CUDA graph is captured, and for what is prepared already.

    Args:
        dtypes: those not in `TRITON_TYPES` are ignored.
        choices: flags, as `CpuKernel.measure_memory` takes them.
    """
    kernel = _kernels.get(device)
    if device.type != "cuda" or not is_chosen() or isinstance(kernel, str) or is_capturing():
        return
    try:
        if torch.version.hip is not None:
            raise KernelUnusable("it is for CUDA")
        if kernel is None:
            with torch.inference_mode(False):
                kernel = _kernels[device] = GpuKernel(device)
        for dtype in dtypes:
            for wanted in choices:
                if dtype in TRITON_TYPES:
                    kernel.compile_and_test(dtype, wanted)
    except Exception as error:
        _disable(device, error)


def measure(values: Tensor, wanted: int, start: int = 0) -> Tensor | None:
    """Measure a tensor as `GpuKernel.measure` does; None if its device has no kernel.

    Never raises.
    """
    kernel = _kernels.get(values.device)
    if not isinstance(kernel, GpuKernel) or not is_chosen():
        return None
    try:
        return kernel.measure(values, wanted, start)
    except Exception as error:
        _disable(values.device, error)
        return None


def was_prepared() -> bool:
    """Return whether `prepare` was tried for any GPU, successfully or not."""
    return bool(_kernels)


def try_out() -> str:
    """Test the kernel on the current GPU, if any, and describe the result.

    For a process that measures nothing itself (`otel-torch doctor`).
    """
    if not torch.cuda.is_available():
        return f"{describe()} (no GPU)"
    device = torch.device("cuda", torch.cuda.current_device())
    prepare(device, TRITON_TYPES, (cpu_kernel.SUMS,))
    return describe()


def describe() -> str:
    """Describe what measures GPU tensors: `triton 3.7.1` or `torch (no Triton kernel: …)`."""
    if not is_chosen():
        return "torch"
    try:
        triton = f"triton {version('triton')}"
    except PackageNotFoundError:
        return "torch (no Triton kernel: triton is not installed)"
    reasons = dict.fromkeys(reason for reason in _kernels.values() if isinstance(reason, str))
    if reasons:
        return f"torch (no Triton kernel: {'; '.join(reasons)})"
    return triton if _kernels else f"{triton}, not tested yet"


def _disable(device: torch.device, error: Exception) -> None:
    """Use torch's operators on this device from now on."""
    if isinstance(error, KernelUnusable):
        reason = str(error)
    else:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    _kernels[device] = reason
    say_once(f"statistics of tensors on {device} are by torch (no Triton kernel: {reason})")
