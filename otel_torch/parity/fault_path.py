"""Find the path from a model's inputs to the first fault, so that a reader can check it."""

from __future__ import annotations

from otel_torch.parity.align import Alignment
from otel_torch.parity.call_graph import Role
from otel_torch.parity.faults import Fault
from otel_torch.parity.tensor_pair import TensorPair

# keeps the path on one screen
_LONGEST = 8


def path_to(fault: Fault, alignment: Alignment) -> list[TensorPair]:
    """Return the compared pairs on the way to a fault, inputs first, at most eight.

    Each step goes from a value to the latest value that it was made from, in the reference.
    """
    pair_of: dict[Role, TensorPair] = {}
    for pair in alignment.pairs:
        for role in pair.reference:
            pair_of.setdefault(role, pair)
    current = fault.reference.role if fault.reference is not None else None
    path: list[TensorPair] = []
    seen: set[Role] = set()
    while current is not None and current not in seen and len(path) < _LONGEST:
        seen.add(current)
        match = pair_of.get(current)
        if match is not None and match not in path:
            path.append(match)
        current = _source(current)
    return path[::-1]


def _source(role: Role) -> Role | None:
    """Return the source of a value.

    An output was made from the latest input of its call, an input from the latest output before it
    in the enclosing call.
    """
    birth = role.value.birth
    if birth is not role:
        return birth
    if role.side == "output":
        inputs = role.call.inputs
        computed = [r for r in inputs if not r.value.is_constant and not r.value.is_integer]
        return max(computed or inputs, key=lambda r: r.value.birth.time, default=None)
    parent = role.call.parent
    if parent is None:
        return None
    before = [
        output
        for call in parent.children
        if call.exited < role.call.entered
        for output in call.outputs
        if not output.value.is_constant
    ]
    latest = max(before, key=lambda output: output.time, default=None)
    return latest or next(iter(parent.inputs), None)
