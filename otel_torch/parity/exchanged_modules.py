"""The rule for modules that run in another order: one receives what another one should.

reference    layers.1.norm <- x         layers.2.norm <- layers.1(x)
port         layers.2.norm <- x         layers.1.norm <- layers.2(x), the first wrong pair
"""

from __future__ import annotations

from otel_torch.parity.evidence import Evidence, is_informative
from otel_torch.parity.faults import Fault, Location
from otel_torch.parity.pair_roles import pair_roles
from otel_torch.parity.tensor_pair import TensorPair


def find_exchanged_modules(evidence: Evidence, first: TensorPair) -> Fault | None:
    """Return the fault of a module that runs in place of the same one of another block, or None.

    The first wrong pair is an input. An earlier call of the module in another block receives it,
    whole or as a sum, and that block's own input is wrong, too.
    """
    reference, alignment = first.reference[0], evidence.alignment
    call = alignment.partner.get(reference.call)
    if reference.side != "input" or call is None or not is_informative(reference):
        return None
    for sibling in evidence.sibling_calls(call):
        own_pairs = evidence.input_pairs(sibling)
        is_earlier = sibling.entered < call.entered
        if not is_earlier or not own_pairs or any(pair.is_right for pair in own_pairs):
            continue
        for pair in pair_roles(alignment.comparer, [reference], sibling.inputs, "alike"):
            if pair.is_right:
                places = Location.of(reference), Location.of(pair.port[0])
                return Fault("value", *places, first, first.relation)
    return None
