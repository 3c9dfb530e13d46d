"""The way from a model's inputs to the first wrong place: what a person follows to believe it."""

from __future__ import annotations

from otel_torch.parity.align import Alignment, TensorPair
from otel_torch.parity.call_graph import Role
from otel_torch.parity.judge import Fault

# more than a person follows, and less than a screen
_LONGEST = 8


def chain_to(fault: Fault, alignment: Alignment) -> list[TensorPair]:
    """The compared pairs on the way to a fault, inputs first, at most eight: from each value to the
    latest of what it was made from, as far as the reference tells.
    """
    by_role: dict[Role, TensorPair] = {}
    for one in alignment.pairs:
        for part in one.reference:
            by_role.setdefault(part, one)
    spot = fault.reference
    role: Role | None = spot.role if spot is not None else None
    found: list[TensorPair] = []
    seen: set[Role] = set()
    while role is not None and role not in seen and len(found) < _LONGEST:
        seen.add(role)
        pair = by_role.get(role)
        if pair is not None and pair not in found:
            found.append(pair)
        role = _made_from(role, alignment)
    return found[::-1]


def _made_from(role: Role, alignment: Alignment) -> Role | None:
    """Of what a value was made: an output of the latest input of its call, an input of what was
    made last before it.
    """
    birth = role.value.birth
    if birth is not role:
        return birth
    if role.side == "output":
        given = [
            one
            for one in role.call.inputs
            if not one.value.is_constant and not one.value.is_integer
        ] or role.call.inputs
        return max(given, key=lambda one: one.value.birth.time, default=None)
    above = role.call.parent
    if above is None:
        return None
    before = [
        out
        for call in above.children
        if call.exited < role.call.entered
        for out in call.outputs
        if not out.value.is_constant
    ]
    return max(before, key=lambda out: out.time, default=None) or next(iter(above.inputs), None)
