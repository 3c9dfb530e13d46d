"""Writes the pairs that a comparison found as a map, for a person to correct and pass back.

Equal blocks are folded into one line; a comment says how the modules were paired:

    [modules]
    "blocks.*.attn" = "layers.*.attn"  # 40 modules, equal parameters
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from otel_torch.parity.call_graph import Parameter
from otel_torch.parity.correspondence import Correspondence
from otel_torch.parity.fold_names import fold
from otel_torch.parity.map_file import SCHEMA, SIDE_NAMES, SideIndex, quoted
from otel_torch.parity.modules import ModulePairs, ModulePath
from otel_torch.parity.parameters import ParameterPair
from otel_torch.parity.resolve_map import RecordedNames
from otel_torch.rendering.table import as_given

_HEAD = """\
# Pairs found by `otel-torch diff`: name in the reference = name in the port.
# Correct them and pass this file to --map. `*` is one component of a name, the same on both sides,
# `**` any number of them; a line without wildcards takes precedence. Tables: models, modules,
# parameters, fused.port (a module of the port = the reference's modules that it combines),
# fused.reference, unpaired, layouts.
# reference: {}
# port: {}
schema = "{}"
"""

# The comment for each way of pairing two modules.
_REASONS = {
    "map": "given by a map or the port's loader",
    "equal": "equal parameters",
    "transposed": "equal parameters, transposed",
    "fused": "parameters that add up",
    "name": "name",
    "different": "name, the parameters differ",
}
# The comment for a module of one side only, from the port's point of view.
_UNPAIRED_LABELS = ("removed", "added")
_MAX_ALIGNMENT = 88  # columns; comments of longer lines are not aligned
_SHOWN_RIVALS = 3

PartnersByPath = Mapping[ModulePath, tuple[ModulePath, ...]]
MapLine = tuple[str, str]  # the line, and its comment


def save_map(
    path: str | Path,
    pairs: ModulePairs,
    models: Mapping[str, str],
    weights: Sequence[ParameterPair],
    reference: RecordedNames,
    port: RecordedNames,
    *,
    given: Correspondence | None = None,
    ambiguous: Mapping[ModulePath, Sequence[ModulePath]] | None = None,
    titles: tuple[str, str] = ("", ""),
) -> None:
    """Write the pairs that were found.

    Args:
        path: The file to write.
        pairs: The pairs of modules.
        models: Reference's model -> port's.
        weights: The pairs of parameters, for those that do not follow from the modules.
        reference: The names of the reference.
        port: The names of the port.
        given: The map that was used, if any; its unpaired names and layouts are copied.
        ambiguous: Module of the reference -> modules of the port that match equally well.
        titles: The names of the recordings, for the head of the file.

    Raises:
        OSError: If the file cannot be written.
    """
    writer = _MapWriter(pairs, models, weights, (reference, port), given, ambiguous or {})
    head = _HEAD.format(*map(quoted, titles), SCHEMA)
    Path(path).write_text(as_given(head) + writer.text(), encoding="utf-8", errors="replace")


class _MapWriter:
    def __init__(
        self,
        pairs: ModulePairs,
        models: Mapping[str, str],
        weights: Sequence[ParameterPair],
        recorded: tuple[RecordedNames, RecordedNames],
        given: Correspondence | None,
        ambiguous: Mapping[ModulePath, Sequence[ModulePath]],
    ) -> None:
        self._pairs = pairs
        self._models = models
        self._weights = weights
        self._given = given
        self._ambiguous = ambiguous
        self._modules = recorded[0].modules, recorded[1].modules
        self._parameters = [
            [_path_of(parameter) for parameter in names.parameters] for names in recorded
        ]
        model_counts = [len({model for model, _ in modules}) for modules in self._modules]
        self._has_several_models = max(model_counts) > 1

    def text(self) -> str:
        model_lines = [
            (f"{quoted(reference)} = {quoted(port)}", "")
            for reference, port in self._models.items()
        ]
        tables = [
            _table("models", model_lines),
            _table("modules", self._module_lines()),
            _table("fused.port", self._fused_lines(1)),
            _table("fused.reference", self._fused_lines(0)),
            _table("parameters", self._parameter_lines()),
            self._unpaired_table(),
            _table("layouts", self._layout_lines()),
        ]
        return "".join(tables)

    # -- pairs

    def _module_lines(self) -> Iterator[MapLine]:
        partners = {
            module: (port,)
            for module, port in self._pairs.matched.items()
            if module[1] or port[1]  # two roots are paired by their models
        }
        for name, (partner,), members in self._fold(partners, 0, self._modules):
            yield f"{quoted(name)} = {quoted(partner)}", self._module_comment(members)

    def _module_comment(self, members: Sequence[ModulePath]) -> str:
        """Return how the modules of a line were paired."""
        reasons = Counter(map(self._pairing_reason, members))
        text = ", ".join(
            reason if count == len(members) else f"{count} by {reason}"
            for reason, count in reasons.most_common()
        )
        for module in members:
            if rivals := self._rivals(module):
                alternatives = " or ".join(quoted(name) for _, name in rivals[:_SHOWN_RIVALS])
                text += f"; ambiguous: {quoted(module[1])} could also be {alternatives}"
                break
        return text if len(members) == 1 else f"{len(members)} modules, {text}"

    def _rivals(self, module: ModulePath) -> list[ModulePath]:
        chosen = self._pairs.matched[module]
        return [rival for rival in self._ambiguous.get(module, ()) if rival != chosen]

    def _pairing_reason(self, module: ModulePath) -> str:
        kinds = set()
        for pair in self._pairs.weights.get((module, self._pairs.matched[module]), ()):
            is_different = pair.how != "map" and not pair.equal
            kinds.add("different" if is_different else pair.how)
        if kinds:
            return " and ".join(reason for kind, reason in _REASONS.items() if kind in kinds)
        return "what they contain" if module in self._pairs.containers else "name alone"

    def _fused_lines(self, side: SideIndex) -> Iterator[MapLine]:
        """Yield the modules that combine others; if not all of their parameters do, yield the
        parameters instead.
        """
        fused_modules = {
            whole: tuple(parts)
            for whole, parts in self._fusions_of(side).items()
            if self._is_fused_as_a_whole(side, whole, parts)
        }
        fused_parameters = {
            _path_of(whole): tuple(map(_path_of, parts))
            for whole, parts in self._fused_parameters(side)
            if whole.module_path not in fused_modules
        }
        for partners, names in (
            (fused_modules, self._modules),
            (fused_parameters, self._parameters),
        ):
            for name, parts, members in self._fold(partners, side, names):
                yield f"{quoted(name)} = [{', '.join(map(quoted, parts))}]", _count(members)

    def _fusions_of(self, side: SideIndex) -> dict[ModulePath, list[ModulePath]]:
        return self._pairs.wholes if side == 0 else self._pairs.parts

    def _fused_parameters(
        self, side: SideIndex
    ) -> Iterator[tuple[Parameter, tuple[Parameter, ...]]]:
        """Yield (parameter of this side, the parameters of the other side that it combines)."""
        for pair in self._weights:
            whole, parts = (pair.reference, pair.port) if side == 0 else (pair.port, pair.reference)
            if len(whole) == 1 and len(parts) > 1:
                yield whole[0], parts

    def _is_fused_as_a_whole(
        self, side: SideIndex, whole: ModulePath, parts: Sequence[ModulePath]
    ) -> bool:
        """Return whether a module combines these parts and nothing else, and the parts belong to no
        other module.
        """
        paired = {*self._pairs.matched}, {*self._pairs.matched.values()}
        if len(parts) < 2 or whole in paired[side] or not paired[1 - side].isdisjoint(parts):
            return False
        for other_whole, other_parts in self._fusions_of(side).items():
            if other_whole != whole and not set(parts).isdisjoint(other_parts):
                return False
        for parameter, part_parameters in self._fused_parameters(side):
            if parameter.module_path != whole:
                continue
            if [part.module_path for part in part_parameters] != list(parts):
                return False
            if any(part.name != parameter.name for part in part_parameters):
                return False
        return True

    def _parameter_lines(self) -> Iterator[MapLine]:
        """Yield the pairs of parameters that do not follow from the pairs of their modules."""
        partners = {}
        for pair in self._weights:
            if len(pair.reference) != 1 or len(pair.port) != 1:
                continue
            reference, port = pair.reference[0], pair.port[0]
            follows = (
                self._pairs.matched.get(reference.module_path) == port.module_path
                and reference.name == port.name
            )
            if not follows:
                partners[_path_of(reference)] = (_path_of(port),)
        for name, (partner,), members in self._fold(partners, 0, self._parameters):
            yield f"{quoted(name)} = {quoted(partner)}", _count(members)

    # -- modules without a pair, and layouts

    def _unpaired_table(self) -> str:
        """Return the names that the map keeps unpaired, then the unmatched ones as comments."""
        entries = self._given.map.unpaired if self._given else []
        text = "\n[unpaired]\n"
        for side in (0, 1):
            names = [quoted(entry.name) for entry in entries if entry.side == side]
            text += f"{SIDE_NAMES[side]} = [{', '.join(names)}]\n"
        reference, port = self._paired_modules()
        return text + self._unpaired_comments(0, reference) + self._unpaired_comments(1, port)

    def _unpaired_comments(self, side: SideIndex, paired: set[ModulePath]) -> str:
        unpaired: dict[ModulePath, tuple[ModulePath, ...]] = {
            module: () for module in self._modules[side] if module not in paired
        }
        if not unpaired:
            return ""
        label, owner = _UNPAIRED_LABELS[side], SIDE_NAMES[side]
        text = f"# {label}: {len(unpaired)} modules that only the {owner} has\n"
        for name, _, members in self._fold(unpaired, side, self._modules):
            text += f"#   {quoted(name)}  {_count(members)}".rstrip() + "\n"
        return text

    def _paired_modules(self) -> tuple[set[ModulePath], set[ModulePath]]:
        reference, port = {*self._pairs.matched}, {*self._pairs.matched.values()}
        for whole, parts in self._pairs.wholes.items():
            reference.add(whole)
            port.update(parts)
        for whole, parts in self._pairs.parts.items():
            port.add(whole)
            reference.update(parts)
        return reference, port

    def _layout_lines(self) -> Iterator[MapLine]:
        for entry, layout in self._given.map.layouts if self._given else ():
            yield f"{quoted(entry.name)} = {quoted(layout.text)}", ""

    # -- folding

    def _fold(
        self, partners: PartnersByPath, side: SideIndex, names: Sequence[Sequence[ModulePath]]
    ) -> Iterator[tuple[str, tuple[str, ...], list[ModulePath]]]:
        """Yield (name or pattern, its partners, the paths it covers), model by model, in the order
        of the program.
        """
        groups: dict[tuple[str, tuple[str, ...]], dict[str, tuple[str, ...]]] = defaultdict(dict)
        for model, name in names[side]:
            of_name = partners.get((model, name))
            if of_name is not None:
                partner_models = tuple(partner_model for partner_model, _ in of_name)
                groups[model, partner_models][name] = tuple(partner for _, partner in of_name)
        for (model, partner_models), group in groups.items():
            model_names = _names_of(model, names[side])
            partner_names = [
                set(_names_of(other_model, names[1 - side])) for other_model in partner_models
            ]
            for name, folded, members in fold(group, model_names, partner_names):
                prefixed = [
                    self._with_model(partner_model, partner)
                    for partner_model, partner in zip(partner_models, folded, strict=True)
                ]
                paths = [(model, member) for member in members]
                yield self._with_model(model, name), tuple(prefixed), paths

    def _with_model(self, model: str, name: str) -> str:
        return f"{model}/{name}" if self._has_several_models else name


def _path_of(parameter: Parameter) -> ModulePath:
    return parameter.model, parameter.full_name


def _names_of(model: str, paths: Iterable[ModulePath]) -> list[str]:
    return [name for path_model, name in paths if path_model == model]


def _count(members: Sequence[ModulePath]) -> str:
    return f"{len(members)} of them" if len(members) > 1 else ""


def _table(title: str, lines: Iterable[MapLine]) -> str:
    """Return a table with aligned comments; empty if it has no lines."""
    rows = list(lines)
    if not rows:
        return ""
    width = min(max(len(line) for line, _ in rows), _MAX_ALIGNMENT)
    text = f"\n[{title}]\n"
    for line, comment in rows:
        text += f"{line.ljust(width)}  # {comment}\n" if comment else f"{line}\n"
    return text
