"""What a port's own loader says of names: the mapping that a model carries, or a person's map."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from otel_torch.parity.program import Parameter


def names_by_loader(meta: dict[str, Any]) -> Callable[[Parameter], list[str]]:
    """What the port's own `param_names_mapping` and `stacked_params_mapping`, kept in its metadata, make of a reference's
    parameter: its full names in the port, [] where they say nothing."""
    renamed: list[tuple[re.Pattern[str], str]] = []
    stacked: list[tuple[str, str]] = []
    models = meta.get("models")
    for facts in models.values() if isinstance(models, dict) else ():
        if not isinstance(facts, dict):
            continue
        for rule in facts.get("param_names_mapping") or ():
            try:
                target = rule[1][0] if isinstance(rule[1], list) else rule[1]
                renamed.append((re.compile(rule[0]), target))
            except (re.error, IndexError, TypeError):
                continue
        for rule in facts.get("stacked_params_mapping") or ():
            if isinstance(rule, list) and len(rule) >= 2 and all(isinstance(part, str) for part in rule[:2]):
                stacked.append((rule[0], rule[1]))

    def named(parameter: Parameter) -> list[str]:
        found = []
        for expression, target in renamed:
            if expression.match(parameter.full):
                try:
                    found.append(expression.sub(target, parameter.full))
                except re.error:
                    continue
                break
        for whole, part in stacked:
            if part in parameter.full:
                found.append(parameter.full.replace(part, whole))
        return found

    return named
