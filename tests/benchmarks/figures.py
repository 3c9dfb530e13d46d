"""A figure with its goal, and the command line of all benchmarks."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.pairing import Estimate

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Figure:
    """One line of the table; less is better. `ours` is None if it could not be measured; `detail` says why.

    spread: from where to where `ours` may be; if the goal lies between, nobody can tell.
    """

    name: str
    ours: float | None
    goal: float | None = None
    detail: str = ""
    spread: tuple[float, float] | None = None

    @classmethod
    def estimated(
        cls, name: str, estimate: Estimate, goal: float | None = None, detail: str = ""
    ) -> Figure:
        """Make a figure of a ratio with its range."""
        return cls(name, estimate.value, goal, detail, (estimate.low, estimate.high))

    @property
    def met(self) -> bool | None:
        """Return whether the goal is met; None without a goal or a measurement that can tell."""
        if self.ours is None or self.goal is None or self.is_unclear:
            return None
        return self.ours <= self.goal

    @property
    def is_unclear(self) -> bool:
        """Return whether the goal is within the spread."""
        if self.goal is None or self.spread is None:
            return False
        return self.spread[0] <= self.goal < self.spread[1]

    def plain(self) -> dict[str, Any]:
        """Return the figure as in the JSON.

        >>> Figure("start", 1.05, 1.1).plain()
        {'name': 'start', 'ours': 1.05, 'goal': 1.1, 'met': True, 'detail': '', 'spread': None}
        """
        return {
            "name": self.name,
            "ours": self.ours,
            "goal": self.goal,
            "met": self.met,
            "detail": f"cannot tell; {self.detail}" if self.is_unclear else self.detail,
            "spread": None if self.spread is None else list(self.spread),
        }


@dataclass(frozen=True)
class Size:
    """How much is measured. The smallest size only tests that a benchmark runs."""

    smallest: bool = False
    rounds: int | None = None

    def of(self, full: int, smallest: int) -> int:
        """Return the number for this size."""
        return smallest if self.smallest else full

    def count(self, full: int) -> int:
        """Return the number of rounds: as requested, or `full`."""
        return self.rounds or self.of(full, 2)


def command(about: str | None, measure: Callable[[Size], list[Figure]], argv: Sequence[str]) -> int:
    """Run the command line of a benchmark that measures all its figures together."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json",
        help="write {'figures': […]} to this file, or print it (-), instead of lines for people",
    )
    parser.add_argument(
        "--rounds", type=int, help="how often each side is measured; more narrow the interval"
    )
    parser.add_argument("--smallest", action="store_true", help="only show that it runs")
    arguments = parser.parse_args(argv)
    tell(measure(Size(arguments.smallest, arguments.rounds)), arguments.json)
    return 0


def tell(figures: Sequence[Figure], json_path: str | None) -> None:
    """Print the figures as text, or as JSON if requested."""
    if json_path is None:
        for figure in figures:
            print(
                f"{figure.name}: {measured(figure.plain())}{goal_of(figure)}\n    {figure.detail}"
            )
        return
    text = json.dumps({"figures": [figure.plain() for figure in figures]}, indent=1)
    if json_path == "-":
        print(text, flush=True)
    else:
        Path(json_path).write_text(text)


def goal_of(figure: Figure) -> str:
    """Describe the goal and whether it is met."""
    if figure.goal is None:
        return ""
    verdict = {True: ", met", False: ", not met", None: ""}[figure.met]
    return f", goal ≤ {number(figure.goal)}" + (", cannot tell" if figure.is_unclear else verdict)


def is_unclear(figure: Mapping[str, Any]) -> bool:
    """Return whether a plain figure has a goal within its spread."""
    return (
        figure.get("met") is None and figure.get("goal") is not None and bool(figure.get("spread"))
    )


def measured(figure: Mapping[str, Any]) -> str:
    """Format what was measured: the range where that does not tell whether the goal is met.

    >>> measured(Figure("step", 1.008, 1.01, spread=(1.002, 1.03)).plain())
    '1 to 1.03'
    >>> measured(Figure("step", 1.02, 1.01, spread=(1.015, 1.03)).plain())
    '1.02'
    """
    if is_unclear(figure):
        return " to ".join(map(number, figure["spread"]))
    return number(figure.get("ours"))


def number(value: float | None) -> str:
    """Format a figure's number.

    >>> number(0.2517), number(882.0), number(None)
    ('0.252', '882', '–')
    """
    return "–" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of a child process: one thread, and no variables of this package,
    OpenTelemetry or FastVideo except those given.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OTEL_", "FASTVIDEO_", "TRACEPARENT"))
    }
    found = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(ROOT), *([found] if found else [])])
    return (
        kept
        | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path}
        | variables
    )


def module_command(name: str, *arguments: str) -> list[str]:
    """Return the command that runs a benchmark, by module name to keep its folder off `sys.path`."""
    return [sys.executable, "-m", f"tests.benchmarks.{name}", *arguments]
