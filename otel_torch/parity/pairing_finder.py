"""Learn which tensor of the reference to feed into each place of the port.

A first fault makes everything downstream wrong and hides a second one. In an isolated run, every
module of the port computes from the reference's inputs and its outputs are replaced by the
reference's, so a tensor that is still wrong was made wrong by that module. The pairing says which
tensors to exchange.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from otel_torch.parity.align import Alignment
from otel_torch.parity.call_graph import Role
from otel_torch.parity.parameter_names import pattern
from otel_torch.parity.tensor_pair import TensorPair
from otel_torch.recording.isolation_pairing import CallIndex, Pairing, Slot

# a slot in any block: model, pattern of the module's name, tensor, and the number of tensors of
# that call and side
_SlotPattern = tuple[str, str, str, int]


class _Vote(NamedTuple):
    """A candidate for a slot of the port.

    slot: the reference's. right: its numbers were equal. sure: the two correspond even if their
    numbers differ.
    """

    slot: Slot
    right: bool
    sure: bool
    port_pattern: _SlotPattern
    reference_pattern: _SlotPattern


class PairingFinder:
    """Collects votes from one aligned forward after another."""

    def __init__(self) -> None:
        self._votes: dict[Slot, Counter[_Vote]] = {}
        self._shifts: dict[tuple[str, str], Counter[CallIndex]] = {}
        # how often slots of these two patterns held equal numbers
        self._equal: Counter[tuple[_SlotPattern, _SlotPattern]] = Counter()
        self._matched: set[_SlotPattern] = set()

    def learn(self, alignment: Alignment, harmless: Iterable[TensorPair] = ()) -> None:
        """Count the votes of one forward.

        Args:
            harmless: Pairs that differ legally; the port keeps its own values there.
        """
        skipped = {id(pair) for pair in harmless}
        for pair in alignment.pairs:
            if id(pair) not in skipped and _can_exchange(pair):
                self._vote(pair)

    def _vote(self, pair: TensorPair) -> None:
        reference, port = pair.reference[0], pair.port[0]
        slot, patterns = _slot(port), (_slot_pattern(port), _slot_pattern(reference))
        if pair.is_right and not port.value.is_constant:
            self._equal[patterns] += 1
            self._matched.add(patterns[0])
        vote = _Vote(_slot(reference), pair.is_right, _is_sure(pair), *patterns)
        self._votes.setdefault(slot, Counter())[vote] += 1
        port_index, reference_index = _call_index(port), _call_index(reference)
        loop, step, call = (a - b for a, b in zip(port_index, reference_index, strict=True))
        self._shifts.setdefault(slot[:2], Counter())[loop, step, call] += 1

    def pairing(self) -> Pairing:
        """Return the best candidate for each slot.

        A candidate with equal numbers wins, then one whose pattern had equal numbers in other
        blocks, then the most frequent one.
        """
        pairing = Pairing()
        for slot, votes in self._votes.items():
            best = max(votes, key=lambda vote: (vote.right, self._equal_count(vote), votes[vote]))
            is_unmatched = best.port_pattern not in self._matched
            if best.right or self._equal_count(best) or (best.sure and is_unmatched):
                pairing.slots[slot] = best.slot
        for module, shifts in self._shifts.items():
            shift = shifts.most_common(1)[0][0]
            if any(shift):
                pairing.shifts[module] = shift
        return pairing

    def _equal_count(self, vote: _Vote) -> int:
        return self._equal[vote.port_pattern, vote.reference_pattern]


def _can_exchange(pair: TensorPair) -> bool:
    """Return whether the reference's tensor fits into the port: one for one, same size and kind."""
    if len(pair.reference) != 1 or len(pair.port) != 1:
        return False
    reference, port = pair.reference[0].value, pair.port[0].value
    return reference.numel == port.numel and reference.is_integer == port.is_integer


def _is_sure(pair: TensorPair) -> bool:
    """Return whether the two tensors correspond even if their numbers differ.

    Modules of one name may do different work, and a container may return another part of what its
    children computed.
    """
    if pair.basis == "alike":
        return False
    if pair.basis == "owner":
        return True
    if pair.basis == "fused":
        return pair.port[0].side == "input"
    return _computed_count(pair.reference[0]) == 1 and _computed_count(pair.port[0]) == 1


def _computed_count(role: Role) -> int:
    """Return how many computed tensors the call has on this side.

    A block that also receives a residual receives a different first input than one that does not.
    """
    return sum(
        not sibling.value.is_integer and not sibling.value.is_constant
        for sibling in role.call.roles(role.side)
    )


def _slot(role: Role) -> Slot:
    return role.call.model, role.call.module, role.tensor


def _slot_pattern(role: Role) -> _SlotPattern:
    return role.call.model, pattern(role.call.module), role.tensor, _computed_count(role)


def _call_index(role: Role) -> CallIndex:
    return role.call.loop or 0, role.call.step or 0, role.call.number or 0
