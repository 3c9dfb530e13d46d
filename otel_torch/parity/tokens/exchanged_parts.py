"""Find a fused projection whose output begins with the wrong part.

The output is compared with its parts by sums, so that its pair looks right in any order. A module
that receives it whole, as an activation does with `[gate | up]`, then returns something wrong. So
does one that receives a part of it, as a rotation does with the queries:

    reference                         port
    gate_proj out, up_proj out        gate_up_proj out    [up | gate]: the same sums
    act_fn(gate) * up                 act_fn out          wrong, from a right input

The sketch of a row depends on the columns, and equal columns have equal signs. So the sketch of the
whole without that of its first part is the sketch of the rest, and as small; without that of
another part it has the squares of both.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from otel_torch.parity.align import Alignment
from otel_torch.parity.call_graph import ModuleCall, Role
from otel_torch.parity.faults import Fault, Location
from otel_torch.parity.parameter_names import pattern
from otel_torch.parity.tensor_pair import TensorPair
from otel_torch.parity.values import Relation

# how much larger the rest must be without the wrong part; of two equal parts it is three times
_CLEARLY = 1.5


def find_exchanged_parts(alignment: Alignment, first: TensorPair) -> Fault | None:
    """Return the fault of a fused module whose order makes the first wrong pair wrong, or None."""
    fused = [pair for pair in alignment.pairs if _is_fused_output(pair)]
    wrong = first.port[0].value.birth
    for pair in fused:
        if _makes(pair.port[0], wrong):
            expected, begins_with = _expected_first_part(alignment, pair, fused), first_part(pair)
            is_exchanged = None not in (expected, begins_with) and begins_with != expected
        else:
            is_exchanged = _precedes(pair.port[0], wrong) and _begins_with_wrong_part(
                alignment, pair
            )
        if is_exchanged:
            relation = Relation("order", None, pair.relation.limit)
            pair.relation = relation
            places = Location.of(pair.reference[0]), Location.of(pair.port[0])
            return Fault("layout", *places, pair, relation)
    return None


def _is_fused_output(pair: TensorPair) -> bool:
    is_fused = pair.basis == "fused" and pair.is_output and pair.is_right
    return is_fused and len(pair.port) == 1 < len(pair.reference)


def _makes(whole: Role, wrong: Role) -> bool:
    """Return whether a wrong tensor is the output of a module that receives a whole one."""
    return wrong.side == "output" and any(given.value is whole.value for given in wrong.call.inputs)


def _precedes(whole: Role, wrong: Role) -> bool:
    """Return whether a wrong tensor is of a later call in the container of the fused one."""
    return wrong.call.parent is whole.call.parent and wrong.time > whole.time


def _begins_with_wrong_part(alignment: Alignment, pair: TensorPair) -> bool:
    """Return whether the port hands on the beginning of the whole, which is no part at all.

    Right parts in another place are no fault: the code that hands them on knows where they are.
    """
    whole = pair.port[0]
    handed = [
        role
        for role in alignment.port.roles
        if role.value.birth is role and role.side == "input" and _precedes(whole, role)
    ]
    rests = [rest for part in pair.reference if (rest := _rest(whole, part)) is not None]
    if len(rests) < len(pair.reference):
        return False
    return any(
        rest < _squares(whole) - _squares(role) / 2 and min(rests) > _CLEARLY * rest
        for role in handed
        if (rest := _rest(whole, role)) is not None
    )


def _expected_first_part(
    alignment: Alignment, pair: TensorPair, fused: Sequence[TensorPair]
) -> int | None:
    """Return the index of the part that the whole should begin with, None if it is not known.

    The same module of other blocks begins with it, where what it makes is right. Without those it
    is the part that the reference gives to its activation: an engine's takes the gate first.
    """
    name = pattern(pair.port[0].call.module)
    for sibling in fused:
        is_sibling = sibling is not pair and pattern(sibling.port[0].call.module) == name
        if is_sibling and _is_used_rightly(alignment, sibling.port[0]):
            return first_part(sibling)
    calls = alignment.reference.calls
    gates = [
        index
        for index, part in enumerate(pair.reference)
        if any(_receives_only(call, part) for call in calls)
    ]
    return gates[0] if len(gates) == 1 else None


def _is_used_rightly(alignment: Alignment, whole: Role) -> bool:
    """Return whether a module that receives a value returns right ones."""
    users = [use.call for use in whole.value.roles if use.side == "input"]
    right = {role.value for pair in alignment.pairs if pair.is_right for role in pair.port}
    return any(output.value in right for call in users for output in call.outputs)


def _receives_only(call: ModuleCall, part: Role) -> bool:
    return not call.children and [given.value for given in call.inputs] == [part.value]


def first_part(pair: TensorPair) -> int | None:
    """Return the index of the part with which a whole begins, None if the rows do not show it."""
    rests = [_rest(pair.port[0], part) for part in pair.reference]
    known = [rest for rest in rests if rest is not None]
    if len(known) < len(rests):
        return None
    best, second = np.argsort(known)[:2].tolist()
    return best if known[second] > _CLEARLY * known[best] else None


def _squares(role: Role) -> float:
    return 0.0 if role.value.sketch is None else float(np.square(role.value.sketch).sum())


def _rest(whole: Role, part: Role) -> float | None:
    """Return the squares of a whole without a part at its beginning, None if not known."""
    sketch, beginning = whole.value.sketch, part.value.sketch
    if sketch is None or beginning is None or sketch.shape != beginning.shape:
        return None
    return float(np.square(sketch - beginning).sum()) if "tokens" in whole.row else None
