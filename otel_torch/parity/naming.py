"""What is known of names besides the names themselves: the mapping that a port's own loader has,
and a map's wildcards.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from otel_torch.parity.call_graph import Parameter


def names_by_loader(meta: dict[str, Any]) -> Callable[[Parameter], list[str]]:
    """What the port's own `param_names_mapping` and `stacked_params_mapping`, kept in its metadata,
    make of a reference's parameter: its full names in the port, [] where they say nothing.
    """
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
            if (
                isinstance(rule, list)
                and len(rule) >= 2
                and all(isinstance(part, str) for part in rule[:2])
            ):
                stacked.append((rule[0], rule[1]))

    def named(parameter: Parameter) -> list[str]:
        found = []
        for expression, target in renamed:
            if expression.match(parameter.full_name):
                try:
                    found.append(expression.sub(target, parameter.full_name))
                except re.error:
                    continue
                break
        for whole, part in stacked:
            if part in parameter.full_name:
                found.append(parameter.full_name.replace(part, whole))
        return found

    return named


_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def plain_name(module: str) -> str:
    """A module's name without what compiling, sharding and checkpointing add to it, as FastVideo's
    own trace leaves it.

    >>> plain_name("_orig_mod.blocks.0._checkpoint_wrapped_module.attn")
    'blocks.0.attn'
    """
    return ".".join(part for part in module.split(".") if part not in _WRAPPERS)


def has_loader(meta: dict[str, Any]) -> bool:
    """Whether a recording's metadata carries the mapping of a port's loader, as a reference's does
    not.
    """
    models = meta.get("models")
    facts = models.values() if isinstance(models, dict) else ()
    return any(isinstance(one, dict) and bool(one.get("param_names_mapping")) for one in facts)


# -- wildcards of a person's map
# -------------------------------------------------------------------------------------------


def wildcards(name: str) -> list[str]:
    """The wildcards in a name, in order.

    >>> wildcards("**.blocks.*.attn")
    ['**', '*']
    """
    return re.findall(r"\*\*|\*", name)


@functools.lru_cache(maxsize=4096)
def matcher(name: str) -> re.Pattern[str]:
    """What a name with wildcards matches, in full: `*` is one component or a part of one, `**` any
    number of components.

    >>> matcher("blocks.*.attn").fullmatch("blocks.12.attn").groups()
    ('12',)
    >>> [bool(matcher("rope.**").fullmatch(name)) for name in ("rope", "rope.cos.0", "ropes")]
    [True, True, False]
    """
    text, parts = "", name.split(".")
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        if part == "**":
            # it takes the dot beside it along, so that it can stand for nothing; a dot is never
            # left at the start of a name
            whole = (
                r"(.*)"
                if last and not text
                else r"((?:[^.]+\.)*)"
                if not last
                else r"((?:\.[^.]+)*)"
            )
            text = text.removesuffix(r"\.") + whole if last else text + whole
        else:
            text += r"([^.]+?)".join(re.escape(piece) for piece in part.split("*")) + (
                "" if last else r"\."
            )
    return re.compile(text)


def carry(name: str, found: Sequence[str]) -> str:
    """A name whose wildcards are replaced, in order, by what those of another name stood for.

    >>> carry("text_model.**.layers.*.fc", ["", "3"])
    'text_model.layers.3.fc'
    """
    left = iter(found)
    parts = []
    for part in name.split("."):
        filled = re.sub(r"\*\*|\*", lambda _: next(left), part).strip(".")
        if filled or part != "**":
            parts.append(filled)
    return ".".join(parts)
