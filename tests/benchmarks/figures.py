"""A figure with its goal, and the one command line of all benchmarks."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Figure:
    """One line of the table. `ours` is None where it could not be measured, and the detail says
    why; less is better.
    """

    name: str
    ours: float | None
    goal: float | None = None
    detail: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached; None without a goal or without a measurement."""
        return None if self.ours is None or self.goal is None else self.ours <= self.goal

    def plain(self) -> dict[str, Any]:
        """As it stands in the JSON.

        >>> Figure("start", 1.05, 1.1).plain()
        {'name': 'start', 'ours': 1.05, 'goal': 1.1, 'met': True, 'detail': ''}
        """
        return {
            "name": self.name,
            "ours": self.ours,
            "goal": self.goal,
            "met": self.met,
            "detail": self.detail,
        }


@dataclass(frozen=True)
class Size:
    """How much is measured. The smallest only shows that the program runs; its figures mean
    nothing.
    """

    smallest: bool = False
    rounds: int | None = None

    def of(self, full: int, smallest: int) -> int:
        """A number that depends on the size."""
        return smallest if self.smallest else full

    def count(self, full: int) -> int:
        """Rounds: as many as were asked for, else `full`."""
        return self.rounds or self.of(full, 2)


def command(about: str | None, measure: Callable[[Size], list[Figure]], argv: Sequence[str]) -> int:
    """The command line of a benchmark that measures all its figures at once."""
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
    """Print the figures, for people, or as JSON where asked."""
    if json_path is None:
        for figure in figures:
            print(f"{figure.name}: {number(figure.ours)}{goal_of(figure)}\n    {figure.detail}")
        return
    text = json.dumps({"figures": [figure.plain() for figure in figures]}, indent=1)
    if json_path == "-":
        print(text, flush=True)
    else:
        Path(json_path).write_text(text)


def goal_of(figure: Figure) -> str:
    """The goal and whether it is met, in words."""
    if figure.goal is None:
        return ""
    return (
        f", goal ≤ {number(figure.goal)}"
        + {True: ", met", False: ", not met", None: ""}[figure.met]
    )


def number(value: float | None) -> str:
    """A figure's number for people.

    >>> number(0.2517), number(882.0), number(None)
    ('0.252', '882', '–')
    """
    return "–" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def environment(**variables: str) -> dict[str, str]:
    """An environment for a child process: nothing of ours, of OpenTelemetry's or FastVideo's but
    what is given; one thread.
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
    """What runs a benchmark by itself. By its module's name: a file's folder would come first on
    the path of imports.
    """
    return [sys.executable, "-m", f"tests.benchmarks.{name}", *arguments]
