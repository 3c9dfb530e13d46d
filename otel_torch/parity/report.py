"""A comparison as one screen of text: a tired person must see at once what went wrong, where, and
what to do next.

Names come from recordings, so they may hold anything: each passes through `escape` before a
terminal sees it.
"""

from __future__ import annotations

import math
import re
import shlex
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from otel_torch.parity.finding import (
    ComparedPair,
    Finding,
    Kind,
    Report,
    Side,
    State,
    UncomparedTensor,
)
from otel_torch.rendering import table
from otel_torch.rendering.table import Line, escape, paint

SCREEN = 40  # lines of a terminal that a report may fill

# how a place is spoken of, and what is wrong with the tensor there
_PLACES: dict[Side, tuple[str, str]] = {
    "input": (
        "in front of {module}",
        "its input `{tensor}` {manner}, though every recorded module before it is right",
    ),
    "output": ("inside {module}", "its output `{tensor}` {manner}, though what enters it is right"),
    "parameter": ("in the weights of {module}", "`{tensor}` differs, before any forward"),
}
_MANNERS: dict[Kind, str] = {
    "value": "has other values",
    "layout": "has its values in another order",
    "nonfinite": "is not finite",
    "shape": "has another shape",
    "dtype": "has another dtype",
    "weights": "has other values, for its weights are others",
    "missing": "is there on one side only",
}
_ZOOM = "Next: record this neighbourhood again in both programs, with whole tensors:"
_NEXT: dict[Kind, str] = {
    "value": _ZOOM,
    "layout": _ZOOM,
    "nonfinite": _ZOOM,
    "shape": _ZOOM,
    "dtype": "Next: make both sides compute this in one dtype, then compare again.",
    "weights": "Next: look at how this parameter is converted and loaded; no forward is needed for that.",
    "missing": "Next: find out why only one side runs this; a module of another name is paired with --map.",
}
_UNZOOMED: tuple[Kind, ...] = ("dtype", "weights", "missing")
_APART = (
    "Bugs hide each other: record all of the reference with OTEL_TORCH_TENSORS=WHOLE, compare with --save-isolation WHOLE, "
    "and run the port from its values with OTEL_TORCH_ISOLATE=WHOLE."
)

MARKS: dict[State, str] = {
    "right": "✓",
    "layout": "↔",
    "dtype": "≈",
    "healed": "~",
    "inherited": "↓",
    "introduced": "✗",
}
_STYLES: dict[State, str | None] = {
    "right": None,
    "layout": None,
    "dtype": None,
    "healed": None,
    "inherited": "yellow",
    "introduced": "red",
}
# what a curve shows; the other states differ by more than their floor and do no harm
CURVE: tuple[State, ...] = ("right", "inherited", "introduced")
WEAKER = (
    "This judgement is weaker: without sketches only statistics were compared, which do not see values in another order. "
    "OTEL_TORCH_CAPTURE=parity records sketches."
)
Step = tuple[int | None, int | None]  # loop and step
Item = TypeVar("Item")
_BLOCKS = " ▁▂▃▄▅▆▇█"
_CURVE_ROWS = 3
_WIDEST = 3  # columns of one pair, where there are few


def render_text(report: Report, *, color: bool, show_all: bool = False, width: int = 100) -> str:
    """The report as text without a line end: at most `SCREEN` lines, or all there is to say if
    `show_all`.

    width: columns that texts are wrapped and names are shortened to; the commands to copy are never
    cut.
    """
    page = _Page(report, color, max(width, 60), None if show_all else 10)
    while len(lines := page.lines()) > SCREEN and page.few:
        page.few -= 1
        if not page.few:  # the last resort of a narrow terminal
            page.drawn = []
    return "\n".join(lines)


def headline(finding: Finding) -> str:
    """One sentence: where the port goes wrong, in the reference's names where it has any, and how.

    >>> from otel_torch.parity.finding import Finding
    >>> headline(Finding("M", "up", "out", 0, 2, 0, "forward", "P", "to", "out", 0, 2, 0, None, "output", "output", "value",
    ...                  0.5, 1e-6, ""))
    'The port first goes wrong inside up: its output `out` has other values, though what enters it
    is right (step 2, call 0).'
    """
    in_reference = finding.module is not None
    module = finding.module if in_reference else finding.port_module
    tensor = finding.tensor if in_reference else finding.port_tensor
    side = finding.side if in_reference else finding.port_side
    where, what = _PLACES.get(side or "output", _PLACES["output"])
    if finding.kind == "missing":
        has, lacks = ("reference", "port") if in_reference else ("port", "reference")
        where, what = "at {module}", f"only the {has} has this, the {lacks} does not"
    words = {
        "module": name(module),
        "tensor": escape(tensor or "the tensor"),
        "manner": _MANNERS[finding.kind],
    }
    when = "" if side == "parameter" else _when(finding)
    return f"The port first goes wrong {_fill(where, words)}: {_fill(what, words)}{when and f' ({when})'}."


def size(finding: Finding) -> str:
    """How large the error of a finding is, in words; empty where it has none."""
    if finding.error is None:
        return ""
    if not math.isfinite(finding.error):
        return "The error is not finite."
    if finding.floor is None:
        return f"The error is {number(finding.error)} (relative L2)."
    above = times(finding.error, finding.floor)
    return f"The error is {number(finding.error)} (relative L2), {above} its floor of {number(finding.floor)}."


def why(finding: Finding) -> str:
    """The explanation, marked as one: its first word may be a name, so it keeps its case."""
    return f"Why: {finding.explanation}" if finding.explanation else ""


def advice(
    finding: Finding, chain: Sequence[ComparedPair] = ()
) -> tuple[str, list[tuple[str, str]]]:
    """What to do next: a sentence, and for each program the environment that records just the
    neighbourhood, if that helps.

    The environment is quoted for a POSIX shell.
    """
    if finding.kind in _UNZOOMED:
        return _NEXT[finding.kind], []
    before = next(
        (
            one
            for one in reversed(chain)
            if one.state != "introduced" and one.module and one.port_module
        ),
        None,
    )
    sides = (
        ("reference", finding.module, finding.step, before.module if before else None),
        ("port", finding.port_module, finding.port_step, before.port_module if before else None),
    )
    return _NEXT[finding.kind], [
        (program, _environment(module, step, previous))
        for program, module, step, previous in sides
        if module is not None
    ]


def apart(report: Report) -> str:
    """What brings several faults apart; empty where there is one, or where they were brought apart
    already.

    >>> apart(Report("match"))
    ''
    """
    hiding = len(report.introduced) > 1 and any(
        one.kind not in _UNZOOMED for one in report.introduced
    )
    return _APART if hiding and not report.isolated else ""


def name(module: str | None) -> str:
    """A module's name for a person: the root has none of its own.

    >>> name(""), name(None), name("a.b")
    ('(root)', '–', 'a.b')
    """
    return "–" if module is None else escape(module) or "(root)"


def number(value: float | None) -> str:
    """An error or a floor.

    >>> number(None), number(0.0), number(1.23e-7), number(float("inf"))
    ('–', '0', '1.2e-07', 'not finite')
    """
    if value is None:
        return "–"
    return f"{value:.2g}" if math.isfinite(value) else "not finite"


def times(error: float, floor: float) -> str:
    """How many times the floor an error is.

    >>> times(1.0, 0.5), times(1.0, 1e-5), times(1.0, 1e-9), times(1.0, 0.0)
    ('2.0 times', '100,000 times', '1e+09 times', 'above')
    """
    ratio = excess_of(error, floor)
    if not math.isfinite(ratio):
        return "above"
    return (
        f"{ratio:.1f} times"
        if ratio < 10
        else f"{float(f'{ratio:.2g}'):,.0f} times"
        if ratio < 1e7
        else f"{ratio:.0e} times"
    )


def excess_of(error: float | None, floor: float | None) -> float:
    """Error over floor: 1 is just at the floor; infinite for what is not finite, 0 where there is
    no error.
    """
    if error is None or error == 0:
        return 0.0
    if not math.isfinite(error) or not floor:
        return math.inf
    return error / floor


def excess(pair: ComparedPair) -> float:
    """Error over floor of a compared pair; what was introduced counts as the largest of all that
    are as large.
    """
    return excess_of(pair.error, pair.floor)


def worst(pairs: Iterable[ComparedPair]) -> ComparedPair | None:
    """The pair that is furthest above its floor, an introduced one before all others."""
    return max(pairs, key=lambda pair: (pair.state == "introduced", excess(pair)), default=None)


def at_the_finding(report: Report) -> list[ComparedPair]:
    """The pairs of the step and loop in which the first finding lies (of all, where it lies in
    none), in order.
    """
    first = report.first
    pairs = [pair for pair in report.compared if pair.state in CURVE and pair.side != "parameter"]
    if first is not None and first.step is not None:
        pairs = [pair for pair in pairs if (pair.loop, pair.step) == (first.loop, first.step)]
    return sorted(pairs, key=lambda pair: pair.depth)


def binned(pairs: Sequence[Item], bins: int) -> list[list[Item]]:
    """Neighbours put together so that there are at most so many groups, of about equal size.

    >>> [len(group) for group in binned(list("abcde"), 2)]
    [2, 3]
    """
    edges = (
        [
            len(pairs) * position // min(bins, len(pairs))
            for position in range(min(bins, len(pairs)) + 1)
        ]
        if pairs
        else []
    )
    return [list(pairs[start:stop]) for start, stop in pairwise(edges)]


def by_step(report: Report) -> dict[Step, ComparedPair]:
    """For each (loop, step) its worst pair, in order."""
    steps: dict[Step, ComparedPair] = {}
    for pair in report.compared:
        if pair.state in CURVE and pair.side != "parameter":
            key = (pair.loop, pair.step)
            if key not in steps or (pair.error or 0) > (steps[key].error or 0):
                steps[key] = pair
    return dict(
        sorted(steps.items(), key=lambda item: tuple(-1 if one is None else one for one in item[0]))
    )


def pair_of(report: Report, finding: Finding | None) -> ComparedPair | None:
    """The compared pair at a finding's place, None where the finding is of no pair."""
    if finding is None:
        return None
    found = (
        finding.model,
        finding.module,
        finding.tensor,
        finding.loop,
        finding.step,
        finding.call,
    )
    places = (
        (one.model, one.module, one.tensor, one.loop, one.step, one.call) for one in report.compared
    )
    return next(
        (pair for pair, at in zip(report.compared, places, strict=True) if at == found), None
    )


def place(finding: Finding) -> str:
    """A finding's module and which side of it, in few words."""
    in_reference = finding.module is not None
    side = finding.side if in_reference else finding.port_side
    return _fill(
        _PLACES[side or "output"][0],
        {"module": name(finding.module if in_reference else finding.port_module)},
    )


def nearest(report: Report) -> str:
    """Of a match: which pair came nearest to its floor; empty where no pair was kept."""
    top = worst(pair for pair in report.compared if pair.state == "right")
    if top is None:
        return ""
    if not excess(top):
        return "None of them differs at all."
    where = f"{name(top.module)} `{escape(top.tensor)}` at {step_name((top.loop, top.step))}"
    return (
        f"Nearest to its floor of {number(top.floor)} is the error of {where}: {number(top.error)}."
    )


def _in_full(finding: Finding) -> str:
    """A finding on one line."""
    sizes = (
        ""
        if finding.error is None
        else f", error {number(finding.error)}, floor {number(finding.floor)}"
    )
    tensor = finding.tensor if finding.module is not None else finding.port_tensor
    where = ", ".join(
        part for part in (f"{place(finding)} `{escape(tensor or '–')}`", _when(finding)) if part
    )
    return f"{where}: {finding.kind}{sizes}. {escape(finding.explanation)}".rstrip()


def harm(finding: Finding) -> str:
    """What a harmless difference is: one of dtype, of layout, or one that healed."""
    return finding.kind if finding.kind in ("dtype", "layout") else "healed"


def module_names(modules: Iterable[UncomparedTensor]) -> list[str]:
    """Each module once, without model and tensor."""
    return list(dict.fromkeys(name(one.module) for one in modules))


def counts(report: Report) -> str:
    """How much of each a report holds."""
    said = [f"{_plural(report.pairs, 'pair')} compared"]
    if report.introduced:
        said.append(_plural(len(report.introduced), "finding"))
    if report.harmless:
        said.append(_plural(len(report.harmless), "harmless difference"))
    if missed := sum(map(len, report.unpaired.values())) + len(report.ambiguous):
        said.append(f"{_plural(missed, 'place')} not compared")
    return ", ".join(said)


def step_name(key: Step) -> str:
    """A (loop, step) in words.

    >>> step_name((0, 3)), step_name((1, 3)), step_name((0, None))
    ('step 3', 'step 3 of loop 1', 'no step')
    """
    loop, step = key
    return ("no step" if step is None else f"step {step}") + (f" of loop {loop}" if loop else "")


@dataclass(slots=True)
class _Page:
    """The blocks of a report. few: how many entries of each list are shown, as many as a screen
    holds; None for all.
    """

    report: Report
    color: bool
    width: int
    few: int | None
    drawn: list[str] | None = (
        None  # the curves: what takes time for many pairs, and is the same whatever `few` is
    )

    def lines(self) -> list[str]:
        """The whole report, an empty line between blocks."""
        blocks = [block for make in _SHOWN[self.report.verdict] if (block := make(self))]
        return self.heading() + [line for block in blocks for line in ("", *block)][1:]

    def heading(self) -> list[str]:
        """Which recordings."""
        if not self.report.reference and not self.report.port:
            return []
        return self.wrap(f"{self.report.reference} against {self.report.port}", "dim", most=2)

    def finding(self) -> list[str]:
        """What, where in both programs, how large, why."""
        first = self.report.first
        if first is None:
            return []
        loops = bool(first.loop or first.port_loop)
        header = [
            "",
            "model",
            "module",
            "tensor",
            "side",
            *(["loop"] if loops else []),
            "step",
            "call",
        ]
        rows = [
            self._row("reference", first.model, first.module, first.tensor, first.side)
            + [_cell(one) for one in (*([first.loop] if loops else []), first.step, first.call)],
            self._row(
                "port", first.port_model, first.port_module, first.port_tensor, first.port_side
            )
            + [
                _cell(one)
                for one in (*([first.port_loop] if loops else []), first.port_step, first.port_call)
            ],
        ]
        rank = "" if first.rank is None else f"This is rank {first.rank}."
        return [
            *self.wrap(f"✗ {headline(first)}", "red", hang="  "),
            *table.format_table(
                header, [Line(row) for row in rows], left=5, color=self.color
            ).splitlines(),
            *self.wrap(
                " ".join(part for part in (size(first), rank, why(first)) if part),
                None,
                indent="  ",
                most=3,
            ),
            *self.weaker(),
        ]

    def weaker(self) -> list[str]:
        """Whether statistics alone decided."""
        return self.wrap(f"! {WEAKER}", "yellow", hang="  ") if self.report.weaker else []

    def advice(self) -> list[str]:
        """What to do next."""
        if self.report.first is None:
            return []
        sentence, environments = advice(self.report.first, self.report.chain)
        commands = [
            f"  {program:9}  {self.paint(escape(values), 'bold')}"
            for program, values in environments
        ]
        return [sentence, *commands, *self.wrap(apart(self.report), None)]

    def chain(self) -> list[str]:
        """From the inputs to the finding."""
        pairs = list(self.report.chain)
        if (
            pairs
            and pairs[-1].state != "introduced"
            and (found := pair_of(self.report, self.report.first)) is not None
        ):
            pairs.append(found)
        if not pairs:
            return []
        hidden = [] if self.few is None else pairs[1 : -max(self.few, 1)]
        shown = pairs[:1] + pairs[1 + len(hidden) :]
        modules = [name(pair.module) for pair in shown]
        ports = [_renamed(pair) for pair in shown]
        tensors = [self.tail(escape(pair.tensor), 16) for pair in shown]
        room, port_room = _shares(modules, ports, self.width - 34 - max(map(len, tensors)))
        lines = [
            Line(
                [
                    f"{MARKS[pair.state]} {pair.state}",
                    self.tail(module, room),
                    tensor,
                    self.tail(port, port_room),
                    number(pair.error),
                    number(pair.floor),
                ],
                _STYLES[pair.state],
            )
            for pair, module, tensor, port in zip(shown, modules, tensors, ports, strict=True)
        ]
        if hidden:
            lines.insert(
                1,
                Line(
                    [
                        "",
                        f"… {len(hidden):,} more: {_counted(pair.state for pair in hidden)}",
                        "",
                        "",
                        "",
                        "",
                    ],
                    "dim",
                ),
            )
        header = [
            "",
            "from the inputs to it",
            "tensor",
            "in the port" if any(ports) else "",
            "error",
            "floor",
        ]
        return table.format_table(header, lines, left=4, color=self.color).splitlines()

    def further(self) -> list[str]:
        """The findings after the first, each with a cause of its own."""
        further = [one for one in self.report.introduced if one != self.report.first]
        if not further:
            return []
        title = f"{_plural(len(further), 'further finding')}, independent of it"
        if self.few is None:
            return [
                self.paint(title, "bold"),
                *(self.paint(f"✗ {_in_full(one)}", "red") for one in further),
            ]
        room = self.width - 45
        lines = [
            Line(
                [
                    "✗",
                    self.tail(place(one), room),
                    one.kind,
                    _cell(_moment(one)[1]),
                    number(one.error),
                    number(one.floor),
                ],
                "red",
            )
            for one in further[: self.few]
        ]
        if left_out := len(further) - len(lines):
            lines.append(Line(["", f"… {left_out:,} more (--all)", "", "", "", ""], "dim"))
        return table.format_table(
            ["", title, "kind", "step", "error", "floor"], lines, left=3, color=self.color
        ).splitlines()

    def curves(self) -> list[str]:
        """Error by depth, and by step where there are several."""
        if self.drawn is None:
            self.drawn = self._by_depth() + self._by_step()
        return self.drawn

    def match(self) -> list[str]:
        """How sure a match is."""
        report = self.report
        said = f"✓ The port computes what the reference computes: {_plural(report.pairs, 'pair')} of tensors within their floors."
        return [
            *self.wrap(said, "bold", hang="  "),
            *self.wrap(nearest(report), None, indent="  "),
            *self.weaker(),
        ]

    def incomparable(self) -> list[str]:
        """Why nothing can be said."""
        return self.wrap(
            f"These recordings cannot be compared: {self.report.reason or 'no reason is known'}",
            "yellow",
            hang="  ",
        )

    def asides(self) -> list[str]:
        """What did no harm, what was not compared, and what else a person should know."""
        report, lines = self.report, []
        if report.harmless:
            kinds = _counted(harm(one) for one in report.harmless)
            whole = self.few is None
            lines += self._listed(
                f"harmless: {kinds}",
                [_in_full(one) if whole else place(one) for one in report.harmless],
            )
        for side, modules in report.unpaired.items():
            if modules:
                lines += self._listed(
                    f"only in the {side}: {len(modules):,}", module_names(modules)
                )
        if report.ambiguous:
            lines += self._listed(
                f"not told apart: {len(report.ambiguous):,}", module_names(report.ambiguous)
            )
        if report.compared_left_out:
            lines.append(
                f"not drawn: {report.compared_left_out:,} compared pairs of steps without a difference"
            )
        for warning in report.warnings[: self.few]:
            lines += self.wrap(f"! {warning}", "yellow", hang="  ", most=1)
        if self.few is not None and len(report.warnings) > self.few:
            lines.append(
                self.paint(
                    f"! … {len(report.warnings) - self.few:,} more warnings (--all)", "yellow"
                )
            )
        return lines

    def verdict(self) -> list[str]:
        """The last line: what a person sees above the prompt."""
        styles = {"match": "bold", "diverged": "red", "incomparable": "yellow"}
        return [
            f"{self.paint(self.report.verdict, styles[self.report.verdict])}: {counts(self.report)}"
        ]

    def paint(self, text: str, style: str) -> str:
        """The text in a style, if there are colours."""
        return paint(text, style, self.color)

    def tail(self, text: str, room: int) -> str:
        """A name, whose end tells most, without its beginning where it is longer than the room for
        it and not all is shown.
        """
        return (
            text
            if self.few is None or len(text) <= max(room, 12)
            else f"…{text[1 - max(room, 12) :]}"
        )

    def wrap(
        self,
        text: str,
        style: str | None,
        *,
        indent: str = "",
        hang: str | None = None,
        most: int | None = None,
    ) -> list[str]:
        """Lines of a sentence, escaped; the last one ends in … where there are more than `most`,
        unless show_all is shown.
        """
        lines = textwrap.wrap(
            escape(text),
            self.width,
            initial_indent=indent,
            subsequent_indent=indent if hang is None else hang,
            max_lines=None if self.few is None else most,
            placeholder=" …",
            break_on_hyphens=False,
        )
        return [paint(line, style, self.color) for line in lines]

    def _row(
        self,
        program: str,
        model: str | None,
        module: str | None,
        tensor: str | None,
        side: str | None,
    ) -> list[str]:
        return [f"  {program}", model or "–", name(module), tensor or "–", side or "–"]

    def _listed(self, title: str, names: Sequence[str]) -> list[str]:
        """A count and as many of the names as one line holds, or each on a line of its own."""
        if self.few is None:
            return [title, *(f"  {one}" for one in names)]
        for count in range(len(names), 1, -1):
            more = f", … {len(names) - count:,} more" if count < len(names) else ""
            if sum(map(len, names[:count])) + 2 * count + len(title) + len(more) + 1 <= self.width:
                return [f"{title} ({', '.join(names[:count])}{more})"]
        return [
            f"{title} ({self.tail(names[0], self.width - len(title) - 5)}{', …' if len(names) > 1 else ''})"
        ]

    def _by_depth(self) -> list[str]:
        pairs = at_the_finding(self.report)
        columns = [
            top for group in binned(pairs, self.width - 10) if (top := worst(group)) is not None
        ]
        columns = [
            pair for pair in columns for _ in range(min((self.width - 10) // len(columns), _WIDEST))
        ]
        above = [pair for pair in columns if pair.state != "right"]
        if len(columns) < 2 or not above:
            return []
        level = _scale(columns, 8 * _CURVE_ROWS)
        heights = [0 if pair.state == "right" else level(pair.error) for pair in columns]
        first = self.report.first
        step = (
            ""
            if first is None or first.step is None
            else f" of {step_name((first.loop, first.step))}"
        )
        lines = [
            self.paint(
                f"error by depth: {len(pairs):,} pairs{step} in the reference's order, log scale, · within its floor",
                "bold",
            )
        ]
        ends = {
            0: number(max(_errors(above), default=None)),
            _CURVE_ROWS - 1: number(_lowest(columns)),
        }
        for row in range(_CURVE_ROWS):
            below = 8 * (_CURVE_ROWS - 1 - row)
            bars = "".join(
                "·" if not height and not below else _BLOCKS[min(max(height - below, 0), 8)]
                for height in heights
            )
            lines.append(f"{ends.get(row, ''):>7}  {bars}".rstrip())
        if marks := [
            at
            for at, pair in enumerate(columns)
            if pair.state == "introduced" and (not at or columns[at - 1] is not pair)
        ]:
            lines.append(
                self.paint(
                    f"{'':9}{self._marked(marks, '' if first is None else place(first))}", "red"
                )
            )
        return lines

    def _marked(self, marks: list[int], label: str) -> str:
        """A mark under each finding, and the name of the first beside them where there is room."""
        arrows = "".join("▲" if position in marks else " " for position in range(marks[-1] + 1))
        if len(arrows) + 1 + len(label) <= self.width - 9:
            return f"{arrows} {label}".rstrip()
        if len(label) < marks[0]:
            return f"{label} ".rjust(marks[0]) + arrows[marks[0] :]
        return arrows

    def _by_step(self) -> list[str]:
        steps = list(by_step(self.report).items())
        if len(steps) < 2 or all(pair.state == "right" for _, pair in steps):
            return []
        tops = [
            max(group, key=lambda step: step[1].error or 0)[1]
            for group in binned(steps, self.width // 2 - 10)
        ]
        level = _scale(tops, 8)
        bars = "".join(
            "·" if pair.state == "right" else _BLOCKS[level(pair.error)] for pair in tops
        )
        said = f"{number(steps[0][1].error)} at {step_name(steps[0][0])}, {number(steps[-1][1].error)} at {step_name(steps[-1][0])}"
        return [f"{self.paint('error by step:', 'bold')} {bars}  {said}"]


_SHOWN: dict[str, tuple[Callable[[_Page], list[str]], ...]] = {
    "diverged": (
        _Page.finding, _Page.advice, _Page.chain, _Page.further, _Page.curves, _Page.asides,
        _Page.verdict,
    ),
    "match": (_Page.match, _Page.asides, _Page.verdict),
    "incomparable": (_Page.incomparable, _Page.asides, _Page.verdict),
}  # fmt: skip


def _moment(finding: Finding) -> tuple[int | None, int | None, int | None]:
    """Loop, step and call, the reference's where it has the place."""
    if finding.module is not None:
        return finding.loop, finding.step, finding.call
    return finding.port_loop, finding.port_step, finding.port_call


def _when(finding: Finding) -> str:
    words = zip(("loop", "step", "call"), _moment(finding), strict=True)
    return ", ".join(
        f"{word} {value}"
        for word, value in words
        if value is not None and (word != "loop" or value)
    )


def _renamed(pair: ComparedPair) -> str:
    """The port's place, as far as it has another name."""
    tensor = "" if pair.port_tensor == pair.tensor else escape(pair.port_tensor)
    module = "" if pair.port_module == pair.module and not tensor else name(pair.port_module)
    return f"{module} {tensor}".strip()


def _shares(left: Sequence[str], right: Sequence[str], room: int) -> tuple[int, int]:
    """How many columns two columns of names get: what they need, and where that is too much, the
    shorter one as much as half.

    >>> _shares(["a" * 30], ["b" * 10], 30), _shares(["a" * 30], ["b" * 40], 30), _shares(["a"], ["b"], 30)
    ((20, 10), (15, 15), (1, 1))
    """
    wanted, other = max(map(len, left)), max(map(len, right))
    if wanted + other <= room:
        return wanted, other
    if wanted <= other:
        first = min(wanted, room // 2)
        return first, room - first
    second = min(other, room // 2)
    return room - second, second


def _environment(module: str, step: int | None, previous: str | None) -> str:
    """The variables that record one module's neighbourhood: what lies in its container, and what
    ran right before it.
    """
    container = _container(module) or module
    names = (
        [container] if previous is None or _inside(previous, container) else [container, previous]
    )
    found = "|".join(re.escape(one) for one in names)
    pattern = f"^{found}(\\.|$)" if len(names) == 1 else f"^({found})(\\.|$)"
    steps = "" if step is None else f"OTEL_TORCH_STEPS={step} "
    return f"OTEL_TORCH_MODULES={shlex.quote(pattern)} {steps}OTEL_TORCH_TENSORS=FOLDER"


def _container(module: str) -> str:
    """The module around it; a place in a list is no container of its own.

    >>> _container("blocks.0.attn.to_out.0"), _container("blocks.0.norm"), _container("blocks.0")
    ('blocks.0.attn', 'blocks.0', '')
    """
    parts = module.split(".")
    while parts and parts.pop().isdigit():
        pass
    return ".".join(parts)


def _inside(module: str, container: str) -> bool:
    return module == container or module.startswith(f"{container}.")


def _scale(pairs: Sequence[ComparedPair], levels: int) -> Callable[[float | None], int]:
    """A function from an error to a level from 1 to `levels`, by its logarithm, from the smallest
    floor to the largest error.
    """
    low = math.log10(_lowest(pairs))
    high = max(math.log10(max(_errors(pairs), default=1.0)), low + 1e-9)

    def level(error: float | None) -> int:
        if error is None or not math.isfinite(error):
            return levels
        part = (math.log10(error) - low) / (high - low) if error > 0 else 0.0
        return min(max(math.ceil(part * levels), 1), levels)

    return level


def _lowest(pairs: Iterable[ComparedPair]) -> float:
    """The smallest floor of any: where a curve begins."""
    return min((pair.floor for pair in pairs if pair.floor > 0), default=1e-9)


def _errors(pairs: Iterable[ComparedPair]) -> list[float]:
    return [pair.error for pair in pairs if pair.error and math.isfinite(pair.error)]


def _counted(words: Iterable[str]) -> str:
    """How often each word comes.

    >>> _counted(["healed", "dtype", "healed"])
    '2 healed, 1 dtype'
    """
    counts: dict[str, int] = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    return ", ".join(f"{count:,} {word}" for word, count in counts.items())


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def _cell(value: object) -> str:
    return "–" if value is None else str(value)


def _fill(text: str, words: dict[str, str]) -> str:
    """The text with its places filled in once, so that braces in a name stay what they are."""
    return re.sub(r"\{(\w+)\}", lambda found: words.get(found[1], found[0]), text)
