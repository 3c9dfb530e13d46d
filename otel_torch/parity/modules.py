"""Pair the modules of two programs: owners of parameters by these, containers by their contents.

For example, with these pairs of parameters, `blocks.0` and `layers.0` are paired as containers,
because all owners inside them correspond:

    blocks.0.norm.weight = layers.0.ln.weight     -> blocks.0.norm = layers.0.ln
    blocks.0.ff.weight   = layers.0.mlp.weight    -> blocks.0.ff = layers.0.mlp
                                                  -> blocks.0 = layers.0
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from otel_torch.parity.call_graph import Parameter, enclosing_names
from otel_torch.parity.parameter_names import similarity
from otel_torch.parity.parameters import ParameterPair
from otel_torch.parity.sides import Sides

ModulePath = tuple[str, str]  # model, module

# the share of their contents in which two containers must agree
_OVERLAP = 0.75


@dataclass(slots=True)
class ModulePairs:
    """Which modules correspond.

    Attributes:
        matched: Reference's module -> port's, one to one.
        parts: Port's fused module -> the reference's modules that it consists of, in order.
        wholes: Reference's fused module -> the port's modules that it consists of, in order.
        containers: Those of `matched` that were paired by their contents.
        ambiguous: Reference's module -> modules of the port that match as well as its own.
        unpaired: Modules of the reference, and of the port, that the user's map keeps unpaired.
        weights: The parameter pairs of a pair of modules.
        owners: All modules with parameters, buffers left out.
        order: The place of each module in its program's table.
        uncalled: Modules of the table that are never called.
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
    owners: Sides[set[ModulePath]] = field(
        default_factory=lambda: Sides[set[ModulePath]](set(), set())
    )
    order: Sides[dict[ModulePath, int]] = field(
        default_factory=lambda: Sides[dict[ModulePath, int]]({}, {})
    )
    uncalled: Sides[set[ModulePath]] = field(
        default_factory=lambda: Sides[set[ModulePath]](set(), set())
    )

    @property
    def paired(self) -> Sides[set[ModulePath]]:
        """The modules that have a counterpart, whole or in parts."""
        return Sides(
            {*self.matched, *self.wholes, *itertools.chain(*self.parts.values())},
            {*self.matched.values(), *self.parts, *itertools.chain(*self.wholes.values())},
        )


def counterpart(path: ModulePath, matched: Mapping[ModulePath, ModulePath]) -> ModulePath:
    """Return the match of a module: its own, or what has its name in that of one around it.

    >>> counterpart(("A", "h.0.attn.norm"), {("A", "h.0"): ("B", "layers.0")})
    ('B', 'layers.0.attn.norm')
    """
    model, module = path
    for name in (module, *enclosing_names(module)):
        if (model, name) in matched:
            other, match = matched[model, name]
            inside = module.removeprefix(name).removeprefix(".")
            return other, ".".join(filter(None, (match, inside)))
    return path


def pair_modules(
    parameter_pairs: Sequence[ParameterPair],
    reference: Iterable[ModulePath],
    port: Iterable[ModulePath],
    owners: Sides[set[ModulePath]],
) -> ModulePairs:
    """Pair owners by votes of their parameters, then containers by the paired owners inside.

    Args:
        reference: All modules, whether they own parameters or not.
        port: Likewise.
        owners: Those with parameters, buffers left out.
    """
    pairs = ModulePairs(owners=owners)
    votes: dict[ModulePath, Counter[ModulePath]] = defaultdict(Counter)
    for pair in parameter_pairs:
        parts = [part.module_path for part in pair.reference]
        port_parts = [part.module_path for part in pair.port]
        if len(parts) == len(port_parts) == 1:
            parts[0], port_parts[0] = _owners_of_one_name(parts[0], port_parts[0], owners)
            # a bias may be another module's by right, where a norm is folded into a convolution
            size = pair.port[0].numel
            votes[parts[0]][port_parts[0]] += 2 * size if pair.equal else size
        elif len(port_parts) == 1:
            _extend(pairs.parts, port_parts[0], parts)
        else:
            _extend(pairs.wholes, parts[0], port_parts)
        for module, match in itertools.product(set(parts), set(port_parts)):
            pairs.weights.setdefault((module, match), []).append(pair)
    _match_owners(pairs, votes)
    _note_ambiguous_owners(pairs)
    _pair_containers(pairs, list(reference), list(port))
    return pairs


def _owners_of_one_name(
    module: ModulePath, match: ModulePath, owners: Sides[set[ModulePath]]
) -> Sides[ModulePath]:
    """Return the owners that a pair of parameters speaks for.

    One program may keep a module's parameter in a module inside it. The outer one, if it has
    parameters of its own and the name of the other program's module, is then what corresponds:

        gate.weight, gate.moe_statics.bias    gate.weight, gate.bias    gate = gate
    """
    return Sides(
        _outer_owner(module, match[1], owners.reference),
        _outer_owner(match, module[1], owners.port),
    )


def _outer_owner(module: ModulePath, name: str, owners: Set[ModulePath]) -> ModulePath:
    """Return the owner around a module that has the last component of a name, else the module.

    A position in a list is no name.

    >>> owners = {("A", "mlp.gate"), ("A", "mlp.gate.statics")}
    >>> _outer_owner(("A", "mlp.gate.statics"), "h.mlp.gate", owners)
    ('A', 'mlp.gate')
    >>> _outer_owner(("A", "mlp.gate.statics"), "h.mlp.statics", owners)
    ('A', 'mlp.gate.statics')
    >>> _outer_owner(("A", "h.0.out"), "blocks.0.attn.out.0", {("A", "h.0"), ("A", "h.0.out")})
    ('A', 'h.0.out')
    """
    last = _last_component(name)
    if last.isdigit() or _last_component(module[1]) == last:
        return module
    around = ((module[0], outer) for outer in enclosing_names(module[1]))
    named = (path for path in around if path in owners and _last_component(path[1]) == last)
    return next(named, module)


def _last_component(name: str) -> str:
    return name.rpartition(".")[2]


def _match_owners(pairs: ModulePairs, votes: dict[ModulePath, Counter[ModulePath]]) -> None:
    """Match each module once: most votes first, then the most similar names."""
    candidates = sorted(
        (-count, -similarity(module[1], match[1]), module, match)
        for module, counts in votes.items()
        for match, count in counts.items()
    )
    taken: set[ModulePath] = set()
    for _, _, module, match in candidates:
        if module not in pairs.matched and match not in taken:
            pairs.matched[module] = match
            taken.add(match)


def _note_ambiguous_owners(pairs: ModulePairs) -> None:
    for module, match in pairs.matched.items():
        rivals = [
            {rival.module_path for rival in pair.rivals} - {match}
            for pair in pairs.weights[module, match]
        ]
        common = set.intersection(*rivals)
        if common:
            pairs.ambiguous[module] = sorted(common)


def _extend(
    groups: dict[ModulePath, list[ModulePath]], key: ModulePath, modules: list[ModulePath]
) -> None:
    group = groups.setdefault(key, [])
    group += [module for module in modules if module not in group]


def pair_within_containers(
    pairs: ModulePairs,
    parameter_pairs: Sequence[ParameterPair],
    reference: Sequence[Parameter],
    port: Sequence[Parameter],
) -> list[ParameterPair]:
    """Pair the remaining parameters of paired containers that have one name and size.

    Both containers must have equally many of them.
    """
    paired = {id(part) for pair in parameter_pairs for part in (*pair.reference, *pair.port)}
    remaining, remaining_port = (
        [part for part in side if id(part) not in paired and not part.is_buffer]
        for side in (reference, port)
    )
    further: list[ParameterPair] = []
    for parameter in remaining:
        container = _matched_container(pairs, parameter.module_path)
        if container is None:
            continue
        matches = _similar_inside(parameter, remaining_port, pairs.matched[container])
        rivals = _similar_inside(parameter, remaining, container)
        if matches and len(matches) == len(rivals):
            match = matches[rivals.index(parameter)]
            further.append(ParameterPair((parameter,), (match,), "name", None, False))
    return further


def _similar_inside(
    parameter: Parameter, candidates: Sequence[Parameter], container: ModulePath
) -> list[Parameter]:
    """Return the parameters inside a container with the same leaf name and size."""
    return [
        candidate
        for candidate in candidates
        if candidate.name == parameter.name
        and candidate.numel == parameter.numel
        and _is_inside(candidate.module_path, container)
    ]


def _is_inside(module: ModulePath, container: ModulePath) -> bool:
    if module[0] != container[0]:
        return False
    return not container[1] or module[1].startswith(f"{container[1]}.")


def _matched_container(pairs: ModulePairs, module: ModulePath) -> ModulePath | None:
    """Return the innermost matched module that contains a module, or None."""
    for name in enclosing_names(module[1]):
        if (module[0], name) in pairs.matched:
            return module[0], name
    return None


# -- containers
# --------------------------------------------------------------------------------------------------


def _pair_containers(
    pairs: ModulePairs, reference: list[ModulePath], port: list[ModulePath]
) -> None:
    """Match containers whose contents agree most, then by the similarity of their names."""
    numbers = _number_groups(pairs)
    contents = _contents(reference, numbers.reference)
    port_contents = _contents(port, numbers.port)
    candidates = _container_candidates(pairs, contents, port_contents)
    taken = set(pairs.matched.values()) | set(pairs.parts)
    for _, group in itertools.groupby(sorted(candidates), key=lambda item: item[:3]):
        equally_good = [
            (module, match)
            for *_, module, match in group
            if module not in pairs.matched and match not in taken
        ]
        for module, match in equally_good:
            if module in pairs.matched or match in taken:
                continue
            pairs.matched[module] = pairs.containers[module] = match
            taken.add(match)
            rivals = [rival for first, rival in equally_good if first == module and rival != match]
            if rivals:
                pairs.ambiguous[module] = rivals


def _number_groups(pairs: ModulePairs) -> Sides[dict[ModulePath, set[int]]]:
    """Number the pairs of owners; return the numbers of each owner, for either side."""
    groups = [([module], [match]) for module, match in pairs.matched.items()]
    groups += [(parts, [whole]) for whole, parts in pairs.parts.items()]
    groups += [([whole], parts) for whole, parts in pairs.wholes.items()]
    numbers: Sides[dict[ModulePath, set[int]]] = Sides({}, {})
    for number, group in enumerate(groups):
        for modules, numbers_of in zip(group, numbers, strict=True):
            for module in modules:
                numbers_of.setdefault(module, set()).add(number)
    return numbers


def _container_candidates(
    pairs: ModulePairs,
    contents: dict[ModulePath, set[int]],
    port_contents: dict[ModulePath, set[int]],
) -> list[tuple[float, float, int, ModulePath, ModulePath]]:
    """Return (-overlap, -similarity of names, difference in depth, module, match)."""
    containers_of: dict[int, list[ModulePath]] = defaultdict(list)
    for container, numbers in port_contents.items():
        for number in numbers:
            containers_of[number].append(container)
    candidates = []
    for module, numbers in contents.items():
        if module in pairs.matched or module in pairs.wholes:
            continue
        for match in {container for number in numbers for container in containers_of[number]}:
            shared, both = numbers & port_contents[match], numbers | port_contents[match]
            overlap = len(shared) / len(both)
            if overlap >= _OVERLAP:
                depth = abs(module[1].count(".") - match[1].count("."))
                alike = similarity(module[1], match[1])
                candidates.append((-overlap, -alike, depth, module, match))
    return candidates


def _contents(
    modules: list[ModulePath], owners: dict[ModulePath, set[int]]
) -> dict[ModulePath, set[int]]:
    """Return the numbers of the owners in each module with children, its own included."""
    has_children = {
        (model, outer) for model, module in modules for outer in enclosing_names(module)
    }
    contents: dict[ModulePath, set[int]] = defaultdict(set)
    for (model, module), numbers in owners.items():
        for name in (module, *enclosing_names(module)):
            if (model, name) in has_children:
                contents[model, name] |= numbers
    return dict(contents)
