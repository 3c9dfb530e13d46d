"""Say which ranks' parts are wrong, and where, by whole tensors that both programs have kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from otel_torch.parity.diagnosis.stored_tensors import Array, as_floats, tensors_of
from otel_torch.parity.finding import Finding
from otel_torch.parity.layouts.wrong_places import UNKNOWN_RANK
from otel_torch.parity.sides import Sides
from otel_torch.recording.metadata import read_metadata
from otel_torch.recording.tensor_files import tensor_key


def with_wrong_positions(
    finding: Finding, reference: Path, ranks: Mapping[int, Path], folders: Sides[Path] | None
) -> Finding:
    """Return a finding with the ranks that are wrong, and where, if it does not say so.

    Args:
        folders: Where the whole tensors are; None for where the runs put them.
    """
    if finding.rank is not None or UNKNOWN_RANK not in finding.explanation:
        return finding
    whole = _read(reference, folders and folders.reference, finding, is_port=False)
    parts = [
        _read(path, folders and folders.port, finding, is_port=True) for path in ranks.values()
    ]
    known = [part for part in parts if part is not None]
    if whole is None or len(known) != len(parts) or finding.floor is None:
        return finding
    axis = _axis(whole, known)
    if axis is None:
        return finding
    wrong = _wrong_positions(whole, known, axis, finding.floor)
    if not wrong:
        return finding
    names = list(ranks)
    clauses = [
        f"rank {names[index]} {_where(positions, known[index].shape[axis])}"
        for index, positions in wrong.items()
    ]
    sentence = f"Along dimension {axis}, {', and '.join(clauses)}."
    explanation = finding.explanation.replace(UNKNOWN_RANK, sentence)
    return replace(finding, rank=names[min(wrong)], explanation=explanation)


def _read(recording: Path, folder: Path | None, finding: Finding, *, is_port: bool) -> Array | None:
    names = ("model", "module", "tensor", "call", "loop", "step")
    prefix = "port_" if is_port else ""
    model, module, tensor, call, loop, step = (getattr(finding, prefix + name) for name in names)
    if model is None or module is None or tensor is None:
        return None
    tensors = tensors_of(recording, read_metadata(recording), folder)
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
