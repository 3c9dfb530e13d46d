"""Choose modules of a model by object, by name or by pattern."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from torch import nn

from otel_torch.capture.module_paths import without_root
from otel_torch.rendering.near_name import near_name

ModuleChoice = nn.Module | str | re.Pattern[str]


def choose_modules(
    model: nn.Module,
    named: list[tuple[str, nn.Module]],
    choices: Iterable[ModuleChoice] | None,
    resolve: Callable[[str], str | None],
) -> dict[nn.Module, str]:
    """Return the chosen modules of `model`, each with the first of its names.

    Args:
        named: All (name, module) pairs of the model; a shared module once for each of its names.
        choices: Modules, names, or patterns for `re.search`; None chooses all.
        resolve: Turns a name as typed into a canonical one, or None.

    Raises:
        ValueError: A choice matches nothing; the message suggests similar names.
    """
    first_name = {module: name for name, module in reversed(named)}
    if choices is None:
        return dict(reversed(first_name.items()))
    chosen: dict[nn.Module, str] = {}
    for choice in choices:
        if isinstance(choice, nn.Module):
            if choice not in first_name:
                raise ValueError(f"{type(choice).__name__} is not in {type(model).__name__}")
            chosen[choice] = first_name[choice]
            continue
        matches = {}
        for name, module in named:
            if _matches(choice, name, resolve):
                matches[module] = first_name[module]
        if not matches:
            raise ValueError(_describe_no_match(choice, model, [name for name, _ in named]))
        chosen |= matches
    return chosen


def _matches(
    choice: str | re.Pattern[str], name: str, resolve: Callable[[str], str | None]
) -> bool:
    if isinstance(choice, re.Pattern):
        return bool(choice.search(name))
    return resolve(choice) == name


def _describe_no_match(choice: str | re.Pattern[str], model: nn.Module, names: list[str]) -> str:
    text = choice.pattern if isinstance(choice, re.Pattern) else choice
    hint = near_name(without_root(text), names, is_regex=isinstance(choice, re.Pattern))
    hint = hint or f"; it has {len(names)} modules, see named_modules()"
    return f"no module of {type(model).__name__} matches {text!r}{hint}"
