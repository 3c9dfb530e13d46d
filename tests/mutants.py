"""Plants small mistakes in the comparison, one at a time, and asks whether a test notices.

    python -m tests.mutants [--count 60] [--seed 1] [--file build/mutants.json] [--again]

A mutant is a comparison, a number, an `and`, a returned value or a statement changed, on a line that
a test runs. For each, the tests that run its line are run, the quickest first, up to `--limit`
seconds of them. `--file` keeps the mutants and their fate; `--again` draws none, but asks whether the
mutants of that file are still killed, by the same tests or, where those are gone, by any. So two
versions of the tests can be compared.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MUTATED = ROOT / "otel_torch/parity"
TESTS = ("tests/parity", "tests/corpora", "tests/reports", "tests/cli/test_diff.py")
KILLED, SURVIVED, TIMED_OUT = "killed by ", "survived", "timed out"
COVERAGE = "MUTANTS_COVERAGE"  # names the file that the tests write as they run
SWAPPED: dict[type[ast.AST], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
    ast.And: "or", ast.Or: "and",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """The bytes of a file from `start` to `end` replaced; `line` counts from 1."""

    file: str
    line: int
    start: int
    end: int
    text: str
    kind: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.kind} -> {self.text.strip()}"


# ---- which tests run which line: a plugin of pytest


class Coverage:
    """Collects the lines of the comparison that each test runs, and how long it takes."""

    def __init__(self) -> None:
        self.lines: dict[str, set[tuple[str, int]]] = defaultdict(set)
        self.seconds: dict[str, float] = defaultdict(float)
        self._test = ""

    def _call(self, frame: Any, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(str(MUTATED)):
            return None
        seen, file = self.lines[self._test], name[len(str(ROOT)) + 1 :]

        def line(frame: Any, event: str, argument: Any) -> Any:
            seen.add((file, frame.f_lineno))
            return line

        return line(frame, event, argument)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        # a fixture may serve every test of its file
        return (yield from self._traced(item.nodeid.partition("::")[0]))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        return (yield from self._traced(item.nodeid))

    def _traced(self, test: str) -> Iterator[None]:
        self._test = test
        begin = time.perf_counter()
        sys.settrace(self._call)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            self.seconds[test] += time.perf_counter() - begin

    def pytest_sessionfinish(self) -> None:
        lines = {test: sorted(lines) for test, lines in self.lines.items()}
        Path(os.environ[COVERAGE]).write_text(json.dumps([lines, self.seconds]))


def pytest_configure(config: pytest.Config) -> None:
    if COVERAGE in os.environ:
        config.pluginmanager.register(Coverage())


# ---- mutants


def mutants_of(file: Path) -> Iterator[Mutant]:
    """Yield every mutant of a file."""
    source = file.read_bytes()
    offsets = [0]
    for text in source.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(text))

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = offsets[node.lineno - 1] + node.col_offset
        return start, offsets[node.end_lineno - 1] + node.end_col_offset

    def mutant(node: Any, start: int, end: int, text: str, kind: str) -> Mutant:
        return Mutant(str(file.relative_to(ROOT)), node.lineno, start, end, text, kind)

    def between(left: ast.expr, right: ast.expr, operator: ast.AST, kind: str) -> Iterator[Mutant]:
        # brackets around an operand stand in between
        start, end = span(left)[1], span(right)[0]
        if not set(source[start:end]) & set(b"()#"):
            yield mutant(left, start, end, f" {SWAPPED[type(operator)]} ", kind)

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
                yield from between(left, right, operator, "comparison")
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from between(left, right, node.op, "and/or")
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
            changed = not node.value if isinstance(node.value, bool) else node.value * 2 + 1
            yield mutant(node, *span(node), repr(changed), "constant")
        elif isinstance(node, ast.Return) and node.value is not None:
            if not (isinstance(node.value, ast.Constant) and node.value.value is None):
                yield mutant(node, *span(node), "return None", "returned value")
        elif isinstance(node, ast.AugAssign | ast.Assign) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        ):
            yield mutant(node, *span(node), "pass", "statement")


def draw(count: int, seed: int, covered: set[tuple[str, int]]) -> list[Mutant]:
    """Draw mutants on covered lines; each kind is as likely, so that constants are not the most."""
    kinds = defaultdict(list)
    for file in sorted(MUTATED.rglob("*.py")):
        for mutant in mutants_of(file):
            if (mutant.file, mutant.line) in covered:
                kinds[mutant.kind].append(mutant)
    chance = random.Random(seed)
    drawn: dict[Mutant, None] = {}
    while len(drawn) < count:
        drawn[chance.choice(kinds[chance.choice(sorted(kinds))])] = None
    return list(drawn)


# ---- running


def run_pytest(
    arguments: list[str], timeout: float | None = None, **variables: str
) -> tuple[int, str]:
    """Run pytest on the tests and return its exit status and output."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not scoreboard and not engines",
    ]
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, env={**os.environ, **variables}, timeout=timeout,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def cover(file: Path) -> tuple[dict[str, list[list[Any]]], dict[str, float]]:
    """Run all tests and return the lines and the seconds of each."""
    written = file.with_suffix(".coverage.json")
    _, output = run_pytest(["-p", "tests.mutants", *TESTS], **{COVERAGE: str(written)})
    print(output.splitlines()[-1], flush=True)
    lines, seconds = json.loads(written.read_text())
    return lines, seconds


def fate(mutant: Mutant, tests: list[str], timeout: float) -> str:
    """Plant a mutant, run the tests until one fails, and return which; `survived` if none does."""
    path = ROOT / mutant.file
    source = path.read_bytes()
    path.write_bytes(source[: mutant.start] + mutant.text.encode() + source[mutant.end :])
    try:
        status, output = run_pytest(["-x", *tests], timeout)
    except subprocess.TimeoutExpired:
        return TIMED_OUT
    finally:
        path.write_bytes(source)
    if status == 0:
        return SURVIVED
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (
        f"{KILLED}{failed[0].partition(' ')[2].partition(' - ')[0]}"
        if failed
        else f"exit status {status}"
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--count", type=int, default=60)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--limit", type=float, default=120, help="seconds of tests a mutant")
    arguments.add_argument("--file", type=Path, default=Path("build/mutants.json"))
    arguments.add_argument("--again", action="store_true", help="those of the file")
    options = arguments.parse_args()
    options.file.parent.mkdir(parents=True, exist_ok=True)
    if options.again:
        return again(json.loads(options.file.read_text()))
    lines, seconds = cover(options.file)
    running = defaultdict(set)
    for test, places in lines.items():
        for name, line in places:
            running[name, line].add(test)
    rows = []
    for mutant in draw(options.count, options.seed, set(running)):
        tests = sorted(running[mutant.file, mutant.line], key=lambda test: seconds[test])
        chosen, total = [], 0.0
        for test in tests:
            if total + seconds[test] <= options.limit or not chosen:
                chosen.append(test)
                total += seconds[test]
        result = fate(mutant, chosen, 5 * total + 120)
        rows.append({"mutant": asdict(mutant), "fate": result})
        print(f"{mutant}: {result} [{len(chosen)} of {len(tests)} tests]", flush=True)
        options.file.write_text(json.dumps(rows, indent=1))
    print(f"{sum(row['fate'] != SURVIVED for row in rows)} of {len(rows)} mutants killed")


def again(rows: list[dict[str, Any]]) -> None:
    """Plant the mutants that tests have killed before."""
    killed = [row for row in rows if row["fate"] != SURVIVED]
    alive = 0
    for row in killed:
        mutant, before = Mutant(**row["mutant"]), row["fate"].removeprefix(KILLED).partition("[")[0]
        result = fate(mutant, [before], timeout=600) if "::" in before else SURVIVED
        if not result.startswith(KILLED):  # the test is gone, or lets it pass
            result = fate(mutant, list(TESTS), timeout=3600)
        alive += result == SURVIVED
        print(f"{mutant}: {result} (was: {row['fate']})", flush=True)
    print(f"{len(killed) - alive} of {len(killed)} mutants killed again")


if __name__ == "__main__":
    main()
