"""A comparison as text that fits one terminal screen: what went wrong, where, what to do next."""

from __future__ import annotations

from dataclasses import replace

from otel_torch.parity.finding import Report
from otel_torch.parity.report.screen import Screen
from otel_torch.parity.report.text_coverage import coverage_block
from otel_torch.parity.report.text_curves import curves_block
from otel_torch.parity.report.text_finding import (
    finding_block,
    further_findings_block,
    next_step_block,
    path_block,
)
from otel_torch.parity.report.text_rankings import golden_block, precision_block
from otel_torch.parity.report.wording import (
    PARTIAL_VERDICT,
    WEAKER_VERDICT,
    closest_to_floor,
    count_summary,
    environment_sentence,
    log_probabilities_sentence,
    recording_names,
)
from otel_torch.rendering.words import plural

SCREEN_LINES = 40  # lines of a terminal that a report may fill
DEFAULT_WIDTH, _MIN_WIDTH = 100, 60  # columns of texts and names
_MOST_ENTRIES = 10  # of each list

_VERDICT_STYLES = {
    "match": "bold",
    "diverged": "red",
    "incomparable": "yellow",
    "partial": "yellow",
}


def render_text(
    report: Report, *, color: bool, show_all: bool = False, width: int = DEFAULT_WIDTH
) -> str:
    """Return the report as text without a final line end.

    Args:
        report: The comparison.
        color: Whether to use escape codes for colors.
        show_all: Whether to show full lists and names; otherwise lists are shortened until the
            report has at most `SCREEN_LINES` lines.
        width: Columns for texts and names; commands to copy are never cut.
    """
    screen = Screen(color, max(width, _MIN_WIDTH), None if show_all else _MOST_ENTRIES)
    curves = curves_block(report, screen) if report.verdict == "diverged" else []
    lines = _lines(report, screen, curves)
    while len(lines) > SCREEN_LINES and screen.list_limit:
        screen = replace(screen, list_limit=screen.list_limit - 1)
        if screen.list_limit == 0:  # even empty lists are too long: drop the curves
            curves = []
        lines = _lines(report, screen, curves)
    return "\n".join(lines)


def _lines(report: Report, screen: Screen, curves: list[str]) -> list[str]:
    """Return the whole report, with an empty line between its blocks."""
    if report.verdict == "diverged":
        blocks = [
            finding_block(report, screen),
            next_step_block(report, screen),
            path_block(report, screen),
            further_findings_block(report, screen),
            curves,
        ]
    elif report.verdict in ("match", "partial"):
        blocks = [_match_block(report, screen), precision_block(report.lower_precision, screen)]
    else:
        blocks = [_incomparable_block(report, screen)]
    blocks += [
        golden_block(report.golden, screen),
        _log_probabilities_block(report, screen),
        coverage_block(report, screen),
        _verdict_line(report, screen),
    ]

    blocks.insert(0, _environment_block(report, screen))
    separated = [line for block in blocks if block for line in ("", *block)]
    return _heading(report, screen) + separated[1:]


def _heading(report: Report, screen: Screen) -> list[str]:
    if not report.reference and not report.port:
        return []
    text = "reference {}, port {}".format(*recording_names(report))
    return screen.wrap(text, "dim", max_lines=2)


def _environment_block(report: Report, screen: Screen) -> list[str]:
    if not report.environment:
        return []
    text = f"! {environment_sentence(report.environment)}"
    return screen.wrap(text, "yellow", hanging_indent="  ", max_lines=3)


def _match_block(report: Report, screen: Screen) -> list[str]:
    pairs = f"{plural(report.pairs, 'tensor pair')} within floor"
    if report.verdict == "partial":
        lines = screen.wrap(f"! {PARTIAL_VERDICT}: {pairs}.", "yellow", hanging_indent="  ")
        for text in report.uncompared:
            lines += screen.wrap(f"not compared: {text}", indent="  ", max_lines=2)
    else:
        text = f"✓ The port matches the reference: {pairs}."
        lines = screen.wrap(text, "bold", hanging_indent="  ")
    lines = [
        *lines,
        *screen.wrap(closest_to_floor(report), indent="  "),
    ]
    if report.weaker:
        lines += screen.wrap(f"! {WEAKER_VERDICT}", "yellow", hanging_indent="  ")
    return lines


def _log_probabilities_block(report: Report, screen: Screen) -> list[str]:
    if report.log_probabilities is None:
        return []
    return screen.wrap(log_probabilities_sentence(report.log_probabilities), hanging_indent="  ")


def _incomparable_block(report: Report, screen: Screen) -> list[str]:
    text = f"These recordings cannot be compared: {report.reason or 'the reason is unknown'}"
    return screen.wrap(text, "yellow", hanging_indent="  ")


def _verdict_line(report: Report, screen: Screen) -> list[str]:
    """Return the last line, which stays visible above the prompt."""
    verdict = screen.paint(report.verdict, _VERDICT_STYLES[report.verdict])
    return [f"{verdict}: {count_summary(report)}"]
