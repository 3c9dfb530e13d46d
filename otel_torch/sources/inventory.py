"""The table of a model's modules, those never called included, and the names that its checkpoint had.

A comparison cannot say "this block is never called" from records alone: what is not called makes none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from otel_torch.sources.modules import Model
from otel_torch.sources.names import class_name

# where a port keeps how a checkpoint's names become its own: regex -> name, and which parts are fused into what
_MAPPINGS = ("param_names_mapping", "stacked_params_mapping")


def describe_modules(model: Model) -> dict[str, Any]:
    """For the metadata: `table` has a line a module: `module` (canonical name), `class`, `called`, `parameters` (names),
    and `aliases`, the further names of a shared module; beside it a port's own mappings of names, where it has any."""
    called = model.called()
    table = []
    for site in list(model.sites.values()):
        module = site.module()
        if module is None or not site.names:
            continue
        (name, _), *others = site.names
        line: dict[str, Any] = {
            "module": name,
            "class": class_name(module),
            "called": any(alias in called for alias, _ in site.names),
            "parameters": [key for key, tensor in module._parameters.items() if tensor is not None],
        }
        if others:
            line["aliases"] = [alias for alias, _ in others]
        table.append(line)
    found: dict[str, Any] = {"table": table}
    for mapping in _MAPPINGS:
        if rules := _rules(model.root(), mapping):
            found[mapping] = rules
    return found


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
