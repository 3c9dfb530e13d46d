"""What a misspelt module name was meant to be, at the level at which it is misspelt.

Similarity of whole names suggests the wrong layer: among `layers.0.self_attn` to
`layers.31.self_attn`, each is as close to `layers.9.self_atn` as any other.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_MAX_CHILDREN = 6
# `.` or `\.` between two components, but not the dot of `.*`
_SEPARATOR = re.compile(r"(\\\.|\.)(?![*+?{])")


def near_name(pattern: str, names: Iterable[str], *, is_regex: bool = True) -> str:
    r"""Return what there is instead of a module, to be added to a message; empty if unknown.

    Args:
        pattern: A name from the root, or a regular expression as OTEL_TORCH_MODULES takes it, which
            matches none of the names.
        names: Of all modules, from the root.

    >>> names = ["model", "model.layers", "model.layers.0", "model.layers.0.mlp"]
    >>> print(near_name(r"layers\.\d+\.mpl$", names))
    ; model.layers.0 has mlp; did you mean 'layers\.\d+\.mlp$'?
    >>> near_name("model.layers.7", names, is_regex=False)
    '; model.layers has 0'
    """
    pieces = _SEPARATOR.split(pattern)
    components, last = pieces[::2], len(pieces) // 2
    children = _children_by_parent(names)
    is_rooted = not is_regex or pattern.startswith("^")
    parents = [""] if is_rooted else list(children)
    for index, component in enumerate(components):
        matcher = _matcher(component, is_regex, index == 0, index == last)
        if matcher is None:
            return ""
        matching = [
            f"{parent}.{child}".lstrip(".")
            for parent in parents
            for child in children.get(parent, ())
            if matcher.fullmatch(child)
        ]
        if not matching:
            return _describe_level(pieces, 2 * index, parents, children)
        parents = matching
    return ""  # it matches a module, which another setting excludes


def _children_by_parent(names: Iterable[str]) -> dict[str, list[str]]:
    children: dict[str, dict[str, None]] = {"": {}}
    for name in filter(None, names):
        parent = ""
        for child in name.split("."):
            children.setdefault(parent, {})[child] = None
            parent = f"{parent}.{child}" if parent else child
    return {parent: list(names) for parent, names in children.items()}


def _matcher(
    component: str, is_regex: bool, is_first: bool, is_last: bool
) -> re.Pattern[str] | None:
    """Return what matches a component of a name; None if it cannot be taken apart."""
    if not is_regex:
        return re.compile(re.escape(component))
    start = ".*" if is_first and not component.startswith("^") else ""
    end = ".*" if is_last and not component.endswith("$") else ""
    try:
        return re.compile(f"{start}(?:{component.removeprefix('^').removesuffix('$')}){end}")
    except re.error:
        return None


def _describe_level(
    pieces: list[str], index: int, parents: list[str], children: dict[str, list[str]]
) -> str:
    """Return what the parents have instead of the component at `index`, and the closest one."""
    component = re.sub(r"[\^$]", "", pieces[index])
    candidates = dict.fromkeys(child for parent in parents for child in children.get(parent, ()))
    # the numbers that there are say enough
    similar = [] if component.isdigit() else difflib.get_close_matches(component, candidates, 1)
    parent = parents[0]
    if similar:
        parent = next(path for path in parents if similar[0] in children.get(path, ()))
    there = children.get(parent, [])
    listed = ", ".join(there[:_MAX_CHILDREN]) or "no modules"
    if len(there) > _MAX_CHILDREN:
        is_list = all(child.isdigit() for child in there)
        listed = f"{there[0]} to {there[-1]}" if is_list else f"{listed}, …"
    hint = f"; {parent or 'it'} has {listed}"
    if similar:
        corrected = pieces[index].replace(component, similar[0])
        whole = "".join([*pieces[:index], corrected, *pieces[index + 1 :]])
        hint += f"; did you mean '{whole}'?"
    return hint
