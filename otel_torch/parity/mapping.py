"""A person's map: what corresponds to what, said in a TOML file because the comparison cannot find
it or found it wrong.

What a map says overrides everything that is found. So that a typing mistake does not pass for
knowledge, every line of it is either used or said: a name that no module has, on whichever side,
ends the comparison.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol

from otel_torch.parity.call_graph import Parameter
from otel_torch.parity.layout import Layout, parse_layout
from otel_torch.parity.modules import ModulePairs, ModulePath
from otel_torch.parity.naming import carry, matcher, wildcards

SCHEMA = "otel_torch.map/1"

Side = Literal[0, 1]
SIDES = ("reference", "port")


class MapError(ValueError):
    """The map cannot be used; the message is one line that names the file, the table, the entry and
    what is wrong with it.
    """


class Names(Protocol):
    """What a recording has that a map can name: every module, as (model, name), and every parameter
    and buffer.
    """

    @property
    def modules(self) -> Sequence[ModulePath]: ...

    @property
    def parameters(self) -> Sequence[Parameter]: ...


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a map: a name, and what stands behind its `=`. side: whose name it is; the others
    are of the other side.
    """

    table: str
    name: str
    others: tuple[str, ...] = ()
    side: Side = 0

    def __str__(self) -> str:
        behind = [quoted(other) for other in self.others]
        text = (
            ""
            if not behind
            else f" = {behind[0]}"
            if len(behind) == 1
            else f" = [{', '.join(behind)}]"
        )
        return f"[{self.table}] {quoted(self.name)}{text}"


# -- the file
# --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Map:
    """A map as it is written. `between` says what it means for two recordings."""

    path: Path
    models: list[Entry] = field(default_factory=list)
    modules: list[Entry] = field(default_factory=list)
    parameters: list[Entry] = field(default_factory=list)
    fused: list[Entry] = field(default_factory=list)
    unpaired: list[Entry] = field(default_factory=list)
    layouts: list[tuple[Entry, Layout]] = field(default_factory=list)

    def between(self, reference: Names, port: Names) -> Correspondence:
        """What the map says of two recordings. Raises MapError where it names what neither has, or
        contradicts itself.
        """
        return _Resolution(self, (reference, port)).resolve()


def load_map(path: str | Path) -> Map:
    """Read a map. Raises MapError for what is no map, OSError for what is no file."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise MapError(f"{path}: is not TOML: {' '.join(str(error).split())}") from None
    except (UnicodeDecodeError, RecursionError):
        raise MapError(f"{path}: is not TOML") from None
    return _Reader(Path(path), content).read()


class _Reader:
    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self._content = content
        self._map = Map(path)

    def read(self) -> Map:
        readers: dict[str, Callable[[Any], None]] = {
            "schema": self._schema,
            "models": lambda value: self._names("models", self._map.models, value),
            "modules": lambda value: self._names("modules", self._map.modules, value),
            "parameters": lambda value: self._names("parameters", self._map.parameters, value),
            "fused": self._fused,
            "unpaired": self._unpaired,
            "layouts": self._layouts,
        }
        for name, value in self._content.items():
            if name not in readers:
                self._fail(
                    f"[{name}] is no table of a map; there are {', '.join(list(readers)[1:])}{_nearest(name, readers)}"
                )
            readers[name](value)
        return self._map

    def _fail(self, text: str) -> NoReturn:
        raise MapError(f"{self._map.path}: {text}")

    def _schema(self, value: Any) -> None:
        if value != SCHEMA:
            self._fail(f"schema is {value!r}; this version reads {SCHEMA!r}")

    def _table(self, name: str, value: Any) -> dict[str, Any]:
        """The entries of a table. Names without quotes, `blocks.0.attn = …`, are tables in tables
        to TOML, and names to us.
        """
        if not isinstance(value, dict):
            self._fail(f"{name} is no table; write [{name}] on a line and its entries below it")
        found: dict[str, Any] = {}
        for key, behind in value.items():
            if isinstance(behind, dict):
                found |= {
                    f"{key}.{below}": deeper
                    for below, deeper in self._table(f"{name}.{key}", behind).items()
                }
            else:
                found[key] = behind
        return found

    def _names(self, table: str, entries: list[Entry], value: Any) -> None:
        for name, other in self._table(table, value).items():
            if isinstance(other, list):
                self._fail(
                    f"[{table}] {quoted(name)} is paired with a list; a module of the reference that is several in the port "
                    f"stands under [fused.reference], the other way round under [fused.port]"
                )
            if not isinstance(other, str):
                self._fail(
                    f"[{table}] {quoted(name)} is paired with {other!r}, which is no name in quotes"
                )
            self._add(entries, Entry(table, name, (other,)))

    def _add(self, entries: list[Entry], entry: Entry) -> None:
        for name in (entry.name, *entry.others):
            if any("**" in part and part != "**" for part in name.split(".")):
                self._fail(f'{entry}: `**` stands for whole components, as in "a.**.b"')
        for other in entry.others:
            if wildcards(other) != wildcards(entry.name):
                self._fail(
                    f"{entry}: what `*` stands for is carried over, so that all names need the same ones, in order"
                )
        entries.append(entry)

    def _fused(self, value: Any) -> None:
        for owner, table in self._sides("fused", value).items():
            side: Side = 0 if owner == "reference" else 1
            for name, parts in self._table(f"fused.{owner}", table).items():
                entry = f"[fused.{owner}] {quoted(name)}"
                if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
                    self._fail(
                        f'{entry} needs the list of its parts in the {SIDES[1 - side]}: ["…", "…"]'
                    )
                if len(set(parts)) < len(parts):
                    self._fail(f"{entry} names a part twice")
                if len(parts) < 2:
                    self._fail(
                        f"{entry} has {len(parts)} parts; one that is one in the other program stands under [modules]"
                    )
                self._add(self._map.fused, Entry(f"fused.{owner}", name, tuple(parts), side))

    def _unpaired(self, value: Any) -> None:
        for owner, names in self._sides("unpaired", value).items():
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                self._fail(f'[unpaired] {owner} needs a list of names: ["…"]')
            for name in names:
                self._add(
                    self._map.unpaired,
                    Entry("unpaired", name, (), 0 if owner == "reference" else 1),
                )

    def _sides(self, table: str, value: Any) -> dict[str, Any]:
        for name in value if isinstance(value, dict) else [table]:
            if name not in SIDES:
                self._fail(f"[{table}] has `reference` and `port`, and no {name!r}")
        found: dict[str, Any] = value
        return found

    def _layouts(self, value: Any) -> None:
        for name, text in self._table("layouts", value).items():
            if ":" not in name:
                self._fail(
                    f'[layouts] {quoted(name)} names no tensor; write "module:out", "module:in[0]", "module:param.weight"'
                )
            entry = Entry("layouts", name, (str(text),))
            try:
                self._map.layouts.append((entry, parse_layout(text)))
            except ValueError as error:
                self._fail(f"{entry}: {error}")


# -- what it means for two recordings
# --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Correspondence:
    """What a map says of two recordings, every wildcard replaced.

    models: reference's model -> port's. matched, parts, wholes: as in `ModulePairs`. parameters: groups
    that belong together, of a fused one its parts in order. unpaired: modules of the reference, and
    of the port, that are never to be paired. warnings: a line each.
    """

    map: Map
    models: dict[str, str] = field(default_factory=dict)
    matched: dict[ModulePath, ModulePath] = field(default_factory=dict)
    parts: dict[ModulePath, list[ModulePath]] = field(default_factory=dict)
    wholes: dict[ModulePath, list[ModulePath]] = field(default_factory=dict)
    containers: set[ModulePath] = field(default_factory=set)
    parameters: list[tuple[list[Parameter], list[Parameter]]] = field(default_factory=list)
    unpaired: tuple[set[ModulePath], set[ModulePath]] = field(
        default_factory=lambda: (set(), set())
    )
    warnings: list[str] = field(default_factory=list)
    _layouts: dict[ModulePath, list[tuple[Entry, re.Pattern[str], Layout]]] = field(
        default_factory=dict
    )
    _used: set[Entry] = field(default_factory=set)

    def forbids(self, side: Side, place: ModulePath) -> bool:
        """Whether a module of the reference (side 0) or the port (1) is never to be paired."""
        return place in self.unpaired[side]

    def layout(self, place: ModulePath, tensor: str) -> Layout | None:
        """How the port lays out a tensor of the reference's module, None where it is as in the
        reference.
        """
        for entry, expression, found in self._layouts.get(place, ()):
            if expression.fullmatch(tensor):
                self._used.add(entry)
                return found
        return None

    def reorders(self, place: ModulePath, tensor: str) -> bool:
        """Whether the port keeps the elements of a tensor of the reference's module in another
        order.
        """
        layout = self.layout(place, tensor)
        return layout is not None and not layout.keeps_order

    def unused(self) -> list[str]:
        """After the comparison: the lines of the map whose tensor never came, as warnings."""
        path = self.map.path
        return [
            f"{path}: {entry}: no such tensor was compared"
            for entry, _ in self.map.layouts
            if entry not in self._used
        ]

    def apply(self, found: ModulePairs) -> ModulePairs:
        """Put what the map says over what was found, in place: whatever contradicts it goes."""
        said = [
            ([one], [other])
            for one, other in self.matched.items()
            if found.matched.get(one) != other
        ]
        said += [(parts, [whole]) for whole, parts in self.parts.items()]
        said += [([whole], parts) for whole, parts in self.wholes.items()]
        said.append((list(self.unpaired[0]), list(self.unpaired[1])))
        drop = (
            {place for group, _ in said for place in group},
            {place for _, group in said for place in group},
        )
        for one, other in list(found.matched.items()):
            if one in drop[0] or other in drop[1]:
                del found.matched[one]
                found.containers.pop(one, None)
        taken = {*self.matched} | drop[0], {*self.matched.values()} | drop[1]
        for groups, side in ((found.parts, 1), (found.wholes, 0)):
            for whole, parts in list(groups.items()):
                if whole in taken[side] or not taken[1 - side].isdisjoint(parts):
                    del groups[whole]
        found.matched.update(self.matched)
        found.containers.update(
            {one: other for one, other in self.matched.items() if one in self.containers}
        )
        found.parts.update(self.parts)
        found.wholes.update(self.wholes)
        found.unpaired = self.unpaired
        found.ambiguous = {
            one: rivals
            for one, rivals in found.ambiguous.items()
            if one in found.matched and one not in self.matched
        }
        return found


@dataclass(frozen=True, slots=True)
class _Universe:
    """What names of one kind can stand for, on both sides. what: for a person."""

    what: str
    sides: tuple[Mapping[ModulePath, Any], Mapping[ModulePath, Any]]


class _Resolution:
    """Works out what a map says of two recordings."""

    def __init__(self, written: Map, names: tuple[Names, Names]) -> None:
        self._map = written
        self._models = [list(dict.fromkeys(model for model, _ in _places(side))) for side in names]
        self._modules = _Universe(
            "module", (dict.fromkeys(names[0].modules), dict.fromkeys(names[1].modules))
        )
        self._parameters = _Universe(
            "parameter", (_by_place(names[0].parameters), _by_place(names[1].parameters))
        )
        self._both = _Universe(
            "module and no parameter",
            (
                {**self._modules.sides[0], **self._parameters.sides[0]},
                {**self._modules.sides[1], **self._parameters.sides[1]},
            ),
        )
        self._owned: tuple[dict[ModulePath, list[str]], dict[ModulePath, list[str]]] = (
            defaultdict(list),
            defaultdict(list),
        )
        for owned, side in zip(self._owned, names, strict=True):
            for one in side.parameters:
                owned[one.module_path].append(one.name)
        self._found = Correspondence(written)
        self._claimed: tuple[
            dict[ModulePath, tuple[Entry, ModulePath]], dict[ModulePath, tuple[Entry, ModulePath]]
        ] = (
            {},
            {},
        )
        self._grouped: tuple[set[int], set[int]] = set(), set()
        self._alone: list[
            tuple[Entry, ModulePath]
        ] = []  # matched on one side, without a counterpart on the other

    def resolve(self) -> Correspondence:
        self._pair_models()
        for entry, place in self._assign(self._map.unpaired, self._modules):
            self._claim(entry, place, entry.side, place)
            self._found.unpaired[entry.side].add(place)
        self._pair_parameters()
        self._pair_fused()
        self._pair_modules()
        self._find_layouts()
        self._say_alone()
        return self._found

    def _fail(self, entry: Entry, text: str) -> NoReturn:
        raise MapError(f"{self._map.path}: {entry}: {text}")

    # -- models
    # ----------------------------------------------------------------------------------------------

    def _pair_models(self) -> None:
        found = self._found.models
        for entry in self._map.models:
            for side, name in enumerate((entry.name, entry.others[0])):
                if name not in self._models[side]:
                    has = ", ".join(self._models[side]) or "none"
                    self._fail(
                        entry, f"the {SIDES[side]} has no model {quoted(name)}; it has {has}"
                    )
            if entry.others[0] in found.values():
                self._fail(entry, "another line pairs this model of the port")
            found[entry.name] = entry.others[0]

    def _counterparts(self, side: Side, model: str) -> list[str]:
        """The models of the other side in which the counterparts of a model's modules are looked
        for.
        """
        said = (
            self._found.models
            if side == 0
            else {other: one for one, other in self._found.models.items()}
        )
        if model in said:
            return [said[model]]
        free = [other for other in self._models[1 - side] if other not in said.values()]
        return (
            [model]
            if model in free
            else [other for other in free if other not in self._models[side]]
        )

    # -- names
    # ----------------------------------------------------------------------------------------------

    def _split(self, side: Side, name: str) -> tuple[str | None, str]:
        """The model in front of a name, as in `Model/name`, None where there is none."""
        model, slash, rest = name.partition("/")
        return (model, rest) if slash and model in self._models[side] else (None, name)

    def _matches(self, side: Side, name: str, places: Mapping[ModulePath, Any]) -> list[ModulePath]:
        """Every place that a name matches, with a model in front or without."""
        model, rest = self._split(side, name)
        if not wildcards(rest):
            return [
                (one, rest)
                for one in (self._models[side] if model is None else [model])
                if (one, rest) in places
            ]
        expression = matcher(rest)
        return [
            place
            for place in places
            if model in (None, place[0]) and expression.fullmatch(place[1])
        ]

    def _assign(
        self, entries: Sequence[Entry], universe: _Universe
    ) -> list[tuple[Entry, ModulePath]]:
        """Which entry speaks of which place: one without wildcards before one with them, one with
        its model before others.
        """
        speaking: dict[tuple[Side, ModulePath], list[Entry]] = defaultdict(list)
        for entry in entries:
            places = self._matches(entry.side, entry.name, universe.sides[entry.side])
            if not places:
                self._fail(entry, self._nothing(entry.side, entry.name, universe))
            for place in places:
                speaking[entry.side, place].append(entry)
        found = []
        for (_, place), rivals in speaking.items():
            best = max(map(self._exactness, rivals))
            first, *others = [entry for entry in rivals if self._exactness(entry) == best]
            for other in others:
                if other.others != first.others:
                    self._fail(
                        other,
                        f"{first} says something else of {_name(place)}; a line without `*` would decide",
                    )
            found.append((first, place))
        silent = set(entries) - {entry for entry, _ in found}
        self._found.warnings += [
            f"{self._map.path}: {entry}: other lines already say it"
            for entry in entries
            if entry in silent
        ]
        return found

    def _exactness(self, entry: Entry) -> tuple[bool, bool]:
        model, rest = self._split(entry.side, entry.name)
        return not wildcards(rest), model is not None

    def _nothing(self, side: Side, name: str, universe: _Universe) -> str:
        near = _nearest(self._split(side, name)[1], [place[1] for place in universe.sides[side]])
        return f"the {SIDES[side]} has no {universe.what} {quoted(name)}{near}"

    def _claim(self, entry: Entry, speaker: ModulePath, side: Side, place: ModulePath) -> None:
        """Remember which line, at which of its places, speaks of a place; two that do contradict
        each other.
        """
        known, first = self._claimed[side].setdefault(place, (entry, speaker))
        if (known, first) == (entry, speaker):
            return
        if entry.table == known.table == "modules":
            self._fail(
                entry,
                f"{_name(first)} and {_name(speaker)} of the reference would both be {_name(place)} of the port; "
                "if it is made of both, write so under [fused.port]",
            )
        self._fail(entry, f"{known} says something else of {_name(place)} of the {SIDES[side]}")

    def _carried(self, entry: Entry, place: ModulePath, other: str) -> tuple[str | None, str]:
        """The model, if it is said, and the name that a line gives the counterpart of a place."""
        model, rest = self._split(_turned(entry.side), other)
        stood_for = matcher(self._split(entry.side, entry.name)[1]).fullmatch(place[1])
        return model, carry(rest, stood_for.groups() if stood_for else ())

    def _counterpart(
        self, entry: Entry, place: ModulePath, other: str, universe: _Universe
    ) -> ModulePath | None:
        """The place of the other side that a line gives a place, None where there is none."""
        model, name = self._carried(entry, place, other)
        models = [model] if model is not None else self._counterparts(entry.side, place[0])
        found = [(one, name) for one in models if (one, name) in universe.sides[1 - entry.side]]
        if len(found) > 1:
            self._fail(
                entry,
                f"{' and '.join(one for one, _ in found)} have a {quoted(name)}; write Model/name",
            )
        return found[0] if found else None

    def _said(
        self, entries: Sequence[Entry], universe: _Universe
    ) -> list[tuple[Entry, ModulePath, list[ModulePath]]]:
        """(line, place, its counterparts) for everything that lines of one kind match; what they
        match is claimed.
        """
        found, met = [], set()
        missing: dict[Entry, list[tuple[ModulePath, str]]] = defaultdict(list)
        for entry, place in self._assign(entries, universe):
            others = {
                other: self._counterpart(entry, place, other, universe) for other in entry.others
            }
            lacking = next((other for other, there in others.items() if there is None), None)
            if lacking is not None:
                missing[entry].append((place, lacking))
                continue
            met.add(entry)
            counterparts = [there for there in others.values() if there is not None]
            self._claim(entry, place, entry.side, place)
            for there in counterparts:
                self._claim(entry, place, _turned(entry.side), there)
            found.append((entry, place, counterparts))
        for entry, places in missing.items():
            if entry not in met:
                place, other = places[0]
                self._fail(
                    entry,
                    self._nothing(
                        _turned(entry.side), self._carried(entry, place, other)[1], universe
                    ),
                )
            self._alone += [(entry, place) for place, _ in places]
        return found

    def _say_alone(self) -> None:
        if self._alone:
            entry, place = self._alone[0]
            count = (
                f", nor of {len(self._alone) - 1} more that the map pairs"
                if len(self._alone) > 1
                else ""
            )
            self._found.warnings.append(
                f"{self._map.path}: {entry}: the {SIDES[1 - entry.side]} has no counterpart of {_name(place)}{count}"
            )

    # -- modules and parameters
    # ----------------------------------------------------------------------------------------

    def _pair_parameters(self) -> None:
        """Lines about single parameters come before what lines about their modules imply."""
        for _, place, (other,) in self._said(self._map.parameters, self._parameters):
            self._group([self._parameters.sides[0][place]], [self._parameters.sides[1][other]])

    def _pair_fused(self) -> None:
        for entry, whole, parts in self._said(self._map.fused, self._both):
            side = entry.side
            groups = (self._found.wholes, self._found.parts)[side]
            kinds = {
                whole in self._modules.sides[side],
                *(part in self._modules.sides[1 - side] for part in parts),
            }
            if len(kinds) > 1:
                self._fail(entry, "some of these are modules and some are parameters")
            if kinds == {True}:
                groups[whole] = parts
                for name in self._owned[side][whole]:
                    self._fuse(side, _below(whole, name), [_below(part, name) for part in parts])
            else:
                self._fuse(side, whole, parts)
                owners = groups.setdefault(self._parameters.sides[side][whole].module_path, [])
                places = [self._parameters.sides[1 - side][part].module_path for part in parts]
                owners += [place for place in dict.fromkeys(places) if place not in owners]

    def _fuse(self, side: Side, whole: ModulePath, parts: Sequence[ModulePath]) -> None:
        mine, theirs = self._parameters.sides[side], self._parameters.sides[1 - side]
        if all(part in theirs for part in parts):
            groups = [mine[whole]], [theirs[part] for part in parts]
            self._group(*(groups if side == 0 else groups[::-1]))

    def _pair_modules(self) -> None:
        holders = {
            (model, module.rpartition(".")[0]) for model, module in self._modules.sides[0] if module
        }
        pairs = [
            (place, other) for _, place, (other,) in self._said(self._map.modules, self._modules)
        ]
        for place, other in [
            *pairs,
            *(((one, ""), (other, "")) for one, other in self._found.models.items()),
        ]:
            if (
                place in self._found.matched
            ):  # a root that a line of its own pairs otherwise than its model
                continue
            self._found.matched[place] = other
            if place in holders and place not in self._owned[0]:
                self._found.containers.add(place)
            for name in self._owned[0].get(place, ()):
                mine, theirs = _below(place, name), _below(other, name)
                if theirs in self._parameters.sides[1]:
                    self._group(
                        [self._parameters.sides[0][mine]], [self._parameters.sides[1][theirs]]
                    )

    def _group(self, reference: list[Parameter], port: list[Parameter]) -> None:
        """Parameters that belong together, unless a line that came before has said something else
        of one of them.
        """
        ids = {id(one) for one in reference}, {id(one) for one in port}
        if self._grouped[0].isdisjoint(ids[0]) and self._grouped[1].isdisjoint(ids[1]):
            for known, new in zip(self._grouped, ids, strict=True):
                known |= new
            self._found.parameters.append((reference, port))

    # -- layouts
    # ----------------------------------------------------------------------------------------------

    def _find_layouts(self) -> None:
        for entry, found in sorted(
            self._map.layouts, key=lambda line: bool(wildcards(line[0].name))
        ):
            module, _, tensor = entry.name.rpartition(":")
            places = self._matches(0, module, self._modules.sides[0])
            if not places:
                self._fail(entry, self._nothing(0, module, self._modules))
            for place in places:
                self._found._layouts.setdefault(place, []).append((entry, matcher(tensor), found))


def _turned(side: Side) -> Side:
    return 1 if side == 0 else 0


def _places(names: Names) -> list[ModulePath]:
    return [*names.modules, *((one.model, one.module) for one in names.parameters)]


def _by_place(parameters: Sequence[Parameter]) -> dict[ModulePath, Parameter]:
    """Parameters by (model, full name); one that goes by several names is the same under each."""
    first: dict[tuple[str, Any], Parameter] = {}
    found = {}
    for one in parameters:
        number = one.row.get("value")
        key = one.model, number if isinstance(number, int) else id(one)
        found[one.model, one.full_name] = first.setdefault(key, one)
    return found


def _below(place: ModulePath, name: str) -> ModulePath:
    return place[0], f"{place[1]}.{name}" if place[1] else name


def _name(place: ModulePath) -> str:
    return place[1] or f"the root of {place[0]}"


def _nearest(name: str, known: Iterable[str]) -> str:
    """What was probably meant."""
    names = list(dict.fromkeys(known))
    if wildcards(name):  # the nearest of a pattern is a pattern
        names = list(
            dict.fromkeys(
                ".".join("*" if part.isdigit() else part for part in one.split("."))
                for one in names
            )
        )
    near = difflib.get_close_matches(name, names, 1)
    return f"; the nearest is {quoted(near[0])}" if near else ""


def quoted(name: str) -> str:
    """A name as TOML writes it.

    >>> print(quoted('a"b'))
    "a\\"b"
    """
    return json.dumps(name, ensure_ascii=False).replace("\x7f", "\\u007f")
