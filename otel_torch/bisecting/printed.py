"""Whether two programs print the same numbers: a loss, a norm, a mean of what they made.

That says nothing of a place, but of two programs that match it tells whether something was not
compared.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from otel_torch.graph.graph import MAX, MEAN, MIN, Graph
from otel_torch.parity.sides import Sides

# with a fraction or an exponent: whole numbers count things, of which programs have more or fewer
_NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:(?:\d+\.\d*|\d*\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?|nan|inf)(?!\.?\w)"
)
# a list of whole numbers is a text in tokens: each program may print another text
_TOKENS = re.compile(r"\[\s*-?\d+(?:[\s,]+-?\d+)*\s*\]")
# how far printed numbers may be apart: rounding brings about a tenth of it to a loss in float32
_TOLERANCE = 1e-3
# below it a number is what rounding leaves of zero
_LEAST = 1e-5
# how many numbers a program may print one by one
_FEW = 16
# of what is printed in full: the statistics of a recording are computed in float32
_ROUNDING = 1e-6


class PrintedNumber(NamedTuple):
    """A number, and what its last digit counts."""

    value: float
    unit: float

    @classmethod
    def read(cls, text: str) -> PrintedNumber:
        """Return a number as it is printed.

        >>> PrintedNumber.read("-2.50"), PrintedNumber.read("1.5e-3")
        (PrintedNumber(value=-2.5, unit=0.01), PrintedNumber(value=0.0015, unit=0.0001))
        """
        mantissa, _, exponent = text.lower().partition("e")
        decimals = len(mantissa.partition(".")[2])
        return cls(float(text), float(f"1e{int(exponent or 0) - decimals}"))

    @property
    def tells(self) -> bool:
        """Whether the digits are enough to tell programs apart."""
        return self.unit <= _TOLERANCE * abs(self.value)

    def is_apart(self, other: PrintedNumber, tolerance: float) -> bool:
        """Return whether another number differs by more than rounding.

        >>> first, second = map(PrintedNumber.read, ("0.0012", "0.0013"))
        >>> first.is_apart(second, 1e-3), first.is_apart(PrintedNumber.read("0.0024"), 1e-3)
        (False, True)
        """
        size = max(abs(self.value), abs(other.value))
        if not math.isfinite(size):
            return repr(self.value) != repr(other.value)
        allowed = tolerance * size + 1.5 * max(self.unit, other.unit)
        return size > _LEAST and abs(self.value - other.value) > allowed


class PrintedLine(NamedTuple):
    """A line that a program prints: its text, and its words without the numbers."""

    text: str
    words: str
    numbers: tuple[PrintedNumber, ...]

    @property
    def tells(self) -> bool:
        """Whether any number has digits enough to tell programs apart."""
        return any(number.tells for number in self.numbers)

    def numbers_apart(self, other: PrintedLine, limit: float) -> list[Sides[PrintedNumber]]:
        """Return which numbers of a line with the same words differ by more than rounding.

        Args:
            limit: The relative error that results of the programs may have.
        """
        pairs = zip(self.numbers, other.numbers, strict=True)
        tolerance = max(limit, _TOLERANCE)
        return [Sides(own, its) for own, its in pairs if own.is_apart(its, tolerance)]


def pair_lines(references: Sequence[Path], port: Path) -> list[Sides[PrintedLine]]:
    """Return the lines that two programs print with the same words, as often in both outputs.

    Args:
        references: Outputs of the reference: a line that it does not print each time, as one with a
            time, is left out.
        port: Output of the port.
    """
    first, *others = [_read(path) for path in references]
    stable = {line.text for line in first}.intersection(
        *({line.text for line in lines} for lines in others)
    )
    lines_of_port: dict[str, list[PrintedLine]] = defaultdict(list)
    for line in _read(port):
        lines_of_port[line.words].append(line)
    counts = Counter(line.words for line in first)
    common = {words for words, count in counts.items() if count == len(lines_of_port[words])}
    pairs = [
        Sides(line, lines_of_port[line.words].pop(0)) for line in first if line.words in common
    ]
    return [pair for pair in pairs if pair.reference.text in stable]


def find_printed(graphs: Sequence[Graph], numbers: Sides[PrintedNumber]) -> Sides[int] | None:
    """Return the value of each of two graphs that has what its program prints.

    Returns:
        The last of the smallest that both have; None if there is none, or if the print has too few
        digits to tell.
    """
    reference, port = map(_printed_by_size, graphs, numbers)
    sizes = reference.keys() & port.keys()
    return Sides(reference[min(sizes)], port[min(sizes)]) if sizes else None


def _printed_by_size(graph: Graph, number: PrintedNumber) -> dict[int, int]:
    """Return the values that have a number, alone or as the mean, the least or the largest of a
    few, by how many elements they have; of each size the last.
    """
    if not number.tells:
        return {}
    values = graph.values
    distance = np.abs(values.statistics[:, [MEAN, MIN, MAX]] - number.value)
    is_printed = (distance <= number.unit / 2 + _ROUNDING * abs(number.value)).any(1)
    is_few = (values.numel > 0) & (values.numel <= _FEW) & (values.roundoff > 0)
    return {int(values.numel[own]): int(own) for own in np.flatnonzero(is_few & is_printed)}


def _read(path: Path) -> list[PrintedLine]:
    """Return the lines of an output that have numbers; none if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    lines = []
    for line in map(str.strip, text.splitlines()):
        numbers = tuple(map(PrintedNumber.read, _NUMBER.findall(line)))
        if numbers:
            words = _TOKENS.sub("[#]", _NUMBER.sub("#", line)).split()
            lines.append(PrintedLine(line, " ".join(words), numbers))
    return lines
