"""Number the modules of a rank as the whole model does.

A pipeline stage counts its layers from 0, and a rank its experts. Their parameters say which ones
they are: those of the whole model that have the same numbers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from otel_torch.parity.call_graph import Sketch, decode_sketch
from otel_torch.recording.reader import iterate_attach_rows

_SAME = 1e-4  # relative distance of equal parameters
ModuleParameter = tuple[str, str, str]  # model, module, parameter


class Numbering:
    """Renames the modules of a rank: prefix of a list -> its number there -> in the whole."""

    def __init__(self, numbers: dict[tuple[str, str], dict[str, str]] | None = None) -> None:
        self._numbers = numbers or {}
        self._names: dict[tuple[str, str], str] = {}

    def rename(self, model: str, module: str) -> str:
        """Return the name of a module in the whole model."""
        if not self._numbers:
            return module
        name = self._names.get((model, module))
        if name is None:
            name = self._names[model, module] = self._renamed(model, module)
        return name

    def _renamed(self, model: str, module: str) -> str:
        parts = module.split(".")
        renamed = [
            self._numbers.get((model, ".".join(parts[:index])), {}).get(part, part)
            for index, part in enumerate(parts)
        ]
        return ".".join(renamed)


def number_modules(whole: Path, rank: Path) -> Numbering:
    """Find the numbers of a rank's modules in the whole model by their parameters."""
    parameters, own = _parameters(whole), _parameters(rank)
    by_pattern: dict[tuple[str, str, str], list[ModuleParameter]] = {}
    for key in parameters:
        by_pattern.setdefault(_pattern(key), []).append(key)
    votes: dict[tuple[str, str], Counter[tuple[str, str]]] = {}
    for key, sketch in own.items():
        candidates = by_pattern.get(_pattern(key), ())
        equal = [name for name in candidates if _are_equal(parameters[name], sketch)]
        if len(equal) != 1:
            continue  # such as the scales of new norms, which are all one
        for prefix, own_number, number in _numbers_of(key[1], equal[0][1]):
            votes.setdefault((key[0], prefix), Counter())[own_number, number] += 1
    numbers = {}
    for numbered, counts in votes.items():
        chosen = _most_voted(counts)
        if any(own_number != number for own_number, number in chosen.items()):
            numbers[numbered] = chosen
    return Numbering(numbers)


def _parameters(path: Path) -> dict[ModuleParameter, Sketch]:
    rows: Iterable[dict[str, object]] = iterate_attach_rows(path)
    sketches = {}
    for row in rows:
        sketch = decode_sketch(row.get("sketch"))
        if sketch is not None and "shard" not in row:
            name = str(row.get("model", "")), str(row["module"]), str(row["tensor"])
            sketches[name] = sketch
    return sketches


def _pattern(key: ModuleParameter) -> tuple[str, str, str]:
    return key[0], re.sub(r"\d+", "*", key[1]), key[2]


def _are_equal(reference: Sketch, own: Sketch) -> bool:
    return bool(np.linalg.norm(reference - own) <= _SAME * np.linalg.norm(reference))


def _numbers_of(own: str, whole: str) -> list[tuple[str, str, str]]:
    """Return (prefix, own number, number in the whole) of each list on the way to a module."""
    pairs = zip(own.split("."), whole.split("."), strict=True)
    parts = own.split(".")
    return [
        (".".join(parts[:index]), own_part, part)
        for index, (own_part, part) in enumerate(pairs)
        if own_part.isdecimal()
    ]


def _most_voted(votes: Counter[tuple[str, str]]) -> dict[str, str]:
    """Return the number in the whole of each own number; two never share one.

    A list keeps its order, so that layers that a rank runs in another order are wrong.
    """
    chosen: dict[str, str] = {}
    for (own, number), _ in votes.most_common():
        if own not in chosen and number not in chosen.values():
            chosen[own] = number
    in_order = sorted(chosen.values(), key=int)
    return dict(zip(sorted(chosen, key=int), in_order, strict=True))
