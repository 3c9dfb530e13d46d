"""Reads a map: a TOML file in which a person pairs the names of two programs.

A map overrides everything that the comparison finds on its own. To keep a typo from passing for
knowledge, every line is checked: a name that no module has ends the comparison.

    [modules]
    "blocks.*.attn1" = "layers.*.attn"              # `*` is one component, the same on both sides
    [fused.port]
    "layers.*.qkv" = ["blocks.*.q", "blocks.*.k", "blocks.*.v"]
    [unpaired]
    port = ["rope"]
    [layouts]
    "blocks.*.attn1:out" = "permute(0, 2, 1, 3)"

becomes

>>> import tempfile
>>> path = Path(tempfile.mkdtemp()) / "map.toml"
>>> _ = path.write_text('''
... [modules]
... "blocks.*.attn1" = "layers.*.attn"
... [fused.port]
... "layers.*.qkv" = ["blocks.*.q", "blocks.*.k", "blocks.*.v"]
... [unpaired]
... port = ["rope"]
... [layouts]
... "blocks.*.attn1:out" = "permute(0, 2, 1, 3)"
... ''')
>>> map = load_map(path)
>>> for entry in (*map.modules, *map.fused, *map.unpaired):
...     print(entry)
[modules] "blocks.*.attn1" = "layers.*.attn"
[fused.port] "layers.*.qkv" = ["blocks.*.q", "blocks.*.k", "blocks.*.v"]
[unpaired] "rope"
>>> map.layouts[0][1].steps
(('permute', (0, 2, 1, 3)),)
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

from otel_torch.parity.layout import Layout, parse_layout
from otel_torch.parity.naming import wildcards
from otel_torch.parity.parameter_names import pattern

SCHEMA = "otel_torch.map/1"

SideIndex = Literal[0, 1]
SIDE_NAMES = ("reference", "port")


class MapError(ValueError):
    """The map cannot be used. The message is one line with the file, the table, the entry and the
    reason.
    """


@dataclass(frozen=True, slots=True)
class MapEntry:
    """One line of a map.

    Attributes:
        table: The table that holds it, such as `fused.port`.
        name: What precedes the `=`.
        partners: What follows the `=`: names of the other side.
        side: The side that `name` belongs to.
    """

    table: str
    name: str
    partners: tuple[str, ...] = ()
    side: SideIndex = 0

    def __str__(self) -> str:
        text = f"[{self.table}] {quoted(self.name)}"
        if not self.partners:
            return text
        partners = ", ".join(map(quoted, self.partners))
        return f"{text} = {partners}" if len(self.partners) == 1 else f"{text} = [{partners}]"


@dataclass(slots=True)
class Map:
    """A map as written, wildcards included. `resolve_map` applies it to two recordings."""

    path: Path
    models: list[MapEntry] = field(default_factory=list)
    modules: list[MapEntry] = field(default_factory=list)
    parameters: list[MapEntry] = field(default_factory=list)
    fused: list[MapEntry] = field(default_factory=list)
    unpaired: list[MapEntry] = field(default_factory=list)
    layouts: list[tuple[MapEntry, Layout]] = field(default_factory=list)


def load_map(path: str | Path) -> Map:
    """Read a map.

    Raises:
        MapError: If the file is not a valid map.
        OSError: If the file cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise MapError(f"{path}: is not TOML: {' '.join(str(error).split())}") from None
    except (UnicodeDecodeError, RecursionError):
        raise MapError(f"{path}: is not TOML") from None
    return _MapReader(Path(path), content).read()


class _MapReader:
    """Turns the content of a TOML file into a `Map`, table by table."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self._content = content
        self._map = Map(path)

    def read(self) -> Map:
        readers: dict[str, Callable[[Any], None]] = {
            "schema": self._read_schema,
            "models": lambda value: self._read_names("models", self._map.models, value),
            "modules": lambda value: self._read_names("modules", self._map.modules, value),
            "parameters": lambda value: self._read_names("parameters", self._map.parameters, value),
            "fused": self._read_fused,
            "unpaired": self._read_unpaired,
            "layouts": self._read_layouts,
        }
        for name, value in self._content.items():
            if name not in readers:
                tables = ", ".join(list(readers)[1:])
                self._fail(
                    f"[{name}] is not a table of a map; the tables are {tables}"
                    f"{did_you_mean(name, readers)}"
                )
            readers[name](value)
        return self._map

    def _fail(self, reason: str) -> NoReturn:
        raise MapError(f"{self._map.path}: {reason}")

    def _read_schema(self, value: Any) -> None:
        if value != SCHEMA:
            self._fail(f"schema is {value!r}; this version reads {SCHEMA!r}")

    def _read_names(self, table: str, entries: list[MapEntry], value: Any) -> None:
        for name, partner in self._flatten(table, value).items():
            if isinstance(partner, list):
                self._fail(
                    f"[{table}] {quoted(name)} is paired with a list; list the parts of a "
                    "reference's module under [fused.reference], of a port's under [fused.port]"
                )
            if not isinstance(partner, str):
                self._fail(
                    f"[{table}] {quoted(name)} is paired with {partner!r}, "
                    "which is not a quoted name"
                )
            self._add(entries, MapEntry(table, name, (partner,)))

    def _read_fused(self, value: Any) -> None:
        for owner, table in self._by_side("fused", value).items():
            side: SideIndex = 0 if owner == "reference" else 1
            for name, parts in self._flatten(f"fused.{owner}", table).items():
                label = f"[fused.{owner}] {quoted(name)}"
                if not _is_list_of_names(parts):
                    part_owner = SIDE_NAMES[1 - side]
                    self._fail(f'{label} needs the list of its parts in the {part_owner}: ["…"]')
                if len(set(parts)) < len(parts):
                    self._fail(f"{label} lists a part twice")
                if len(parts) < 2:
                    self._fail(f"{label} has {len(parts)} parts; put a single pair into [modules]")
                self._add(self._map.fused, MapEntry(f"fused.{owner}", name, tuple(parts), side))

    def _read_unpaired(self, value: Any) -> None:
        for owner, names in self._by_side("unpaired", value).items():
            if not _is_list_of_names(names):
                self._fail(f'[unpaired] {owner} needs a list of names: ["…"]')
            side: SideIndex = 0 if owner == "reference" else 1
            for name in names:
                self._add(self._map.unpaired, MapEntry("unpaired", name, (), side))

    def _read_layouts(self, value: Any) -> None:
        for name, text in self._flatten("layouts", value).items():
            if ":" not in name:
                self._fail(
                    f"[layouts] {quoted(name)} names no tensor; write "
                    '"module:out", "module:in[0]", "module:param.weight"'
                )
            entry = MapEntry("layouts", name, (str(text),))
            try:
                self._map.layouts.append((entry, parse_layout(text)))
            except ValueError as error:
                self._fail(f"{entry}: {error}")

    def _flatten(self, name: str, value: Any) -> dict[str, Any]:
        """Return the entries of a table.

        TOML reads a name without quotes, `blocks.0.attn = …`, as nested tables; here it is a name.
        """
        if not isinstance(value, dict):
            self._fail(f"{name} is not a table; write [{name}] on its own line, entries below it")
        entries: dict[str, Any] = {}
        for key, content in value.items():
            if isinstance(content, dict):
                nested = self._flatten(f"{name}.{key}", content)
                entries |= {f"{key}.{rest}": inner for rest, inner in nested.items()}
            else:
                entries[key] = content
        return entries

    def _by_side(self, table: str, value: Any) -> dict[str, Any]:
        for name in value if isinstance(value, dict) else [table]:
            if name not in SIDE_NAMES:
                self._fail(f"[{table}] has only `reference` and `port`, not {name!r}")
        sides: dict[str, Any] = value
        return sides

    def _add(self, entries: list[MapEntry], entry: MapEntry) -> None:
        for name in (entry.name, *entry.partners):
            if any("**" in part and part != "**" for part in name.split(".")):
                self._fail(f'{entry}: `**` must be a whole component, as in "a.**.b"')
        for partner in entry.partners:
            if wildcards(partner) != wildcards(entry.name):
                self._fail(
                    f"{entry}: what `*` matches is carried over, so both names need the same "
                    "wildcards in the same order"
                )
        entries.append(entry)


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return a hint with the most similar candidate; empty if none is similar.

    >>> did_you_mean("module", ["models", "modules"])
    '; did you mean "modules"?'
    """
    names = list(dict.fromkeys(candidates))
    if wildcards(name):  # suggest a pattern for a pattern
        names = list(dict.fromkeys(map(pattern, names)))
    similar = difflib.get_close_matches(name, names, 1)
    return f"; did you mean {quoted(similar[0])}?" if similar else ""


def quoted(name: str) -> str:
    """Return a name as a TOML string.

    >>> print(quoted('a"b'))
    "a\\"b"
    """
    return json.dumps(name, ensure_ascii=False).replace("\x7f", "\\u007f")
