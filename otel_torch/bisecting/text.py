"""A bisection as text: each fault with its code on both sides, its proof, and what was run."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import PurePath
from typing import NamedTuple

from otel_torch.bisecting.bisection import Bisection
from otel_torch.parity.finding import CodeLine, Finding, Report
from otel_torch.parity.report.code_lines import around
from otel_torch.parity.report.pairs import pairs_around_finding
from otel_torch.parity.report.screen import Screen
from otel_torch.parity.report.text import DEFAULT_WIDTH, render_text
from otel_torch.parity.report.text_curves import error_by_depth
from otel_torch.parity.report.text_finding import next_step_block
from otel_torch.parity.report.wording import format_error, module_name, moment_of
from otel_torch.rendering.table import escape
from otel_torch.rendering.words import enumerate_words, plural

_MARKS = {"proven": "✗ proven", "not proven": "? not proven", None: "? not tried"}
_SENTENCES = {
    "proven": "With the reference's value in its place, what comes after it matches.",
    "not proven": "With the reference's value in its place, what comes after it still differs.",
    None: "",
}
# of a line whose forward is right
_PHASES = {"backward": "in its backward pass", "update": "in the update of the weights"}
# what differs before the run and is listed: the faults should still be on the same screen
_MOST_FACTS = 8
# of the calls that lead to a line: people look at the nearest
_MOST_CALLERS = 3
# columns between the two programs
_GAP = 2


def render_bisection(bisection: Bisection, *, color: bool, width: int = DEFAULT_WIDTH) -> str:
    """Return the answer as text without a final line end."""
    screen = Screen(color, width, None)
    before = _before(bisection, screen)
    if not bisection.faults:
        report = replace(bisection.report, environment=[])  # said above
        text = render_text(report, color=color, width=width)
        gap = [""] if before else []
        return "\n".join([*before, *gap, *text.splitlines(), *list_runs(bisection, screen)])
    blocks = [before]
    blocks += [
        _fault(bisection, index, finding, screen) for index, finding in enumerate(bisection.faults)
    ]
    blocks += [
        _curves(bisection, screen),
        _warnings(bisection, screen),
        next_step_block(bisection.report, screen),
        _verdict(bisection, screen),
    ]
    lines = [line for block in blocks if block for line in ("", *block)]
    return "\n".join(lines[1:])


def facts_before(bisection: Bisection) -> list[str]:
    """Return what differs before the programs compute anything."""
    report = bisection.report
    return [*(f"environment: {fact}" for fact in report.environment), *map(str, report.setup)]


def _before(bisection: Bisection, screen: Screen) -> list[str]:
    facts = facts_before(bisection)
    if not facts:
        return []
    if len(facts) > _MOST_FACTS:
        facts[_MOST_FACTS:] = [f"{len(facts) - _MOST_FACTS} more, which --json has"]
    title = screen.paint("! Differs before the run (reference → port):", "yellow")
    lines = [screen.wrap(fact, indent="    ", hanging_indent="      ") for fact in facts]
    return [title, *(line for own in lines for line in own)]


def _fault(bisection: Bisection, index: int, finding: Finding, screen: Screen) -> list[str]:
    """Return one fault: what it is, its code, and how sure that is."""
    style = "red" if finding.proof else "yellow"
    lines = screen.wrap(fault_title(bisection, index), style, hanging_indent="  ")
    lines += _code(finding, screen)
    for name, callers in (("reference", finding.callers), ("port", finding.port_callers)):
        if callers:
            text = f"{name} called from {_in_calls(callers)}"
            lines += screen.wrap(text, "dim", indent="  ", hanging_indent="    ")
    for name, setting in (("reference", finding.set_by), ("port", finding.port_set_by)):
        if setting:
            text = f"{name} sets what it reads in {_in_calls(setting)}"
            lines += screen.wrap(text, "dim", indent="  ", hanging_indent="    ")
    lines += screen.wrap(fault_place(bisection, index), indent="  ")
    if reason := bisection.unproven.get(index):
        lines += screen.wrap(reason, "yellow", indent="  ")
    return lines


def fault_title(bisection: Bisection, index: int) -> str:
    """Return how sure a fault is, and what it is."""
    finding = bisection.faults[index]
    of = f" ({index + 1} of {len(bisection.faults)})" if len(bisection.faults) > 1 else ""
    return f"{_MARKS[finding.proof]}{of}: {_differs(finding)}"


def fault_place(bisection: Bisection, index: int) -> str:
    """Return where a fault is, how large it is, and what its trial has shown."""
    finding = bisection.faults[index]
    place = module_name(finding.port_module if finding.module is None else finding.module)
    error = ""
    if finding.error is not None:
        limit = format_error(finding.floor)
        error = f"error {format_error(finding.error)}, limit {limit}"
    phase = _PHASES.get(finding.phase or "")
    where = ", ".join(filter(None, [f"in {place}", moment_of(finding), phase, error]))
    return f"{where}. {_proof_sentence(bisection, index)}".rstrip()


def _in_calls(callers: Sequence[CodeLine]) -> str:
    """Return the nearest lines that have called a function.

    >>> _in_calls([CodeLine("a/b.py", 86, "Net.forward", ""), CodeLine("b.py", 7, "<module>", "")])
    'b.py:86 in Net.forward, b.py:7'
    """
    texts = []
    for line in callers[:_MOST_CALLERS]:
        place = f"{PurePath(line.file).name}:{line.line}"
        texts.append(place if line.function.startswith("<") else f"{place} in {line.function}")
    return ", ".join([*texts, *(["…"] if len(callers) > _MOST_CALLERS else [])])


def _proof_sentence(bisection: Bisection, index: int) -> str:
    """Return the sentence about a fault's trial: what it has shown, and for which lines."""
    if index in bisection.unproven:  # the reason says it
        return ""
    lines = bisection.proven_lines(index)
    if len(lines) < 2:
        return _SENTENCES[bisection.faults[index].proof]
    return f"With the reference's value behind {_in_words(lines)}, what comes after them matches."


def _in_words(lines: Sequence[CodeLine]) -> str:
    """Return lines as short as they can be said.

    >>> _in_words([CodeLine("a/b.py", n, "f", "") for n in (86, 87, 87, 102)])
    'b.py:86-87 and b.py:102'
    """
    ranges: list[tuple[CodeLine, int]] = []  # the first line of each, and the number of the last
    for line in lines:
        if ranges and ranges[-1][0].file == line.file and line.line <= ranges[-1][1] + 1:
            ranges[-1] = ranges[-1][0], line.line
        else:
            ranges.append((line, line.line))
    places = [
        f"{PurePath(first.file).name}:{first.line}" + f"-{last}" * (last > first.line)
        for first, last in ranges
    ]
    return enumerate_words(places)


def _differs(finding: Finding) -> str:
    """Return what differs in a sentence."""
    if finding.explanation:
        return finding.explanation
    if finding.kind == "weights":
        return f"{finding.port_tensor or finding.tensor} has other values than the reference's."
    return "from the same values, the port computes others here."


# -- code


class _Cell(NamedTuple):
    """A line of one program, and how it looks."""

    text: str
    style: str | None = None


def _code(finding: Finding, screen: Screen) -> list[str]:
    """Return the lines of both programs, what differs in them marked: side by side if they fit."""
    room = (screen.width - _GAP) // 2
    lines = finding.line, finding.port_line
    sides = [("reference", *lines), ("port", *lines[::-1])]
    columns = [_column(*side, room) for side in sides]
    if all(len(cell.text) <= room for column in columns for cell in column if cell.style != "dim"):
        return _side_by_side(columns, room, screen)
    whole = [cell for side in sides for cell in _column(*side, screen.width)]
    return [screen.paint(cell.text[: screen.width], cell.style or "dim") for cell in whole]


def _side_by_side(columns: list[list[_Cell]], room: int, screen: Screen) -> list[str]:
    lines = []
    for cells in zip_longest(*columns, fillvalue=_Cell("")):
        padded = [cell.text.ljust(room)[:room] for cell in cells]
        painted = [
            screen.paint(text, cell.style) if cell.style else text
            for text, cell in zip(padded, cells, strict=True)
        ]
        lines.append((" " * _GAP).join(painted).rstrip())
    return lines


def _column(name: str, line: CodeLine | None, other: CodeLine | None, room: int) -> list[_Cell]:
    """Return the cells of one program."""
    if line is None:
        return [_Cell(f"  {name}: no line of it was paired with this", "dim")]
    place = escape(line.place)
    if len(place) > room - len(name) - 4:
        place = f"…{place[len(name) + 5 - room :]}"
    cells = [_Cell(f"  {name}  {place}", "bold")]
    for number, content in around(line):
        start = f"  {'▸' if number == line.line else ' '} {number:>5}  "
        cells.append(_Cell(start + escape(content), "red" if number == line.line else "dim"))
        if number == line.line and other is not None:
            marks = _marks(content, other.text)
            if marks:
                cells.append(_Cell(" " * len(start) + marks, "red"))
    return cells


def _marks(text: str, other: str) -> str:
    """Return marks under what only the first of two lines has; nothing if all or none of it.

    >>> _marks("x = kv_idx > q_idx - 33", "x = kv_idx > q_idx - 32")
    '                      ^'
    """
    indent = len(text) - len(text.lstrip())
    matcher = difflib.SequenceMatcher(None, text.strip(), other.strip(), autojunk=False)
    if matcher.ratio() < 0.5:
        return ""
    marks = [" "] * len(text)
    for kind, start, end, *_ in matcher.get_opcodes():
        if kind in ("replace", "delete"):
            marks[indent + start : indent + end] = "^" * (end - start)
    return "".join(marks).rstrip()


# -- the end


def _curves(bisection: Bisection, screen: Screen) -> list[str]:
    """Return the error by depth of the port as it is, and with all that was healed."""
    lines = error_by_depth(bisection.report, screen)
    if bisection.after is None or not lines:
        return lines
    after = error_by_depth(bisection.after, screen)
    title = after_sentence(bisection.after) or "With the reference's values there:"
    return [*lines, *screen.wrap(title, "bold"), *after]


def after_sentence(after: Report) -> str:
    """Return how the pairs of values are with all that was healed; "" if not all are right."""
    pairs = pairs_around_finding(after)
    if any(pair.state != "right" for pair in pairs):
        return ""
    return f"With the reference's values there, all {len(pairs):,} pairs are within their floor"


def _warnings(bisection: Bisection, screen: Screen) -> list[str]:
    texts = bisection.report.warnings
    return [
        line for text in texts for line in screen.wrap(f"! {text}", "yellow", hanging_indent="  ")
    ]


def _verdict(bisection: Bisection, screen: Screen) -> list[str]:
    """Return how many runs it took, and what is known at the end."""
    verdict = screen.paint(bisection.verdict, "red")
    return [*list_runs(bisection, screen), f"{verdict}: {summary_of(bisection)}"]


def summary_of(bisection: Bisection) -> str:
    """Return how many faults there are, and whether the port has others."""
    faults = bisection.faults
    proven = sum(fault.proof == "proven" for fault in faults)
    counts = f"{plural(len(faults), 'fault')}, {proven} proven"
    if bisection.is_healed:
        return f"{counts}; with the reference's values there, the whole port matches"
    if proven == len(faults):
        return f"{counts}; the port differs elsewhere, too"
    return f"{counts}; whether the port differs elsewhere, too, is not known"


def list_runs(bisection: Bisection, screen: Screen) -> list[str]:
    """Return how many runs there were, and a line for each."""
    runs = bisection.runs
    if not runs:
        return []
    seconds = sum(run.seconds for run in runs)
    lines = [f"{plural(len(runs), 'run')}, {seconds:.0f} s"]
    if bisection.seconds > seconds:  # not if runs were taken over
        lines[0] += f"; {bisection.seconds:.0f} s with the comparisons"
    for number, run in enumerate(runs, 1):
        lines.append(f"  {number}  {run.seconds:5.1f} s  {run.side}, {run.why}")
    return [screen.paint(escape(line), "dim") for line in lines]
