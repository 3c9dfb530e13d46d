"""Tensors that a cache has no memory for, in a folder that goes with it."""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor


@dataclass(frozen=True)
class OnDisk:
    """Stands for a tensor; `load` reads it. owner: keeps the folder alive."""

    path: Path
    shape: tuple[int, ...]
    dtype: str
    owner: Spill

    def load(self) -> Tensor:
        """The tensor, read anew from the file."""
        from safetensors.torch import load_file

        return load_file(self.path)["tensor"]


class Spill:
    """A temporary folder of tensors, removed with the last that refers to it. Raises
    ModuleNotFoundError without safetensors.
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

    def put(self, tensor: Tensor) -> OnDisk:
        """Write a tensor; raises OSError where the disk takes no more."""
        from safetensors.torch import save_file

        path = Path(self._folder.name, f"{next(self._numbers)}.safetensors")
        save_file({"tensor": tensor.detach().contiguous()}, path)
        return OnDisk(path, tuple(tensor.shape), str(tensor.dtype), self)
