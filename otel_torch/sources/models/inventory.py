"""The modules of each model and its checkpoint mappings, for the metadata of a recording.

Records alone cannot show that a block is never called, because such a block has no records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from otel_torch.process.console import say_once
from otel_torch.sources.models.model import Model, ModuleSite
from otel_torch.sources.modules.module_names import class_name

# attributes in which a port keeps its mapping from a checkpoint's parameter names to its own, and
# which parameters it fuses
_MAPPING_ATTRIBUTES = ("param_names_mapping", "stacked_params_mapping")


class Inventory:
    """Describes models while they exist: at the end of the program most are gone."""

    def __init__(self) -> None:
        # the names of a module and its line of the table
        self._modules: WeakKeyDictionary[Model, list[tuple[list[str], dict[str, Any]]]]
        self._modules = WeakKeyDictionary()
        # by attribute
        self._mappings: WeakKeyDictionary[Model, dict[str, list[list[Any]]]] = WeakKeyDictionary()

    def add(
        self, model: Model, sites: list[ModuleSite], is_observed: Callable[[nn.Module], bool]
    ) -> None:
        """Add the modules of `sites`, which are new in `model`, and the model's mappings.

        Args:
            is_observed: whether the calls of a module are counted.
        """
        lines = self._modules.setdefault(model, [])
        for site in sites:
            module = site.module()
            if module is None or not site.names:
                continue
            names = [name for name, _ in site.names]
            parameters = module._parameters.items()
            line: dict[str, Any] = {
                "module": names[0],
                "class": class_name(module),
                "called": is_observed(module),
                "parameters": [name for name, tensor in parameters if tensor is not None],
            }
            if names[1:]:
                line["aliases"] = names[1:]
            lines.append((names, line))
        try:
            self._mappings[model] = _mappings(model.root())
        except Exception as error:  # the attribute may be a property that raises
            say_once(
                f"{model.name}: its name mappings are not in the metadata: "
                f"{type(error).__name__}: {error}"
            )

    def describe(self, model: Model) -> dict[str, Any]:
        """Return the model's part of the metadata.

        `table` has an object per module: `module` (canonical name), `class`, `called` (None if
        calls are not counted), `parameters` (names) and `aliases` (other names of a shared module).
        The port's own name mappings follow, if any.
        """
        called = model.calls.modules()
        table = []
        for names, line in self._modules.get(model, ()):
            was_called = not called.isdisjoint(names) if line["called"] else None
            table.append(line | {"called": was_called})
        return {"table": table, **self._mappings.get(model, {})}


def _mappings(root: Any) -> dict[str, list[list[Any]]]:
    """Return the name mappings of a model or its configuration, by attribute, as JSON."""
    mappings = {name: _rules(root, name) for name in _MAPPING_ATTRIBUTES}
    return {name: rules for name, rules in mappings.items() if rules}


def _rules(root: Any, name: str) -> list[list[Any]]:
    """Return a mapping as [pattern, replacement] pairs.

    A replacement may be a list: name, index of the part, number of parts.
    """
    config = getattr(root, "config", None)
    for owner in (root, config, getattr(config, "arch_config", None)):
        rules = getattr(owner, name, None)
        if isinstance(rules, Mapping) and rules:
            items = rules.items()
            return [[str(pattern), _as_json(to)] for pattern, to in items if not callable(to)]
        if isinstance(rules, list | tuple) and rules:
            return [_as_json(rule) for rule in rules if isinstance(rule, list | tuple)]
    return []


def _as_json(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return value if isinstance(value, int | str) else str(value)
