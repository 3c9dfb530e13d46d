"""The legal error of each value: its floor under noise, and the coarsest dtype it was made with."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from otel_torch.parity.call_graph import Parameter, Program, Role, TensorValue
from otel_torch.parity.modules import ModulePath
from otel_torch.parity.rules import largest_errors
from otel_torch.parity.tolerance import Tolerance
from otel_torch.parity.values import errors_of_roles


def floors_of(reference: Program, noise: Program) -> dict[TensorValue, float]:
    """Return how far each value of the reference moved under noise, as relative L2.

    Args:
        noise: The same forward of the reference, recorded under noise.
    """
    noise_roles = {_role_key(role): role for role in noise.roles}
    pairs = [(role, noise_roles.get(_role_key(role))) for role in reference.roles]
    roles = [
        (role, match)
        for role, match in pairs
        if match is not None and match.value.numel == role.value.numel
    ]
    if not roles:
        return {}
    errors = errors_of_roles([role for role, _ in roles], [match for _, match in roles])
    index_of = {id(value): index for index, value in enumerate(reference.values)}
    values = np.array([index_of[id(role.value)] for role, _ in roles])
    largest = largest_errors(errors, values, len(reference.values))
    return {
        value: floor
        for value, floor in zip(reference.values, largest.tolist(), strict=True)
        if not math.isnan(floor)
    }


def _role_key(role: Role) -> tuple[Any, ...]:
    call = role.call
    return call.model, call.module, call.loop, call.step, call.number, call.phase, role.tensor


def coarseness(
    program: Program, parameter_dtypes: dict[ModulePath, set[str]], tolerance: Tolerance
) -> dict[TensorValue, float]:
    """Return, for each value, the limit of the coarsest dtype seen before it in the program.

    Error passes downstream, so a float32 tensor downstream of a bfloat16 one is no more exact.
    """
    limits: dict[TensorValue, float] = {}
    coarsest = 0.0
    for role in program.roles:
        dtypes = parameter_dtypes.get(role.call.module_path, set())
        coarsest = max(coarsest, tolerance.base({str(role.row.get("dtype", ""))} | dtypes))
        limits.setdefault(role.value, coarsest)
    return limits


def dtypes_by_module(parameters: Iterable[Parameter]) -> dict[ModulePath, set[str]]:
    """Return the dtypes of the parameters that each module owns."""
    dtypes: dict[ModulePath, set[str]] = {}
    for parameter in parameters:
        dtype = str(parameter.row.get("dtype", ""))
        dtypes.setdefault(parameter.module_path, set()).add(dtype)
    return dtypes
