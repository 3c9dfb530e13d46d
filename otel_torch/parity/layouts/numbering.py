"""Number the modules of a rank as the whole model does.

A pipeline stage counts its layers from 0, and a rank its experts. Their parameters say which ones
they are: those of the whole model that have the same numbers. A rank with several stages has a
model for each, `GPT` and `GPT#2`, where the whole has one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from otel_torch.parity.call_graph import Sketch, decode_sketch
from otel_torch.recording.reader import iterate_attach_rows

_SAME = 1e-4  # relative distance of equal parameters
ModuleParameter = tuple[str, str, str]  # model, module, parameter


class Numbering:
    """Renames the models and modules of a rank as the whole model names them.

    Attributes:
        chunks: Model of the rank -> the whole model that it is a later part of, and which part.
    """

    def __init__(
        self,
        numbers: dict[tuple[str, str], dict[str, str]] | None = None,
        chunks: dict[str, tuple[str, int]] | None = None,
    ) -> None:
        self._numbers = numbers or {}  # (model, prefix of a list) -> number there -> in the whole
        self._names: dict[tuple[str, str], str] = {}
        self.chunks = chunks or {}

    def chunk(self, model: str) -> tuple[str, int]:
        """Return the name of a model in the whole, and which part of it the rank's is."""
        return self.chunks.get(model, (model, 0))

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


@dataclass(slots=True, eq=False)
class _Stage:
    """The parameters of a model on a rank, and the numbers of its lists in the whole."""

    model: str
    chunk: int
    parameters: dict[ModuleParameter, Sketch]
    numbers: dict[str, dict[str, str]]

    def names_outside(self, prefix: str) -> set[str]:
        """Return the modules that are not in a list."""
        return {module for _, module, _ in self.parameters if not module.startswith(f"{prefix}.")}


def number_ranks(whole: Path, ranks: dict[int, Path]) -> dict[int, Numbering]:
    """Find the names of the ranks' models and modules in the whole model by their parameters."""
    parameters = _parameters(whole)
    stages = {rank: _stages(parameters, _parameters(path)) for rank, path in ranks.items()}
    in_order = [stage for of_rank in stages.values() for stage in of_rank.values()]
    in_order.sort(key=lambda stage: stage.chunk)
    for prefix in {prefix for stage in in_order for prefix in stage.numbers}:
        _tell_stages_apart(prefix, in_order, parameters)
    return {
        rank: Numbering(
            {
                (model, prefix): numbers
                for model, stage in of_rank.items()
                for prefix, numbers in stage.numbers.items()
            },
            {model: (stage.model, stage.chunk) for model, stage in of_rank.items() if stage.chunk},
        )
        for rank, of_rank in stages.items()
    }


def _stages(
    whole: dict[ModuleParameter, Sketch], own: dict[ModuleParameter, Sketch]
) -> dict[str, _Stage]:
    """Return the models of a rank: model -> what it has of the whole."""
    models, known = list(dict.fromkeys(key[0] for key in own)), {key[0] for key in whole}
    stages: dict[str, _Stage] = {}
    for model in models:
        name, _, number = model.partition("#")
        is_chunk = model not in known and name in known and name in stages
        parameters = {
            (name if is_chunk else model, *key[1:]): sketch
            for key, sketch in own.items()
            if key[0] == model
        }
        if is_chunk and parameters.keys() <= stages[name].parameters.keys():
            # a chunk of a pipeline numbers its layers from 0 again; a copy has all modules
            is_chunk = not all(
                _are_equal(stages[name].parameters[key], sketch)
                for key, sketch in parameters.items()
            )
        if not is_chunk:
            parameters = {(model, *key[1:]): sketch for key, sketch in parameters.items()}
        chunk = int(number) - 1 if is_chunk else 0
        stages[model] = _Stage(
            name if is_chunk else model, chunk, parameters, _numbers_of_lists(whole, parameters)
        )
    return stages


def _numbers_of_lists(
    whole: dict[ModuleParameter, Sketch], own: dict[ModuleParameter, Sketch]
) -> dict[str, dict[str, str]]:
    """Return the number in the whole of each number of a list, by the list's prefix."""
    by_pattern: dict[tuple[str, str, str], list[ModuleParameter]] = {}
    for key in whole:
        by_pattern.setdefault(_pattern(key), []).append(key)
    votes: dict[str, Counter[tuple[str, str]]] = {}
    for key, sketch in own.items():
        candidates = by_pattern.get(_pattern(key), ())
        equal = [name for name in candidates if _are_equal(whole[name], sketch)]
        if len(equal) != 1:
            continue  # such as the scales of new norms, which are all one
        for prefix, own_number, number in _numbers_of(key[1], equal[0][1]):
            votes.setdefault(prefix, Counter())[own_number, number] += 1
    return {prefix: _most_voted(counts) for prefix, counts in votes.items()}


def _tell_stages_apart(
    prefix: str, stages: Sequence[_Stage], whole: dict[ModuleParameter, Sketch]
) -> None:
    """Give layers that no stage has to stages that have those of another one, in their order.

    Two stages have different modules around their layers: the first one an embedding, the last one
    a head. If both have the same layers, one of them has the wrong ones.
    """
    having = [stage for stage in stages if prefix in stage.numbers]
    numbers = sorted(_numbers_in(prefix, whole), key=int)
    taken = {number for stage in having for number in stage.numbers[prefix].values()}
    copies: dict[tuple[frozenset[str], frozenset[str]], list[_Stage]] = {}
    for stage in having:
        layers = frozenset(stage.numbers[prefix].values())
        copies.setdefault((layers, frozenset(stage.names_outside(prefix))), []).append(stage)
    sizes = [len(layers) for layers, _ in copies]
    if len(taken) == len(numbers) or sum(sizes) != len(numbers):
        return
    for size, alike in zip(sizes, copies.values(), strict=True):
        own, numbers = numbers[:size], numbers[size:]
        for stage in alike:
            in_order = sorted(stage.numbers[prefix], key=int)
            stage.numbers = stage.numbers | {prefix: dict(zip(in_order, own, strict=True))}


def _numbers_in(prefix: str, parameters: Iterable[ModuleParameter]) -> set[str]:
    start = f"{prefix}."
    parts = (
        key[1].removeprefix(start).partition(".")[0]
        for key in parameters
        if key[1].startswith(start)
    )
    return {part for part in parts if part.isdecimal()}


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
