"""Chooses and calls the Triton kernel: a GPU's tensor in two launches, where torch takes some
fifteen for the sums alone.

Triton comes with torch's builds for CUDA. Nothing here imports it before a model on a GPU is
prepared for, and everything that takes long or waits for the device is done then: compiling, the
tables, and the test that the numbers are torch's. In a forward there is nothing but two launches
into memory that exists already. Where Triton is missing or fails, and for what it was not prepared
for, torch's operators do the work.

So far this has been run by Triton's interpreter on a CPU and compiled for sm_80 and sm_90, but on
no GPU: therefore nobody gets it who has not set OTEL_TORCH_KERNEL=triton.
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

from otel_torch.console import say_once
from otel_torch.statistics import native
from otel_torch.statistics.device_rows import take
from otel_torch.statistics.graph_capture import capturing
from otel_torch.statistics.histogram import BINS, histogram
from otel_torch.statistics.native import HISTOGRAM, SKETCH
from otel_torch.statistics.reduce import sums
from otel_torch.statistics.row_layout import SUMS
from otel_torch.statistics.sketch import FOLD, PIECE, SIZE, bits, shift, sketch
from otel_torch.torch_private import unobserved

TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
}
# flat positions up to here have a place in the table of pieces, and are whole numbers of 32 bits
_PIECES = 2**14
# streams that get a workspace, of half a megabyte: few measure, and what others bring is left to
# torch's operators
_STREAMS = 8


class Unusable(Exception):
    """Why there is no kernel, in words for a person."""


def size_of(wanted: int) -> int:
    """How many numbers a row of these has."""
    return len(SUMS) + (BINS if wanted & HISTOGRAM else 0) + (SIZE if wanted & SKETCH else 0)


def _flags(wanted: int) -> dict[str, bool]:
    return {"HISTOGRAM": bool(wanted & HISTOGRAM), "SKETCH": bool(wanted & SKETCH)}


def compile_kernels(kind: str, wanted: int, target: Any = None) -> tuple[Any, Any]:
    """`partial` and `combine` of triton_kernel.py, compiled for what TYPES calls a dtype.

    target: a GPUTarget of Triton, by default the current device's, whose driver is needed for no
    other.
    """
    kernel: Any = importlib.import_module("otel_torch.statistics.triton_kernel")
    compiler: Any = importlib.import_module("triton.compiler")
    tables = {"signs": "*u8", "turns": "*i32", "projection": "*i64"}
    partial = {"data": kind, "out": "*fp64", "start": "i32", "end": "i32", **tables}
    combine = {"partials": "*fp64", "row": "*fp64", "programs": "i32"}

    def compiled(
        function: Any, types: dict[str, str], constants: Mapping[str, int], warps: int
    ) -> Any:
        types = types | dict.fromkeys(constants, "constexpr")
        source = compiler.ASTSource(function, types, constants, {(0,): [["tt.divisibility", 16]]})
        return compiler.compile(source, target=target, options={"num_warps": warps})

    return compiled(kernel.partial, partial, _flags(wanted), 16), compiled(
        kernel.combine, combine, {"SIZE": size_of(wanted)}, 4
    )


class Kernel:
    """What measures tensors of one device, compiled and tested for some dtypes and choices of
    numbers.
    """

    def __init__(self, device: torch.device) -> None:
        self._kernel: Any = importlib.import_module("otel_torch.statistics.triton_kernel")
        self._device = device
        self._index = (
            device.index if device.type == "cuda" else -1
        )  # Triton's interpreter has a CPU's memory
        self._launches: dict[tuple[torch.dtype, int], tuple[Any, Any]] = {}
        self._programs: int = self._kernel.PROGRAMS.value
        self._tables = [table.to(device) for table in _tables()]
        # all that will ever be needed: what is allocated in a forward may come to lie in a graph's
        # memory
        size = self._programs * size_of(HISTOGRAM | SKETCH)
        self._workspaces = torch.empty(_STREAMS, size, dtype=torch.float64, device=device).unbind()
        self._streams: dict[int, int] = {}  # the number of each one's workspace
        self._lock = (
            threading.Lock()
        )  # two threads may use one stream, and have its workspace in turn

    def learn(self, dtype: torch.dtype, wanted: int) -> None:
        """Compile and test for tensors of `dtype`; waits for the device. Raises Unusable if the
        numbers are wrong.
        """
        if (dtype, wanted) in self._launches:
            return
        with torch.cuda.device(self._index):
            interpreted = self._index < 0
            functions = self._kernel.partial, self._kernel.combine
            self._launches[dtype, wanted] = (
                functions if interpreted else compile_kernels(TYPES[dtype], wanted)
            )
        for count, special in ((5, 0.0), (PIECE + 999, 0.0), (PIECE + 999, math.nan)):
            # whole numbers that every type holds, whose sums are exact in any order
            values = (
                torch.arange(count, dtype=torch.int32, device=self._device)
                .remainder_(509)
                .sub_(254)
                .to(dtype)
            )
            values[count // 2] = special
            wide = [
                function(values)
                for want, function in ((HISTOGRAM, histogram), (SKETCH, sketch))
                if wanted & want
            ]
            expected, row = torch.cat([sums(values, SUMS), *wide]), self.measure(values, wanted)
            if row is None or not torch.allclose(
                row, expected, rtol=1e-9, atol=1e-6, equal_nan=True
            ):
                raise Unusable(f"it computes wrongly for {dtype}")

    def measure(self, values: Tensor, wanted: int, start: int = 0) -> Tensor | None:
        """The row of `values`, as `native.Kernel.measure` lays it out, in memory of the device that
        `take` gives; waits for nothing. None where the kernel cannot read the tensor: what it has
        not learnt, memory with gaps or, for a sketch, in another order than the logical one, or
        beyond two thousand million elements, on a stream beyond the first few.
        """
        launches = self._launches.get((values.dtype, wanted))
        if not wanted & SKETCH and not values.is_contiguous():
            strides = values.stride()
            values = values.permute(sorted(range(values.dim()), key=lambda dim: -strides[dim]))
        end = start + values.numel()
        readable = values.is_contiguous() and not values.is_neg() and values.data_ptr() % 16 == 0
        if launches is None or not readable or end > _PIECES * PIECE:
            return None
        tile: int = self._kernel.ROWS.value * (
            FOLD if wanted & SKETCH else self._kernel.LANES.value
        )
        programs = min(-(-end // tile) - start // tile, self._programs)
        with torch.cuda.device(self._index), self._lock:
            partials = self._workspace()
            if partials is None:
                return None
            size = size_of(wanted)
            row = take(size, torch.float64, self._device)
            partial, combine = launches
            partial[(programs, 1, 1)](
                values,
                partials if programs > 1 else row,
                start,
                end,
                *self._tables,
                *_flags(wanted).values(),
            )
            if programs > 1:
                combine[(-(-size // self._kernel.COMBINED.value), 1, 1)](
                    partials, row, programs, size
                )
        return row

    def _workspace(self) -> Tensor | None:
        """Memory of the current stream for what programs found."""
        stream = torch.cuda.current_stream(self._index) if self._index >= 0 else None
        key, following = stream.cuda_stream if stream is not None else 0, len(self._streams)
        number = self._streams.setdefault(key, following)
        if number >= _STREAMS:
            return None
        if number == following and stream is not None:
            self._workspaces[number].record_stream(stream)
        return self._workspaces[number]


@functools.cache
def _tables() -> tuple[Tensor, Tensor, Tensor]:
    """signs, turns and projection as triton_kernel.py describes them, on the CPU."""
    kernel: Any = importlib.import_module("otel_torch.statistics.triton_kernel")
    lanes, rows = kernel.LANES.value, kernel.ROWS.value

    def negative(purpose: str, count: int) -> Tensor:
        of_columns = 1 - torch.frombuffer(bytearray(bits(purpose, count)), dtype=torch.uint8).view(
            -1, FOLD
        )
        return torch.nn.functional.pad(of_columns, (0, lanes - FOLD)).long()

    def packed(signs: Tensor) -> Tensor:  # bits of the last dimension but one
        return (signs << torch.arange(signs.shape[-2], device="cpu")[:, None]).sum(-2)

    signs = packed(negative("signs", PIECE).view(-1, rows, lanes)).to(torch.uint8)
    turns = array("i", [2 * places + (sign > 0) for places, sign in map(shift, range(_PIECES))])
    return (
        signs,
        torch.frombuffer(turns, dtype=torch.int32),
        packed(negative("projection", SIZE * FOLD)),
    )


_kernels: dict[torch.device, Kernel | str] = {}  # or why there is none


def chosen() -> bool:
    """Whether this process asked for Triton."""
    return native.chosen() == "triton"


@unobserved
def prepare(device: torch.device, dtypes: Iterable[torch.dtype], choices: Iterable[int]) -> None:
    """Compile and test the kernel for tensors of `device`, before a forward; waits for the device.
    Never raises.

    dtypes: others than those of TYPES are passed over. choices: of numbers, as
    `native.Kernel.measure` takes them; what is prepared already costs nothing. While a CUDA graph
    is captured this does nothing.
    """
    kernel = _kernels.get(device)
    if device.type != "cuda" or not chosen() or isinstance(kernel, str) or capturing():
        return
    try:
        if torch.version.hip is not None:
            raise Unusable("it is for CUDA")
        if kernel is None:
            with torch.inference_mode(False):
                kernel = _kernels[device] = Kernel(device)
        for dtype in dtypes:
            for wanted in choices:
                if dtype in TYPES:
                    kernel.learn(dtype, wanted)
    except Exception as error:
        _refuse(device, error)


def measure(values: Tensor, wanted: int, start: int = 0) -> Tensor | None:
    """As `Kernel.measure`; None too where the device has no kernel. Never raises."""
    kernel = _kernels.get(values.device)
    if not isinstance(kernel, Kernel) or not chosen():
        return None
    try:
        return kernel.measure(values, wanted, start)
    except Exception as error:
        _refuse(values.device, error)
        return None


def prepared() -> bool:
    """Whether a GPU was prepared for, with success or without."""
    return bool(_kernels)


def try_out() -> str:
    """`describe`, after the test on the current GPU where there is one: for a process that measures
    nothing itself.
    """
    if not torch.cuda.is_available():
        return f"{describe()} (there is no GPU here)"
    prepare(torch.device("cuda", torch.cuda.current_device()), TYPES, (native.SUMS,))
    return describe()


def describe() -> str:
    """What measures tensors of GPUs, and why, in a few words: `triton 3.7.1`, or `torch (no Triton
    kernel: …)`.
    """
    if not chosen():
        return "torch"
    try:
        triton = f"triton {version('triton')}"
    except PackageNotFoundError:
        return "torch (no Triton kernel: triton is not installed)"
    reasons = dict.fromkeys(reason for reason in _kernels.values() if isinstance(reason, str))
    if reasons:
        return f"torch (no Triton kernel: {'; '.join(reasons)})"
    return triton if _kernels else f"{triton}, not tested yet"


def _refuse(device: torch.device, error: Exception) -> None:
    """From here on torch's operators do the work there."""
    reason = (
        str(error)
        if isinstance(error, Unusable)
        else f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    )
    _kernels[device] = reason
    say_once(f"statistics of tensors on {device} are by torch (no Triton kernel: {reason})")
