"""Reads the whole tensors of one run, if it kept any (OTEL_TORCH_TENSORS)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otel_torch.parity.call_graph import Parameter, Role
from otel_torch.recording.reader import RecordingError
from otel_torch.recording.tensor_files import TensorFolder, tensor_key

Array = NDArray[Any]

# a tensor with more elements is not analyzed: it would take minutes
MOST_ELEMENTS = 2**26


class StoredTensors:
    """The whole tensors of one run.

    Args:
        folder: The run's folder, or None if it kept no tensors.
        is_given: Whether the user named it, so that a file that cannot be read is an error.
    """

    def __init__(self, folder: TensorFolder | None, is_given: bool = False) -> None:
        self.folder = folder
        self._is_given = is_given

    def of_role(self, role: Role) -> Array | None:
        """Return the tensor of a row, or None if it was not kept."""
        call = role.call
        return self.read(
            call.loop,
            call.step,
            tensor_key(call.model, call.module, role.tensor, call.number, call.phase),
        )

    def of_parameter(self, parameter: Parameter) -> Array | None:
        """Return a parameter or buffer as it was before the first forward, or None."""
        row = parameter.row
        key = tensor_key(
            parameter.model, parameter.module, row["tensor"], row.get("call"), row.get("phase")
        )
        return self.read(row.get("loop"), row.get("step"), key)

    def read(self, loop: int | None, step: int | None, key: str) -> Array | None:
        """Return the tensor with that key, or None if it was not kept."""
        if self.folder is None:
            return None
        try:
            stored = self.folder.find(loop, step, key)
            if stored is None or stored.size > 8 * MOST_ELEMENTS:
                return None
            return stored.read()
        except (RecordingError, ValueError, OSError):
            if self._is_given:
                raise
            return None


def tensors_of(recording: Path, meta: dict[str, Any], folder: Path | None) -> StoredTensors:
    """Return the tensors in a folder that the user named, or where the run put them."""
    return find_tensors(recording, meta) if folder is None else open_tensors(folder, meta)


def find_tensors(recording: Path, meta: dict[str, Any]) -> StoredTensors:
    """Return the tensors that the run of a recording kept, wherever it was started."""
    settings = meta.get("settings")
    setting = settings.get("OTEL_TORCH_TENSORS") if isinstance(settings, dict) else None
    if isinstance(setting, str):
        run = f"{meta.get('run_id')}.rank{meta.get('rank')}"
        for parent in (Path(), recording.parent):
            folder = parent / Path(setting).expanduser() / run
            if folder.is_dir():
                return StoredTensors(_open_quietly(folder))
    return StoredTensors(None)


def open_tensors(folder: Path, meta: dict[str, Any]) -> StoredTensors:
    """Return the tensors in a folder that the user named.

    Raises:
        RecordingError: The folder holds no tensors, or those of several runs.
    """
    run = folder / f"{meta.get('run_id')}.rank{meta.get('rank')}"
    return StoredTensors(TensorFolder(run if run.is_dir() else folder, meta.get("rank")), True)


def _open_quietly(folder: Path) -> TensorFolder | None:
    """Return a folder that nobody asked for, or None if it cannot be read."""
    try:
        return TensorFolder(folder)
    except RecordingError:
        return None


def as_floats(array: Array) -> Array:
    """Return float64, or complex128 of complex numbers; a copy that may be changed."""
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)
