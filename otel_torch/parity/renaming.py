"""Learn from examples how the name of a part follows from the name of its whole.

For example, `blocks.0.q` with `layers.0.wq` teaches `blocks.*.q` → `layers.*.wq`. The parts of a
fused weight are several; a whole with one part is a parameter that was renamed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from otel_torch.parity.parameter_names import fill, indices, pattern


@dataclass(frozen=True, slots=True)
class Renaming:
    """How the name of a part follows from the name of its whole.

    Attributes:
        pattern: The pattern of the part's name.
        sources: For each index of the part's name, (position, offset): the index at this position
            of the whole's name plus the offset, or the offset alone where the position is None.
    """

    pattern: str
    sources: tuple[tuple[int | None, int], ...]

    def apply(self, whole_indices: Sequence[int]) -> str:
        """Return the part's name for the indices in the whole's name."""
        part_indices = [
            offset if position is None else whole_indices[position] + offset
            for position, offset in self.sources
        ]
        return fill(self.pattern, part_indices)


# the rules of each pattern of a whole: how each of its parts is named
Rules = dict[str, list[tuple[Renaming, ...]]]

# the indices in the name of a whole, and in those of its parts
_Indices = tuple[tuple[int, ...], list[tuple[int, ...]]]


def learn_rules(examples: Iterable[tuple[str, Sequence[str]]]) -> Rules:
    """Return the rules by the pattern of the whole, the most frequent first.

    Args:
        examples: full names of a whole and of its parts.
    """
    alike: dict[tuple[str, tuple[str, ...]], list[_Indices]] = defaultdict(list)
    for whole, parts in examples:
        key = pattern(whole), tuple(pattern(part) for part in parts)
        alike[key].append((indices(whole), [indices(part) for part in parts]))
    rules: Rules = {}
    by_frequency = sorted(alike.items(), key=lambda item: -len(item[1]))
    for (whole_pattern, part_patterns), pair_indices in by_frequency:
        whole_indices = [whole for whole, _ in pair_indices]
        rule = tuple(
            Renaming(part_pattern, _sources(whole_indices, [parts[i] for _, parts in pair_indices]))
            for i, part_pattern in enumerate(part_patterns)
        )
        rules.setdefault(whole_pattern, []).append(rule)
    return rules


def _sources(
    wholes: list[tuple[int, ...]], parts: list[tuple[int, ...]]
) -> tuple[tuple[int | None, int], ...]:
    """Return the source of each index of the part's name, as in `Renaming.sources`.

    >>> _sources(wholes=[(0,), (1,)], parts=[(1, 7), (2, 7)])
    ((0, 1), (None, 7))
    """
    sources: list[tuple[int | None, int]] = []
    for part_position in range(len(parts[0])):
        column = [part[part_position] for part in parts]
        source: tuple[int | None, int] = (None, column[0])
        for position in range(len(wholes[0])):
            offsets = Counter(
                index - whole[position] for index, whole in zip(column, wholes, strict=True)
            )
            offset, count = offsets.most_common(1)[0]
            if count == len(column) and (len(set(column)) > 1 or offset == 0):
                source = position, offset
                break
        sources.append(source)
    return tuple(sources)
