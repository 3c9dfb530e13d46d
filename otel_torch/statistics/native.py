"""Calls the compiled kernel: a tensor's numbers for about a microsecond, where torch's dispatcher
alone takes ten times that.

The kernel is a plain shared library beside this file, built from `kernel.c` and `tensor.c` when the
package is installed. An ordinary tensor of torch is handed to it as it is; else it is called with a
pointer through ctypes. Where it is missing, old or wrong, there is none, and torch does the same
work.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import struct
import sys
import threading
from array import array
from collections.abc import Callable
from pathlib import Path

import torch

from otel_torch.console import say_once
from otel_torch.statistics.histogram import BINS
from otel_torch.statistics.sketch import FOLD, PIECE, SIZE, bits, shift
from otel_torch.torch_private import count_function_modes, is_plain_memory

# what is wanted, added up
SUMS, HISTOGRAM, SKETCH = 1, 2, 4
_NUMBERS = {SUMS: 7, HISTOGRAM: BINS, SKETCH: SIZE}

FOLDER = Path(__file__).parent
SOURCES = ("kernel.c", "tensor.c")
LIBRARY = FOLDER / ("kernel.dylib" if sys.platform == "darwin" else "kernel.so")

# in the order of the kernel's enumeration; those of one byte are read by a table of their 256
# values
_WIDER = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
)
_BYTES = (
    "bool",
    "int8",
    "uint8",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)
CODES: dict[torch.dtype, int] = {
    getattr(torch, name): code
    for code, name in enumerate((*_WIDER, *_BYTES))
    if hasattr(torch, name)
}

_NAMES = {dtype: str(dtype) for dtype in CODES}

# Up to here the interpreter's lock is kept: to get it back from another thread takes longer than
# the work (some 0.1 ms)
_KEEPS_LOCK = 2**18
# from here on several threads are worth waking, as torch itself holds
_PARALLEL = 2**18
# what `tensor.c` calls of Python, in its order
_PYTHON = (
    "PyObject_Type",
    "PyObject_CallFunctionObjArgs",
    "PyObject_IsTrue",
    "PyErr_Clear",
    "PyLong_AsLongLong",
    "PyLong_FromLongLong",
    "PyFloat_FromDouble",
    "PyList_New",
    "PyList_SetItem",
    "PyTuple_New",
    "PyTuple_SetItem",
    "Py_IncRef",
    "Py_DecRef",
    "PyCFunction_NewEx",
)
# what DLPack calls the kinds of numbers
_KINDS = {"int": 0, "uint": 1, "float": 2, "bfloat": 4, "bool": 6}
# the kernel is told which signs are negative
_FLIPPED = bytes((1, 0)) + bytes(254)


# numbers, as `Kernel.measure` returns them; elements; shape; dtype, as `str` says it
Found = tuple[list[float], int, list[int], str]


class Unusable(Exception):
    """Why there is no kernel, in words for a person."""


class _Request:
    """The memory that one thread shares with the kernel: position and shifts of a sketch, and room
    for the numbers.
    """

    __slots__ = ("address", "numbers", "position")

    def __init__(self) -> None:
        memory = array("d", bytes(8 * (2 + sum(_NUMBERS.values()))))
        sizes = [
            sum(size for want, size in _NUMBERS.items() if wanted & want) for wanted in range(8)
        ]
        self.address = memory.buffer_info()[0]
        self.position = memoryview(memory).cast("B").cast("q")
        self.numbers = [memoryview(memory)[2 : 2 + size] for size in sizes]  # of each choice


class Kernel:
    """A loaded and tested kernel.

    processor: which of its variants this machine runs (`avx512`, `avx2`, `neon`, …). direct: as
    `indirect`, in a fifth of the time, for ordinary tensors that are not large; None for any other.
    Raises Unusable if the library cannot be loaded, is not of this source, or computes wrongly.
    """

    def __init__(self, library: Path = LIBRARY, folder: Path = FOLDER) -> None:
        if not library.exists():
            raise Unusable(f"{library.name} was not built; install again with a C compiler")
        try:
            # the first keeps the interpreter's lock during a call, the second lets it go
            keeping, releasing = ctypes.PyDLL(str(library)), ctypes.CDLL(str(library))
            keeping.kernel_source.restype = keeping.kernel_processor.restype = ctypes.c_char_p
            built_from, processor = keeping.kernel_source(), keeping.kernel_processor()
        except (OSError, AttributeError) as error:
            raise Unusable(f"{library.name} cannot be loaded: {error}") from None
        if (
            built_from
            != hashlib.sha256(b"".join((folder / name).read_bytes() for name in SOURCES))
            .hexdigest()
            .encode()
        ):
            raise Unusable(f"{library.name} is not of this version; install again")
        self.processor: str = processor.decode()
        self._library = keeping
        self._local = threading.local()
        self._shifts: array[int] | None = None
        self._first_shifts: array[int] | None = None  # those that `tensor.c` reads
        self._lock = threading.Lock()
        self._keeping, self._releasing = keeping.kernel_measure, releasing.kernel_measure
        for function in (self._keeping, self._releasing):
            function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
            function.restype = None
        _set_byte_types(keeping)
        _set_parallel(keeping)
        self.direct: Callable[[torch.Tensor, int], Found | None] = _direct(keeping) or (
            lambda tensor, wanted: None
        )
        self._test()

    def measure(
        self, pointer: int, numel: int, code: int, wanted: int, start: int = 0, threads: int = 1
    ) -> list[float]:
        """The numbers of `numel` elements (1 or more) that lie at `pointer` without gaps, in
        logical order.

        code: of their dtype, from `CODES`. wanted: SUMS (min, max, sum, squares, magnitudes,
        nonfinite, zeros: as `measure`), HISTOGRAM (64 counts), SKETCH (64 numbers), added up; they
        are returned in this order. start: flat position of the first element, for the sketch.
        threads: how many may work, which changes no bit of the result.
        """
        try:
            request = self._local.request
        except AttributeError:
            request = self._local.request = _Request()
        if wanted & SKETCH:
            shifts = self._shifts
            last = (start + numel - 1) // PIECE
            if shifts is None or last >= len(shifts):
                shifts = self._more_shifts(last)
            request.position[0], request.position[1] = start, shifts.buffer_info()[0]
        call = self._keeping if numel <= _KEEPS_LOCK else self._releasing
        call(pointer, numel, code + (wanted << 8) + (threads << 16), request.address)
        numbers: list[float] = request.numbers[wanted].tolist()
        return numbers

    def indirect(self, tensor: torch.Tensor, wanted: int) -> Found | None:
        """The numbers of a tensor, as `measure` returns them, with its number of elements, shape
        and dtype; None for one that is not of a CPU's memory as it is, has gaps or another order,
        no elements, or a dtype that is not in `CODES`.
        """
        if not is_plain_memory(tensor):
            return None
        code, numel = CODES.get(tensor.dtype), tensor.numel()
        if (
            code is None
            or not numel
            or not tensor.is_contiguous()
            or not (pointer := tensor.data_ptr())
        ):
            return None
        threads = 1 if numel < _PARALLEL else torch.get_num_threads()
        return (
            self.measure(pointer, numel, code, wanted, 0, threads),
            numel,
            list(tensor.shape),
            _NAMES[tensor.dtype],
        )

    def _more_shifts(self, last: int) -> array[int]:
        """The shifts and signs of the sketch's pieces up to `last` at least; the signs of elements
        with the first ones.
        """
        with self._lock:
            known = self._shifts
            if known is None:
                tables = bits("signs", PIECE), bits("projection", SIZE * FOLD)
                self._library.kernel_set_signs(*(table.translate(_FLIPPED) for table in tables))
                known = array("i")
            if last >= len(known):
                # a new one, for another thread's call may be reading the old one, which that call
                # holds
                numbers = range(len(known), max(last + 1, 2 * len(known), 64))
                known = known + array(
                    "i", [2 * places + (sign > 0) for places, sign in map(shift, numbers)]
                )
            if self._first_shifts is None:
                self._first_shifts = known
                self._library.tensor_set_shifts(ctypes.c_void_p(known.buffer_info()[0]))
            self._shifts = known
            return known

    def _test(self) -> None:
        numbers = [float(number - 20) for number in range(40)]
        count = len(numbers)
        sums = [
            -20.0,
            19.0,
            sum(numbers),
            sum(n * n for n in numbers),
            sum(map(abs, numbers)),
            0.0,
            1.0,
        ]
        counts = [0.0] * BINS
        for number in numbers:
            counts[math.frexp(number)[1] + 41 if number else 0] += 1
        halves = array(
            "H", [struct.unpack("<I", struct.pack("<f", number))[0] >> 16 for number in numbers]
        )
        tests = {
            torch.float32: array("f", numbers),
            torch.float64: array("d", numbers),
            torch.bfloat16: halves,
        }
        tests[torch.int64] = array("q", map(int, numbers))
        for dtype, values in tests.items():
            row = self.measure(values.buffer_info()[0], count, CODES[dtype], SUMS | HISTOGRAM)
            found = self.direct(torch.frombuffer(values, dtype=dtype), SUMS | HISTOGRAM)
            if row != [*sums, *counts] or found not in (None, (row, count, [count], _NAMES[dtype])):
                raise Unusable(f"it computes wrongly for {dtype} ({self.processor})")


def _direct(library: ctypes.PyDLL) -> Callable[[torch.Tensor, int], Found | None] | None:
    """The function that `tensor.c` makes; None where torch (before 2.10) or Python lacks what it
    calls.
    """
    python = ctypes.pythonapi
    try:
        functions = [ctypes.cast(getattr(python, name), ctypes.c_void_p).value for name in _PYTHON]
        python.PyCapsule_GetPointer.restype = ctypes.c_void_p
        python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
        exchange = python.PyCapsule_GetPointer(
            torch.Tensor.__dlpack_c_exchange_api__, b"dlpack_exchange_api"
        )
        objects = (
            None,
            torch.Tensor,
            torch.nn.Parameter,
            torch.Tensor.is_neg,
            count_function_modes,
        )
    except (AttributeError, ValueError):
        return None
    make = library.tensor_measure
    make.restype = ctypes.py_object
    make.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        *(ctypes.py_object for _ in objects),
    ]
    direct: Callable[[torch.Tensor, int], Found | None] | None = make(
        (ctypes.c_void_p * len(functions))(*functions), exchange, _KEEPS_LOCK, *objects
    )
    for dtype, code in CODES.items():
        kind = _KINDS.get(_NAMES[dtype].removeprefix("torch.").rstrip("0123456789"))
        if kind is not None:
            library.tensor_set_dtype(
                code, kind, 8 * dtype.itemsize, ctypes.py_object(_NAMES[dtype])
            )
    return direct


def _set_byte_types(library: ctypes.PyDLL) -> None:
    every_byte = torch.arange(256, dtype=torch.uint8, device="cpu")
    for dtype, code in CODES.items():
        if dtype.itemsize == 1:
            values = every_byte != 0 if dtype is torch.bool else every_byte.view(dtype)
            library.kernel_set_bytes(code, array("f", values.float().tolist()).tobytes())


def _set_parallel(library: ctypes.PyDLL) -> None:
    """Let the kernel use the threads of the OpenMP that torch has loaded; where it has none, one
    thread does the work.
    """
    try:
        torch_itself = ctypes.CDLL(
            str(Path(torch.__file__).with_name("lib") / f"libtorch_cpu{LIBRARY.suffix}")
        )
        function = ctypes.cast(torch_itself.GOMP_parallel, ctypes.c_void_p)
    except (OSError, AttributeError):
        return
    library.kernel_set_parallel(function)


@functools.cache
def _loaded() -> tuple[Kernel | None, str]:
    """The kernel, or None and why."""
    try:
        return Kernel(), ""
    except Unusable as reason:
        return None, str(reason)
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


_chosen = "auto"


def choose(choice: str) -> None:
    """From here on this process measures with the kernel where there is one (`auto`, `native`,
    `triton`), or never (`torch`).
    """
    global _chosen
    _chosen = choice
    if choice == "native" and _loaded()[0] is None:
        say_once(f"OTEL_TORCH_KERNEL='native': statistics are by {describe()}")


def chosen() -> str:
    """What `choose` was told last; `auto` until then."""
    return _chosen


def load() -> Kernel | None:
    """The kernel, loaded once; None where there is none that works, or `torch` was chosen. Never
    raises.
    """
    return None if _chosen == "torch" else _loaded()[0]


def describe() -> str:
    """What measures tensors of a CPU, and why, in a few words: `native (avx512)`, or `torch (no
    compiled kernel: …)`.
    """
    if _chosen == "torch":
        return "torch (as chosen)"
    kernel, reason = _loaded()
    return f"native ({kernel.processor})" if kernel else f"torch (no compiled kernel: {reason})"
