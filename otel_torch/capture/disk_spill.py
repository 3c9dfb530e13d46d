"""Keep tensors on disk once a cache has used up its memory budget."""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor


@dataclass(frozen=True)
class SpilledTensor:
    """A tensor in a file; `load` reads it. `spill` keeps the folder alive."""

    path: Path
    shape: tuple[int, ...]
    dtype: str
    spill: DiskSpill

    def load(self) -> Tensor:
        """Read the tensor from its file; every call returns a new one."""
        from safetensors.torch import load_file

        return load_file(self.path)["tensor"]


class DiskSpill:
    """A temporary folder of tensors, deleted with the last object that refers to it.

    Raises:
        ModuleNotFoundError: safetensors is not installed.
    """

    def __init__(self) -> None:
        try:
            import safetensors.torch  # noqa: F401
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "overflow='disk' needs safetensors: pip install 'otel-torch[tensors]'"
            ) from None
        self._folder = tempfile.TemporaryDirectory(prefix="otel_torch-cache-")
        self._numbers = itertools.count()

    def save(self, tensor: Tensor) -> SpilledTensor:
        """Write a tensor to a new file. Raises OSError when the disk is full."""
        from safetensors.torch import save_file

        path = Path(self._folder.name, f"{next(self._numbers)}.safetensors")
        save_file({"tensor": tensor.detach().contiguous()}, path)
        return SpilledTensor(path, tuple(tensor.shape), str(tensor.dtype), self)
