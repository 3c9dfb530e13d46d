"""Pair the parameters of two programs.

Loaded weights are the best evidence of which modules correspond. Parameters with equal numbers
pair, whatever their names. A fused weight pairs with the parts that add up to it. The remaining
parameters, such as weights that were loaded incorrectly, pair by name patterns learned from the
pairs so far. For example, `blocks.0.q = layers.0.wq`, equal by numbers, teaches the rule
`blocks.*.q = layers.*.wq`, which pairs `blocks.1.q` with the incorrect `layers.1.wq`.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from otel_torch.parity.call_graph import Parameter
from otel_torch.parity.parameter_distance import (
    can_add_up,
    fused_error,
    has_equal_statistics,
    is_padded,
    log_norm,
    ordered_parts,
    parameter_distance,
)
from otel_torch.parity.parameter_names import fill, indices, pattern, similarity
from otel_torch.parity.renaming import Renaming, Rules, learn_rules
from otel_torch.parity.tolerance import Tolerance

How = Literal["map", "equal", "transposed", "fused", "name"]

# the largest fused weights consist of q, k, v and the gate and up projections of the MLP
_MOST_PARTS = 5

# the parts of a fused weight are sought among at most this many siblings or cousins
_MOST_SIBLINGS = 12


@dataclass(frozen=True, slots=True, eq=False)
class ParameterPair:
    """Two parameters that correspond, or a fused parameter and its parts in order.

    Attributes:
        how: The evidence that paired them.
        error: Relative L2 distance; 0 for a transposed parameter, None if unknown.
        equal: Whether both sides hold the same numbers.
        rivals: Further parameters of the port that match equally well.
    """

    reference: tuple[Parameter, ...]
    port: tuple[Parameter, ...]
    how: How
    error: float | None
    equal: bool
    rivals: tuple[Parameter, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether both sides are known to hold other numbers."""
        return not self.equal and self.error is not None

    @property
    def is_fused(self) -> bool:
        """Whether one side has several parts."""
        return len(self.reference) + len(self.port) > 2


def pair_parameters(
    reference: Sequence[Parameter],
    port: Sequence[Parameter],
    tolerance: Tolerance,
    loader_names: Callable[[Parameter], list[str]] = lambda parameter: [],
    mapped: Sequence[tuple[Sequence[Parameter], Sequence[Parameter]]] = (),
    is_reordered: Callable[[Parameter], bool] = lambda parameter: False,
) -> list[ParameterPair]:
    """Pair parameters, starting with the strongest evidence.

    Args:
        loader_names: Returns the names that the port's loader gives to a parameter of the
            reference.
        mapped: Pairs of the user's map; the parts of a fused parameter are in order.
        is_reordered: Returns whether, by the user's map, the port stores a parameter of the
            reference in another order.
    """
    pairing = _Pairing(reference, port, tolerance)
    pairing.pair_mapped(mapped, is_reordered)
    pairing.pair_by_loader(loader_names)
    pairing.pair_equal()
    pairing.pair_transposed()
    pairing.pair_fused()
    pairing.undo_misplaced()
    pairing.pair_by_names()
    return pairing.pairs


class _SimilarPair(NamedTuple):
    """A candidate pair with equal numbers, and the similarity of its names."""

    similarity: float
    reference: Parameter
    port: Parameter
    error: float


class _Pairing:
    """The pairs so far, and the unpaired parameters of the reference [0] and of the port [1]."""

    def __init__(
        self, reference: Sequence[Parameter], port: Sequence[Parameter], tolerance: Tolerance
    ) -> None:
        self.pairs: list[ParameterPair] = []
        self._remaining = [
            list(_without_aliases(reference, port)),
            list(_without_aliases(port, reference)),
        ]
        self._tolerance = tolerance

    def _add(
        self,
        reference: Sequence[Parameter],
        port: Sequence[Parameter],
        how: How,
        error: float | None,
        rivals: Sequence[Parameter] = (),
    ) -> None:
        limit = self._tolerance.of_parameters([*reference, *port])
        equal = error is not None and error <= limit
        self.pairs.append(
            ParameterPair(tuple(reference), tuple(port), how, error, equal, tuple(rivals))
        )
        paired = {id(parameter) for parameter in (*reference, *port)}
        self._remaining = [
            [parameter for parameter in side if id(parameter) not in paired]
            for side in self._remaining
        ]

    def _add_fused(
        self,
        whole_side: int,
        whole: Parameter,
        parts: Sequence[Parameter],
        how: How,
        error: float | None,
    ) -> None:
        """Add a pair whose whole is on `whole_side`: 0 for the reference, 1 for the port."""
        if whole_side == 1:
            self._add(parts, [whole], how, error)
        else:
            self._add([whole], parts, how, error)

    def pair_mapped(
        self,
        mapped: Sequence[tuple[Sequence[Parameter], Sequence[Parameter]]],
        is_reordered: Callable[[Parameter], bool],
    ) -> None:
        """Add the pairs of the user's map, whatever their numbers."""
        for references, ports in mapped:
            if len(ports) > 1:
                error = fused_error(ports, references[0])
            elif len(references) > 1:
                error = fused_error(references, ports[0])
            else:
                reference = references[0]
                error = self._mapped_error(reference, ports[0], is_reordered(reference))
            self._add(references, ports, "map", error)

    def _mapped_error(
        self, reference: Parameter, port: Parameter, is_reordered: bool
    ) -> float | None:
        if is_reordered:
            limit = self._tolerance.of_parameters([reference, port])
            is_same = has_equal_statistics(reference.row, port.row, limit)
        elif self._transposed_error(reference, port) is not None:
            is_same = True
        else:
            is_same = reference.shape != port.shape and is_padded(reference, port)
        return 0.0 if is_same else parameter_distance(reference, port)

    def pair_by_loader(self, loader_names: Callable[[Parameter], list[str]]) -> None:
        """Pair parameters as the port's loader maps them, whatever their numbers."""
        parts_by_name: dict[str, list[Parameter]] = defaultdict(list)
        for parameter in self._remaining[0]:
            for name in loader_names(parameter):
                parts_by_name[name].append(parameter)
        ports = {parameter.full_name: parameter for parameter in self._remaining[1]}
        for name, parts in parts_by_name.items():
            whole = ports.get(name)
            if whole is None or sum(part.numel for part in parts) != whole.numel:
                continue
            if len(parts) == 1:
                self._add(parts, [whole], "map", parameter_distance(parts[0], whole))
            else:
                ordered = ordered_parts(parts, whole) or parts
                self._add(ordered, [whole], "map", fused_error(ordered, whole))

    def pair_equal(self) -> None:
        """Pair equal numbers; among several (unit norms, zero biases), the most similar names."""
        self._pair_greedily(self._equal_error, "equal")

    def pair_transposed(self) -> None:
        """Pair weights with equal statistics and transposed shapes."""
        # a transposed square weight may be a fault, so its name decides
        self._pair_greedily(self._transposed_error, "transposed")

    def _pair_greedily(
        self, error_of: Callable[[Parameter, Parameter], float | None], how: How
    ) -> None:
        """Pair the candidates that have an error, the most similar names first."""
        candidates = sorted(self._similar_pairs(error_of), key=lambda pair: -pair.similarity)
        paired: set[int] = set()
        for _, ties in itertools.groupby(candidates, key=lambda pair: pair.similarity):
            group = [
                pair
                for pair in ties
                if id(pair.reference) not in paired and id(pair.port) not in paired
            ]
            ports: dict[int, list[Parameter]] = defaultdict(list)
            for pair in group:
                ports[id(pair.reference)].append(pair.port)
            for _, reference, port, error in group:
                if id(reference) not in paired and id(port) not in paired:
                    paired |= {id(reference), id(port)}
                    rivals = [rival for rival in ports[id(reference)] if rival is not port]
                    self._add([reference], [port], how, error, rivals)

    def _similar_pairs(
        self, error_of: Callable[[Parameter, Parameter], float | None]
    ) -> list[_SimilarPair]:
        """Return the pairs of equal size and norm for which `error_of` returns an error."""
        ports: dict[tuple[int, int], list[Parameter]] = defaultdict(list)
        for parameter in self._remaining[1]:
            ports[parameter.numel, log_norm(parameter)].append(parameter)
        pairs = []
        for reference in self._remaining[0]:
            magnitude = log_norm(reference)
            for step in (-1, 0, 1):
                for port in ports.get((reference.numel, magnitude + step), ()):
                    error = error_of(reference, port)
                    if error is not None:
                        closeness = similarity(reference.full_name, port.full_name)
                        pairs.append(_SimilarPair(closeness, reference, port, error))
        return pairs

    def _equal_error(self, reference: Parameter, port: Parameter) -> float | None:
        """Return the error of equal parameters, None if they differ."""
        error = parameter_distance(reference, port)
        if error is None or error > self._tolerance.of_parameters([reference, port]):
            return None
        return error

    def _transposed_error(self, reference: Parameter, port: Parameter) -> float | None:
        """Return 0 if one parameter may be the other transposed, else None."""
        if reference.shape == port.shape:
            return None
        if sorted(_squeezed(reference.shape)) != sorted(_squeezed(port.shape)):
            return None
        limit = self._tolerance.of_parameters([reference, port])
        return 0.0 if has_equal_statistics(reference.row, port.row, limit) else None

    def pair_fused(self) -> None:
        """Pair fused weights with parts whose size, squares and row sketches add up to them."""
        for whole_side in (1, 0):
            for whole in list(self._remaining[whole_side]):
                parts = self._find_parts(whole, self._remaining[1 - whole_side])
                if parts is not None:
                    self._add_fused(whole_side, whole, parts, "fused", fused_error(parts, whole))

    def _find_parts(self, whole: Parameter, candidates: list[Parameter]) -> list[Parameter] | None:
        if not whole.shape or whole.row_sketch is None:
            return None
        fitting = [
            candidate
            for candidate in candidates
            if candidate.name == whole.name
            and candidate.shape[1:] == whole.shape[1:]
            and 0 < candidate.numel < whole.numel
        ]
        limit = self._tolerance.of_parameters([whole, *fitting]) * 10
        for relatives in _group_relatives(fitting):
            for count in range(2, _MOST_PARTS + 1):
                for parts in itertools.combinations(relatives, count):
                    if sum(part.numel for part in parts) != whole.numel:
                        continue
                    ordered = (
                        ordered_parts(parts, whole) if can_add_up(parts, whole, limit) else None
                    )
                    if ordered is not None:
                        return ordered
        return None

    def undo_misplaced(self) -> None:
        """Remove equal pairs whose names contradict the names of all other pairs.

        A weight that was loaded into the wrong place (q and k exchanged, a block with the weights
        of the next block) is then compared with its counterpart by name.
        """
        singles = [
            pair
            for pair in self.pairs
            if len(pair.reference) == len(pair.port) == 1 and pair.how == "equal"
        ]
        learned: dict[str, Counter[str]] = defaultdict(Counter)
        for pair in singles:
            learned[pattern(pair.reference[0].full_name)][pattern(pair.port[0].full_name)] += 1
        references = {pair.reference[0].full_name for pair in singles}
        references |= {parameter.full_name for parameter in self._remaining[0]}
        ports = {pair.port[0].full_name: pair.port[0] for pair in singles}
        ports |= {parameter.full_name: parameter for parameter in self._remaining[1]}

        misplaced = [
            pair for pair in singles if self._is_misplaced(pair, learned, references, ports)
        ]
        # Different numbering, or norm2 of one program being norm3 of the other, moves all
        # parameters of a pattern. A fault moves only some of them.
        moved = Counter(pattern(pair.reference[0].full_name) for pair in misplaced)
        for pair in misplaced:
            reference, port = pair.reference[0], pair.port[0]
            reference_pattern = pattern(reference.full_name)
            is_exchanged = (
                reference_pattern == pattern(port.full_name) or port.full_name in references
            )
            if is_exchanged or moved[reference_pattern] < sum(learned[reference_pattern].values()):
                self.pairs.remove(pair)
                self._remaining[0].append(reference)
                self._remaining[1].append(port)

    def _is_misplaced(
        self,
        pair: ParameterPair,
        learned: dict[str, Counter[str]],
        references: set[str],
        ports: dict[str, Parameter],
    ) -> bool:
        """Return whether the names suggest another port parameter, which has other numbers.

        Args:
            learned: How often each pattern of the reference pairs with each pattern of the port.
            references: Names of all parameters of the reference.
            ports: All parameters of the port by name.
        """
        reference, port = pair.reference[0], pair.port[0]
        name = reference.full_name
        if name == port.full_name:
            return False
        if name in ports and port.full_name in references:
            expected_name = name
        else:
            usual_pattern, _ = learned[pattern(name)].most_common(1)[0]
            expected_name = fill(usual_pattern, indices(name))
        expected = ports.get(expected_name)
        if expected is None or expected is port or expected.shape != reference.shape:
            return False
        return self._equal_error(reference, expected) is None

    def pair_by_names(self) -> None:
        """Pair equal names, then names that follow learned rules, then similar names."""
        self._pair_equal_names()
        self._pair_by_learned_rules()
        self._pair_similar_names()

    def _pair_equal_names(self) -> None:
        ports = {parameter.full_name: parameter for parameter in self._remaining[1]}
        for reference in list(self._remaining[0]):
            port = ports.get(reference.full_name)
            if port is None:
                continue
            if port.shape == reference.shape:
                self._add([reference], [port], "name", parameter_distance(reference, port))
            elif is_padded(reference, port):
                self._add([reference], [port], "name", 0.0)

    def _pair_by_learned_rules(self) -> None:
        pairs = [(pair.reference, pair.port) for pair in self.pairs]
        reversed_pairs = [(port, reference) for reference, port in pairs]
        for whole_side, rules in ((1, _learn(reversed_pairs)), (0, _learn(pairs))):
            for whole in list(self._remaining[whole_side]):
                for rule in rules.get(pattern(whole.full_name), ()):
                    parts = self._parts_by_rule(whole, rule, 1 - whole_side)
                    if parts:
                        error = (
                            parameter_distance(parts[0], whole)
                            if len(parts) == 1
                            else fused_error(parts, whole)
                        )
                        self._add_fused(whole_side, whole, parts, "name", error)
                        break

    def _parts_by_rule(
        self, whole: Parameter, rule: tuple[Renaming, ...], part_side: int
    ) -> list[Parameter]:
        """Return the parts that a rule names for a whole; [] if any is missing or misfits."""
        names = [renaming.apply(indices(whole.full_name)) for renaming in rule]
        parts = [
            parameter
            for name in names
            for parameter in self._remaining[part_side]
            if parameter.full_name == name
        ]
        is_complete = len(parts) == len(names)
        return parts if is_complete and sum(part.numel for part in parts) == whole.numel else []

    def _pair_similar_names(self) -> None:
        """Pair parameters with equal shapes, leaf names and indices, the most similar first."""
        ports: dict[tuple[int, ...], list[Parameter]] = defaultdict(list)
        for parameter in self._remaining[1]:
            ports[_squeezed(parameter.shape)].append(parameter)
        candidates: list[tuple[float, Parameter, Parameter]] = []
        for reference in self._remaining[0]:
            for port in ports[_squeezed(reference.shape)]:
                if reference.name != port.name or reference.is_buffer or port.is_buffer:
                    continue
                closeness = similarity(reference.full_name, port.full_name)
                if closeness > 0.6 and indices(reference.full_name) == indices(port.full_name):
                    candidates.append((closeness, reference, port))
        paired: set[int] = set()
        for _, reference, port in sorted(candidates, key=lambda candidate: -candidate[0]):
            if id(reference) not in paired and id(port) not in paired:
                paired |= {id(reference), id(port)}
                self._add([reference], [port], "name", parameter_distance(reference, port))


def _group_relatives(parameters: Sequence[Parameter]) -> list[list[Parameter]]:
    """Group siblings (`attn.to_q`, `attn.to_k`) and cousins (`attn.to_q`, `mlp.fc1`).

    The smallest groups come first; groups too large to try all combinations are omitted.
    """
    groups: dict[str, list[Parameter]] = defaultdict(list)
    for parameter in parameters:
        for depth in (1, 2):
            ancestors = parameter.module.split(".")[:-depth]
            groups["/".join([parameter.model, *ancestors, str(depth)])].append(parameter)
    return [group for group in sorted(groups.values(), key=len) if len(group) <= _MOST_SIBLINGS]


def _learn(pairs: Iterable[tuple[Sequence[Parameter], Sequence[Parameter]]]) -> Rules:
    """Return the renaming rules of (wholes, parts), of the pairs with one whole."""
    return learn_rules(
        (wholes[0].full_name, [part.full_name for part in parts])
        for wholes, parts in pairs
        if len(wholes) == 1
    )


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _without_aliases(
    parameters: Sequence[Parameter], others: Sequence[Parameter]
) -> Iterable[Parameter]:
    """Yield each tensor under its first name, and under those that `others` gives other tensors.

    A program that does not tie its weights is then compared with one that does, name by name.
    """
    tensors = {parameter.full_name: tensor_key(parameter) for parameter in others}
    seen: dict[Hashable, set[Hashable]] = defaultdict(set)
    for parameter in parameters:
        counterparts = seen[tensor_key(parameter)]
        counterpart = tensors.get(parameter.full_name)
        if not counterparts or (counterpart is not None and counterpart not in counterparts):
            yield parameter
        counterparts.add(counterpart)


def tensor_key(parameter: Parameter) -> Hashable:
    """Return the same for all names of one tensor."""
    value = parameter.row.get("value")
    return (parameter.model, value) if isinstance(value, int) else id(parameter)
