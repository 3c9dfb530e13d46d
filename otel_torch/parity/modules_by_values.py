"""Pair modules by what they compute, where a recording has no parameters to pair them by.

A dump of another program often has activations only, under names of its own. What it shares with
the port are the values before the first fault:

    reference            port             paired by
    layers.0.ln          blocks.0.norm1   equal values
    layers.0.mlp.wo      blocks.0.down    equal values
    layers.1.ln          blocks.1.norm1   the names of `layers.0.ln`
    layers.1.mlp.wo      blocks.1.down    the names of `layers.0.mlp.wo`, though the values differ
    head                 lm_head          the order after the last equal value
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from otel_torch.parity.call_graph import Program, Role, TensorValue
from otel_torch.parity.modules import ModulePath
from otel_torch.parity.parameter_names import similarity
from otel_torch.parity.sides import Sides
from otel_torch.parity.values import Comparer

Pairs = dict[ModulePath, ModulePath]

_INDEX = re.compile(r"(?<![^._])\d+(?![^._])")
# how similar the names of two modules must be, if later values match again
_SIMILAR = 0.6
# more outputs than that are paired by value and by name, but not by order
_MOST_IN_ORDER = 500


def pair_by_values(
    programs: Sides[Program], comparer: Comparer, modules: Sides[set[ModulePath]]
) -> Pairs:
    """Return the reference's module -> the port's, by one forward of both.

    Args:
        modules: The modules that may be paired.
    """
    outputs = Sides(*map(_first_outputs, programs, modules))
    equal = _pair_equal_values(outputs, comparer)
    expected = equal | _pair_by_patterns(equal, modules)
    return expected | _pair_in_order(equal, expected, outputs)


def _first_outputs(program: Program, modules: set[ModulePath]) -> list[Role]:
    """Return the first output of each module's first call, in the order of execution."""
    first: dict[ModulePath, Role] = {}
    for role in program.roles:
        if role.side == "output" and role.call.module_path in modules:
            first.setdefault(role.call.module_path, role)
    return list(first.values())


def _pair_equal_values(outputs: Sides[list[Role]], comparer: Comparer) -> Pairs:
    """Pair the modules that return equal values."""
    pairs: Pairs = {}
    values, port_values = outputs.map(_by_value)
    by_size: dict[int, list[TensorValue]] = defaultdict(list)
    for value in port_values:
        by_size[value.numel].append(value)
    for value, roles in values.items():
        candidates = by_size[value.numel]
        match = next((port for port in candidates if comparer.is_equal(value, port)), None)
        if match is not None:
            candidates.remove(match)
            pairs.update(_pair_of_one_value(roles, port_values[match]))
    return pairs


def _by_value(outputs: Sequence[Role]) -> dict[TensorValue, list[ModulePath]]:
    """Return the modules that return each value, the innermost first."""
    modules: dict[TensorValue, list[ModulePath]] = defaultdict(list)
    for role in outputs:
        if not (role.value.is_constant or role.value.is_integer):
            modules[role.value].append(role.call.module_path)
    return modules


def _pair_of_one_value(
    modules: list[ModulePath], ports: list[ModulePath]
) -> Iterator[tuple[ModulePath, ModulePath]]:
    """Pair modules that all return one value: a container returns what its last module does."""
    if len(modules) == len(ports):
        yield from zip(modules, ports, strict=True)
        return
    ports = list(ports)
    for module in modules[: len(ports)]:
        best = max(ports, key=lambda port: similarity(module[1], port[1]))
        ports.remove(best)
        yield module, best


def _pair_by_patterns(pairs: Pairs, modules: Sides[set[ModulePath]]) -> Pairs:
    """Return pairs of modules of further blocks, named as those of the blocks before."""
    patterns: dict[tuple[str, str], ModulePath] = {}
    for (model, name), (port_model, port_name) in pairs.items():
        indices = zip(_indices(name), _indices(port_name), strict=False)
        count = len(list(itertools.takewhile(lambda both: both[0] == both[1], indices)))
        if count:
            patterns[model, _pattern(name, count)] = port_model, _pattern(port_name, count)
    further: Pairs = {}
    taken = set(pairs.values())
    for module in sorted(modules.reference - set(pairs)):
        model, name = module
        numbers = _indices(name)
        for count in range(len(numbers), 0, -1):
            port_model, port_pattern = patterns.get((model, _pattern(name, count)), ("", ""))
            port = port_model, port_pattern.format(*numbers[:count])
            if port in modules.port and port not in taken:
                further[module] = port
                taken.add(port)
                break
    return further


def _indices(name: str) -> list[str]:
    """Return the indices in a name; other programs attach them by an underscore.

    >>> _indices("layers_12.ln_1"), _indices("blocks.12.norm1")
    (['12', '1'], ['12'])
    """
    return _INDEX.findall(name)


def _pattern(name: str, count: int) -> str:
    """Return a name with its first indices replaced, as `str.format` reads it.

    >>> _pattern("layers_12.ln_1", 1)
    'layers_{}.ln_1'
    """
    return _INDEX.sub("{}", name.replace("{", "{{").replace("}", "}}"), count=count)


def _pair_in_order(equal: Pairs, expected: Pairs, outputs: Sides[list[Role]]) -> Pairs:
    """Return pairs of outputs of one size in order: the most, and of those the most similar names.

    Only names tell what corresponds between two equal values: what is there did no harm.
    """
    modules = outputs.map(lambda roles: [role.call.module_path for role in roles])
    if max(map(len, modules)) > _MOST_IN_ORDER:
        return {}
    equal_modules = Sides(set(equal), set(equal.values()))
    ends = Sides(*map(_last, modules, equal_modules))
    alone = Sides(*map(_without_equal, modules, ends, equal_modules))
    expected_ports = set(expected.values())

    def score(index: int, port_index: int) -> float:
        module, port = modules.reference[index], modules.port[port_index]
        if module in expected or port in expected_ports:
            return 3.0 if expected.get(module) == port else 0.0
        sizes = outputs.reference[index].value.numel, outputs.port[port_index].value.numel
        likeness = similarity(module[1], port[1])
        is_after = index > ends.reference and port_index > ends.port
        is_alone = _fold(module) in alone.reference or _fold(port) in alone.port
        may_differ = (is_after and not is_alone) or likeness >= _SIMILAR
        return 1.0 + likeness if may_differ and sizes[0] == sizes[1] else 0.0

    pairs = _best_order(len(modules.reference), len(modules.port), score)
    return {modules.reference[index]: modules.port[port_index] for index, port_index in pairs}


def _without_equal(
    modules: Sequence[ModulePath], end: int, equal: set[ModulePath]
) -> set[ModulePath]:
    """Return the modules of blocks, up to that of the last equal value, that return no equal value.

    Names are folded: where `layers.0.q` has no counterpart, `layers.1.q` has none, either.
    """
    before = modules[: end + 1]
    alone = {_fold(module) for module in before if _indices(module[1])}
    return alone - {_fold(module) for module in before if module in equal}


def _fold(module: ModulePath) -> ModulePath:
    """Return a module with all indices in its name replaced."""
    model, name = module
    return model, _pattern(name, len(_indices(name)))


def _last(modules: Sequence[ModulePath], among: set[ModulePath]) -> int:
    """Return the index of the last module that is among some, -1 if none is."""
    return max((index for index, module in enumerate(modules) if module in among), default=-1)


def _best_order(
    count: int, port_count: int, score: Callable[[int, int], float]
) -> list[tuple[int, int]]:
    """Return the increasing pairs of indices with the largest sum of scores.

    >>> _best_order(3, 2, lambda index, port_index: index == port_index + 1)
    [(1, 0), (2, 1)]
    """
    scores = [
        [score(index, port_index) for port_index in range(port_count)] for index in range(count)
    ]
    # sums[i][j]: of the best pairs from i and j on
    sums = [[0.0] * (port_count + 1) for _ in range(count + 1)]
    for i in reversed(range(count)):
        for j in reversed(range(port_count)):
            sums[i][j] = max(sums[i + 1][j + 1] + scores[i][j], sums[i + 1][j], sums[i][j + 1])
    pairs, i, j = [], 0, 0
    while i < count and j < port_count:
        if sums[i][j] == sums[i + 1][j]:
            i += 1
        elif sums[i][j] == sums[i][j + 1]:
            j += 1
        else:
            pairs.append((i, j))
            i, j = i + 1, j + 1
    return pairs
