"""The legal error of each value: its floor under noise, and the coarsest dtype it was made with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from otel_torch.parity.call_graph import Parameter, Program, Role, TensorValue
from otel_torch.parity.modules import ModulePath
from otel_torch.parity.rules import largest_errors
from otel_torch.parity.tolerance import coarser, rounds_more
from otel_torch.parity.values import Comparer, errors_of_roles


def add_noise(
    comparer: Comparer,
    reference: Program,
    noise: Program,
    parameter_dtypes: dict[ModulePath, set[str]],
) -> None:
    """Set the floors of the reference's values, and the dtypes that they were measured in.

    Args:
        noise: The same forward of the reference, recorded under noise.
        parameter_dtypes: Those of the noise recording.
    """
    noise_roles = {_role_key(role): role for role in noise.roles}
    pairs = [(role, noise_roles.get(_role_key(role))) for role in reference.roles]
    roles = [
        (role, match)
        for role, match in pairs
        if match is not None and match.value.numel == role.value.numel
    ]
    coarse = coarsest_dtypes(noise, parameter_dtypes)
    comparer.noise_dtypes = {role.value: coarse[match.value] for role, match in roles}
    comparer.floors = _floors_of(reference, roles)


def describe_noise_dtype(comparer: Comparer) -> str | None:
    """Return a warning if the noise was recorded in another dtype than the programs, or None."""
    noise, computed = (
        coarser(dtypes.values()) for dtypes in (comparer.noise_dtypes, comparer.coarse)
    )
    names = [dtype.removeprefix("torch.") for dtype in (noise, computed)]
    if rounds_more(computed, noise):
        return (
            f"the noise was recorded in {names[0]}, and a program computes in {names[1]}: the "
            f"floors are estimates; record the reference with noise in {names[1]}"
        )
    if rounds_more(noise, computed):
        return (
            f"the noise was recorded in {names[0]}, and both programs compute in {names[1]}: the "
            f"floors may hide a fault; record the reference with noise in {names[1]}"
        )
    return None


def _floors_of(reference: Program, roles: Sequence[tuple[Role, Role]]) -> dict[TensorValue, float]:
    """Return how far each value of the reference moved under noise, as relative L2."""
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


def coarsest_dtypes(
    program: Program, parameter_dtypes: dict[ModulePath, set[str]]
) -> dict[TensorValue, str]:
    """Return, for each value, the coarsest dtype seen before it in the program.

    Error passes downstream, so a float32 tensor downstream of a bfloat16 one is no more exact.
    """
    coarsest: dict[TensorValue, str] = {}
    dtype = ""
    for role in program.roles:
        dtypes = parameter_dtypes.get(role.call.module_path, set())
        dtype = coarser([dtype, str(role.row.get("dtype", "")), *sorted(dtypes)])
        coarsest.setdefault(role.value, dtype)
    return coarsest


def dtypes_by_module(parameters: Iterable[Parameter]) -> dict[ModulePath, set[str]]:
    """Return the dtypes of the parameters that each module owns."""
    dtypes: dict[ModulePath, set[str]] = {}
    for parameter in parameters:
        dtype = str(parameter.row.get("dtype", ""))
        dtypes.setdefault(parameter.module_path, set()).add(dtype)
    return dtypes
