"""Finds whole tensors on disk by their record, and reads them without torch.

OTEL_TORCH_TENSORS writes one safetensors file a step: `<run>.rank<rank>/loop0.step3.safetensors`,
with keys such as `Net/blocks.0/out/call0/forward`. A type that NumPy lacks (bfloat16) is widened.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_torch.recording.reader import RecordingError

if TYPE_CHECKING:
    from numpy.typing import NDArray

# safetensors dtype -> NumPy dtype of the same bytes
_NUMPY_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4",
    "I16": "<i2", "I8": "i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
    "C64": "<c8", "C128": "<c16",
}  # fmt: skip
_FILE_NAME = re.compile(r"loop(-?\d+)\.step(-?\d+)(?:\.(\d+))?\.safetensors")
_MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors itself
_CACHED_HEADERS = 8


def tensor_key(model: str, module: str, tensor: str, call: int | None, phase: str | None) -> str:
    """Return the key of a tensor in the file of its loop and step.

    A call or phase of None counts as 0 and `forward`: older recordings hold neither.

    >>> tensor_key("Net", "blocks.0", "out[1]", 1, "forward")
    'Net/blocks.0/out[1]/call1/forward'
    """
    return f"{model}/{module}/{tensor}/call{call or 0}/{phase or 'forward'}"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor is on disk.

    Attributes:
        dtype: The name of the dtype in safetensors.
        start: Offset of the first byte in the file.
        size: In bytes.
    """

    path: Path
    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int

    def read(self) -> NDArray[Any] | None:
        """Return the elements, bfloat16 as float32; None for a dtype that cannot be read."""
        import numpy as np

        if self.dtype not in _NUMPY_DTYPES:
            return None
        if math.prod(self.shape) == 0:
            return np.zeros(self.shape)
        with open(self.path, "rb") as file:
            file.seek(self.start)
            content = file.read(self.size)
        array = np.frombuffer(content, dtype=_NUMPY_DTYPES[self.dtype]).reshape(self.shape)
        if self.dtype == "BF16":
            return (array.astype(np.uint32) << 16).view(np.float32)
        return array


class TensorFolder:
    """The whole tensors of one process.

    Args:
        folder: A folder `<run>.rank<rank>`, or one that contains exactly one such folder.
        rank: Which rank to choose if there are several.

    Raises:
        RecordingError: For any other folder; the message is one line.
    """

    def __init__(self, folder: str | Path, rank: int | None = None) -> None:
        self.folder = _find_run_folder(Path(folder).expanduser(), rank)
        self._files: dict[tuple[int, int], list[Path]] = {}
        for _, loop, step, path in sorted(_tensor_files(self.folder)):
            self._files.setdefault((loop, step), []).append(path)
        self._headers: dict[Path, dict[str, StoredTensor]] = {}

    def has(self, loop: int | None, step: int | None) -> bool:
        return (loop or 0, step or 0) in self._files

    def find(self, loop: int | None, step: int | None, key: str) -> StoredTensor | None:
        """Return the tensor with that key, or None if it was not stored.

        Raises:
            RecordingError: If a file of the step is corrupt.
        """
        for path in self._files.get((loop or 0, step or 0), ()):
            header = self._header(path)
            if key in header:
                return header[key]
        return None

    def _header(self, path: Path) -> dict[str, StoredTensor]:
        header = self._headers.get(path)
        if header is None:
            if len(self._headers) > _CACHED_HEADERS:  # a long run: drop the oldest
                del self._headers[next(iter(self._headers))]
            header = self._headers[path] = {stored.key: stored for stored in read_header(path)}
        return header


def _tensor_files(folder: Path) -> Iterator[tuple[int, int, int, Path]]:
    """Yield (index among the files of the same step, loop, step, file)."""
    try:
        for path in folder.iterdir():
            if match := _FILE_NAME.fullmatch(path.name):
                yield int(match[3] or 0), int(match[1]), int(match[2]), path
    except OSError as error:
        raise RecordingError(f"{folder}: {error.strerror}") from None


def _find_run_folder(folder: Path, rank: int | None) -> Path:
    if any(_tensor_files(folder)):
        return folder
    runs = sorted(path for path in folder.iterdir() if path.is_dir() and any(_tensor_files(path)))
    if rank is not None and len(runs) > 1:
        of_rank = [path for path in runs if re.search(rf"\.rank{rank}(\.|$)", path.name)]
        runs = of_rank or runs
    if not runs:
        raise RecordingError(
            f"{folder}: holds no whole tensors; record them with OTEL_TORCH_TENSORS={folder}"
        )
    if len(runs) > 1:
        names = ", ".join(path.name for path in runs)
        raise RecordingError(
            f"{folder}: holds the tensors of several processes ({names}); name one"
        )
    return runs[0]


def read_header(path: Path) -> Iterator[StoredTensor]:
    """Yield the tensors of a safetensors file by its header: eight bytes of length, then JSON with
    dtype, shape and offsets by key.

    Raises:
        RecordingError: The file is none.
    """
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _MAX_HEADER_BYTES:
                raise ValueError("its header is too long")
            header = json.loads(file.read(length))
        for key, entry in header.items():
            if key != "__metadata__":
                start, stop = entry["data_offsets"]
                shape = tuple(entry["shape"])
                if min(start, stop - start, *shape) < 0:
                    raise ValueError(f"{key!r} has a negative size or offset")
                offset = 8 + length + start
                yield StoredTensor(path, key, entry["dtype"], shape, offset, stop - start)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordingError(
            f"{path}: not readable as safetensors ({' '.join(str(error).split())})"
        ) from None
