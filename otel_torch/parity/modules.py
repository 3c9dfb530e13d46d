"""Pairs the modules of two programs: owners of parameters by their parameters, containers by the
owners below them.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from otel_torch.parity.call_graph import Parameter
from otel_torch.parity.parameters import ParameterPair, similarity

ModulePath = tuple[str, str]  # model, module

# how much of what two containers hold must correspond
_OVERLAP = 0.75


@dataclass(slots=True)
class ModulePairs:
    """What corresponds to what.

    matched: reference's module -> port's, one to one. parts: reference's modules of which a port's
    module consists, in order; wholes: port's modules of which a reference's module consists.
    containers: those of `matched` that were paired by what they hold. ambiguous: for a module of the
    reference, those of the port that would have been as good as its own. unpaired: of the reference
    and of the port, what a map keeps apart. weights: the parameter pairs of a module pair.
    """

    matched: dict[ModulePath, ModulePath] = field(default_factory=dict)
    parts: dict[ModulePath, list[ModulePath]] = field(default_factory=dict)
    wholes: dict[ModulePath, list[ModulePath]] = field(default_factory=dict)
    containers: dict[ModulePath, ModulePath] = field(default_factory=dict)
    ambiguous: dict[ModulePath, list[ModulePath]] = field(default_factory=dict)
    unpaired: tuple[set[ModulePath], set[ModulePath]] = field(
        default_factory=lambda: (set(), set())
    )
    weights: dict[tuple[ModulePath, ModulePath], list[ParameterPair]] = field(default_factory=dict)


def pair_modules(
    pairs: Sequence[ParameterPair],
    reference: Iterable[ModulePath],
    port: Iterable[ModulePath],
) -> ModulePairs:
    """Pair owners by votes of their parameters, then containers by the paired owners below them.

    reference, port: every module of each side, whether it owns anything or not.
    """
    found = ModulePairs()
    votes: dict[ModulePath, Counter[ModulePath]] = defaultdict(Counter)
    for pair in pairs:
        weight = 1.0 if pair.equal else 0.5
        if len(pair.reference) == len(pair.port) == 1:
            votes[pair.reference[0].module_path][pair.port[0].module_path] += weight  # type: ignore[assignment]
        elif len(pair.port) == 1:
            _extend(
                found.parts, pair.port[0].module_path, [part.module_path for part in pair.reference]
            )
        else:
            _extend(
                found.wholes,
                pair.reference[0].module_path,
                [part.module_path for part in pair.port],
            )
        for one in {part.module_path for part in pair.reference}:
            for other in {part.module_path for part in pair.port}:
                found.weights.setdefault((one, other), []).append(pair)
    candidates = sorted(
        (
            (-count, -similarity(one[1], other[1]), one, other)
            for one, row in votes.items()
            for other, count in row.items()
        ),
    )
    taken: set[ModulePath] = set()
    for _, _, one, other in candidates:
        if one not in found.matched and other not in taken:
            found.matched[one] = other
            taken.add(other)
    for one, other in found.matched.items():
        rivals = [
            {rival.module_path for rival in pair.rivals} - {other}
            for pair in found.weights[one, other]
        ]
        if common := set.intersection(*rivals):
            found.ambiguous[one] = sorted(common)
    _pair_containers(found, list(reference), list(port))
    return found


def pair_within_containers(
    found: ModulePairs,
    pairs: Sequence[ParameterPair],
    reference: Sequence[Parameter],
    port: Sequence[Parameter],
) -> list[ParameterPair]:
    """Parameters that nothing else pairs, but that are the only ones of their kind left in paired
    containers.
    """
    known = {id(one) for pair in pairs for one in (*pair.reference, *pair.port)}
    left = [
        [one for one in side if id(one) not in known and not one.is_buffer]
        for side in (reference, port)
    ]
    completed: list[ParameterPair] = []
    for one in left[0]:
        container = _container_of(found, one.module_path)
        if container is None:
            continue
        other_container = found.matched[container]
        fitting = [
            other
            for other in left[1]
            if _fits(one, other) and _lies_in(other.module_path, other_container)
        ]
        rivals = [
            rival
            for rival in left[0]
            if _fits(rival, one) and _lies_in(rival.module_path, container)
        ]
        if len(fitting) == len(rivals) and fitting:
            other = fitting[rivals.index(one)]
            completed.append(ParameterPair((one,), (other,), "name", None, False))
    return completed


def _fits(one: Parameter, other: Parameter) -> bool:
    return one.name == other.name and one.numel == other.numel


def _lies_in(place: ModulePath, container: ModulePath) -> bool:
    return place[0] == container[0] and (
        not container[1] or place[1].startswith(f"{container[1]}.")
    )


def _container_of(found: ModulePairs, place: ModulePath) -> ModulePath | None:
    """The innermost paired module that holds a place."""
    model, module = place
    while module:
        module = module.rpartition(".")[0]
        if (model, module) in found.matched:
            return model, module
    return None


def _extend(
    groups: dict[ModulePath, list[ModulePath]], key: ModulePath, places: list[ModulePath]
) -> None:
    known = groups.setdefault(key, [])
    known += [place for place in places if place not in known]


def _pair_containers(
    found: ModulePairs, reference: list[ModulePath], port: list[ModulePath]
) -> None:
    numbers: list[dict[ModulePath, set[int]]] = [{}, {}]
    groups = [([one], [other]) for one, other in found.matched.items()]
    groups += [(parts, [whole]) for whole, parts in found.parts.items()]
    groups += [([whole], parts) for whole, parts in found.wholes.items()]
    for number, group in enumerate(groups):
        for side in (0, 1):
            for place in group[side]:
                numbers[side].setdefault(place, set()).add(number)
    below = [_below(modules, numbers[side]) for side, modules in enumerate((reference, port))]
    holders: dict[int, list[ModulePath]] = defaultdict(list)
    for place, held in below[1].items():
        for number in held:
            holders[number].append(place)
    candidates = []
    for one, held in below[0].items():
        if one in found.matched or one in found.wholes:
            continue
        for other in {place for number in held for place in holders[number]}:
            overlap = len(held & below[1][other]) / len(held | below[1][other])
            if overlap >= _OVERLAP:
                depth = abs(one[1].count(".") - other[1].count("."))
                candidates.append((-overlap, -similarity(one[1], other[1]), depth, one, other))
    taken = set(found.matched.values()) | set(found.parts)
    for _, equals in itertools.groupby(sorted(candidates), key=lambda item: item[:3]):
        equally_good = [
            (one, other)
            for *_, one, other in equals
            if one not in found.matched and other not in taken
        ]
        for one, other in equally_good:
            if one not in found.matched and other not in taken:
                found.matched[one] = found.containers[one] = other
                taken.add(other)
                if rivals := [
                    rival for first, rival in equally_good if first == one and rival != other
                ]:
                    found.ambiguous[one] = rivals


def _below(
    modules: list[ModulePath], owners: dict[ModulePath, set[int]]
) -> dict[ModulePath, set[int]]:
    """What each module that holds others holds, itself included."""
    held: dict[ModulePath, set[int]] = defaultdict(set)
    has_children = set()
    for model, module in modules:
        parent = module
        while parent:
            parent = parent.rpartition(".")[0]
            has_children.add((model, parent))
    for (model, module), numbers in owners.items():
        parent = module
        while True:
            if (model, parent) in has_children:
                held[model, parent] |= numbers
            if not parent:
                break
            parent = parent.rpartition(".")[0]
    return dict(held)
