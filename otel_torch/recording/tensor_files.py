"""Finds whole tensors on disk by the record that they belong to, and reads them without torch.

OTEL_TORCH_TENSORS writes one safetensors file a step. Their numbers may be of types that NumPy
lacks (bfloat16, eight bits), which are widened here.
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

# safetensors' names of types, and NumPy's of the same bytes
_TYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?", "C64": "<c8", "C128": "<c16",
}  # fmt: skip
_FILE = re.compile(r"loop(-?\d+)\.step(-?\d+)(?:\.(\d+))?\.safetensors")
_HEADER_LIMIT = 100_000_000  # what safetensors itself allows


def tensor_key(model: str, module: str, tensor: str, call: int | None, phase: str | None) -> str:
    """A tensor's name in the file of its loop and step; None as in recordings that say neither.

    >>> tensor_key("Net", "blocks.0", "out[1]", 1, "forward")
    'Net/blocks.0/out[1]/call1/forward'
    """
    return f"{model}/{module}/{tensor}/call{call or 0}/{phase or 'forward'}"


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor lies. kind: its type as safetensors calls it. start, size: of its bytes in the
    file.
    """

    path: Path
    key: str
    kind: str
    shape: tuple[int, ...]
    start: int
    size: int

    def read(self) -> NDArray[Any] | None:
        """Its numbers, bfloat16 as float32; None for a type that cannot be read."""
        import numpy as np

        if self.kind not in _TYPES or math.prod(self.shape) == 0:
            return np.zeros(self.shape) if self.kind in _TYPES else None
        with open(self.path, "rb") as file:
            file.seek(self.start)
            numbers = np.frombuffer(file.read(self.size), dtype=_TYPES[self.kind]).reshape(
                self.shape
            )
        if self.kind == "BF16":
            return (numbers.astype(np.uint32) << 16).view(np.float32)
        return numbers


class TensorFolder:
    """The whole tensors of one process: a folder `<run>.rank<rank>`, or the one that holds just one
    such folder.

    rank: which of several ranks is meant, None where there is one. Raises RecordingError, of one
    line, for any other folder.
    """

    def __init__(self, folder: str | Path, rank: int | None = None) -> None:
        self.folder = _folder_of_files(Path(folder).expanduser(), rank)
        self._files: dict[tuple[int, int], list[Path]] = {}
        for _, loop, step, path in sorted(_numbered(self.folder)):
            self._files.setdefault((loop, step), []).append(path)
        self._headers: dict[Path, dict[str, Stored]] = {}

    def has(self, loop: int | None, step: int | None) -> bool:
        """Whether any tensor of that step was kept."""
        return (loop or 0, step or 0) in self._files

    def find(self, loop: int | None, step: int | None, key: str) -> Stored | None:
        """The tensor of that key, None where it was not kept. Raises RecordingError for a file that
        is broken.
        """
        for path in self._files.get((loop or 0, step or 0), ()):
            header = self._headers.get(path)
            if header is None:
                if (
                    len(self._headers) > 8
                ):  # of a long run only the newest steps' tables are kept in memory
                    del self._headers[next(iter(self._headers))]
                header = self._headers[path] = {one.key: one for one in _read_header(path)}
            if key in header:
                return header[key]
        return None


def _numbered(folder: Path) -> Iterator[tuple[int, int, int, Path]]:
    """(which of several of the same step, loop, step, file)."""
    try:
        for path in folder.iterdir():
            if match := _FILE.fullmatch(path.name):
                yield int(match[3] or 0), int(match[1]), int(match[2]), path
    except OSError as error:
        raise RecordingError(f"{folder}: {error.strerror}") from None


def _folder_of_files(folder: Path, rank: int | None) -> Path:
    if any(_numbered(folder)):
        return folder
    runs = sorted(path for path in folder.iterdir() if path.is_dir() and any(_numbered(path)))
    if rank is not None and len(runs) > 1:
        runs = [path for path in runs if re.search(rf"\.rank{rank}(\.|$)", path.name)] or runs
    if not runs:
        raise RecordingError(
            f"{folder}: holds no whole tensors; record them with OTEL_TORCH_TENSORS={folder}"
        )
    if len(runs) > 1:
        raise RecordingError(
            f"{folder}: holds the tensors of several processes ({', '.join(p.name for p in runs)}); name one"
        )
    return runs[0]


def _read_header(path: Path) -> Iterator[Stored]:
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _HEADER_LIMIT:
                raise ValueError("its header is too long")
            header = json.loads(file.read(length))
        for key, entry in header.items():
            if key != "__metadata__":
                start, stop = entry["data_offsets"]
                yield Stored(
                    path,
                    key,
                    entry["dtype"],
                    tuple(entry["shape"]),
                    8 + length + start,
                    stop - start,
                )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordingError(
            f"{path}: not readable as safetensors ({' '.join(str(error).split())})"
        ) from None
