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

# with a fraction or an exponent: whole numbers count things, of which programs have more or fewer
_NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:(?:\d+\.\d*|\d*\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?|nan|inf)(?!\.?\w)"
)
# how far printed numbers may be apart: rounding brings about a tenth of it to a loss in float32
_TOLERANCE = 1e-3
# below it a number is what rounding leaves of zero
_LEAST = 1e-5


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


def find_difference(
    references: Sequence[Path], port: Path, limit: float = 0.0
) -> tuple[str, str] | None:
    """Return the first line of the reference that the port prints with other numbers, and that of
    the port; None if there is none.

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
        pairs = zip(line.numbers, counterpart.numbers, strict=True)
        if line in stable and any(a.is_apart(b, max(limit, _TOLERANCE)) for a, b in pairs):
            return line.text, counterpart.text
    return None


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
