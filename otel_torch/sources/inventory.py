"""The table of a model's modules, those never called included, and the names that its checkpoint
had.

A comparison cannot say "this block is never called" from records alone: what is not called makes
none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from otel_torch.console import say_once
from otel_torch.sources.module_names import class_name
from otel_torch.sources.modules import Model, ModuleSite

# where a port keeps how a checkpoint's names become its own: regex -> name, and which parts are
# fused into what
_MAPPINGS = ("param_names_mapping", "stacked_params_mapping")


class Inventory:
    """Takes down what models consist of while they live: at the program's end most are gone."""

    def __init__(self) -> None:
        self._lines: dict[str, list[tuple[list[str], dict[str, Any]]]] = {}
        self._rules: dict[str, dict[str, Any]] = {}

    def take_down(
        self, model: Model, sites: list[ModuleSite], observed: Callable[[nn.Module], bool]
    ) -> None:
        """Add the modules of `sites`, which are new in `model`. observed: whether anybody sees the
        calls of a module.
        """
        lines = self._lines.setdefault(model.name, [])
        for site in sites:
            module = site.module()
            if module is None or not site.names:
                continue
            names = [name for name, _ in site.names]
            line: dict[str, Any] = {
                "module": names[0],
                "class": class_name(module),
                "called": observed(module),
            }
            line["parameters"] = [
                key for key, tensor in module._parameters.items() if tensor is not None
            ]
            if names[1:]:
                line["aliases"] = names[1:]
            lines.append((names, line))
        try:
            self._rules[model.name] = {
                name: rules for name in _MAPPINGS if (rules := _rules(model.root(), name))
            }
        except Exception as error:  # the model's own code: a property may raise
            say_once(
                f"{model.name}: its mappings of names are not in the metadata: {type(error).__name__}: {error}"
            )

    def describe(self, model: Model) -> dict[str, Any]:
        """For the metadata: `table` has a line a module: `module` (canonical name), `class`,
        `called` (None where nobody would have seen it), `parameters` (names), and `aliases`, the
        further names of a shared module; beside it a port's own mappings of names, if any.
        """
        called = model.calls.modules()
        table = [
            line | {"called": not called.isdisjoint(names) if line["called"] else None}
            for names, line in self._lines.get(model.name, ())
        ]
        return {"table": table, **self._rules.get(model.name, {})}


def _rules(root: Any, name: str) -> list[list[Any]]:
    """[pattern, replacement] lines; a replacement may be a list: name, which part, of how many."""
    config = getattr(root, "config", None)
    for holder in (root, config, getattr(config, "arch_config", None)):
        rules = getattr(holder, name, None)
        if isinstance(rules, Mapping) and rules:
            return [[str(pattern), _plain(to)] for pattern, to in rules.items() if not callable(to)]
        if isinstance(rules, list | tuple) and rules:
            return [_plain(rule) for rule in rules if isinstance(rule, list | tuple)]
    return []


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, int | str) else str(value)
