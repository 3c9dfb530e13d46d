"""The rule for modules that the port lacks together with their weights: it leaves them out.

reference    q_proj -> q_norm -> (rotation) -> attn in[0]
port         q_proj ->           (rotation) -> attn in[0]    the first wrong pair
"""

from __future__ import annotations

import math

from otel_torch.parity.call_graph import ModuleCall, Role
from otel_torch.parity.earlier_faults import KEEPS_NORM, possible_sources
from otel_torch.parity.evidence import Evidence, is_informative
from otel_torch.parity.faults import Fault, MissingModule
from otel_torch.parity.missing_modules import widened_fault
from otel_torch.parity.modules import counterpart
from otel_torch.parity.tensor_pair import TensorPair


def find_absent(evidence: Evidence, first: TensorPair) -> Fault | None:
    """Return the fault of a module between right tensors and the first wrong pair, or None.

    Its weights have no counterpart, it receives right values, and the port has no value that the
    reference computes from its output.
    """
    modules = evidence.alignment.modules
    unpaired = modules.owners.reference - modules.paired.reference - modules.unpaired[0]
    called = {call.module_path for call in evidence.alignment.port.calls}
    for call in evidence.alignment.reference.calls:
        place = counterpart(call.module_path, modules.matched)
        # ranks of a mesh have weights without sketches, which pair with none
        if call.module_path not in unpaired or place in called:
            continue
        if _is_left_out(evidence, call, first):
            module = MissingModule(call.module_path, place, port_is_idle=True)
            return widened_fault(evidence, module, call) or module.fault(call)
    return None


def _is_left_out(evidence: Evidence, call: ModuleCall, first: TensorPair) -> bool:
    inputs, outputs = (list(filter(is_informative, roles)) for roles in (call.inputs, call.outputs))
    wrong = first.reference[0]
    if call.exited > first.time or call.parent is None or not inputs or not outputs:
        return False
    if call.parent not in (wrong.call, wrong.call.parent):
        return False
    if not all(_is_right(evidence, role) for role in inputs):
        return False
    if any(role.value in evidence.right for role in outputs):
        return False
    return not _makes_right_value_later(evidence, call, first.time) and not _has_rival(
        evidence, call
    )


def _is_right(evidence: Evidence, role: Role) -> bool:
    """Return whether a value is right, or has the numbers of a right one in another shape."""
    return role.value in evidence.right or any(
        source.value in evidence.right for source in _sources(role)
    )


def _sources(role: Role) -> list[Role]:
    """Return the earlier outputs of the container that an input may be a view or a rotation of.

    Both keep the norm.
    """
    norm = role.row.get("l2")
    if not isinstance(norm, float):
        return []
    return [
        source
        for source in possible_sources(role)
        if source.value.numel == role.value.numel
        and math.isclose(source.row.get("l2", math.nan), norm, rel_tol=KEEPS_NORM)
    ]


def _makes_right_value_later(evidence: Evidence, call: ModuleCall, until: int) -> bool:
    """Return whether code of the same container makes a right value after the call.

    Not from what another module returned.
    """
    return any(
        role.value.birth is role
        and role.side == "input"
        and role.call.parent is call.parent
        and call.exited < role.time < until
        and is_informative(role)
        and role.value in evidence.right
        and not _sources(role)
        for role in evidence.alignment.reference.roles
    )


def _has_rival(evidence: Evidence, call: ModuleCall) -> bool:
    """Return whether the port calls a module with weights of its own there, by another name."""
    modules = evidence.alignment.modules
    unpaired = modules.owners.port - modules.paired.port
    container = None if call.parent is None else evidence.alignment.partner.get(call.parent)
    return container is None or any(child.module_path in unpaired for child in container.children)
