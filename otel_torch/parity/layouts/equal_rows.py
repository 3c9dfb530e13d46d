"""Say what it means that ranks have equal numbers where they should not: causes of wrong places.

On a mesh, the ranks of a group have equal copies, of a part of a parameter or of what a module
gets. If other ranks agree at a wrong place, its value was reduced over another group. And two
parameters that have the same gradient, each on a rank of its own, were averaged with each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from otel_torch.parity.finding import Cause
from otel_torch.parity.layouts.judged_places import JudgedPlace
from otel_torch.parity.layouts.rank_layout import group_alike, relative_distance
from otel_torch.parity.layouts.rank_rows import PARAMETER_GRADIENT, PlaceKey, RankRow
from otel_torch.records import FORWARD_PHASES

Groups = frozenset[frozenset[int]]
# relative distance up to which numbers are equal on two ranks
_EQUAL = 1e-5
_PARAMETER = "param."


@dataclass(slots=True)
class EqualRows:
    """Which ranks have equal numbers: of each parameter, and of the latest right activation."""

    _parameters: dict[tuple[str, str, str], Groups] = field(default_factory=dict)
    _activations: Groups | None = None

    def find_causes(self, judged: Sequence[JudgedPlace]) -> dict[PlaceKey, Cause]:
        """Return what equal numbers say of the wrong places of a step."""
        causes = {}
        for entry in judged:
            cause = self._another_group(entry)
            if cause is not None:
                causes[entry.key] = cause
        return causes | _mixed_gradients(judged)

    def _another_group(self, entry: JudgedPlace) -> Cause | None:
        model, module, tensor, *_, phase, _ = entry.key
        groups = _groups_of(entry.place.ranks)
        if entry.layout is None or groups is None:
            return None
        if tensor.startswith(_PARAMETER):
            if not entry.is_wrong:
                self._parameters[model, module, tensor.removeprefix(_PARAMETER)] = groups
            return None
        if tensor.startswith(PARAMETER_GRADIENT):
            name = tensor.removeprefix(PARAMETER_GRADIENT)
            expected = self._parameters.get((model, module, name))
            what = "the same part of the parameter"
        elif phase in FORWARD_PHASES:
            if not entry.is_wrong:
                self._activations = groups
                return None
            expected, what = self._activations, "the same values before it"
        else:
            return None
        if not entry.is_wrong or expected is None or groups == expected:
            return None
        if {len(group) for group in groups} != {len(group) for group in expected}:
            return None
        text = (
            f"{_in_words(groups)} have equal values, where {_in_words(expected)} have {what}: it "
            "is reduced over another group of ranks"
        )
        return Cause("another_group", True, text)


@dataclass(slots=True)
class TiedWeights:
    """The parameters that the reference has under another name: a head with the embedding's."""

    _names: set[tuple[str, str, str]] = field(default_factory=set)

    def learn(self, judged: Sequence[JudgedPlace]) -> None:
        """Remember the parameters without a reference whose parts are those of another one."""
        attached = [entry for entry in judged if entry.key.phase == "attach"]
        known = {
            _numbers(row)
            for entry in attached
            if entry.reference is not None
            for row in entry.place.ranks
        }
        self._names |= {
            _parameter(entry)
            for entry in attached
            if entry.reference is None and all(_numbers(row) in known for row in entry.place.ranks)
        }

    def has(self, entry: JudgedPlace) -> bool:
        """Return whether a place is such a parameter, or its gradient."""
        return _parameter(entry) in self._names


def _parameter(entry: JudgedPlace) -> tuple[str, str, str]:
    model, module, tensor, *_ = entry.key
    return model, module, tensor.partition(".")[2]


def _numbers(row: RankRow) -> str:
    """Return what is equal where two rows have the same numbers."""
    return repr([row.row.get(name) for name in ("shape", "sum", "l2", "min", "max")])


def _groups_of(rows: Sequence[RankRow]) -> Groups | None:
    """Return the ranks with equal numbers; None unless each rank agrees with some, not with all."""
    groups = group_alike(rows, _EQUAL, _are_equal)
    if len(groups) < 2 or min(map(len, groups)) < 2:
        return None
    return frozenset(frozenset(row.rank for row in group) for group in groups)


def _are_equal(first: RankRow, second: RankRow) -> bool:
    if first.sketch is None or second.sketch is None or first.numel != second.numel:
        return False
    scale = max(first.l2, second.l2)
    return bool(scale) and relative_distance(first.sketch, second.sketch, scale) <= _EQUAL


def _in_words(groups: Groups) -> str:
    """Return groups of ranks as text.

    >>> _in_words(frozenset({frozenset({2, 3}), frozenset({0, 1})}))
    'ranks 0 and 1, 2 and 3'
    """
    in_order = sorted(sorted(group) for group in groups)
    return "ranks " + ", ".join(" and ".join(map(str, group)) for group in in_order)


def _mixed_gradients(judged: Sequence[JudgedPlace]) -> dict[PlaceKey, Cause]:
    """Return the cause where different parameters have one gradient, each on its own rank."""
    by_numbers: dict[str, list[JudgedPlace]] = {}
    for entry in judged:
        if entry.key.is_parameter_gradient and entry.is_wrong and len(entry.place.ranks) == 1:
            by_numbers.setdefault(_numbers(entry.place.ranks[0]), []).append(entry)
    causes: dict[PlaceKey, Cause] = {}
    for equal in by_numbers.values():
        names = [entry.key.module for entry in equal]
        ranks = {entry.place.ranks[0].rank for entry in equal}
        if len(set(names)) < 2 or len(ranks) < len(names) or not equal[0].place.ranks[0].l2:
            continue
        text = (
            f"{' and '.join(names)} have the same gradient, each on a rank of its own: it is "
            "reduced over ranks that have other parameters"
        )
        causes |= {entry.key: Cause("gradients_mixed", True, text) for entry in equal}
    return causes
