"""Says which tensors of two programs should be equal: calls are paired, then what goes into them
and comes out of them.

Two ports of one model name their modules differently and cut them at other places. What surely
corresponds are the modules that own the same parameters; what encloses them, and what stands beside
them under the same name, follows from these.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from otel_torch.parity.call_graph import ModuleCall, Program, Role
from otel_torch.parity.modules import ModulePairs, ModulePath
from otel_torch.parity.parameters import pattern
from otel_torch.parity.values import Comparer, Relation

# how far beyond the error of its parts under noise the error of a fused tensor is still chance
FUSED_FACTOR = 2.0

# why two roles should be equal, the surest first
Ground = Literal["owner", "fused", "container", "outermost", "alike"]


@dataclass(slots=True, eq=False)
class TensorPair:
    """Two roles that should be equal. Several on one side: their sum, or their parts under each
    other, is what is meant.
    """

    reference: list[Role]
    port: list[Role]
    ground: Ground
    relation: Relation

    @property
    def is_right(self) -> bool:
        """Whether they are."""
        return self.relation.is_right

    @property
    def time(self) -> int:
        """When the reference comes to it."""
        return min(role.time for role in self.reference)


@dataclass(slots=True)
class Alignment:
    """Two programs, laid side by side. calls: pairs; uncalled: calls of the reference (side 0) and
    the port (side 1) whose module is paired, but that have no partner.
    """

    reference: Program
    port: Program
    modules: ModulePairs
    comparer: Comparer
    calls: dict[ModuleCall, ModuleCall] = field(default_factory=dict)
    uncalled: tuple[list[ModuleCall], list[ModuleCall]] = field(default_factory=lambda: ([], []))
    pairs: list[TensorPair] = field(default_factory=list)
    partner: dict[ModuleCall, ModuleCall] = field(default_factory=dict)  # of both sides


def align(reference: Program, port: Program, modules: ModulePairs, comparer: Comparer) -> Alignment:
    """Lay two stretches of run side by side."""
    found = Alignment(reference, port, modules, comparer)
    _pair_outermost(found)
    _pair_calls(found)
    _expect_of_pairs(found)
    _expect_of_fused(found)
    _expect_of_alike(found)
    _expect_of_equal_inputs(found)
    _expect_of_namesakes(found)
    found.pairs.sort(key=lambda one: one.time)
    return found


# -- calls
# --------------------------------------------------------------------------------------------------


def _pair_outermost(found: Alignment) -> None:
    # modules that are known to correspond are paired as such: here only what encloses them,
    # whatever it is called
    known = set(found.modules.matched), set(found.modules.matched.values())
    left, right = (
        [
            call
            for call in program.outermost
            if call.module_path not in places and (not call.module or call.number is not None)
        ]
        for program, places in zip((found.reference, found.port), known, strict=True)
    )
    for one, other in _in_turn(found, left, right):
        _pair(found, one, other)


def _pair(found: Alignment, one: ModuleCall, other: ModuleCall) -> None:
    if one not in found.partner and other not in found.partner:
        found.calls[one] = other
        found.partner[one], found.partner[other] = other, one


def _pair_calls(found: Alignment) -> None:
    mine, theirs = _by_place(found.reference.calls), _by_place(found.port.calls)
    for one, other in found.modules.matched.items():
        left, right = mine.get(one, []), theirs.get(other, [])
        left = [call for call in left if call not in found.partner]
        right = [call for call in right if call not in found.partner]
        for first, second in _in_turn(found, left, right):
            _pair(found, first, second)
        found.uncalled[0].extend(call for call in left if call not in found.partner)
        found.uncalled[1].extend(call for call in right if call not in found.partner)


def _by_place(calls: Iterable[ModuleCall]) -> dict[ModulePath, list[ModuleCall]]:
    groups: dict[ModulePath, list[ModuleCall]] = defaultdict(list)
    for call in calls:
        groups[call.module_path].append(call)
    return groups


def _in_turn(
    found: Alignment, left: Sequence[ModuleCall], right: Sequence[ModuleCall]
) -> list[tuple[ModuleCall, ModuleCall]]:
    """Calls of one module on both sides, in order; where one side has more of them, first those
    with equal inputs.
    """
    if len(left) == len(right):
        return list(zip(left, right, strict=True))
    pairs, rest = [], list(right)
    unmatched = []
    for call in left:
        for other in rest:
            if _meet(found.comparer, call, other):
                pairs.append((call, other))
                rest.remove(other)
                break
        else:
            unmatched.append(call)
    return pairs + list(zip(unmatched, rest, strict=False))


def _meet(comparer: Comparer, one: ModuleCall, other: ModuleCall) -> bool:
    """Whether an input of one call is an input of the other."""
    return any(
        comparer.is_equal(first.value, second.value)
        for first in one.inputs
        for second in other.inputs
        if not first.value.is_constant
    )


# -- tensors
# --------------------------------------------------------------------------------------------------


def _expect_of_pairs(found: Alignment) -> None:
    """What goes into and comes out of paired calls."""
    for one, other in found.calls.items():
        ground: Ground = "owner"
        if one.parent is None or other.parent is None:
            ground = "outermost"
        elif one.module_path in found.modules.containers:
            ground = "container"
        _expect_sides(found, one, other, ground)


def _expect_sides(found: Alignment, one: ModuleCall, other: ModuleCall, ground: Ground) -> None:
    for left, right in ((one.inputs, other.inputs), (one.outputs, other.outputs)):
        found.pairs += pair_roles(found.comparer, left, right, ground)


def pair_roles(
    comparer: Comparer, left: Sequence[Role], right: Sequence[Role], ground: Ground
) -> list[TensorPair]:
    """Pair the tensors of one side of two calls: equal ones, equal names, then the only ones of a
    size.
    """
    found: list[TensorPair] = []
    ones, others = list(left), list(right)

    def take(one: list[Role], other: list[Role], relation: Relation) -> None:
        found.append(TensorPair(one, other, ground, relation))
        for role in one:
            ones.remove(role)
        for role in other:
            others.remove(role)

    for one in left:
        partners = [other for other in others if comparer.is_equal(one.value, other.value)]
        if partners:
            best = max(
                partners, key=lambda other: (_same_name(one, other), other.tensor == one.tensor)
            )
            take([one], [best], comparer.relation(one.value, best.value))
    _uncross(comparer, found, ground)
    for one in list(ones):
        for first, second in _pairs(others):
            relation = _sum(comparer, one, first, second)
            if relation is not None:
                take([one], [first, second], relation)
                break
    for other in list(others):
        for first, second in _pairs(ones):
            relation = _sum(comparer, other, first, second)
            if relation is not None:
                take([first, second], [other], relation)
                break
    if ground == "owner":  # a residual that is added inside, though not to what it should be
        for one in list(ones):
            fitting = [other for other in others if _fits(one, other)]
            if (
                one.side == "input"
                and len(fitting) == 2
                and len([rival for rival in ones if _fits(rival, fitting[0])]) == 1
            ):
                take([one], fitting, _sum_relation(comparer, one, *fitting))
    for one in list(ones):
        partners = [
            other
            for other in others
            if _same_name(one, other) and (_fits(one, other) or _tell(one, other))
        ]
        if len(partners) == 1:
            take([one], partners, comparer.relation(one.value, partners[0].value))
    for one in list(ones):
        partners = [other for other in others if _fits(one, other)]
        rivals = [rival for rival in ones if _fits(one, rival)]
        # a container may be given other things in each program, a module's result is its result
        if partners and (
            len(partners) == len(rivals) or (one.side == "output" and ground != "container")
        ):
            best = partners[min(rivals.index(one), len(partners) - 1)]
            take([one], [best], comparer.relation(one.value, best.value))
    for one in (
        list(ones) if ground in ("owner", "outermost") else ()
    ):  # indices of another number: not what they should be
        partners = [
            other
            for other in others
            if one.value.is_integer and other.value.is_integer and _same_name(one, other)
        ]
        if (
            one.side == "input"
            and len(partners) == 1
            and one.value.numel != partners[0].value.numel
        ):
            take([one], partners, comparer.relation(one.value, partners[0].value))
    if (
        ground == "owner"
        and len(left) == len(right) == 1
        and ones
        and others
        and left[0].value.is_constant != right[0].value.is_constant
    ):
        take([ones[0]], [others[0]], comparer.relation(ones[0].value, others[0].value))
    weighty = _weighty(ones), _weighty(others)
    if (
        ground == "owner" and len(weighty[0]) == len(weighty[1]) == 1
    ):  # what it works on, whatever its shape
        one, other = weighty[0][0], weighty[1][0]
        take([one], [other], comparer.relation(one.value, other.value))
    for one in list(ones):
        partners = [
            other
            for other in others
            if comparer.relation(one.value, other.value).state == "repeated"
        ]
        if partners and not one.value.is_constant:
            take([one], [partners[0]], comparer.relation(one.value, partners[0].value))
    return found


def _uncross(comparer: Comparer, found: list[TensorPair], ground: Ground) -> None:
    """Equal tensors whose names are exchanged (q given as k, and k as q) are no match of both, but
    a fault of both.
    """
    for first in list(found):
        for second in list(found):
            if first is second or first not in found or second not in found:
                continue
            a, b, c, d = first.reference[0], first.port[0], second.reference[0], second.port[0]
            crossed = (
                _same_name(a, d) and _same_name(c, b) and not comparer.is_equal(a.value, d.value)
            )
            if crossed and not _same_name(a, b):
                found.remove(first)
                found.remove(second)
                found.append(TensorPair([a], [d], ground, comparer.relation(a.value, d.value)))
                found.append(TensorPair([c], [b], ground, comparer.relation(c.value, b.value)))


def _pairs(roles: Sequence[Role]) -> list[tuple[Role, Role]]:
    return [(first, second) for index, first in enumerate(roles) for second in roles[index + 1 :]]


def _sum(comparer: Comparer, one: Role, first: Role, second: Role) -> Relation | None:
    """One value against the sum of two: a residual that one program has added and the other not
    yet.
    """
    values = one.value, first.value, second.value
    if len({value.numel for value in values}) > 1 or any(
        value.sketch is None or value.is_constant for value in values
    ):
        return None
    relation = _sum_relation(comparer, one, first, second)
    return relation if relation.is_right else None


def _sum_relation(comparer: Comparer, one: Role, first: Role, second: Role) -> Relation:
    limit = 2 * comparer.limit(one.value, first.value)
    whole, a, b = one.value.sketch, first.value.sketch, second.value.sketch
    if whole is None or a is None or b is None:
        return Relation("different", None, limit)
    size = float(np.linalg.norm(whole))
    error = float(np.linalg.norm(whole - (a + b))) / size if size else math.inf
    return Relation("equal" if error <= limit else "different", error, limit)


def _fits(one: Role, other: Role) -> bool:
    return (
        one.value.numel == other.value.numel
        and not one.value.is_constant
        and not other.value.is_constant
    )


def _tell(one: Role, other: Role) -> bool:
    """Whether two constants are numbers of the program (a timestep, a guidance scale), and not
    masks or nothing.
    """
    numbers = [role.row.get("min") for role in (one, other)]
    return (
        one.value.numel == other.value.numel
        and one.value.is_constant
        and other.value.is_constant
        and all(
            isinstance(number, int | float) and abs(number) not in (0, 1) and abs(number) < 1e9
            for number in numbers
        )
    )


def _same_name(one: Role, other: Role) -> bool:
    """Whether both programs call it the same: the argument of forward, or the key of an output."""
    name = one.argument or one.tensor.partition(".")[2]
    return bool(name) and name == (other.argument or other.tensor.partition(".")[2])


def _expect_of_fused(found: Alignment) -> None:
    """A fused module has the input of each of its parts, and its output is theirs put together."""
    mine, theirs = _by_place(found.reference.calls), _by_place(found.port.calls)
    for whole, parts in found.modules.parts.items():
        _fuse(found, [mine.get(part, []) for part in parts], theirs.get(whole, []), False)
    for whole, parts in found.modules.wholes.items():
        _fuse(found, [theirs.get(part, []) for part in parts], mine.get(whole, []), True)


def _fuse(
    found: Alignment, parts: list[list[ModuleCall]], wholes: list[ModuleCall], turned: bool
) -> None:
    if not parts or any(len(calls) != len(wholes) for calls in parts):
        return
    for index, whole in enumerate(wholes):
        calls = [part[index] for part in parts]
        for call in calls:
            pairs = (whole.inputs, call.inputs) if turned else (call.inputs, whole.inputs)
            found.pairs += pair_roles(found.comparer, *pairs, "fused")
        outs = [call.outputs[0] for call in calls if call.outputs]
        if len(outs) == len(calls) and whole.outputs:
            relation = _put_together(found.comparer, outs, whole.outputs[0], turned)
            sides = ([whole.outputs[0]], outs) if turned else (outs, [whole.outputs[0]])
            found.pairs.append(TensorPair(*sides, "fused", relation))


def _put_together(comparer: Comparer, parts: list[Role], whole: Role, turned: bool) -> Relation:
    """Whether parts make a whole, by the sums that add up whichever way they are laid together."""
    first, second = (whole.value, parts[0].value) if turned else (parts[0].value, whole.value)
    limit = max(
        comparer.limit(first, second),
        *(comparer.floors.get(part.value, 0.0) * FUSED_FACTOR for part in parts),
    )
    if sum(part.value.numel for part in parts) != whole.value.numel:
        return Relation("shape", None, limit)
    squares = [float(role.row.get("l2") or 0.0) ** 2 for role in parts]
    total = float(whole.row.get("l2") or 0.0) ** 2
    error = abs(sum(squares) - total) / total if total else 0.0
    scale = float(whole.row.get("abs_mean") or 0.0) * whole.value.numel
    for name, weigh in (("abs_mean", True), ("sum", False)):
        values = [
            float(role.row.get(name) or 0.0) * (role.value.numel if weigh else 1) for role in parts
        ]
        other = float(whole.row.get(name) or 0.0) * (whole.value.numel if weigh else 1)
        error = max(error, abs(sum(values) - other) / scale if scale else 0.0)
    return Relation("equal" if error <= limit else "different", error, limit)


def _expect_of_alike(found: Alignment) -> None:
    """Modules without parameters, of one name in paired containers or of equal inputs."""
    mine: dict[tuple[ModuleCall, str], list[ModuleCall]] = defaultdict(list)
    for call in _free_to_pair(found, 1):
        if (
            call not in found.partner
            and call.parent is not None
            and (above := _known_above(found, call)) is not None
        ):
            mine[above, _leaf(call)].append(call)
    groups: dict[tuple[ModuleCall, str], list[ModuleCall]] = defaultdict(list)
    for call in _free_to_pair(found, 0):
        if (
            call not in found.partner
            and call.parent is not None
            and (above := _known_above(found, call)) is not None
        ):
            groups[found.partner[above], _leaf(call)].append(call)
    for key, calls in groups.items():
        others = mine.get(key, [])
        for one, other in (
            zip(calls, others, strict=False)
            if len(calls) == len(others)
            else _in_turn(found, calls, others)
        ):
            _pair(found, one, other)
            if any(call.module_path in found.modules.matched for call in (one,)):
                continue
            inputs = pair_roles(found.comparer, one.inputs, other.inputs, "alike")
            found.pairs += inputs
            if (
                inputs
                and all(pair.relation.state == "equal" for pair in inputs)
                and len(inputs) == len(one.inputs) == len(other.inputs)
            ):
                found.pairs += pair_roles(found.comparer, one.outputs, other.outputs, "alike")


def _expect_of_namesakes(found: Alignment) -> None:
    """What goes into modules of one name in paired containers, though one of them has parameters
    and the other has not.
    """
    groups: list[dict[tuple[ModuleCall, str], list[ModuleCall]]] = []
    for side in (0, 1):
        group: dict[tuple[ModuleCall, str], list[ModuleCall]] = defaultdict(list)
        for call in _free_to_pair(found, side):
            above = _known_above(found, call)
            if above is not None and call.inputs:
                group[found.partner[above] if side == 0 else above, _leaf(call)].append(call)
        groups.append(group)
    for key, calls in groups[0].items():
        others = groups[1].get(key, [])
        if len(calls) == len(others):
            for one, other in zip(calls, others, strict=True):
                if found.partner.get(one) is not other and (
                    one not in found.partner or other not in found.partner
                ):
                    found.pairs += pair_roles(
                        found.comparer, _weighty(one.inputs), _weighty(other.inputs), "alike"
                    )


def _expect_of_equal_inputs(found: Alignment) -> None:
    """Modules without parameters and with equal inputs, whatever they are called, that make
    something of them.
    """
    left = [
        [call for call in _free_to_pair(found, side) if _is_free(found, call)] for side in (0, 1)
    ]
    for one in left[0]:
        fitting = [
            other
            for other in left[1]
            if other not in found.partner
            and len(_weighty(one.inputs)) == len(_weighty(other.inputs))
            and _lie_alike(found, one, other)
        ]
        for other in fitting:
            inputs = pair_roles(
                found.comparer, _weighty(one.inputs), _weighty(other.inputs), "alike"
            )
            if len(inputs) == len(_weighty(one.inputs)) and all(
                pair.relation.state == "equal" for pair in inputs
            ):
                outputs = pair_roles(
                    found.comparer, _weighty(one.outputs), _weighty(other.outputs), "alike"
                )
                if outputs:
                    _pair(found, one, other)
                    found.pairs += outputs
                    break


def _free_to_pair(found: Alignment, side: int) -> list[ModuleCall]:
    """The calls of a side but those that a map keeps apart."""
    calls = (found.reference, found.port)[side].calls
    return [call for call in calls if call.module_path not in found.modules.unpaired[side]]


def _is_free(found: Alignment, call: ModuleCall) -> bool:
    """Whether a call is a leaf without a partner, and not one that hands on what it is given by its
    nature.
    """
    by_nature = any(word in call.cls.lower() for word in ("identity", "dropout", "droppath"))
    return (
        call not in found.partner
        and not call.children
        and not by_nature
        and bool(_weighty(call.inputs))
        and len(_weighty(call.outputs)) == 1
    )


def _weighty(roles: Sequence[Role]) -> list[Role]:
    return [role for role in roles if not role.value.is_constant and not role.value.is_integer]


def _lie_alike(found: Alignment, one: ModuleCall, other: ModuleCall) -> bool:
    """Whether two calls are made in a pair of calls, which for those of another class is more than
    the whole model.
    """
    around = set(_above(other))
    pairs = [call for call in _above(one) if found.partner.get(call) in around]
    return bool(pairs) and (pairs[0].parent is not None or one.cls == other.cls)


def _above(call: ModuleCall) -> list[ModuleCall]:
    """The calls around one, the innermost first."""
    found = []
    while call.parent is not None:
        call = call.parent
        found.append(call)
    return found


def _known_above(found: Alignment, call: ModuleCall) -> ModuleCall | None:
    """The innermost enclosing call that has a partner."""
    above = call.parent
    while above is not None and above not in found.partner:
        above = above.parent
    return above


def _leaf(call: ModuleCall) -> str:
    """The last component of its name that says something."""
    parts = pattern(call.module).split(".")
    return parts[-1] if parts[-1] != "*" else ".".join(parts[-2:])
