"""Reads single arrays of .npy, .npz and safetensors files as tensors.

Nothing is unpickled. What a file says of itself is checked before memory is allocated: an archive
of a few kilobytes can claim to hold terabytes.
"""

from __future__ import annotations

import difflib
import math
import os
import tokenize
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.lib import format as npy

from otel_torch.importing.manifest import ManifestError
from otel_torch.recording.input_file import require_regular_file
from otel_torch.recording.reader import RecordingError
from otel_torch.recording.tensor_files import read_header

# numpy's kind and size of an element -> torch's dtype
_NUMPY_DTYPES = {
    "b1": torch.bool, "u1": torch.uint8, "u2": torch.uint16, "u4": torch.uint32, "u8": torch.uint64,
    "i1": torch.int8, "i2": torch.int16, "i4": torch.int32, "i8": torch.int64,
    "f2": torch.float16, "f4": torch.float32, "f8": torch.float64,
    "c8": torch.complex64, "c16": torch.complex128,
}  # fmt: skip
# safetensors' names
_SAFETENSORS_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32,
    "F64": torch.float64, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
# what a manifest may call the type of an array
_GIVEN_DTYPES = {
    name: dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and dtype in {
        *_NUMPY_DTYPES.values(), *_SAFETENSORS_DTYPES.values()
    }
}  # fmt: skip
_NPY_MAGIC, ZIP_MAGIC = b"\x93NUMPY", b"PK\x03\x04"
_MOST_DIMENSIONS = 64
# what a damaged file raises: encrypted, compressed in an unknown way, cut off
_DAMAGES = (
    ValueError, EOFError, RuntimeError, NotImplementedError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """How an array is stored.

    Attributes:
        dtype: None for elements without a type, which the manifest has to give.
        is_fortran: The first dimension varies fastest.
        is_swapped: The bytes of an element are in the other order than this machine's.
    """

    dtype: torch.dtype | None
    item_size: int
    shape: tuple[int, ...]
    is_fortran: bool = False
    is_swapped: bool = False

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * self.item_size

    def typed(self, name: str | None) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtype of the bytes, and that of the program, which a manifest may give.

        Raises:
            ValueError: The name is unknown, or there is none and the elements have no type.
        """
        if name is None:
            if self.dtype is None:
                raise ValueError(
                    f"its elements of {self.item_size} bytes have no type, as NumPy lacks bfloat16 "
                    'and float8; give it in the manifest: "dtype": "bfloat16"'
                )
            return self.dtype, self.dtype
        given = _GIVEN_DTYPES.get(name.removeprefix("torch."))
        if given is None:
            raise ValueError(f"unknown dtype {name!r}; choose from {', '.join(_GIVEN_DTYPES)}")
        if self.dtype is not None and not _is_raw(self.dtype, given):
            return self.dtype, given
        if given.itemsize != self.item_size:
            raise ValueError(f"its elements have {self.item_size} bytes, those of {name} do not")
        return given, given


def _is_raw(stored: torch.dtype, given: torch.dtype) -> bool:
    """Return whether unsigned integers are the bits of floats."""
    is_unsigned = stored in (torch.uint8, torch.uint16)
    return is_unsigned and given.is_floating_point and stored.itemsize == given.itemsize


class ArrayFile(ABC):
    """A file with arrays."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def open(self, key: str) -> Iterator[tuple[ArrayLayout, IO[bytes]]]:
        """Open an array: how it is stored, and its elements, which nothing has read yet.

        Raises:
            ManifestError: There is no such array, or it is damaged.
            OSError: The file cannot be read.
        """
        try:
            with self._open(key) as (layout, file):
                if layout.size > _most_bytes():
                    raise ValueError(f"its {layout.size} bytes do not fit into memory")
                yield layout, file
        except ManifestError:
            raise
        except _DAMAGES as error:
            text = " ".join(str(error).split()) or type(error).__name__
            raise ManifestError(f"{self.path}: {key!r} cannot be read: {text}") from None

    @abstractmethod
    def _open(self, key: str) -> AbstractContextManager[tuple[ArrayLayout, IO[bytes]]]:
        """Open an array; errors may be any of `_DAMAGES`."""

    def _missing(self, key: str, keys: Collection[str]) -> ManifestError:
        near = difflib.get_close_matches(key, keys, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {len(keys)} others"
        return ManifestError(f"{self.path}: has no {key!r}; {hint}")


def open_arrays(path: Path) -> ArrayFile:
    """Open a file of arrays, by its content and not by its name.

    Raises:
        ManifestError: It holds no arrays.
        OSError: It cannot be read.
    """
    require_regular_file(path)
    with open(path, "rb") as file:
        magic = file.read(len(_NPY_MAGIC))
    if magic == _NPY_MAGIC:
        return _NpyFile(path)
    return NpzFile(path) if magic.startswith(ZIP_MAGIC) else _SafetensorsFile(path)


def check_array(file: ArrayFile, key: str, dtype: str | None) -> int:
    """Return the number of dimensions of an array that could be read, by its header alone.

    Raises:
        ManifestError, OSError: It cannot.
    """
    with file.open(key) as (layout, _):
        layout.typed(dtype)
        return len(layout.shape)


def read_tensor(file: ArrayFile, key: str, dtype: str | None) -> torch.Tensor:
    """Return an array as a tensor on the CPU.

    Args:
        dtype: What the program computed in, if the manifest says so.

    Raises:
        ManifestError, OSError: It cannot be read.
    """
    with file.open(key) as (layout, elements):
        stored, given = layout.typed(dtype)
        buffer = bytearray(layout.size)
        _fill(elements, memoryview(buffer))
    if layout.is_swapped:
        part = layout.item_size // 2 if stored.is_complex else layout.item_size
        buffer = bytearray(np.frombuffer(buffer, f"u{part}").byteswap().tobytes())
    shape = layout.shape[::-1] if layout.is_fortran else layout.shape
    tensor = torch.empty(shape, dtype=stored)
    if buffer:
        tensor = torch.frombuffer(buffer, dtype=stored).reshape(shape)
    if layout.is_fortran:
        tensor = tensor.permute(*reversed(range(tensor.dim())))
    return tensor.to(given)


def _fill(file: IO[bytes], buffer: memoryview) -> None:
    """Read as many bytes as a buffer has."""
    filled = 0
    while filled < len(buffer):
        count = file.readinto(buffer[filled:])  # type: ignore[attr-defined]
        if not count:
            raise ValueError(f"it ends after {filled} of {len(buffer)} bytes")
        filled += count


def _most_bytes() -> int:
    """Return the size of the largest array that may be read: half of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


# -- NumPy


def _read_npy_header(file: IO[bytes]) -> ArrayLayout:
    """Read the header of a .npy file; the elements follow.

    Raises:
        ValueError: It is damaged, or the elements are no numbers.
    """
    readers: dict[Any, Callable[..., Any]] = {
        (1, 0): npy.read_array_header_1_0,
        (2, 0): npy.read_array_header_2_0,
    }
    version = npy.read_magic(file)
    if version not in readers:
        raise ValueError(f"version {version} of the .npy format holds no plain array")
    try:
        shape, is_fortran, dtype = readers[version](file)
    except (SyntaxError, TypeError, tokenize.TokenError, RecursionError, MemoryError) as error:
        raise ValueError(f"its header is damaged ({type(error).__name__})") from None
    if dtype.hasobject:
        raise ValueError("it holds pickled Python objects, which are not loaded; dump numbers")
    if dtype.kind == "V" and dtype.names is None and dtype.subdtype is None:
        known = None  # what NumPy writes for types of other libraries
    elif dtype.str[1:] in _NUMPY_DTYPES:
        known = _NUMPY_DTYPES[dtype.str[1:]]
    else:
        raise ValueError(f"its elements are of type {dtype}, which are no numbers of torch")
    if min(shape, default=0) < 0 or len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"its header is damaged (shape {shape})")
    is_swapped = not dtype.isnative
    return ArrayLayout(known, dtype.itemsize, tuple(shape), is_fortran, is_swapped)


class _NpyFile(ArrayFile):
    """A file of one array, which has no key."""

    @contextmanager
    def _open(self, key: str) -> Iterator[tuple[ArrayLayout, IO[bytes]]]:
        with open(self.path, "rb") as file:
            layout = _read_npy_header(file)
            _check_length(layout, os.fstat(file.fileno()).st_size - file.tell())
            yield layout, file


class NpzFile(ArrayFile):
    """An archive of .npy files.

    Attributes:
        keys: The names of its arrays, in the order in which they were written.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            self._zip = zipfile.ZipFile(path)
        except _DAMAGES as error:
            raise ManifestError(f"{path}: is no complete .npz file ({error})") from None
        self.keys = [name.removesuffix(".npy") for name in self._zip.namelist()]

    @contextmanager
    def _open(self, key: str) -> Iterator[tuple[ArrayLayout, IO[bytes]]]:
        names = {key, f"{key}.npy"} & set(self._zip.namelist())
        if not names:
            raise self._missing(key, self.keys)
        info = self._zip.getinfo(names.pop())
        with self._zip.open(info) as file:
            layout = _read_npy_header(file)
            _check_length(layout, info.file_size - file.tell())
            yield layout, file


# -- safetensors


class _SafetensorsFile(ArrayFile):
    """A safetensors file: a header that lists all arrays, then their elements."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            self._arrays = {stored.key: stored for stored in read_header(path)}
        except RecordingError as error:
            reason = str(error).removeprefix(f"{path}: ")
            raise ManifestError(f"{path}: is neither .npy nor .npz, and {reason}") from None

    @contextmanager
    def _open(self, key: str) -> Iterator[tuple[ArrayLayout, IO[bytes]]]:
        stored = self._arrays.get(key)
        if stored is None:
            raise self._missing(key, self._arrays)
        dtype = _SAFETENSORS_DTYPES.get(stored.dtype)
        if dtype is None:
            raise ValueError(f"unknown dtype {stored.dtype}")
        layout = ArrayLayout(dtype, dtype.itemsize, stored.shape)
        with open(self.path, "rb") as file:
            available = os.fstat(file.fileno()).st_size - stored.start
            _check_length(layout, min(stored.size, available))
            file.seek(stored.start)
            yield layout, file


def _check_length(layout: ArrayLayout, size: int) -> None:
    """Raise ValueError if the elements take more than the bytes that are there."""
    if layout.size > size:
        raise ValueError(f"shape {list(layout.shape)} needs {layout.size} bytes, it has {size}")
