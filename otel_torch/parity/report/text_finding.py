"""The blocks of a text report about the findings: the first one, the next step, the path to it."""

from __future__ import annotations

from collections.abc import Sequence

from otel_torch.parity.finding import ComparedPair, Finding, Report, State
from otel_torch.parity.report.code_lines import around
from otel_torch.parity.report.next_steps import next_steps
from otel_torch.parity.report.pairs import path_to_finding
from otel_torch.parity.report.screen import Screen
from otel_torch.parity.report.wording import (
    STATE_MARKS,
    WEAKER_VERDICT,
    error_sentence,
    explanation_sentence,
    format_error,
    headline,
    module_name,
    moment_of,
    place_of,
    step_key_of,
    tally,
)
from otel_torch.rendering.next_step import advice
from otel_torch.rendering.table import Line, escape
from otel_torch.rendering.words import plural

_STATE_STYLES: dict[State, str] = {"inherited": "yellow", "introduced": "red"}
_LONGEST_TENSOR_NAME = 16


def finding_block(report: Report, screen: Screen) -> list[str]:
    """Return what the first finding is, where it is in both programs, how large, and why."""
    first = report.first
    if first is None:
        return []
    rank = "" if first.rank is None else f"This is rank {first.rank}."
    details = [error_sentence(first), rank, explanation_sentence(first)]
    lines = [
        *screen.wrap(
            f"✗ {headline(first, by_tokens=report.by_tokens)}", "red", hanging_indent="  "
        ),
        *lines_of_code(first, screen),
        *_location_table(first, screen),
        *screen.wrap(" ".join(filter(None, details)), indent="  ", max_lines=5),
        *(line for text in first.breakdown for line in screen.wrap(text, indent="  ", max_lines=2)),
    ]
    if report.weaker:
        lines += screen.wrap(f"! {WEAKER_VERDICT}", "yellow", hanging_indent="  ")
    return lines


def lines_of_code(finding: Finding, screen: Screen) -> list[str]:
    """Return the line of each program with the lines around it; empty without any."""
    text: list[str] = []
    for program, line in (("reference", finding.line), ("port", finding.port_line)):
        if line is None:
            continue
        text.append(
            f"  {program:<9}  {screen.paint(escape(line.place), 'bold')}  {escape(line.function)}"
        )
        for number, content in around(line):
            is_it = number == line.line
            row = f"  {'▸' if is_it else ' '} {number:>5}  {escape(content)}"[: screen.width]
            text.append(screen.paint(row, "red" if is_it else "dim"))
    return text


def _location_table(finding: Finding, screen: Screen) -> list[str]:
    reference: list[object] = [
        "  reference",
        finding.model or "–",
        module_name(finding.module),
        finding.tensor or "–",
        finding.side or "–",
        finding.loop,
        finding.step,
        finding.call,
    ]
    port: list[object] = [
        "  port",
        finding.port_model or "–",
        module_name(finding.port_module),
        finding.port_tensor or "–",
        finding.port_side or "–",
        finding.port_loop,
        finding.port_step,
        finding.port_call,
    ]
    header = ["", "model", "module", "tensor", "side", "loop", "step", "call"]
    if not finding.loop and not finding.port_loop:
        for row in (header, reference, port):
            del row[5]
    lines = [
        Line(["–" if cell is None else str(cell) for cell in row]) for row in (reference, port)
    ]
    return screen.table(header, lines, left_columns=5)


def next_step_block(report: Report, screen: Screen) -> list[str]:
    """Return the next steps: commands to copy, and what they are for."""
    lines = []
    for sentence, commands in advice(next_steps(report)):
        lines += screen.wrap(sentence)
        lines += [f"  {screen.paint(escape(command), 'bold')}" for command in commands]
    return lines


def path_block(report: Report, screen: Screen) -> list[str]:
    """Return the pairs on the path from the inputs to the first finding."""
    path = path_to_finding(report)
    if not path:
        return []
    hidden = [] if screen.list_limit is None else path[1 : -max(screen.list_limit, 1)]
    shown = path[:1] + path[1 + len(hidden) :]

    modules = [module_name(pair.module) for pair in shown]
    port_names = [_port_name(pair) for pair in shown]
    tensors = [screen.shorten(escape(pair.tensor), _LONGEST_TENSOR_NAME) for pair in shown]
    room = screen.width - 34 - max(map(len, tensors))
    module_room, port_room = _split_room(modules, port_names, room)

    lines = []
    for pair, module, tensor, port_name in zip(shown, modules, tensors, port_names, strict=True):
        cells = [
            f"{STATE_MARKS[pair.state]} {pair.state}",
            screen.shorten(module, module_room),
            tensor,
            screen.shorten(port_name, port_room),
            format_error(pair.error),
            format_error(pair.floor),
        ]
        lines.append(Line(cells, _STATE_STYLES.get(pair.state)))
    if hidden:
        summary = f"… {len(hidden):,} more: {tally(pair.state for pair in hidden)}"
        lines.insert(1, Line(["", summary, "", "", "", ""], "dim"))
    port_title = "in the port" if any(port_names) else ""
    header = ["", "from the inputs to it", "tensor", port_title, "error", "floor"]
    return screen.table(header, lines, left_columns=4)


def further_findings_block(report: Report, screen: Screen) -> list[str]:
    """Return the findings after the first, each with its own cause."""
    further = [finding for finding in report.introduced if finding != report.first]
    if not further:
        return []
    title = f"{plural(len(further), 'further finding')}, independent of it"
    if screen.shows_all:
        findings = (screen.paint(f"✗ {finding_line(finding)}", "red") for finding in further)
        return [screen.paint(title, "bold"), *findings]
    lines = []
    for finding in further[: screen.list_limit]:
        _, step = step_key_of(finding)
        cells = [
            "✗",
            screen.shorten(place_of(finding), screen.width - 45),
            finding.kind,
            "–" if step is None else str(step),
            format_error(finding.error),
            format_error(finding.floor),
        ]
        lines.append(Line(cells, "red"))
    if hidden := len(further) - len(lines):
        lines.append(Line(["", f"… {hidden:,} more (--all)", "", "", "", ""], "dim"))
    return screen.table(["", title, "kind", "step", "error", "floor"], lines, left_columns=3)


def finding_line(finding: Finding) -> str:
    """Return a finding on one line."""
    tensor = finding.tensor if finding.module is not None else finding.port_tensor
    parts = [f"{place_of(finding)} `{escape(tensor or '–')}`", moment_of(finding)]
    place = ", ".join(filter(None, parts))
    error = ""
    if finding.error is not None:
        error = f", error {format_error(finding.error)}, floor {format_error(finding.floor)}"
    return f"{place}: {finding.kind}{error}. {escape(finding.explanation)}".rstrip()


def _port_name(pair: ComparedPair) -> str:
    """Return the names of the port that differ from the reference's."""
    tensor = "" if pair.port_tensor == pair.tensor else escape(pair.port_tensor)
    has_same_name = pair.port_module == pair.module and not tensor
    module = "" if has_same_name else module_name(pair.port_module)
    return f"{module} {tensor}".strip()


def _split_room(references: Sequence[str], ports: Sequence[str], room: int) -> tuple[int, int]:
    """Return the widths of two columns of names.

    If both do not fit into the room, the narrower one gets at most half of it.

    >>> _split_room(["a" * 30], ["b" * 10], 30)
    (20, 10)
    >>> _split_room(["a" * 30], ["b" * 40], 30)
    (15, 15)
    """
    reference_width, port_width = max(map(len, references)), max(map(len, ports))
    if reference_width + port_width <= room:
        return reference_width, port_width
    if reference_width <= port_width:
        reference_width = min(reference_width, room // 2)
        return reference_width, room - reference_width
    port_width = min(port_width, room // 2)
    return room - port_width, port_width
