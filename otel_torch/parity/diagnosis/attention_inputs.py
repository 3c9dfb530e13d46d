"""Finds the queries, keys and values that went into an attention, and its rotary tables."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otel_torch.parity.call_graph import ModuleCall, Role
from otel_torch.parity.diagnosis.clues import Clues
from otel_torch.parity.diagnosis.stored_tensors import StoredTensors

Array = NDArray[Any]

# squares of a recorded cosine and sine add up to 1 within this, also in bf16
_ONE = 1e-2


@dataclass(frozen=True)
class AttentionInputs:
    """The tensors before the attention, of the first batch entry, and rotary tables if recorded.

    q, k, v: shape (tokens, channels). tables: pairs of cos and sin, shape (tokens, head size).
    """

    q: Array
    k: Array
    v: Array
    tables: tuple[tuple[Array, Array], ...]


def possible_inputs(
    clues: Clues, tensors: StoredTensors, shape: tuple[int, ...]
) -> Iterator[AttentionInputs]:
    """Yield queries, keys and values among the tensors of the same module before this one."""
    assert clues.role is not None
    role = clues.role
    tokens = shape[0]
    call = role.call
    before = _siblings_before(call, role.time) if role.side == "input" else []
    if not before and role.side == "output":
        before = [child for inner in call.children for child in inner.outputs]
        before.sort(key=lambda output: output.time)
        before = [output for output in before if output.time < role.time]
    given = _latest_versions(before)
    flat = (_flat(tensors.of_role(output), tokens) for output in given)
    arrays = [array for array in flat if array is not None]
    tables = _rotary_tables(clues, tensors, tokens)
    for array in arrays:  # a fused projection
        if array.shape[1] == 3 * shape[1]:
            q, k, v = np.split(array, 3, axis=1)
            yield AttentionInputs(q, k, v, tables)
    for first, second, third in itertools.combinations(arrays, 3):
        if first.shape[1] == shape[1] and second.shape == third.shape:
            yield AttentionInputs(first, second, third, tables)


def _siblings_before(call: ModuleCall | None, time: int) -> list[Role]:
    """Return the outputs of the calls in the same module that ended before `time`, in order."""
    if call is None or call.parent is None:
        return []
    outputs = (role for child in call.parent.children for role in child.outputs)
    return sorted((role for role in outputs if role.time < time), key=lambda role: role.time)


def _latest_versions(roles: list[Role]) -> list[Role]:
    """Leave out what a later one of them was computed from, such as queries before their norm."""
    consumed = {
        given.value for role in roles for given in role.call.inputs if given.value is not role.value
    }
    return [role for role in roles if role.value not in consumed]


def _flat(array: Array | None, tokens: int) -> Array | None:
    """Return (tokens, channels) of the first batch entry, float64."""
    if array is None or array.dtype.kind != "f" or array.ndim < 2:
        return None
    first = array if array.ndim == 2 and array.shape[0] == tokens else array[0]
    if first.ndim == 3 and first.shape[1] == tokens and first.shape[0] != tokens:
        first = first.transpose(1, 0, 2)  # heads before tokens
    if first.ndim < 2:
        return None
    channels: Array = first.reshape(first.shape[0], -1).astype(np.float64)
    return channels


def _rotary_tables(
    clues: Clues, tensors: StoredTensors, tokens: int
) -> tuple[tuple[Array, Array], ...]:
    """Return recorded pairs of cos and sin: tensors of one call whose squares add up to 1."""
    assert clues.alignment is not None and clues.role is not None
    time = clues.role.time
    tables: list[tuple[Array, Array]] = []
    seen: set[int] = set()
    for call in clues.alignment.reference.calls:
        if call.entered > time or len(tables) >= 2:
            break
        for first, second in itertools.pairwise((*call.inputs, *call.outputs)):
            if first.value.numel != second.value.numel or first.value.numel % tokens:
                continue
            if id(first.value) in seen or first.side != second.side:
                continue
            seen.add(id(first.value))
            cos, sin = (_rows(tensors.of_role(role)) for role in (first, second))
            if cos is None or sin is None or cos.shape != sin.shape or len(cos) < tokens:
                continue
            if np.allclose(cos**2 + sin**2, 1, atol=_ONE):
                tables.append((cos[:tokens], sin[:tokens]))
    return tuple(tables)


def _rows(array: Array | None) -> Array | None:
    if array is None or array.dtype.kind != "f" or not array.ndim:
        return None
    rows: Array = array.astype(np.float64).reshape(-1, array.shape[-1])
    return rows
