"""Say which ranks' parts are wrong, and where, by whole tensors that both programs have kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from otel_torch.parity.diagnosis.stored_tensors import (
    Array,
    StoredTensors,
    as_floats,
    find_tensors,
    open_tensors,
)
from otel_torch.parity.finding import Finding, Report
from otel_torch.parity.layouts.wrong_places import UNKNOWN_RANK
from otel_torch.parity.sides import Sides
from otel_torch.recording.metadata import read_metadata
from otel_torch.recording.tensor_files import tensor_key


def find_wrong_parts(
    report: Report, reference: Path, ranks: Mapping[int, Path], folders: Sides[Path] | None
) -> None:
    """Add to the first finding which ranks are wrong, and where, if it does not say so.

    Args:
        folders: Where the whole tensors are; None for where the runs put them.
    """
    first = report.first
    if first is None or first.rank is not None or UNKNOWN_RANK not in first.explanation:
        return
    whole = _read(_tensors_of(reference, folders and folders.reference), first, is_port=False)
    stored = (_tensors_of(path, folders and folders.port) for path in ranks.values())
    parts = [_read(tensors, first, is_port=True) for tensors in stored]
    known = [part for part in parts if part is not None]
    if whole is None or len(known) != len(parts) or first.floor is None:
        return
    axis = _axis(whole, known)
    wrong = {} if axis is None else _wrong_positions(whole, known, axis, first.floor)
    if not wrong:
        return
    names = list(ranks)
    clauses = [
        f"rank {names[index]} {_where(positions, known[index].shape[axis or 0])}"
        for index, positions in wrong.items()
    ]
    found = replace(
        first,
        rank=names[min(wrong)],
        explanation=first.explanation.replace(
            UNKNOWN_RANK, f"Along dimension {axis}, {', and '.join(clauses)}."
        ),
    )
    report.introduced = [found if own is first else own for own in report.introduced]
    report.first = found


def _tensors_of(recording: Path, folder: Path | None) -> StoredTensors:
    meta = read_metadata(recording)
    return find_tensors(recording, meta) if folder is None else open_tensors(folder, meta)


def _read(tensors: StoredTensors, finding: Finding, *, is_port: bool) -> Array | None:
    names = ("model", "module", "tensor", "call", "loop", "step")
    prefix = "port_" if is_port else ""
    model, module, tensor, call, loop, step = (getattr(finding, prefix + name) for name in names)
    if model is None or module is None or tensor is None:
        return None
    array = tensors.read(loop, step, tensor_key(model, module, tensor, call, finding.phase))
    return None if array is None else as_floats(array)


def _axis(whole: Array, parts: Sequence[Array]) -> int | None:
    """Return the axis along which the parts make up the whole, the last one padded at its end.

    >>> _axis(np.zeros((2, 5)), [np.zeros((2, 3)), np.zeros((2, 3))])
    1
    """
    if any(part.ndim != whole.ndim for part in parts):
        return None
    sizes = [[part.shape[axis] for part in parts] for axis in range(whole.ndim)]
    uneven = [
        axis for axis, size in enumerate(whole.shape) if any(own != size for own in sizes[axis])
    ]
    if len(uneven) != 1:
        return None
    (axis,) = uneven
    padding = sum(sizes[axis]) - whole.shape[axis]
    return axis if 0 <= padding < sizes[axis][-1] else None


def _wrong_positions(
    whole: Array, parts: Sequence[Array], axis: int, limit: float
) -> dict[int, list[int]]:
    """Return the wrong positions along the axis by the index of each wrong part.

    >>> whole = np.arange(8.0).reshape(4, 2)
    >>> _wrong_positions(whole, [whole[:2], whole[2:] + [[9], [0]]], 0, 1e-6)
    {1: [0]}
    """
    most, begin = limit * float(np.linalg.norm(whole)), 0
    wrong: dict[int, list[int]] = {}
    for index, part in enumerate(parts):
        end = min(begin + part.shape[axis], whole.shape[axis])
        right = np.moveaxis(whole, axis, 0)[begin:end]
        own = np.moveaxis(part, axis, 0)[: end - begin]
        errors = np.linalg.norm((own - right).reshape(end - begin, -1), axis=1)
        if positions := np.flatnonzero(errors > most).tolist():
            wrong[index] = positions
        begin = end
    return wrong


def _where(positions: Sequence[int], size: int) -> str:
    """Return where a part is wrong in words.

    >>> _where([3], 4), _where([0, 1, 2, 3], 4)
    ('is wrong at index 3 of 0 to 3', 'is wrong everywhere')
    """
    if len(positions) == size:
        return "is wrong everywhere"
    shown = ", ".join(map(str, positions[:4])) + (", …" if len(positions) > 4 else "")
    return f"is wrong at index {shown} of 0 to {size - 1}"
