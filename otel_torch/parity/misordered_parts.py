"""A fused module that holds its parts in another order.

Its output adds up to that of the parts, so its pair looks right. The first wrong pair shows the
order: it has one part where the reference has another, and the reference calls its parts in another
order than the port's weight holds them.
"""

from __future__ import annotations

from otel_torch.parity.align import Alignment
from otel_torch.parity.faults import Fault, Location
from otel_torch.parity.tensor_pair import TensorPair
from otel_torch.parity.values import Relation


def find_misordered_parts(alignment: Alignment, first: TensorPair) -> Fault | None:
    """Return the fault of a fused module that the first wrong pair shows, or None."""
    reference, port = first.reference[0], first.port[0]
    for pair in alignment.pairs:
        parts = sorted(pair.reference, key=lambda role: role.call.entered)
        is_whole = pair.basis == "fused" and pair.is_output and len(pair.port) == 1
        if not is_whole or reference.value.birth.call not in [part.call for part in parts]:
            continue
        is_other_part = any(
            part.value is not reference.value
            and alignment.comparer.is_equal(part.value, port.value)
            for part in parts
        )
        if is_other_part and parts != pair.reference:
            pair.relation = Relation("order", first.relation.error, pair.relation.limit)
            places = Location.of(reference.value.birth), Location.of(pair.port[0])
            return Fault("layout", *places, pair, pair.relation)
    return None
