"""A bisection as one HTML page: each fault with its code, and the errors before and after."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from otel_torch.bisecting.bisection import Bisection
from otel_torch.bisecting.text import (
    after_sentence,
    facts_before,
    fault_place,
    fault_title,
    summary_of,
)
from otel_torch.parity.report.html import code_beside, next_commands, write_html
from otel_torch.parity.report.html_charts import error_by_depth
from otel_torch.parity.report.html_modules import module_tree
from otel_torch.rendering.page import escaped, html_table, plotted


def write_page(bisection: Bisection, path: Path) -> None:
    """Write the answer as one page of about 1 MB; missing folders are created.

    Raises:
        ModuleNotFoundError: Without vl-convert-python; the message is one line.
        OSError: If the file cannot be written.
    """
    if not bisection.faults:
        write_html(bisection.report, path)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_page(bisection), encoding="utf-8", newline="\n")


def _page(bisection: Bisection) -> str:
    verdict, summary = bisection.verdict, summary_of(bisection)
    body = [
        '<header class="card">',
        f'<p><span class="badge {verdict}">{verdict}</span> '
        f'<span class="faint">{escaped(summary)}</span></p>',
    ]
    for index in range(len(bisection.faults)):
        body += _fault(bisection, index)
    body += next_commands(bisection.report)
    notices = [f"differs before the run: {fact}" for fact in facts_before(bisection)]
    notices += bisection.report.warnings
    body += [f'<p class="warning">{escaped(text)}</p>' for text in notices]
    body.append("</header>")
    curves, plots = _curves(bisection)
    body += [*curves, *module_tree(bisection.report), *_runs(bisection)]
    return plotted(f"{verdict}: {summary}", body, plots)


def _fault(bisection: Bisection, index: int) -> list[str]:
    finding = bisection.faults[index]
    lines = [
        f"<h1>{escaped(fault_title(bisection, index))}</h1>",
        *code_beside(finding, bisection.operations[index]),
        f"<p>{escaped(fault_place(bisection, index))}</p>",
    ]
    if reason := bisection.unproven.get(index):
        lines.append(f'<p class="warning">{escaped(reason)}</p>')
    return lines


def _curves(bisection: Bisection) -> tuple[list[str], dict[str, dict[str, object]]]:
    """Return the error by depth of the port as it is, and with all that was healed."""
    lines: list[str] = []
    plots: dict[str, dict[str, object]] = {}
    reports = {"curve": bisection.report, "after": bisection.after}
    for id, report in reports.items():
        chart = None if report is None else error_by_depth(report)
        if chart is not None:
            when = "as the port is" if id == "curve" else "with all that was healed"
            lines += replace(chart, title=f"{chart.title}, {when}").section(id)
            plots[id] = chart.plot
    sentence = "" if bisection.after is None else after_sentence(bisection.after)
    if sentence:
        lines.append(f"<p>{escaped(sentence)}.</p>")
    return lines, plots


def _runs(bisection: Bisection) -> list[str]:
    rows = [
        [str(number), run.side, escaped(run.why), f"{run.seconds:.1f} s"]
        for number, run in enumerate(bisection.runs, 1)
    ]
    return ["<h2>Runs</h2>", html_table(["", "program", "why", "time"], rows, numbers=1)]
