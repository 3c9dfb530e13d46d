"""Keeps single values of a recorded graph, and puts others in their place.

An answer is tried: the port runs again with the reference's value where a fault ends. Both sides of
that are folders with one file for each value, named by where the value stands in its graph. The
program's environment need not hold the package safetensors, so its format is written here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from otel_torch import torch_private
from otel_torch.recording.graph_values import (
    AXES,
    PLACES,
    WANTED,
    ValueKey,
    file_name,
    read_header,
    read_wanted,
    write_header,
)
from otel_torch.sources.interventions.conform_tensor import CannotConform, conform

_KEY = "value"
# up to which relative error numbers are the same: far above rounding, and below any factor that is
# meant
_SAME = 1e-3
# dtype -> its name in safetensors
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.bool: "BOOL", torch.complex64: "C64", torch.complex128: "C128",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip


class GraphValues:
    """Keeps and puts values of the graph that this process records.

    Args:
        keep: A folder with a list of values, which receives them.
        put_from: A folder with values to put in place.
        rank: Of this process.

    Attributes:
        put: By file, None for a value that was put, else the reason why it was not.
        not_kept: By file, why a value that was wanted could not be kept.
        differed: By file, where whole numbers first differed from those that were put in their
            place: `count` of those that did, `index`, `reference` and `port` of the first.
        scaled: By file, how many times the other numbers a value held, if it differed from them by
            a factor alone.
    """

    def __init__(self, keep: str | None, put_from: str | None, rank: int) -> None:
        self._rank = rank
        self._keep = None if keep is None else Path(keep)
        self._put_from = None if put_from is None else Path(put_from)
        self._wanted = frozenset() if self._keep is None else read_wanted(self._keep / WANTED)
        self._given = frozenset(
            () if self._put_from is None else (path.name for path in self._put_from.iterdir())
        )
        self.put: dict[str, str | None] = {}
        self.not_kept: dict[str, str] = {}
        self.differed: dict[str, dict[str, Any]] = {}
        self.scaled: dict[str, float] = {}

    def meet(self, loop: int, step: int, label: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Keep a value if it is wanted, and put another in its place if one is given.

        Returns:
            What the tensor held, if something else was put there.
        """
        name = file_name(ValueKey(loop, step, label), self._rank)
        if self._keep is not None and name in self._wanted:
            try:
                self._save(self._keep / name, tensor)
            except Exception as error:  # of no dense dtype, or the disk is full: the graph goes on
                self.not_kept[name] = _first_line(error)
        if self._put_from is None or name not in self._given:
            return None
        own = _copy(tensor)
        reason = self.put[name] = self._replace(self._put_from / name, tensor)
        return own if reason is None else None

    @torch_private.unobserved
    def _save(self, path: Path, tensor: torch.Tensor) -> None:
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"{tensor.dtype} has no name in safetensors")
        tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        entry = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [0, len(content)],
        }
        with path.open("wb") as file:
            write_header(file, {_KEY: entry})
            file.write(content)

    @torch_private.unobserved
    def _replace(self, path: Path, tensor: torch.Tensor) -> str | None:
        """Write a stored value into a tensor; return the reason if that is not possible."""
        try:
            with torch.no_grad():
                stored, axes, places = _load(path)
                if places is None:
                    value = conform(stored, tensor, axes)
                else:
                    value = _with_rows(tensor, stored, places)
                if difference := _first_difference(value, tensor):
                    self.differed[path.name] = difference
                if factor := _factor(value, tensor):
                    self.scaled[path.name] = factor
                _write(tensor, value)
        except CannotConform as error:
            return f"{error} does not fit"
        except (RuntimeError, NotImplementedError) as error:
            return _first_line(error)
        return None


@torch_private.unobserved
def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _write(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value into a tensor, whose elements may be the same memory along some axes.

    Raises:
        CannotConform: The value is not the same along such an axis.
    """
    for axis, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[axis] > 1:
            first = value.narrow(axis, 0, 1)
            if not torch.equal(value, first.expand_as(value)):
                raise CannotConform("a value that repeats along no axis")
            tensor, value = tensor.narrow(axis, 0, 1), first
    tensor.copy_(value)


def _first_difference(value: torch.Tensor, tensor: torch.Tensor) -> dict[str, Any] | None:
    """Return where two tensors of whole numbers differ first; None for others and equal ones."""
    if tensor.is_floating_point() or tensor.is_complex() or value.shape != tensor.shape:
        return None
    indices = (value != tensor).nonzero()
    if not len(indices):
        return None
    index = tuple(indices[0].tolist())
    return {
        "count": len(indices),
        "index": list(index),
        "reference": value[index].item(),
        "port": tensor[index].item(),
    }


def _factor(value: torch.Tensor, tensor: torch.Tensor) -> float | None:
    """Return by what factor alone a tensor differs from a value; None if by anything else."""
    if not tensor.is_floating_point() or value.shape != tensor.shape:
        return None
    reference, port = value.double().flatten(), tensor.double().flatten()
    square = float(reference @ reference)
    factor = float(reference @ port) / square if square > 0 else 0.0
    rest = float((port - factor * reference).norm())
    is_scaled = rest <= _SAME * abs(factor) * square**0.5 and abs(factor - 1) > _SAME
    return factor if is_scaled else None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _with_rows(tensor: torch.Tensor, rows: torch.Tensor, places: list[int]) -> torch.Tensor:
    """Return a copy of a tensor with other rows along its last axis.

    Raises:
        CannotConform: The rows are of another length.
    """
    if rows.shape[-1] != tensor.shape[-1]:
        raise CannotConform("shape")
    value = tensor.detach().clone(memory_format=torch.contiguous_format)
    value.view(-1, value.shape[-1])[places] = rows.to(device=value.device, dtype=value.dtype)
    return value


def _load(path: Path) -> tuple[torch.Tensor, tuple[int, int] | None, list[int] | None]:
    """Return a stored value, an axis of it with the same one of what it replaces, if known, and
    which rows of that are replaced, if not all.
    """
    with path.open("rb") as file:
        header = read_header(file)
        content = bytearray(file.read())
    entry, metadata = header[_KEY], header.get("__metadata__", {})
    axes, places = (json.loads(metadata.get(name, "null")) for name in (AXES, PLACES))
    dtype = next(dtype for dtype, name in _DTYPES.items() if name == entry["dtype"])
    if not content:
        return torch.empty(entry["shape"], dtype=dtype), axes, places
    return torch.frombuffer(content, dtype=dtype).reshape(entry["shape"]), axes, places
