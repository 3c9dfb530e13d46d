"""The pairs that a map prescribes for two recordings, with every wildcard replaced."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from otel_torch.parity.call_graph import Parameter
from otel_torch.parity.layout import Layout
from otel_torch.parity.map_file import Map, MapEntry, SideIndex
from otel_torch.parity.modules import ModulePairs, ModulePath


@dataclass(slots=True)
class Correspondence:
    """What a map prescribes for two recordings; made by `resolve_map`.

    Attributes:
        models: Reference's model -> port's.
        matched, parts, wholes: As in `ModulePairs`.
        containers: Reference's modules of `matched` that have submodules and no parameters.
        parameters: Groups that belong together; the parts of a fused parameter are in order.
        unpaired: Modules of the reference, and of the port, that must not be paired.
        warnings: One line each.
        layouts: Module of the reference -> (line, pattern of tensor names, layout).
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
    layouts: dict[ModulePath, list[tuple[MapEntry, re.Pattern[str], Layout]]] = field(
        default_factory=dict
    )
    _used_layouts: set[MapEntry] = field(default_factory=set)

    def forbids(self, side: SideIndex, module: ModulePath) -> bool:
        """Return whether a module of the reference (side 0) or port (1) must not be paired."""
        return module in self.unpaired[side]

    def layout(self, module: ModulePath, tensor: str) -> Layout | None:
        """Return how the port lays out a tensor of the reference's module, or None for the same."""
        for entry, pattern, layout in self.layouts.get(module, ()):
            if pattern.fullmatch(tensor):
                self._used_layouts.add(entry)
                return layout
        return None

    def reorders(self, module: ModulePath, tensor: str) -> bool:
        """Return whether the port stores a tensor's elements in another flat order."""
        layout = self.layout(module, tensor)
        return layout is not None and not layout.keeps_order

    def unused(self) -> list[str]:
        """Return a warning for each layout that no compared tensor used."""
        return [
            f"{self.map.path}: {entry}: no such tensor was compared"
            for entry, _ in self.map.layouts
            if entry not in self._used_layouts
        ]

    def apply(self, pairs: ModulePairs) -> ModulePairs:
        """Override the pairs found automatically, in place; what contradicts the map is removed."""
        self._remove_contradictions(pairs)
        pairs.matched.update(self.matched)
        pairs.containers.update(
            {module: port for module, port in self.matched.items() if module in self.containers}
        )
        pairs.parts.update(self.parts)
        pairs.wholes.update(self.wholes)
        pairs.unpaired = self.unpaired
        pairs.ambiguous = {
            module: rivals
            for module, rivals in pairs.ambiguous.items()
            if module in pairs.matched and module not in self.matched
        }
        return pairs

    def _remove_contradictions(self, pairs: ModulePairs) -> None:
        changed = self._modules_that_change(pairs)
        for module, partner in list(pairs.matched.items()):
            if module in changed[0] or partner in changed[1]:
                del pairs.matched[module]
                pairs.containers.pop(module, None)
        taken = changed[0] | {*self.matched}, changed[1] | {*self.matched.values()}
        for groups, whole_side in ((pairs.parts, 1), (pairs.wholes, 0)):
            for whole, parts in list(groups.items()):
                if whole in taken[whole_side] or not taken[1 - whole_side].isdisjoint(parts):
                    del groups[whole]

    def _modules_that_change(self, pairs: ModulePairs) -> tuple[set[ModulePath], set[ModulePath]]:
        """Return the modules of each side that the map pairs otherwise than `pairs` does."""
        reference, port = set(self.unpaired[0]), set(self.unpaired[1])
        for module, partner in self.matched.items():
            if pairs.matched.get(module) != partner:
                reference.add(module)
                port.add(partner)
        for whole, parts in self.parts.items():
            reference.update(parts)
            port.add(whole)
        for whole, parts in self.wholes.items():
            reference.add(whole)
            port.update(parts)
        return reference, port
