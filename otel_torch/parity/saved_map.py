"""Writes what a comparison found to correspond as a map: to be read, corrected where it is wrong,
and given back.

Forty blocks are one line: where the indices of both names agree, a `*` stands for them. What is
written must mean the same when it is read, so that a `*` is only written where it matches nothing
else.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from otel_torch.parity.call_graph import Parameter
from otel_torch.parity.mapping import SCHEMA, SIDES, Correspondence, Names, Side, quoted
from otel_torch.parity.modules import ModulePairs, ModulePath
from otel_torch.parity.naming import carry, matcher, wildcards
from otel_torch.parity.parameters import ParameterPair

_HEAD = """\
# What corresponds, as `otel-torch diff` found it: the name in the reference = the name in the port.
# Correct it and give it back with --map. A `*` is one component of a name, the same on both sides, `**` any number of them;
# a line without them decides over one with them. Tables: models, modules, parameters, fused.port (a module of the port
# = those of the reference that it is made of), fused.reference, unpaired, layouts.
# reference: {}
# port: {}
schema = "{}"
"""

# what paired two modules, for a person
_HOW = {
    "map": "said by a map or by the port's loader",
    "equal": "equal parameters",
    "transposed": "equal parameters, transposed",
    "fused": "parameters that add up",
    "name": "name",
    "different": "name, the parameters differ",
}

# only one program has it: what that is called, seen from the port
_ALONE = ("removed", "added")

Rows = Mapping[str, tuple[str, ...]]


def save_map(
    path: str | Path,
    found: ModulePairs,
    models: Mapping[str, str],
    weights: Sequence[ParameterPair],
    reference: Names,
    port: Names,
    *,
    given: Correspondence | None = None,
    ambiguous: Mapping[ModulePath, Sequence[ModulePath]] | None = None,
    titles: tuple[str, str] = ("", ""),
) -> None:
    """Write what was found. Raises OSError where the file cannot be written.

    models: reference's -> port's. weights: the parameter pairs, for those that do not follow from
    the pairs of modules. given: the map that was in force; what it keeps apart, and how it lays out
    tensors, is handed on. ambiguous: for a module of the reference those of the port that would
    have been as good as its own. titles: what the recordings are called.
    """
    writer = _Writer(found, models, weights, (reference, port), given, ambiguous or {})
    head = _HEAD.format(*map(quoted, titles), SCHEMA)
    Path(path).write_text(head + writer.text(), encoding="utf-8", errors="replace")


class _Writer:
    def __init__(
        self,
        found: ModulePairs,
        models: Mapping[str, str],
        weights: Sequence[ParameterPair],
        names: tuple[Names, Names],
        given: Correspondence | None,
        ambiguous: Mapping[ModulePath, Sequence[ModulePath]],
    ) -> None:
        self._found = found
        self._models = models
        self._weights = weights
        self._given = given
        self._ambiguous = ambiguous
        self._modules = names[0].modules, names[1].modules
        self._parameters = [
            [(one.model, one.full_name) for one in side.parameters] for side in names
        ]
        self._several = max(len({model for model, _ in side}) for side in self._modules) > 1

    def text(self) -> str:
        tables = [
            _table(
                "models",
                [(f"{quoted(one)} = {quoted(other)}", "") for one, other in self._models.items()],
            ),
            _table("modules", self._module_lines()),
            _table("fused.port", self._fused_lines(1)),
            _table("fused.reference", self._fused_lines(0)),
            _table("parameters", self._parameter_lines()),
            self._unpaired(),
            _table("layouts", self._layout_lines()),
        ]
        return "".join(tables)

    # -- pairs
    # ----------------------------------------------------------------------------------------------

    def _module_lines(self) -> Iterator[tuple[str, str]]:
        rows = {one: (other,) for one, other in self._found.matched.items() if one[1] or other[1]}
        for key, partners, members in self._folded(rows, 0, self._modules):
            yield f"{quoted(key)} = {quoted(partners[0])}", self._said_of(members)

    def _said_of(self, members: Sequence[ModulePath]) -> str:
        """How modules were paired, for a comment."""
        kinds = Counter(self._how(one) for one in members)
        text = ", ".join(
            kind if count == len(members) else f"{count} by {kind}"
            for kind, count in kinds.most_common()
        )
        rivals = {
            one: [
                rival for rival in self._ambiguous.get(one, ()) if rival != self._found.matched[one]
            ]
            for one in members
        }
        unsure = [one for one in members if rivals[one]]
        if unsure:
            others = " or ".join(quoted(rival[1]) for rival in rivals[unsure[0]][:3])
            text += f"; ambiguous: {quoted(unsure[0][1])} could as well be {others}"
        return text if len(members) == 1 else f"{len(members)} modules, {text}"

    def _how(self, one: ModulePath) -> str:
        other = self._found.matched[one]
        pairs = self._found.weights.get((one, other), ())
        kinds = {
            "different" if pair.how != "map" and not pair.equal else pair.how for pair in pairs
        }
        if kinds:
            return " and ".join(text for kind, text in _HOW.items() if kind in kinds)
        return "what they hold" if one in self._found.containers else "name alone"

    def _fused_lines(self, side: Side) -> Iterator[tuple[str, str]]:
        """Modules that are made of others; where not all their parameters are so made, the
        parameters.
        """
        groups = (self._found.wholes, self._found.parts)[side]
        rows = {
            whole: tuple(parts)
            for whole, parts in groups.items()
            if self._is_whole(side, whole, parts)
        }
        single = {
            (one.model, one.full_name): tuple((part.model, part.full_name) for part in parts)
            for one, parts in self._fusions(side)
            if one.module_path not in rows
        }
        for these, names in ((rows, self._modules), (single, self._parameters)):
            for key, partners, members in self._folded(these, side, names):
                yield f"{quoted(key)} = [{', '.join(map(quoted, partners))}]", _times(members)

    def _fusions(self, side: Side) -> Iterator[tuple[Parameter, tuple[Parameter, ...]]]:
        """(a parameter of this side, those of the other that it is put together of)."""
        for pair in self._weights:
            whole, parts = (pair.reference, pair.port) if side == 0 else (pair.port, pair.reference)
            if len(whole) == 1 and len(parts) > 1:
                yield whole[0], parts

    def _is_whole(self, side: Side, whole: ModulePath, parts: Sequence[ModulePath]) -> bool:
        """Whether a module is made of these and of nothing else, and they are parts of nothing
        else.
        """
        paired = {*self._found.matched}, {*self._found.matched.values()}
        if len(parts) < 2 or whole in paired[side] or not paired[1 - side].isdisjoint(parts):
            return False
        groups = (self._found.wholes, self._found.parts)[side]
        if any(
            other != whole and not set(parts).isdisjoint(others) for other, others in groups.items()
        ):
            return False
        made = [(one, of) for one, of in self._fusions(side) if one.module_path == whole]
        return all(
            [part.module_path for part in of] == list(parts)
            and {part.name for part in of} == {one.name}
            for one, of in made
        )

    def _parameter_lines(self) -> Iterator[tuple[str, str]]:
        """Pairs that do not follow from those of their modules."""
        rows = {}
        for pair in self._weights:
            one, other = pair.reference[0], pair.port[0]
            single = len(pair.reference) == len(pair.port) == 1
            if single and (
                self._found.matched.get(one.module_path) != other.module_path
                or one.name != other.name
            ):
                rows[one.model, one.full_name] = ((other.model, other.full_name),)
        for key, partners, members in self._folded(rows, 0, self._parameters):
            yield f"{quoted(key)} = {quoted(partners[0])}", _times(members)

    # -- what has no pair
    # ----------------------------------------------------------------------------------------------

    def _unpaired(self) -> str:
        """What the map in force keeps apart, then, as comments, what nothing corresponds to."""
        kept = [
            [entry.name for entry in self._given.map.unpaired if entry.side == side]
            if self._given
            else []
            for side in (0, 1)
        ]
        paired: tuple[set[ModulePath], set[ModulePath]] = (
            {*self._found.matched},
            {*self._found.matched.values()},
        )
        for side, groups in enumerate((self._found.wholes, self._found.parts)):
            paired[side].update(groups)
            paired[1 - side].update(place for parts in groups.values() for place in parts)
        text = "\n[unpaired]\n"
        for side in (0, 1):
            text += f"{SIDES[side]} = [{', '.join(map(quoted, kept[side]))}]\n"
        for side in (0, 1):
            alone: dict[ModulePath, tuple[ModulePath, ...]] = {
                place: () for place in self._modules[side] if place not in paired[side]
            }
            if alone:
                text += f"# {_ALONE[side]}: {len(alone)} modules that only the {SIDES[side]} has\n"
            for key, _, members in self._folded(alone, 0 if side == 0 else 1, self._modules):
                text += f"#   {quoted(key)}  {_times(members)}".rstrip() + "\n"
        return text

    def _layout_lines(self) -> Iterator[tuple[str, str]]:
        for entry, layout in self._given.map.layouts if self._given else ():
            yield f"{quoted(entry.name)} = {quoted(layout.text)}", ""

    # -- folding
    # ----------------------------------------------------------------------------------------------

    def _folded(
        self,
        rows: Mapping[ModulePath, tuple[ModulePath, ...]],
        side: Side,
        names: Sequence[Sequence[ModulePath]],
    ) -> Iterator[tuple[str, tuple[str, ...], list[ModulePath]]]:
        """(name, its partners, the places that this line speaks of), model by model, in the order
        of the program.
        """
        groups: dict[tuple[str, tuple[str, ...]], dict[str, tuple[str, ...]]] = defaultdict(dict)
        for model, name in names[side]:
            partners = rows.get((model, name))
            if partners is not None:
                groups[model, tuple(other for other, _ in partners)][name] = tuple(
                    partner for _, partner in partners
                )
        for (model, others), group in groups.items():
            universe = [name for one, name in names[side] if one == model]
            there = [{name for one, name in names[1 - side] if one == other} for other in others]
            for key, folded, members in fold(group, universe, there):
                yield (
                    self._prefix(model) + key,
                    tuple(
                        self._prefix(other) + partner
                        for other, partner in zip(others, folded, strict=True)
                    ),
                    [(model, member) for member in members],
                )

    def _prefix(self, model: str) -> str:
        return f"{model}/" if self._several else ""


def _times(members: Sequence[ModulePath]) -> str:
    return f"{len(members)} of them" if len(members) > 1 else ""


def _table(title: str, lines: Iterable[tuple[str, str]]) -> str:
    """A table of a map, its comments below each other; "" for an empty one."""
    rows = list(lines)
    width = min(max((len(line) for line, _ in rows), default=0), 88)
    body = "".join(
        f"{line.ljust(width)}  # {said}\n" if said else f"{line}\n" for line, said in rows
    )
    return f"\n[{title}]\n{body}" if rows else ""


# -- patterns
# --------------------------------------------------------------------------------------------------


def fold(
    rows: Rows, universe: Iterable[str], others: Sequence[set[str]]
) -> list[tuple[str, tuple[str, ...], list[str]]]:
    """Lines that say the same as `rows`, in their order, with `*` where indices agree: (name, its
    partners, what it covers).

    universe: all names that a pattern could match. others: for each partner, all names that it
    could become.

    >>> rows = {"a.0.q": ("b.0.x",), "a.1.q": ("b.1.x",), "a.2.q": ("b.9.x",)}
    >>> [line[:2] for line in fold(rows, rows, [{"b.0.x", "b.1.x", "b.2.x", "b.9.x"}])]
    [('a.*.q', ('b.*.x',)), ('a.2.q', ('b.9.x',))]
    """
    by_length = defaultdict(list)
    for name in universe:
        by_length[name.count(".")].append(name)
    members: dict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
    for name, partners in rows.items():
        for candidate in _candidates(name, partners):
            members[candidate].append(name)
    chosen: dict[str, tuple[str, tuple[str, ...]]] = {}  # name -> the pattern that says it
    exact: set[str] = set()  # said without a pattern, whatever patterns match
    for candidate, names in sorted(
        members.items(), key=lambda item: (-len(item[1]), len(wildcards(item[0][0])))
    ):
        names = [name for name in names if name not in chosen and name not in exact]
        if len(names) < 2:
            continue
        expression = matcher(candidate[0])
        exceptions: set[str] = set()
        for name in by_length[candidate[0].count(".")]:
            match = expression.fullmatch(name)
            if match is None:
                continue
            partners = tuple(carry(partner, match.groups()) for partner in candidate[1])
            if name in rows:
                if rows[name] != partners and name in chosen:
                    break
                if rows[name] != partners:
                    exceptions.add(name)
            elif all(partner in known for partner, known in zip(partners, others, strict=True)):
                break
        else:
            if 2 * len(exceptions) <= len(names):
                chosen |= dict.fromkeys(names, candidate)
                exact |= exceptions
    lines: dict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
    for name, partners in rows.items():
        lines[chosen.get(name, (name, partners))].append(name)
    return [(*line, names) for line, names in lines.items()]


def _candidates(name: str, partners: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every way to write `*` for indices of a name and the same ones, in the same order, of its
    partners.
    """
    parts = name.split(".")
    positions = _indices(parts)
    for count in range(1, len(positions) + 1):
        for opened in itertools.combinations(positions, count):
            values = [parts[position] for position in opened]
            yield from itertools.product(
                [_opened(parts, opened)],
                itertools.product(*(_ways(other, values) for other in partners)),
            )


def _ways(name: str, values: list[str]) -> list[str]:
    parts = name.split(".")
    ways = itertools.combinations(_indices(parts), len(values))
    return [_opened(parts, way) for way in ways if [parts[position] for position in way] == values]


def _indices(parts: Sequence[str]) -> list[int]:
    return [position for position, part in enumerate(parts) if part.isdigit()][:4]


def _opened(parts: Sequence[str], positions: Iterable[int]) -> str:
    opened = set(positions)
    return ".".join("*" if position in opened else part for position, part in enumerate(parts))
