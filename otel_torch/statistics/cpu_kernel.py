"""Loads and calls the compiled kernel for CPU tensors, and holds the choice of kernel.

A small tensor takes about a microsecond, a tenth of what torch's dispatcher alone takes. The kernel
is a shared library that is built from the C files here when the package is installed. Ordinary
tensors are passed as objects (`native_functions.py`), others by pointer through ctypes. If the
library is missing, stale or computes wrong numbers, torch's operators are used instead.
"""

from __future__ import annotations

import ctypes
import math
import struct
import threading
from array import array
from collections.abc import Callable
from pathlib import Path

import torch

from otel_torch.process import at_fork
from otel_torch.process.compiled_library import SUFFIX, source_version
from otel_torch.process.console import say_once
from otel_torch.statistics.native_functions import ObjectFunctions
from otel_torch.statistics.row_layout import BINS, SCALARS
from otel_torch.statistics.sketch import FOLD, PIECE, bits, shift
from otel_torch.statistics.sketch_format import SIZE
from otel_torch.statistics.unwrap_tensor import has_memory
from otel_torch.torch_private import is_plain_memory, unobserved

# flags of what a kernel computes, and how many numbers each gives, in the order of a row
SUMS, HISTOGRAM, SKETCH = 1, 2, 4
_LENGTHS = {SUMS: len(SCALARS), HISTOGRAM: BINS, SKETCH: SIZE}

FOLDER = Path(__file__).with_name("native")
SOURCES = (
    "kernel.c", "vectors.h", "avx2.c", "avx512.c", "tensor.c", "recognizer.c", "observer.c",
    "module_call.c", "lines.c", "native.h", "layout.h",
)  # fmt: skip
LIBRARY = FOLDER / f"kernel{SUFFIX}"

# fmt: off
# dtypes in the order of the kernel's enumeration; those of one byte are read by a table of their
# 256 values
_WIDE_DTYPES = (
    "float32", "float64", "float16", "bfloat16",
    "int16", "uint16", "int32", "uint32", "int64", "uint64",
)
_BYTE_DTYPES = (
    "bool", "int8", "uint8",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
)
# fmt: on
CODES: dict[torch.dtype, int] = {
    getattr(torch, name): code
    for code, name in enumerate((*_WIDE_DTYPES, *_BYTE_DTYPES))
    if hasattr(torch, name)
}
_DTYPE_NAMES = {dtype: str(dtype) for dtype in CODES}
# up to this many elements the call holds the GIL: getting it back from another thread takes longer
# than the work (0.1 ms)
_HOLD_GIL_MAX = 2**18
# from this many elements on several threads pay off; torch uses the same threshold
_PARALLEL_MIN = 2**18
# for `bytes.translate`: the kernel's tables are 1 where a sign is negative
_FLIP_BITS = bytes((1, 0)) + bytes(254)

# numbers, as `CpuKernel.measure_memory` returns them; elements; shape; dtype
KernelResult = tuple[list[float], int, list[int], str]


class KernelUnusable(Exception):
    """Why a kernel is not used, as text for users."""


class _Request:
    """Memory that a thread shares with the kernel: the arguments of a sketch, and the results."""

    __slots__ = ("address", "numbers", "position")

    def __init__(self) -> None:
        memory = array("d", bytes(8 * (2 + sum(_LENGTHS.values()))))
        lengths = [
            sum(length for flag, length in _LENGTHS.items() if wanted & flag)
            for wanted in range(sum(_LENGTHS) + 1)
        ]
        self.address = memory.buffer_info()[0]
        self.position = memoryview(memory).cast("B").cast("q")
        # a view of the results by choice of flags
        self.numbers = [memoryview(memory)[2 : 2 + length] for length in lengths]


class CpuKernel:
    """A loaded and tested kernel.

    Raises `KernelUnusable` if the library cannot be loaded, was built from other sources, or
    computes wrong numbers.

    processor: the variant that this machine runs (`avx512`, `avx2`, `neon`, …). objects: its
    functions of Python objects, or None. measure_tensor: like `measure_by_pointer`, in a fifth of
    the time, for ordinary tensors that are not large; None for any other.
    """

    def __init__(self, library: Path = LIBRARY, folder: Path = FOLDER) -> None:
        if not library.exists():
            raise KernelUnusable(f"{library.name} was not built; install again with a C compiler")
        try:
            # calls through PyDLL hold the GIL, calls through CDLL release it
            holding_gil, releasing_gil = ctypes.PyDLL(str(library)), ctypes.CDLL(str(library))
            holding_gil.kernel_source.restype = ctypes.c_char_p
            holding_gil.kernel_processor.restype = ctypes.c_char_p
            built_from, processor = holding_gil.kernel_source(), holding_gil.kernel_processor()
        except (OSError, AttributeError) as error:
            raise KernelUnusable(f"{library.name} cannot be loaded: {error}") from None
        if built_from != source_version(folder, SOURCES):
            raise KernelUnusable(f"{library.name} is of another version; install again")
        self.processor: str = processor.decode()
        self._library = holding_gil
        self._local = threading.local()
        self._shifts: array[int] | None = None
        # the table that `tensor.c` reads, kept alive
        self._first_shifts: array[int] | None = None
        self._lock = threading.Lock()
        self._call_holding_gil = holding_gil.kernel_measure
        self._call_releasing_gil = releasing_gil.kernel_measure
        for function in (self._call_holding_gil, self._call_releasing_gil):
            function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
            function.restype = None
        _set_byte_dtypes(holding_gil)
        _set_parallel(holding_gil)
        self.objects = ObjectFunctions.of(holding_gil, CODES, _HOLD_GIL_MAX)
        self.measure_tensor: Callable[[torch.Tensor, int], KernelResult | None]
        self.measure_tensor = self.objects.measure if self.objects else lambda tensor, wanted: None
        self._test()

    def measure_memory(
        self, pointer: int, numel: int, code: int, wanted: int, start: int = 0, threads: int = 1
    ) -> list[float]:
        """Measure `numel` elements, at least 1, that are contiguous at `pointer`.

        Args:
            code: the dtype, from `CODES`.
            wanted: flags: SUMS (the columns `SCALARS`), HISTOGRAM (64 counts), SKETCH (64 numbers).
            start: flat position of the first element, for the sketch.
            threads: at most this many. The result is the same to the bit for any number.

        Returns:
            the wanted numbers, in the order of the flags above.
        """
        try:
            request = self._local.request
        except AttributeError:
            request = self._local.request = _Request()
        if wanted & SKETCH:
            shifts = self._shifts
            last = (start + numel - 1) // PIECE
            if shifts is None or last >= len(shifts):
                shifts = self._extend_shifts(last)
            request.position[0], request.position[1] = start, shifts.buffer_info()[0]
        call = self._call_holding_gil if numel <= _HOLD_GIL_MAX else self._call_releasing_gil
        call(pointer, numel, code + (wanted << 8) + (threads << 16), request.address)
        numbers: list[float] = request.numbers[wanted].tolist()
        return numbers

    def measure_by_pointer(self, tensor: torch.Tensor, wanted: int) -> KernelResult | None:
        """Measure a tensor: its numbers, number of elements, shape and dtype.

        None for a tensor that is not plain, contiguous CPU memory, is empty, or has a dtype that is
        not in `CODES`.
        """
        if not is_plain_memory(tensor):
            return None
        code, numel = CODES.get(tensor.dtype), tensor.numel()
        if code is None or not numel or not tensor.is_contiguous() or not has_memory(tensor):
            return None
        threads = 1 if numel < _PARALLEL_MIN else torch.get_num_threads()
        numbers = self.measure_memory(tensor.data_ptr(), numel, code, wanted, 0, threads)
        return numbers, numel, list(tensor.shape), _DTYPE_NAMES[tensor.dtype]

    def _extend_shifts(self, last: int) -> array[int]:
        """Return a table of shifts and signs of the sketch's pieces, up to `last` at least.

        The first call also sends the signs of the elements.
        """
        with self._lock:
            shifts = self._shifts
            if shifts is None:
                tables = bits("signs", PIECE), bits("projection", SIZE * FOLD)
                self._library.kernel_set_signs(*(table.translate(_FLIP_BITS) for table in tables))
                shifts = array("i")
            if last >= len(shifts):
                # in a new array: another thread's call may be reading the old one
                pieces = range(len(shifts), max(last + 1, 2 * len(shifts), 64))
                encoded = [2 * places + (sign > 0) for places, sign in map(shift, pieces)]
                shifts = shifts + array("i", encoded)
            if self._first_shifts is None:
                self._first_shifts = shifts
                self._library.tensor_set_shifts(ctypes.c_void_p(shifts.buffer_info()[0]))
            self._shifts = shifts
            return shifts

    def _test(self) -> None:
        """Measure small known tensors; raise KernelUnusable if a number is wrong."""
        numbers = [float(number - 20) for number in range(40)]
        count = len(numbers)
        squares, magnitudes = sum(n * n for n in numbers), sum(map(abs, numbers))
        scalars = [-20.0, 19.0, sum(numbers), squares, magnitudes, 0.0, 1.0]
        counts = [0.0] * BINS
        for number in numbers:
            counts[math.frexp(number)[1] + 41 if number else 0] += 1
        upper_halves = [struct.unpack("<I", struct.pack("<f", n))[0] >> 16 for n in numbers]
        cases = {
            torch.float32: array("f", numbers),
            torch.float64: array("d", numbers),
            torch.bfloat16: array("H", upper_halves),
            torch.int64: array("q", map(int, numbers)),
        }
        for dtype, values in cases.items():
            row = self.measure_memory(
                values.buffer_info()[0], count, CODES[dtype], SUMS | HISTOGRAM
            )
            result = self.measure_tensor(torch.frombuffer(values, dtype=dtype), SUMS | HISTOGRAM)
            expected = [*scalars, *counts]
            whole_result = (expected, count, [count], _DTYPE_NAMES[dtype])
            # sums alone may be computed by other code
            sums = self.measure_memory(values.buffer_info()[0], count, CODES[dtype], SUMS)
            if row != expected or sums != scalars or result not in (None, whole_result):
                raise KernelUnusable(f"it computes wrong numbers for {dtype} ({self.processor})")


def _set_byte_dtypes(library: ctypes.PyDLL) -> None:
    """Send the kernel the 256 values of each dtype of one byte."""
    every_byte = torch.arange(256, dtype=torch.uint8, device="cpu")
    for dtype, code in CODES.items():
        if dtype.itemsize == 1:
            values = every_byte != 0 if dtype is torch.bool else every_byte.view(dtype)
            library.kernel_set_bytes(code, array("f", values.float().tolist()).tobytes())


def _set_parallel(library: ctypes.PyDLL) -> None:
    """Let the kernel use the OpenMP threads of torch, if torch has OpenMP."""
    path = Path(torch.__file__).with_name("lib") / f"libtorch_cpu{LIBRARY.suffix}"
    try:
        function = ctypes.cast(ctypes.CDLL(str(path)).GOMP_parallel, ctypes.c_void_p)
    except (OSError, AttributeError):
        return
    library.kernel_set_parallel(function)


_kernel: tuple[CpuKernel | None, str] | None = None


def _loaded() -> tuple[CpuKernel | None, str]:
    """Return the kernel, or None and the reason.

    One thread loads it: the library has one set of tables, which belong to the kernel made last.
    """
    global _kernel
    if _kernel is None:
        with at_fork.no_fork():
            _kernel = _kernel or _load()
    return _kernel


@unobserved  # the first tensor may be measured inside a mode or tracer of the program
def _load() -> tuple[CpuKernel | None, str]:
    try:
        return CpuKernel(), ""
    except KernelUnusable as reason:
        return None, str(reason)
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


_choice = "auto"


def choose(choice: str) -> None:
    """Set this process's kernel: OTEL_TORCH_KERNEL.

    `auto`, `native` and `triton` use the compiled kernel on a CPU if there is one; `torch` never
    does. On a GPU `auto` and `triton` use Triton's.
    """
    global _choice
    _choice = choice
    if choice == "native" and _loaded()[0] is None:
        say_once(f"OTEL_TORCH_KERNEL='native': statistics are by {describe()}")


def current_choice() -> str:
    """Return the last argument of `choose`, by default `auto`."""
    return _choice


def load() -> CpuKernel | None:
    """Return the kernel, loaded once; None if none works or `torch` was chosen. Never raises."""
    return None if _choice == "torch" else _loaded()[0]


def describe() -> str:
    """Describe what measures CPU tensors: `native (avx512)`, or `torch` and the reason."""
    if _choice == "torch":
        return "torch (as chosen)"
    kernel, reason = _loaded()
    if kernel:
        return f"native ({kernel.processor})"
    return f"torch, 4 to 30 times slower (no compiled kernel: {reason})"
