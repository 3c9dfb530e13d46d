"""Folds pairs of names into patterns, so that forty equal blocks take one line of a map.

A `*` replaces indices that agree on both sides. It is used only if the pattern, read back, yields
exactly the pairs it replaced:

>>> pairs = {"a.0.q": ("b.0.x",), "a.1.q": ("b.1.x",), "a.2.q": ("b.9.x",)}
>>> for name, partners, covered in fold(pairs, pairs, [{"b.0.x", "b.1.x", "b.2.x", "b.9.x"}]):
...     print(name, partners, len(covered))
a.*.q ('b.*.x',) 2
a.2.q ('b.9.x',) 1
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from otel_torch.parity.naming import carry, matcher, wildcards

Pattern = tuple[str, tuple[str, ...]]  # a name and its partners, with wildcards or without
PartnersByName = Mapping[str, tuple[str, ...]]

_MAX_INDICES = 4  # indices of a name that can become `*`


def fold(
    pairs: PartnersByName, names: Iterable[str], partner_names: Sequence[set[str]]
) -> list[tuple[str, tuple[str, ...], list[str]]]:
    """Return lines equivalent to `pairs`, in the same order.

    Args:
        pairs: Name -> its partners.
        names: All names that a pattern could match.
        partner_names: For each partner, all names that it could match.

    Returns:
        (name or pattern, its partners, the names it covers) for each line.
    """
    names_by_depth = defaultdict(list)
    for name in names:
        names_by_depth[name.count(".")].append(name)

    # The patterns that cover most names come first.
    covered: dict[Pattern, list[str]] = defaultdict(list)
    for name, partners in pairs.items():
        for pattern in _patterns(name, partners):
            covered[pattern].append(name)
    candidates = sorted(
        covered.items(), key=lambda item: (-len(item[1]), len(wildcards(item[0][0])))
    )

    pattern_of: dict[str, Pattern] = {}
    exact: set[str] = set()  # names that keep a line of their own
    for pattern, members in candidates:
        members = [name for name in members if name not in pattern_of and name not in exact]
        if len(members) < 2:
            continue
        same_depth = names_by_depth[pattern[0].count(".")]
        exceptions = _exceptions(pattern, same_depth, pairs, pattern_of, partner_names)
        if exceptions is not None and 2 * len(exceptions) <= len(members):
            pattern_of |= dict.fromkeys(members, pattern)
            exact |= exceptions

    lines: dict[Pattern, list[str]] = defaultdict(list)
    for name, partners in pairs.items():
        lines[pattern_of.get(name, (name, partners))].append(name)
    return [(*line, members) for line, members in lines.items()]


def _exceptions(
    pattern: Pattern,
    names: Iterable[str],
    pairs: PartnersByName,
    pattern_of: Mapping[str, Pattern],
    partner_names: Sequence[set[str]],
) -> set[str] | None:
    """Return the names that the pattern matches with wrong partners, and which therefore need lines
    of their own; None if the pattern cannot be used.
    """
    expression = matcher(pattern[0])
    exceptions = set()
    for name in names:
        match = expression.fullmatch(name)
        if match is None:
            continue
        partners = tuple(carry(partner, match.groups()) for partner in pattern[1])
        if name not in pairs:
            exist = (
                partner in existing
                for partner, existing in zip(partners, partner_names, strict=True)
            )
            if all(exist):  # it would pair a name that has no partner
                return None
        elif pairs[name] != partners:
            if name in pattern_of:
                return None
            exceptions.add(name)
    return exceptions


def _patterns(name: str, partners: tuple[str, ...]) -> Iterator[Pattern]:
    """Yield every way to replace indices of a name, and equal ones of its partners, by `*`.

    >>> list(_patterns("a.3.q", ("b.3.x",)))
    [('a.*.q', ('b.*.x',))]
    """
    parts = name.split(".")
    positions = _index_positions(parts)
    for count in range(1, len(positions) + 1):
        for chosen in itertools.combinations(positions, count):
            indices = [parts[position] for position in chosen]
            ways = [_with_stars_for(partner, indices) for partner in partners]
            for partner_patterns in itertools.product(*ways):
                yield _replace(parts, chosen), partner_patterns


def _with_stars_for(name: str, indices: list[str]) -> list[str]:
    """Return every way to replace exactly these indices of a name, in this order, by `*`."""
    parts = name.split(".")
    return [
        _replace(parts, positions)
        for positions in itertools.combinations(_index_positions(parts), len(indices))
        if [parts[position] for position in positions] == indices
    ]


def _index_positions(parts: Sequence[str]) -> list[int]:
    return [position for position, part in enumerate(parts) if part.isdigit()][:_MAX_INDICES]


def _replace(parts: Sequence[str], positions: Iterable[int]) -> str:
    replaced = set(positions)
    return ".".join("*" if position in replaced else part for position, part in enumerate(parts))
