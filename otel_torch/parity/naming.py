"""Name parameters and modules of the port: by its loader's mapping, and by a map's wildcards."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from otel_torch.parity.call_graph import Parameter


def names_by_loader(meta: dict[str, Any]) -> Callable[[Parameter], list[str]]:
    """Return a function that applies the port's own mapping of parameter names.

    The port's metadata holds its `param_names_mapping` and `stacked_params_mapping`. The function
    takes a parameter of the reference and returns its full names in the port, [] without a rule.
    """
    renaming = list(_renaming_rules(meta))
    stacking = list(_stacking_rules(meta))

    def port_names(parameter: Parameter) -> list[str]:
        names = []
        for expression, target in renaming:
            if expression.match(parameter.full_name):
                try:
                    names.append(expression.sub(target, parameter.full_name))
                except re.error:
                    continue
                break
        for whole, part in stacking:
            if part in parameter.full_name:
                names.append(parameter.full_name.replace(part, whole))
        return names

    return port_names


def _renaming_rules(meta: dict[str, Any]) -> Iterator[tuple[re.Pattern[str], str]]:
    for facts in _model_facts(meta):
        for rule in facts.get("param_names_mapping") or ():
            try:
                target = rule[1][0] if isinstance(rule[1], list) else rule[1]
                expression = re.compile(rule[0])
            except (re.error, IndexError, TypeError):
                continue
            yield expression, target


def _stacking_rules(meta: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for facts in _model_facts(meta):
        for rule in facts.get("stacked_params_mapping") or ():
            if not isinstance(rule, list) or len(rule) < 2:
                continue
            if isinstance(rule[0], str) and isinstance(rule[1], str):
                yield rule[0], rule[1]


def _model_facts(meta: dict[str, Any]) -> list[dict[str, Any]]:
    return list(meta.get("models", {}).values())


_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def plain_name(module: str) -> str:
    """Return a module's name without the wrappers of compiling, sharding and checkpointing.

    FastVideo's own trace writes names like this.

    >>> plain_name("_orig_mod.blocks.0._checkpoint_wrapped_module.attn")
    'blocks.0.attn'
    """
    return ".".join(part for part in module.split(".") if part not in _WRAPPERS)


def has_loader(meta: dict[str, Any]) -> bool:
    """Return whether the metadata has a loader's mapping, which only a port's does."""
    return any(bool(facts.get("param_names_mapping")) for facts in _model_facts(meta))


# -- wildcards of a person's map
# -------------------------------------------------------------------------------------------


def wildcards(name: str) -> list[str]:
    """Return the wildcards in a name, in order.

    >>> wildcards("**.blocks.*.attn")
    ['**', '*']
    """
    return re.findall(r"\*\*|\*", name)


@functools.lru_cache(maxsize=4096)
def matcher(name: str) -> re.Pattern[str]:
    """Return the expression that matches what a name with wildcards stands for, in full.

    `*` is one component or a part of it, `**` any number of components.

    >>> matcher("blocks.*.attn").fullmatch("blocks.12.attn").groups()
    ('12',)
    >>> [bool(matcher("rope.**").fullmatch(name)) for name in ("rope", "rope.cos.0", "ropes")]
    [True, True, False]
    """
    text, parts = "", name.split(".")
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        if part == "**":
            # includes the adjacent dot, so that it can match nothing; names never start with a dot
            if last:
                whole = r"((?:\.[^.]+)*)" if text else r"(.*)"
            else:
                whole = r"((?:[^.]+\.)*)"
            text = text.removesuffix(r"\.") + whole if last else text + whole
        else:
            text += r"([^.]+?)".join(re.escape(piece) for piece in part.split("*")) + (
                "" if last else r"\."
            )
    return re.compile(text)


def carry(name: str, matches: Sequence[str]) -> str:
    """Replace the wildcards of a name, in order, by what those of another name matched.

    >>> carry("text_model.**.layers.*.fc", ["", "3"])
    'text_model.layers.3.fc'
    """
    remaining = iter(matches)
    parts = []
    for part in name.split("."):
        filled = re.sub(r"\*\*|\*", lambda _: next(remaining), part).strip(".")
        if filled or part != "**":
            parts.append(filled)
    return ".".join(parts)
