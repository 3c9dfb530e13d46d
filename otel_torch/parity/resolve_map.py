"""Applies a map to two recordings: replaces wildcards, and checks every name and every conflict.

With the modules `blocks.0` and `blocks.1` on one side, `layers.0` and `layers.1` on the other, the
line `"blocks.*" = "layers.*"` becomes two pairs. A line without wildcards takes precedence over one
with them, and a line that names the model over one that does not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from otel_torch.parity.call_graph import Parameter
from otel_torch.parity.correspondence import Correspondence
from otel_torch.parity.map_file import (
    SIDE_NAMES,
    Map,
    MapEntry,
    MapError,
    SideIndex,
    did_you_mean,
    quoted,
)
from otel_torch.parity.modules import ModulePath
from otel_torch.parity.naming import carry, matcher, wildcards

ByPath = Mapping[ModulePath, Any]


class RecordedNames(Protocol):
    """The names of a recording that a map can use: modules as (model, name), and parameters and
    buffers.
    """

    @property
    def modules(self) -> Sequence[ModulePath]: ...

    @property
    def parameters(self) -> Sequence[Parameter]: ...


def resolve_map(map: Map, reference: RecordedNames, port: RecordedNames) -> Correspondence:
    """Return what a map prescribes for two recordings.

    Raises:
        MapError: If it names something that a recording lacks, or contradicts itself.
    """
    return _Resolver(map, (reference, port)).resolve()


@dataclass(frozen=True, slots=True)
class _Namespace:
    """The names of one kind on both sides. kind: for messages."""

    kind: str
    sides: tuple[ByPath, ByPath]


class _Resolver:
    def __init__(self, map: Map, recorded: tuple[RecordedNames, RecordedNames]) -> None:
        self._map = map
        self._result = Correspondence(map)
        self._models = [_models_of(names) for names in recorded]
        self._modules = _Namespace(
            "module", (dict.fromkeys(recorded[0].modules), dict.fromkeys(recorded[1].modules))
        )
        self._parameters = _Namespace(
            "parameter", (_by_path(recorded[0].parameters), _by_path(recorded[1].parameters))
        )
        self._modules_and_parameters = _Namespace(
            "module or parameter",
            (
                {**self._modules.sides[0], **self._parameters.sides[0]},
                {**self._modules.sides[1], **self._parameters.sides[1]},
            ),
        )
        self._parameter_names = tuple(_names_by_module(names.parameters) for names in recorded)
        # For each side: path -> the line, and its own path, that uses the path.
        self._claims: tuple[
            dict[ModulePath, tuple[MapEntry, ModulePath]],
            dict[ModulePath, tuple[MapEntry, ModulePath]],
        ] = ({}, {})
        self._grouped_parameters: tuple[set[int], set[int]] = set(), set()
        self._without_counterpart: list[tuple[MapEntry, ModulePath]] = []

    def resolve(self) -> Correspondence:
        self._pair_models()
        self._keep_unpaired()
        self._pair_parameters()
        self._pair_fused()
        self._pair_modules()
        self._resolve_layouts()
        self._warn_of_missing_counterparts()
        return self._result

    def _fail(self, entry: MapEntry, reason: str) -> NoReturn:
        raise MapError(f"{self._map.path}: {entry}: {reason}")

    # -- models

    def _pair_models(self) -> None:
        pairs = self._result.models
        for entry in self._map.models:
            partner = entry.partners[0]
            for side, name in enumerate((entry.name, partner)):
                if name not in self._models[side]:
                    available = ", ".join(self._models[side]) or "none"
                    self._fail(
                        entry,
                        f"the {SIDE_NAMES[side]} has no model {quoted(name)}; it has {available}",
                    )
            if partner in pairs.values():
                self._fail(entry, "another line pairs this model of the port")
            pairs[entry.name] = partner

    def _candidate_models(self, side: SideIndex, model: str) -> list[str]:
        """Return the models of the other side in which counterparts of a model's modules can be."""
        pairs = self._result.models
        if side == 1:
            pairs = {port: reference for reference, port in pairs.items()}
        if model in pairs:
            return [pairs[model]]
        free = [name for name in self._models[1 - side] if name not in pairs.values()]
        if model in free:
            return [model]
        return [name for name in free if name not in self._models[side]]

    # -- from lines to paths

    def _split_model(self, side: SideIndex, name: str) -> tuple[str | None, str]:
        """Return the model and the rest of `Model/name`, or (None, name) without a model."""
        model, slash, rest = name.partition("/")
        return (model, rest) if slash and model in self._models[side] else (None, name)

    def _matching_paths(self, side: SideIndex, name: str, paths: ByPath) -> list[ModulePath]:
        model, rest = self._split_model(side, name)
        if not wildcards(rest):
            models = self._models[side] if model is None else [model]
            return [(model, rest) for model in models if (model, rest) in paths]
        pattern = matcher(rest)
        return [path for path in paths if model in (None, path[0]) and pattern.fullmatch(path[1])]

    def _assign(
        self, entries: Sequence[MapEntry], namespace: _Namespace
    ) -> list[tuple[MapEntry, ModulePath]]:
        """Return which line decides about each path; warn of lines that decide about none."""
        matching: dict[tuple[SideIndex, ModulePath], list[MapEntry]] = defaultdict(list)
        for entry in entries:
            paths = self._matching_paths(entry.side, entry.name, namespace.sides[entry.side])
            if not paths:
                self._fail(entry, self._has_no(entry.side, entry.name, namespace))
            for path in paths:
                matching[entry.side, path].append(entry)

        assigned = [
            (self._most_specific(path, rivals), path) for (_, path), rivals in matching.items()
        ]
        effective = {entry for entry, _ in assigned}
        self._result.warnings += [
            f"{self._map.path}: {entry}: has no effect, other lines override it"
            for entry in entries
            if entry not in effective
        ]
        return assigned

    def _most_specific(self, path: ModulePath, rivals: Sequence[MapEntry]) -> MapEntry:
        best = max(map(self._specificity, rivals))
        first, *equals = [entry for entry in rivals if self._specificity(entry) == best]
        for entry in equals:
            if entry.partners != first.partners:
                self._fail(
                    entry,
                    f"contradicts {first} for {_display(path)}; a line without `*` "
                    "takes precedence",
                )
        return first

    def _specificity(self, entry: MapEntry) -> tuple[bool, bool]:
        model, rest = self._split_model(entry.side, entry.name)
        return not wildcards(rest), model is not None

    def _has_no(self, side: SideIndex, name: str, namespace: _Namespace) -> str:
        _, bare_name = self._split_model(side, name)
        hint = did_you_mean(bare_name, [path[1] for path in namespace.sides[side]])
        return f"the {SIDE_NAMES[side]} has no {namespace.kind} {quoted(name)}{hint}"

    def _claim(
        self, entry: MapEntry, own_path: ModulePath, side: SideIndex, path: ModulePath
    ) -> None:
        """Register that a line uses a path; raise if another line, or the same line for another of
        its own paths, already does.
        """
        first_entry, first_path = self._claims[side].setdefault(path, (entry, own_path))
        if (first_entry, first_path) == (entry, own_path):
            return
        if entry.table == first_entry.table == "modules":
            self._fail(
                entry,
                f"{_display(first_path)} and {_display(own_path)} of the reference would both "
                f"pair with {_display(path)} of the port; if it combines them, use [fused.port]",
            )
        self._fail(
            entry, f"contradicts {first_entry} about {_display(path)} of the {SIDE_NAMES[side]}"
        )

    def _partner_name(
        self, entry: MapEntry, path: ModulePath, partner: str
    ) -> tuple[str | None, str]:
        """Return the model (if given) and the name of a path's partner, wildcards replaced."""
        model, rest = self._split_model(_opposite(entry.side), partner)
        _, pattern = self._split_model(entry.side, entry.name)
        match = matcher(pattern).fullmatch(path[1])
        return model, carry(rest, match.groups() if match else ())

    def _find_partner(
        self, entry: MapEntry, path: ModulePath, partner: str, namespace: _Namespace
    ) -> ModulePath | None:
        model, name = self._partner_name(entry, path, partner)
        models = [model] if model is not None else self._candidate_models(entry.side, path[0])
        existing = namespace.sides[1 - entry.side]
        candidates = [(model, name) for model in models if (model, name) in existing]
        if len(candidates) > 1:
            owners = " and ".join(model for model, _ in candidates)
            self._fail(entry, f"{owners} have a {quoted(name)}; write Model/name")
        return candidates[0] if candidates else None

    def _resolve_entries(
        self, entries: Sequence[MapEntry], namespace: _Namespace
    ) -> list[tuple[MapEntry, ModulePath, list[ModulePath]]]:
        """Return (line, path, partners) for every path of these lines, and claim them all.

        A pattern may lack a partner for some of its paths, which is a warning, but not for all.
        """
        resolved = []
        effective = set()
        incomplete: dict[MapEntry, list[tuple[ModulePath, str]]] = defaultdict(list)
        for entry, path in self._assign(entries, namespace):
            partners = []
            for partner in entry.partners:
                partner_path = self._find_partner(entry, path, partner, namespace)
                if partner_path is None:
                    incomplete[entry].append((path, partner))
                    break
                partners.append(partner_path)
            else:
                effective.add(entry)
                self._claim(entry, path, entry.side, path)
                for partner_path in partners:
                    self._claim(entry, path, _opposite(entry.side), partner_path)
                resolved.append((entry, path, partners))
        for entry, missing in incomplete.items():
            if entry not in effective:
                path, partner = missing[0]
                _, name = self._partner_name(entry, path, partner)
                self._fail(entry, self._has_no(_opposite(entry.side), name, namespace))
            self._without_counterpart += [(entry, path) for path, _ in missing]
        return resolved

    def _warn_of_missing_counterparts(self) -> None:
        if not self._without_counterpart:
            return
        entry, path = self._without_counterpart[0]
        count = len(self._without_counterpart) - 1
        more = f", nor of {count} more that the map pairs" if count else ""
        self._result.warnings.append(
            f"{self._map.path}: {entry}: the {SIDE_NAMES[1 - entry.side]} has no counterpart of "
            f"{_display(path)}{more}"
        )

    # -- tables

    def _keep_unpaired(self) -> None:
        for entry, path in self._assign(self._map.unpaired, self._modules):
            self._claim(entry, path, entry.side, path)
            self._result.unpaired[entry.side].add(path)

    def _pair_parameters(self) -> None:
        """Pair single parameters first: they override what lines about their modules imply."""
        pairs = self._resolve_entries(self._map.parameters, self._parameters)
        for _, reference, (port,) in pairs:
            self._group([self._parameters.sides[0][reference]], [self._parameters.sides[1][port]])

    def _pair_fused(self) -> None:
        fusions = self._resolve_entries(self._map.fused, self._modules_and_parameters)
        for entry, whole, parts in fusions:
            side = entry.side
            are_modules = {whole in self._modules.sides[side]}
            are_modules |= {part in self._modules.sides[1 - side] for part in parts}
            if len(are_modules) > 1:
                self._fail(entry, "some of these are modules and some are parameters")
            if are_modules == {True}:
                self._fuse_modules(side, whole, parts)
            else:
                self._fuse_parameters(side, whole, parts)
                self._fuse_owners(side, whole, parts)

    def _fuse_modules(self, side: SideIndex, whole: ModulePath, parts: list[ModulePath]) -> None:
        self._fusions_of(side)[whole] = parts
        for name in self._parameter_names[side].get(whole, ()):
            self._fuse_parameters(side, _child(whole, name), [_child(part, name) for part in parts])

    def _fuse_parameters(
        self, side: SideIndex, whole: ModulePath, parts: Sequence[ModulePath]
    ) -> None:
        whole_side, part_side = self._parameters.sides[side], self._parameters.sides[1 - side]
        if not all(part in part_side for part in parts):
            return
        whole_group, part_group = [whole_side[whole]], [part_side[part] for part in parts]
        if side == 0:
            self._group(whole_group, part_group)
        else:
            self._group(part_group, whole_group)

    def _fuse_owners(self, side: SideIndex, whole: ModulePath, parts: Sequence[ModulePath]) -> None:
        """Register the modules that own the parts of a fused parameter."""
        owner = self._parameters.sides[side][whole].module_path
        owners = self._fusions_of(side).setdefault(owner, [])
        for part in parts:
            part_owner = self._parameters.sides[1 - side][part].module_path
            if part_owner not in owners:
                owners.append(part_owner)

    def _fusions_of(self, side: SideIndex) -> dict[ModulePath, list[ModulePath]]:
        return self._result.wholes if side == 0 else self._result.parts

    def _pair_modules(self) -> None:
        have_submodules = {
            (model, module.rpartition(".")[0]) for model, module in self._modules.sides[0] if module
        }
        matched = self._result.matched
        for _, reference, (port,) in self._resolve_entries(self._map.modules, self._modules):
            matched[reference] = port
        for reference_model, port_model in self._result.models.items():
            matched.setdefault((reference_model, ""), (port_model, ""))
        for reference, port in matched.items():
            names = self._parameter_names[0].get(reference, ())
            if reference in have_submodules and not names:
                self._result.containers.add(reference)
            for name in names:
                counterpart = self._parameters.sides[1].get(_child(port, name))
                if counterpart is not None:
                    self._group([self._parameters.sides[0][_child(reference, name)]], [counterpart])

    def _group(self, reference: list[Parameter], port: list[Parameter]) -> None:
        """Group parameters, unless an earlier line already groups one of them."""
        ids = {id(parameter) for parameter in reference}, {id(parameter) for parameter in port}
        if all(
            grouped.isdisjoint(new)
            for grouped, new in zip(self._grouped_parameters, ids, strict=True)
        ):
            for grouped, new in zip(self._grouped_parameters, ids, strict=True):
                grouped |= new
            self._result.parameters.append((reference, port))

    def _resolve_layouts(self) -> None:
        exact_first = sorted(self._map.layouts, key=lambda item: bool(wildcards(item[0].name)))
        for entry, layout in exact_first:
            module, _, tensor = entry.name.rpartition(":")
            paths = self._matching_paths(0, module, self._modules.sides[0])
            if not paths:
                self._fail(entry, self._has_no(0, module, self._modules))
            for path in paths:
                item = (entry, matcher(tensor), layout)
                self._result.layouts.setdefault(path, []).append(item)


def _opposite(side: SideIndex) -> SideIndex:
    return 1 if side == 0 else 0


def _models_of(names: RecordedNames) -> list[str]:
    models = [model for model, _ in names.modules]
    models += [parameter.model for parameter in names.parameters]
    return list(dict.fromkeys(models))


def _names_by_module(parameters: Sequence[Parameter]) -> dict[ModulePath, list[str]]:
    names: dict[ModulePath, list[str]] = defaultdict(list)
    for parameter in parameters:
        names[parameter.module_path].append(parameter.name)
    return dict(names)


def _by_path(parameters: Sequence[Parameter]) -> dict[ModulePath, Parameter]:
    """Return parameters by (model, full name); a shared one is the same object under each name."""
    first: dict[tuple[str, Any], Parameter] = {}
    by_path = {}
    for parameter in parameters:
        number = parameter.row.get("value")
        identity = number if isinstance(number, int) else id(parameter)
        path = parameter.model, parameter.full_name
        by_path[path] = first.setdefault((parameter.model, identity), parameter)
    return by_path


def _child(path: ModulePath, name: str) -> ModulePath:
    model, module = path
    return model, f"{module}.{name}" if module else name


def _display(path: ModulePath) -> str:
    model, name = path
    return name or f"the root of {model}"
