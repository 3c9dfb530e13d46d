"""Causes at the output of a module with a bias: one program adds none, or adds it twice.

The bias itself need not be kept: without it the sum of the output is smaller by the sum of the bias
times the number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otel_torch.parity.call_graph import Parameter, Role
from otel_torch.parity.diagnosis.clues import Clues, parameters_of
from otel_torch.parity.diagnosis.stored_tensors import StoredTensors
from otel_torch.parity.finding import Cause

# how exactly the sums have to agree with the bias (relative), and how far above rounding
_EXACT, _ABOVE_ROUNDING = 1e-3, 10.0
_ROUNDING = 1e-6


def missing_bias(clues: Clues) -> Cause | None:
    """One of two paired modules has no bias, and the two outputs differ by the other's."""
    if any(role.side != "output" for role in (*clues.roles, *clues.port_roles)):
        return None
    biases = _biases(clues.roles, clues.parameters.reference)
    port_biases = _biases(clues.port_roles, clues.parameters.port)
    for program, having, lacking, direction in (
        ("port", biases, port_biases, -1),
        ("reference", port_biases, biases, 1),
    ):
        present = [bias for bias in having if bias is not None]
        if present and not any(lacking) and _is_difference(clues, having, direction):
            names = " and ".join(bias.full_name for bias in present)
            return Cause("bias_absent", True, f"the {program} lacks the bias {names}")
    return None


def unused_bias(clues: Clues) -> Cause | None:
    """The two outputs differ by the bias of the module: the port does not add it, or twice."""
    if any(role.side != "output" for role in clues.roles):
        return None
    biases = _biases(clues.roles, clues.parameters.reference)
    names = " and ".join(bias.full_name for bias in biases if bias is not None)
    is_certain = clues.elements is not None
    if names and _is_difference(clues, biases, -1):
        return Cause("bias_absent", is_certain, f"the port does not add the bias {names}")
    if names and _is_difference(clues, biases, 1):
        return Cause("term_added", is_certain, f"the port adds the bias {names} twice")
    return None


def _biases(roles: Sequence[Role], parameters: Sequence[Parameter]) -> list[Parameter | None]:
    """Return the bias of each module; None for one without."""
    return [parameters_of(parameters, role.call.module_path).get("bias") for role in roles]


def _is_difference(clues: Clues, biases: Sequence[Parameter | None], direction: int) -> bool:
    """Return whether the port's tensor is the reference's plus (minus) these biases."""
    if clues.elements is not None and clues.tensors is not None:
        tensors = clues.tensors.reference if direction < 0 else clues.tensors.port
        numbers = _numbers(biases, tensors)
        if numbers is None and direction > 0:
            numbers = _numbers(biases, clues.tensors.reference)
        return numbers is not None and _is_added(clues, direction * numbers)
    roles = clues.roles if len(biases) == len(clues.roles) else clues.port_roles
    expected = direction * sum(
        role.value.numel / bias.numel * float(bias.row.get("sum", math.nan))
        for role, bias in zip(roles, biases, strict=True)
        if bias is not None
    )
    moved = _sum(clues.port_roles) - _sum(clues.roles)
    magnitude = sum(
        float(role.value.row.get("abs_mean", math.nan)) * math.sqrt(role.value.numel)
        for role in clues.roles
    )
    rounding = max(_ROUNDING, clues.limit) * magnitude
    slack = max(rounding, _EXACT * abs(expected))
    return abs(expected) > _ABOVE_ROUNDING * rounding and abs(moved - expected) <= slack


def _sum(roles: Sequence[Role]) -> float:
    return sum(float(role.value.row.get("sum", math.nan)) for role in roles)


def _numbers(
    biases: Sequence[Parameter | None], tensors: StoredTensors
) -> NDArray[np.float64] | None:
    """Return the biases one after the other, or None if one was not kept."""
    arrays: list[NDArray[Any]] = []
    for bias in biases:
        array = None if bias is None else tensors.of_parameter(bias)
        if array is None:
            return None
        arrays.append(array.astype(np.float64).ravel())
    return np.concatenate(arrays)


def _is_added(clues: Clues, numbers: NDArray[np.float64]) -> bool:
    """Return whether the tensors differ by these numbers along one axis."""
    assert clues.elements is not None
    reference, port = clues.elements
    difference = port - reference
    size = float(np.linalg.norm(difference))
    slack = max(_EXACT * size, 3 * clues.limit * float(np.linalg.norm(reference)))
    for axis in range(reference.ndim):
        if reference.shape[axis] == numbers.size:
            shape = [1] * reference.ndim
            shape[axis] = -1
            remainder = float(np.linalg.norm(difference - numbers.reshape(shape)))
            if remainder <= slack <= 0.1 * size:
                return True
    return False
