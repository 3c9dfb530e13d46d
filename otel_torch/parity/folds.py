"""Compare a fold as a whole: where its values meet those of the modules that it replaces.

A batch norm is folded into the convolution before it, an adapter is added to the weight beside it,
the weight of a norm moves into the next layer. The weights differ legally then, and so do the
tensors inside the fold:

    reference   fc1.base ── + fc1.up(fc1.down) ──▶ fc1 out       port   fc1 ──▶ out
    reference   norm (weight w) ── fc ──▶ fc out                 port   norm (1) ── fc ──▶ fc out

What is a fold in one block of a model is one in all blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from operator import attrgetter

from otel_torch.parity.align import Alignment
from otel_torch.parity.call_graph import ModuleCall, Role, is_informative
from otel_torch.parity.parameter_names import pattern
from otel_torch.parity.sides import Sides
from otel_torch.parity.tensor_pair import TensorPair
from otel_torch.parity.values import Relation

# how many tensors after a module a fold may end
_LOOKAHEAD = 4

_Key = tuple[str, str]  # the modules of a pair, in any block
_Name = tuple[str, str, str]  # a tensor in any block: module, side and name


def pair_folds(alignment: Alignment) -> None:
    """Pair the output of a module with that of the modules folded into it, in all blocks alike.

    They are found in a block in which the two outputs are equal.
    """
    candidates = [pair for pair in alignment.pairs if _has_other_weights(alignment, pair)]
    ends: dict[_Key, Sides[_Name | None]] = {}
    for pair in candidates:
        reference, port = pair.reference[0], pair.port[0]
        for end in _made_after(reference):
            if alignment.comparer.is_equal(end.value, port.value):
                ends.setdefault(_key(pair), Sides(_name(end), None))
        for end in _made_after(port):
            if alignment.comparer.is_equal(reference.value, end.value):
                ends.setdefault(_key(pair), Sides(None, _name(end)))
    for pair in candidates:
        if _key(pair) in ends:
            _extend(alignment, pair, ends[_key(pair)])
    alignment.pairs.sort(key=lambda pair: pair.time)


def _extend(alignment: Alignment, pair: TensorPair, end: Sides[_Name | None]) -> None:
    """Compare the fold of a pair where it ends, if it has such an end."""
    roles = Sides(pair.reference[0], pair.port[0])
    modules = roles.map(lambda role: role.call.module_path)
    ends = Sides(_named(roles.reference, end.reference), _named(roles.port, end.port))
    if ends.reference is None or ends.port is None:
        return
    pair.reference, pair.port = [ends.reference], [ends.port]
    pair.relation = alignment.comparer.relation(ends.reference.value, ends.port.value)
    alignment.folded.add((modules.reference, modules.port))


def _has_other_weights(alignment: Alignment, pair: TensorPair) -> bool:
    """Return whether two modules return other tensors and hold other weights."""
    if pair.is_right or pair.basis != "owner" or not pair.is_output or not pair.is_single:
        return False
    calls = pair.reference[0].call, pair.port[0].call
    return is_informative(pair.port[0]) and bool(alignment.unequal_weights(*calls))


def _made_after(role: Role) -> Iterator[Role]:
    """Yield the next tensors that are made after the call of an output, in the module around it."""
    made = (later for later in _tensors_after(role.call) if later.value.birth is later)
    return islice(made, _LOOKAHEAD)


def _named(role: Role, name: _Name | None) -> Role | None:
    """Return the tensor of this name after an output, the output itself without a name."""
    if name is None:
        return role
    return next((later for later in _made_after(role) if _name(later) == name), None)


def _name(role: Role) -> _Name:
    return pattern(role.call.module), role.side, role.tensor


def _key(pair: TensorPair) -> _Key:
    return pattern(pair.reference[0].call.module), pattern(pair.port[0].call.module)


def with_folds(
    alignment: Alignment, healed: Sequence[TensorPair], wrong: Sequence[TensorPair]
) -> tuple[Alignment, list[TensorPair]]:
    """Return an alignment in which nothing differs inside of folds, and the pairs that did.

    A module with other weights whose wrong output does no harm in another block is the beginning of
    a fold; one with other weights whose output is right there is its end.
    """
    begins = {_key(pair) for pair in healed if _has_other_weights(alignment, pair)}
    ends = {_key(pair) for pair in alignment.pairs if pair.is_right and _differ(alignment, pair)}
    inside = [
        pair for pair in wrong if _key(pair) in begins and _has_other_weights(alignment, pair)
    ]
    folded = alignment.folded | {
        (pair.reference[0].call.module_path, pair.port[0].call.module_path)
        for pair in (*inside, *(pair for pair in alignment.pairs if _key(pair) in ends))
    }
    values = {pair.port[0].value for pair in inside}

    def accept(pair: TensorPair) -> TensorPair:
        if pair.port[0].value not in values:
            return pair
        return replace(pair, relation=Relation("equal", 0.0, pair.relation.limit))

    return replace(alignment, pairs=[accept(p) for p in alignment.pairs], folded=folded), inside


def _differ(alignment: Alignment, pair: TensorPair) -> bool:
    """Return whether the modules of an output are known to hold other weights."""
    if pair.basis != "owner" or not pair.is_output or not pair.is_single:
        return False
    weights = alignment.unequal_weights(pair.reference[0].call, pair.port[0].call)
    return any(weight.differs for weight in weights)


def _tensors_after(call: ModuleCall) -> Iterator[Role]:
    """Yield the tensors of what the same module calls afterwards, and then its outputs."""
    if call.parent is None:
        return
    siblings = call.parent.children
    start = bisect_left(siblings, call.exited, key=attrgetter("entered"))
    for sibling in islice(siblings, start, None):
        yield from sibling.inputs
        yield from sibling.outputs
    yield from call.parent.outputs
