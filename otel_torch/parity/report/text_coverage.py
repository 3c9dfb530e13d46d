"""The block of a text report about the rest: harmless differences, gaps and warnings."""

from __future__ import annotations

from otel_torch.parity.finding import Report
from otel_torch.parity.report.screen import Screen
from otel_torch.parity.report.text_finding import finding_line
from otel_torch.parity.report.wording import (
    further_warnings,
    harmless_kind,
    module_names,
    place_of,
    tally,
)


def coverage_block(report: Report, screen: Screen) -> list[str]:
    """Return the harmless differences, what was not compared, and the warnings."""
    lines: list[str] = []
    if report.harmless:
        kinds = tally(map(harmless_kind, report.harmless))
        describe = finding_line if screen.shows_all else place_of
        names = [describe(finding) for finding in report.harmless]
        lines += screen.list_names(f"harmless: {kinds}", names)
    for side, tensors in report.unpaired.items():
        if tensors:
            title = f"only in the {side}: {len(tensors):,}"
            lines += screen.list_names(title, module_names(tensors))
    if report.ambiguous:
        title = f"ambiguous: {len(report.ambiguous):,}"
        lines += screen.list_names(title, module_names(report.ambiguous))
    if report.compared_left_out:
        lines.append(
            f"not shown: {report.compared_left_out:,} compared pairs of steps without a difference"
        )
    return lines + _warning_lines(report, screen)


def _warning_lines(report: Report, screen: Screen) -> list[str]:
    lines = []
    warnings = further_warnings(report)
    for warning in warnings[: screen.list_limit]:
        lines += screen.wrap(f"! {warning}", "yellow", hanging_indent="  ", max_lines=1)
    if screen.list_limit is not None and len(warnings) > screen.list_limit:
        hidden = len(warnings) - screen.list_limit
        lines.append(screen.paint(f"! … {hidden:,} more warnings (--all)", "yellow"))
    return lines
