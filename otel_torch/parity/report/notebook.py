"""A comparison in a REPL or a notebook: its verdict in a few lines, and a table of its findings."""

from __future__ import annotations

from collections.abc import Sequence

from otel_torch.parity.finding import Finding, Report, Side
from otel_torch.parity.report.wording import (
    count_summary,
    format_error,
    further_warnings,
    headline,
    module_name,
)
from otel_torch.rendering.notebook import notebook_html
from otel_torch.rendering.table import escape

_HEADER = ("", "reference", "port", "difference", "error", "floor")


def describe_report(report: Report) -> list[str]:
    """Return the verdict, the first finding and what was compared, a line each."""
    lines = [f"{report.verdict}: {count_summary(report)}"]
    if report.reason:
        lines.append(escape(report.reason))
    if report.first is not None:
        lines += [
            headline(report.first, by_tokens=report.by_tokens),
            escape(report.first.explanation),
        ]
    warnings = further_warnings(report)
    lines += [f"warning: {escape(warning)}" for warning in warnings[:1]]
    if len(warnings) > 1:
        lines[-1] += f" (and {len(warnings) - 1} more)"
    return [line for line in lines if line]


def report_html(report: Report) -> str:
    """Return the lines of `describe_report` and a table of all findings."""
    rows = [_row("finding", finding) for finding in report.introduced]
    rows += [_row("harmless", finding) for finding in report.harmless]
    return notebook_html(describe_report(report), _HEADER, rows)


def _row(label: str, finding: Finding) -> Sequence[str]:
    return (
        label,
        _place(finding.module, finding.tensor, finding.side, finding.step),
        _place(finding.port_module, finding.port_tensor, finding.port_side, finding.port_step),
        finding.kind,
        format_error(finding.error),
        format_error(finding.floor),
    )


def _place(module: str | None, tensor: str | None, side: Side | None, step: int | None) -> str:
    if module is None:
        return "–"
    when = f", step {step}" if step is not None and side != "parameter" else ""
    return f"{module_name(module)} {escape(tensor or '')}{when}"
