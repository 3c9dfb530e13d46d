"""What is known of legal error before two programs are compared: the floor of every value, and how
coarse its making was.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from otel_torch.parity.call_graph import Program, Role, TensorValue
from otel_torch.parity.modules import ModulePath
from otel_torch.parity.tolerance import Tolerance
from otel_torch.parity.values import sketch_error, statistics_error


def floors_of(reference: Program, noise: Program) -> dict[TensorValue, float]:
    """How far each value of the reference moved when it was run again under noise: relative L2, by
    value.
    """
    again = {_key(role): role for role in noise.roles}
    floors: dict[TensorValue, float] = {}
    for role in reference.roles:
        other = again.get(_key(role))
        if other is None or other.value.numel != role.value.numel:
            continue
        error = sketch_error(role.value, other.value)
        if error is None:
            error = statistics_error(role.row, other.row)
        if error is not None:
            floors[role.value] = max(floors.get(role.value, 0.0), error)
    return floors


def _key(role: Role) -> tuple[Any, ...]:
    call = role.call
    return call.model, call.module, call.loop, call.step, call.number, call.phase, role.tensor


def coarseness(
    program: Program, parameter_types: dict[ModulePath, set[str]], tolerance: Tolerance
) -> dict[TensorValue, float]:
    """For each value the limit that the coarsest type sets of all that was there before it: what
    enters is passed on.
    """
    found: dict[TensorValue, float] = {}
    coarsest = 0.0
    for role in program.roles:
        types = {str(role.row.get("dtype", ""))} | parameter_types.get(role.call.module_path, set())
        coarsest = max(coarsest, tolerance.base(types))
        if role.value not in found:
            found[role.value] = coarsest
    return found


def types_by_place(parameters: Iterable[Any]) -> dict[ModulePath, set[str]]:
    """The types of each module's own parameters."""
    found: dict[ModulePath, set[str]] = {}
    for one in parameters:
        found.setdefault(one.module_path, set()).add(str(one.row.get("dtype", "")))
    return found
