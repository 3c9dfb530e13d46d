"""Pair the parameters of two programs: what both load shows best what corresponds.

Equal numbers pair, whatever the names. A fused weight pairs with the parts that add up to it. What
is left (a weight loaded wrong equals nothing) pairs by the patterns that the names of the other
pairs show. For example, `blocks.0.q = layers.0.wq`, equal by numbers, teaches the rule
`blocks.*.q = layers.*.wq`, which pairs `blocks.1.q` with the wrong `layers.1.wq`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from otel_torch.parity.call_graph import Parameter, Sketch
from otel_torch.parity.tolerance import SINGLE, Tolerance
from otel_torch.statistics.sketch_format import TURNS

How = Literal["map", "equal", "transposed", "fused", "name"]

# no fused weight has more parts (q, k, v and the MLP's gate and up)
_MOST_PARTS = 5


@dataclass(frozen=True, slots=True, eq=False)
class ParameterPair:
    """Parameters that correspond: one to one, or the parts of a fused one, in order.

    Attributes:
        how: What paired them.
        error: Relative L2 distance, 0 for transposed ones, None if unknown.
        equal: Whether they hold the same numbers.
        rivals: Parameters of the port that match as well.
    """

    reference: tuple[Parameter, ...]
    port: tuple[Parameter, ...]
    how: How
    error: float | None
    equal: bool
    rivals: tuple[Parameter, ...] = ()


def pair_parameters(
    reference: Sequence[Parameter],
    port: Sequence[Parameter],
    tolerance: Tolerance,
    named: Callable[[Parameter], list[str]] = lambda parameter: [],
    mapped: Sequence[tuple[Sequence[Parameter], Sequence[Parameter]]] = (),
    reordered: Callable[[Parameter], bool] = lambda parameter: False,
) -> list[ParameterPair]:
    """Pair parameters, the surest pairs first.

    Args:
        named: Returns the names of a reference's parameter in the port, by the port's loader.
        mapped: Pairs of the user's map; the parts of a fused parameter are in order.
        reordered: Returns whether the port, by the map, stores a parameter in another order.
    """
    pairing = _Pairing(reference, port, tolerance)
    pairing.by_map(mapped, reordered)
    pairing.by_loader(named)
    pairing.by_equality()
    pairing.by_transposition()
    pairing.by_fusion()
    pairing.take_back_misplaced()
    pairing.by_patterns()
    return pairing.pairs


class _Pairing:
    """The pairs so far, and the remaining parameters of either side."""

    def __init__(
        self, reference: Sequence[Parameter], port: Sequence[Parameter], tolerance: Tolerance
    ) -> None:
        self.pairs: list[ParameterPair] = []
        self._remaining = [list(_without_aliases(reference)), list(_without_aliases(port))]
        self._tolerance = tolerance

    def _take(
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
        taken = {id(one) for one in (*reference, *port)}
        self._remaining = [
            [one for one in side if id(one) not in taken] for side in self._remaining
        ]

    def by_map(
        self,
        mapped: Sequence[tuple[Sequence[Parameter], Sequence[Parameter]]],
        reordered: Callable[[Parameter], bool],
    ) -> None:
        """Pair what the map pairs, whatever the numbers."""
        for reference, port in mapped:
            one, other = reference[0], port[0]
            if len(reference) > 1 or len(port) > 1:
                error = (
                    _fused_error(reference, other) if len(port) == 1 else _fused_error(port, one)
                )
            elif reordered(one):
                error = (
                    0.0
                    if _alike(one.row, other.row, self._tolerance.of_parameters([one, other]))
                    else _distance(one, other)
                )
            else:
                transposed = self._transposed(one, other)
                padded = one.shape != other.shape and _padded(one, other)
                error = 0.0 if transposed is not None or padded else _distance(one, other)
            self._take(reference, port, "map", error)

    def by_loader(self, named: Callable[[Parameter], list[str]]) -> None:
        """Pair what the port's own loader maps, whatever the numbers."""
        targets: dict[str, list[Parameter]] = defaultdict(list)
        for one in self._remaining[0]:
            for name in named(one):
                targets[name].append(one)
        ports = {one.full_name: one for one in self._remaining[1]}
        for name, parts in targets.items():
            whole = ports.get(name)
            if whole is None:
                continue
            if len(parts) == 1:
                if parts[0].numel == whole.numel:
                    self._take(parts, [whole], "map", _distance(parts[0], whole))
            elif sum(part.numel for part in parts) == whole.numel:
                ordered = _in_order(parts, whole) or parts
                self._take(ordered, [whole], "map", _fused_error(ordered, whole))

    def by_equality(self) -> None:
        """Pair equal numbers; of several (norms of ones, zero biases), the most similar names."""
        self._greedily(self._equal, "equal")

    def by_transposition(self) -> None:
        """Pair equal statistics in another order: a weight that one program stores transposed."""
        # a square one of the same name may be a fault: that it is transposed is then for the name
        # to say
        self._greedily(self._transposed, "transposed")

    def _greedily(self, same: Callable[[Parameter, Parameter], float | None], how: How) -> None:
        """Pair parameters of one size and norm that are `same`, the most similar names first."""
        ports: dict[tuple[int, int], list[Parameter]] = defaultdict(list)
        for one in self._remaining[1]:
            ports[one.numel, _magnitude(one)].append(one)
        found: list[tuple[float, int, Parameter, Parameter, float]] = []
        for one in self._remaining[0]:
            near = [
                other
                for step in (-1, 0, 1)
                for other in ports.get((one.numel, _magnitude(one) + step), ())
            ]
            for other in near:
                error = same(one, other)
                if error is not None:
                    found.append(
                        (-similarity(one.full_name, other.full_name), len(found), one, other, error)
                    )
        taken: set[int] = set()
        for _, equals in itertools.groupby(
            sorted(found, key=lambda item: item[:2]), key=lambda item: item[0]
        ):
            group = [
                item[2:] for item in equals if id(item[2]) not in taken and id(item[3]) not in taken
            ]
            rivals: dict[int, list[Parameter]] = defaultdict(list)
            for one, other, _ in group:
                rivals[id(one)].append(other)
            for one, other, error in group:
                if id(one) not in taken and id(other) not in taken:
                    taken |= {id(one), id(other)}
                    self._take(
                        [one],
                        [other],
                        how,
                        error,
                        [rival for rival in rivals[id(one)] if rival is not other],
                    )

    def _equal(self, one: Parameter, other: Parameter) -> float | None:
        error = _distance(one, other)
        return (
            error
            if error is not None and error <= self._tolerance.of_parameters([one, other])
            else None
        )

    def _transposed(self, one: Parameter, other: Parameter) -> float | None:
        if one.shape == other.shape or sorted(_squeezed(one.shape)) != sorted(
            _squeezed(other.shape)
        ):
            return None
        limit = self._tolerance.of_parameters([one, other])
        return 0.0 if _alike(one.row, other.row, limit) else None

    def by_fusion(self) -> None:
        """Pair a weight with the parts whose size, squares and row sketches add up to it."""
        for whole_side in (1, 0):
            for whole in list(self._remaining[whole_side]):
                parts = self._parts_of(whole, self._remaining[1 - whole_side])
                if parts is not None:
                    sides = (parts, [whole]) if whole_side == 1 else ([whole], parts)
                    self._take(*sides, "fused", _fused_error(parts, whole))

    def _parts_of(self, whole: Parameter, candidates: list[Parameter]) -> list[Parameter] | None:
        if not whole.shape or whole.row_sketch is None:
            return None
        leaf, width = whole.name, whole.shape[1:]
        fitting = [
            one
            for one in candidates
            if one.name == leaf and one.shape[1:] == width and 0 < one.numel < whole.numel
        ]
        groups: dict[str, list[Parameter]] = defaultdict(list)
        for one in fitting:
            for depth in (1, 2):  # siblings, or cousins: `attn.to_q` with `mlp.fc1`
                groups["/".join([one.model, *one.module.split(".")[:-depth], str(depth)])].append(
                    one
                )
        limit = self._tolerance.of_parameters([whole, *fitting]) * 10
        for group in sorted(groups.values(), key=len):
            if len(group) > 12:
                continue
            for count in range(2, _MOST_PARTS + 1):
                for chosen in itertools.combinations(group, count):
                    if sum(one.numel for one in chosen) == whole.numel and _adds_up(
                        chosen, whole, limit
                    ):
                        ordered = _in_order(chosen, whole)
                        if ordered is not None:
                            return ordered
        return None

    def take_back_misplaced(self) -> None:
        """Undo equal pairs that contradict the names of all others.

        A weight loaded into the wrong place (q and k exchanged, a block with the next block's
        weights) should be compared with the one that belongs there.
        """
        learned: dict[str, Counter[str]] = defaultdict(Counter)
        singles = [
            pair
            for pair in self.pairs
            if len(pair.reference) == len(pair.port) == 1 and pair.how == "equal"
        ]
        for pair in singles:
            learned[pattern(pair.reference[0].full_name)][pattern(pair.port[0].full_name)] += 1
        ports = {pair.port[0].full_name: pair.port[0] for pair in singles} | {
            one.full_name: one for one in self._remaining[1]
        }
        references = {pair.reference[0].full_name for pair in singles} | {
            one.full_name for one in self._remaining[0]
        }
        misplaced = []
        for pair in singles:
            one, other = pair.reference[0], pair.port[0]
            if one.full_name == other.full_name:
                continue
            expected = (
                one.full_name if one.full_name in ports and other.full_name in references else None
            )
            if expected is None:
                best, _ = learned[pattern(one.full_name)].most_common(1)[0]
                expected = fill(best, indices(one.full_name))
            there = ports.get(expected)
            if (
                there is not None
                and there is not other
                and there.shape == one.shape
                and self._equal(one, there) is None
            ):
                misplaced.append(pair)
        # numbering that begins elsewhere, or one program's norm2 being the other's norm3, moves all
        # of a name, not some
        moved = Counter(pattern(pair.reference[0].full_name) for pair in misplaced)
        for pair in misplaced:
            one, other = pair.reference[0], pair.port[0]
            exchanged = (
                pattern(one.full_name) == pattern(other.full_name) or other.full_name in references
            )
            if exchanged or moved[pattern(one.full_name)] < sum(
                learned[pattern(one.full_name)].values()
            ):
                self.pairs.remove(pair)
                self._remaining[0].append(one)
                self._remaining[1].append(other)

    def by_patterns(self) -> None:
        """Pair by the name patterns of the pairs so far, then by similar names and equal shapes."""
        for how in (self._by_exact_names, self._by_learned_names, self._by_similar_names):
            how()

    def _by_exact_names(self) -> None:
        ports = {one.full_name: one for one in self._remaining[1]}
        for one in list(self._remaining[0]):
            other = ports.get(one.full_name)
            if other is not None and other.shape == one.shape:
                self._take([one], [other], "name", _distance(one, other))
            elif other is not None and _padded(one, other):
                self._take([one], [other], "name", 0.0)

    def _by_learned_names(self) -> None:
        learned = _learn(self.pairs)
        for side in (1, 0):
            for whole in list(self._remaining[side]):
                for rule in learned[side].get(pattern(whole.full_name), ()):
                    names = [part.apply(indices(whole.full_name)) for part in rule]
                    chosen = [
                        one
                        for name in names
                        for one in self._remaining[1 - side]
                        if one.full_name == name
                    ]
                    if (
                        chosen
                        and len(chosen) == len(names)
                        and sum(part.numel for part in chosen) == whole.numel
                    ):
                        error = (
                            _distance(chosen[0], whole)
                            if len(chosen) == 1
                            else _fused_error(chosen, whole)
                        )
                        self._take(
                            *((chosen, [whole]) if side == 1 else ([whole], chosen)), "name", error
                        )
                        break

    def _by_similar_names(self) -> None:
        ports: dict[tuple[int, ...], list[Parameter]] = defaultdict(list)
        for one in self._remaining[1]:
            ports[_squeezed(one.shape)].append(one)
        found: list[tuple[float, int, Parameter, Parameter]] = []
        for one in self._remaining[0]:
            for other in ports[_squeezed(one.shape)]:
                if one.name == other.name and not one.is_buffer and not other.is_buffer:
                    closeness = similarity(one.full_name, other.full_name)
                    if closeness > 0.6 and indices(one.full_name) == indices(other.full_name):
                        found.append((-closeness, len(found), one, other))
        taken: set[int] = set()
        for _, _, one, other in sorted(found, key=lambda item: item[:2]):
            if id(one) not in taken and id(other) not in taken:
                taken |= {id(one), id(other)}
                self._take([one], [other], "name", _distance(one, other))


@dataclass(frozen=True, slots=True)
class _Renaming:
    """How the name of a part follows from the whole's: a pattern, and the source of each index."""

    name: str
    sources: tuple[
        tuple[int | None, int], ...
    ]  # (which index of the whole's name or None, what is added to it)

    def apply(self, numbers: Sequence[int]) -> str:
        """Return the part's name for the indices of the whole's."""
        return fill(
            self.name,
            [more if source is None else numbers[source] + more for source, more in self.sources],
        )


_Rules = dict[str, list[tuple[_Renaming, ...]]]


def _learn(pairs: Sequence[ParameterPair]) -> tuple[_Rules, _Rules]:
    """Return the renaming rules of pairs, by the whole's pattern, the most frequent first.

    [0] has the reference's parameter as the whole, [1] the port's.
    """
    examples: tuple[dict[Any, list[Any]], dict[Any, list[Any]]] = (
        defaultdict(list),
        defaultdict(list),
    )
    for pair in pairs:
        for side, (parts, wholes) in enumerate(
            ((pair.port, pair.reference), (pair.reference, pair.port))
        ):
            if len(wholes) == 1:
                key = pattern(wholes[0].full_name), tuple(pattern(part.full_name) for part in parts)
                examples[side][key].append(
                    (indices(wholes[0].full_name), tuple(indices(part.full_name) for part in parts))
                )
    found: tuple[_Rules, _Rules] = {}, {}
    for side in (0, 1):
        for (whole, names), seen in sorted(examples[side].items(), key=lambda item: -len(item[1])):
            rule = tuple(
                _Renaming(
                    name,
                    _sources([numbers for numbers, _ in seen], [parts[index] for _, parts in seen]),
                )
                for index, name in enumerate(names)
            )
            found[side].setdefault(whole, []).append(rule)
    return found


def _sources(
    wholes: list[tuple[int, ...]], parts: list[tuple[int, ...]]
) -> tuple[tuple[int | None, int], ...]:
    """Return, for each index of the part's name, the whole's index or the constant it follows."""
    found: list[tuple[int | None, int]] = []
    for position in range(len(parts[0])):
        column = [part[position] for part in parts]
        best: tuple[int | None, int] = (None, column[0])
        for source in range(len(wholes[0])):
            differences = Counter(
                number - whole[source] for number, whole in zip(column, wholes, strict=True)
            )
            more, count = differences.most_common(1)[0]
            if count == len(column) and (len(set(column)) > 1 or more == 0):
                best = source, more
                break
        found.append(best)
    return tuple(found)


# -- names
# --------------------------------------------------------------------------------------------------


def pattern(name: str) -> str:
    """Replace the indices of a name by `*`; the 1 of `attn1` is no index.

    >>> pattern("blocks.12.attn1.to_q.weight")
    'blocks.*.attn1.to_q.weight'
    """
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def fill(name: str, numbers: Sequence[int]) -> str:
    """Put indices into a pattern; return "" if their number differs.

    >>> fill("blocks.*.to_q", [3])
    'blocks.3.to_q'
    """
    parts = name.split(".")
    if parts.count("*") != len(numbers):
        return ""
    left = iter(numbers)
    return ".".join(str(next(left)) if part == "*" else part for part in parts)


def indices(name: str) -> tuple[int, ...]:
    """Return the indices in a name.

    >>> indices("blocks.12.net.0")
    (12, 0)
    """
    return tuple(int(part) for part in name.split(".") if part.isdigit())


def similarity(one: str, other: str) -> float:
    """Return how much two names have in common, from 0 to 1.

    Their last components weigh most; equal indices count, too.

    >>> name = "a.0.to_q.weight"
    >>> similarity(name, "b.0.to_q.weight") > similarity(name, "b.1.to_k.weight")
    True
    """
    if one == other:
        return 1.0
    left, right = _words(one), _words(other)
    common = sum((Counter(left) & Counter(right)).values())
    tail = 0
    for first, second in zip(reversed(one.split(".")), reversed(other.split(".")), strict=False):
        if first != second:
            break
        tail += 1
    same_index = indices(one)[:1] == indices(other)[:1]
    return 0.6 * 2 * common / (len(left) + len(right)) + 0.15 * min(tail, 2) / 2 + 0.24 * same_index


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[._]|(?<=[a-z])(?=[0-9A-Z])", name) if word]


# -- numbers
# --------------------------------------------------------------------------------------------------


def distance(one: Sketch, other: Sketch) -> float:
    """Return the estimated L2 distance of two tensors, relative to the first if it is not zero."""
    difference = float(np.linalg.norm(one - other))
    if difference == 0:
        return 0.0
    size = float(np.linalg.norm(one))
    return difference / size if size else float("inf")


def _distance(one: Parameter, other: Parameter) -> float | None:
    if one.numel != other.numel:
        return None
    if one.sketch is None or other.sketch is None:
        return 0.0 if _alike(one.row, other.row, SINGLE) else None
    return distance(one.sketch, other.sketch)


def _alike(one: dict[str, object], other: dict[str, object], limit: float) -> bool:
    """Return whether the statistics that both have are equal: the same numbers in some order."""
    compared = 0
    for name in ("abs_mean", "l2", "min", "max", "sum"):
        left, right = one.get(name), other.get(name)
        if isinstance(left, int | float) and isinstance(right, int | float):
            compared += 1
            # a sum may be nearly nothing, of many that are not
            scale = max(abs(left), abs(right), _magnitudes(one) if name == "sum" else 0.0)
            if abs(left - right) > limit * scale:
                return False
    return compared > 0


def _padded(one: Parameter, other: Parameter) -> bool:
    """Return whether one is the other with rows of zeros appended (a vocabulary rounded up)."""
    squares = _squares(one), _squares(other)
    return one.shape[1:] == other.shape[1:] and abs(squares[0] - squares[1]) <= SINGLE * max(
        squares
    )


def _magnitudes(row: dict[str, object]) -> float:
    mean, shape = row.get("abs_mean"), row.get("shape")
    if not isinstance(mean, int | float) or not isinstance(shape, list):
        return 0.0
    return float(mean) * math.sqrt(math.prod(shape))


def _magnitude(one: Parameter) -> int:
    """Return the norm to about 1.5 %, as an integer; equal parameters differ by at most 1."""
    squares = _squares(one)
    return round(32 * math.log(squares)) if squares > 0 and math.isfinite(squares) else -(10**6)


def _squares(one: Parameter) -> float:
    norm = one.row.get("l2")
    return float(norm) ** 2 if isinstance(norm, int | float) else float("nan")


def _adds_up(parts: Iterable[Parameter], whole: Parameter, limit: float) -> bool:
    total = sum(_squares(part) for part in parts)
    return abs(total - _squares(whole)) <= 2 * limit * _squares(whole)


def _stacked(parts: Sequence[Parameter]) -> Sketch | None:
    """Return the row sketch of the concatenated parts."""
    total, rows = np.zeros(32, dtype=np.complex128), 0
    for part in parts:
        if part.row_sketch is None:
            return None
        half = part.row_sketch[:32] + 1j * part.row_sketch[32:]
        total = total + half * np.exp(2j * np.pi * np.mod(rows * np.array(TURNS), 1.0))
        rows += part.shape[0] if part.shape else 1
    return np.concatenate((total.real, total.imag))


def _fused_error(parts: Sequence[Parameter], whole: Parameter) -> float | None:
    stacked = _stacked(parts)
    if stacked is None or whole.row_sketch is None:
        return None
    return distance(whole.row_sketch, stacked)


def _in_order(parts: Sequence[Parameter], whole: Parameter) -> list[Parameter] | None:
    """Return the order in which the parts make the whole, or None."""
    best = min(
        itertools.permutations(parts),
        key=lambda order: (
            error if (error := _fused_error(order, whole)) is not None else float("inf")
        ),
    )
    error = _fused_error(best, whole)
    return list(best) if error is not None and error < 0.02 else None


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _without_aliases(parameters: Sequence[Parameter]) -> Iterable[Parameter]:
    """Yield each tensor once, under its first name."""
    seen: set[tuple[str, int]] = set()
    for one in parameters:
        number = one.row.get("value")
        if isinstance(number, int):
            if (one.model, number) in seen:
                continue
            seen.add((one.model, number))
        yield one
