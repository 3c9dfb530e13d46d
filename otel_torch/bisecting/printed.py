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

from otel_torch.graph.graph import MEAN, Graph
from otel_torch.parity.sides import Sides

# with a fraction or an exponent: whole numbers count things, of which programs have more or fewer
_NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:(?:\d+\.\d*|\d*\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?|nan|inf)(?!\.?\w)"
)
# how far printed numbers may be apart: rounding brings about a tenth of it to a loss in float32
_TOLERANCE = 1e-3
# below it a number is what rounding leaves of zero
_LEAST = 1e-5
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


class PrintedDifference(NamedTuple):
    """A line of each program, and the numbers in it that differ."""

    lines: Sides[str]
    numbers: tuple[Sides[PrintedNumber], ...]


def find_difference(
    references: Sequence[Path], port: Path, limit: float = 0.0
) -> PrintedDifference | None:
    """Return the first line that the port prints with other numbers, None if there is none.

    Lines are compared that have the same words, as often in both outputs.

    Args:
        references: Outputs of the reference: a line that it does not print each time, as one with a
            time, is not compared.
        port: Output of the port.
        limit: The relative error that results of the programs may have.
    """
    first, *others = [_read(path) for path in references]
    stable = set(first).intersection(*others)
    counts = Counter(line.words for line in first)
    lines_of_port: dict[str, list[PrintedLine]] = defaultdict(list)
    for line in _read(port):
        lines_of_port[line.words].append(line)
    for line in first:
        same = lines_of_port[line.words]
        # as many are left on each side
        if len(same) != counts[line.words]:
            continue
        counts[line.words] -= 1
        counterpart = same.pop(0)
        numbers = tuple(
            Sides(own, other)
            for own, other in zip(line.numbers, counterpart.numbers, strict=True)
            if own.is_apart(other, max(limit, _TOLERANCE))
        )
        if numbers and line in stable:
            return PrintedDifference(Sides(line.text, counterpart.text), numbers)
    return None


def find_printed(graph: Graph, number: PrintedNumber) -> int | None:
    """Return the last single number of a graph that is printed so; None if there is none, or if the
    print has too few digits to tell.
    """
    if number.unit > _TOLERANCE * abs(number.value):
        return None
    values = graph.values
    distance = np.abs(values.statistics[:, MEAN] - number.value)
    is_printed = distance <= number.unit / 2 + _ROUNDING * abs(number.value)
    found = np.flatnonzero((values.numel == 1) & (values.roundoff > 0) & is_printed)
    return int(found[-1]) if len(found) else None


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
            lines.append(PrintedLine(line, " ".join(_NUMBER.sub("#", line).split()), numbers))
    return lines
