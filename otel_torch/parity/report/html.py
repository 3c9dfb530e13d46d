"""A comparison as one HTML page: finding, charts, module tree, statistics and full lists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from otel_torch.parity.finding import (
    Finding,
    ListedOperation,
    LogProbabilities,
    Report,
    UncomparedTensor,
)
from otel_torch.parity.rankings import GoldenComparison, LowerPrecision
from otel_torch.parity.report.code_lines import around
from otel_torch.parity.report.html_charts import Chart, error_by_depth, module_by_step
from otel_torch.parity.report.html_modules import module_tree
from otel_torch.parity.report.html_statistics import statistics_around_finding
from otel_torch.parity.report.next_steps import next_steps
from otel_torch.parity.report.pairs import path_to_finding
from otel_torch.parity.report.wording import (
    GAIN_UNKNOWN,
    PARTIAL_VERDICT,
    STATE_MARKS,
    WEAKER_VERDICT,
    closest_to_floor,
    count_summary,
    environment_sentence,
    error_sentence,
    explanation_sentence,
    format_error,
    further_warnings,
    golden_sentence,
    harmless_kind,
    headline,
    log_probabilities_sentence,
    module_name,
    place_of,
    precision_sentence,
    recording_names,
    setup_sentence,
    step_key_of,
    step_name,
)
from otel_torch.rendering.next_step import advice
from otel_torch.rendering.page import code, escaped, html_table, plotted, sentence

MAX_ENTRIES = 2000  # of a list
_OPEN_ENTRIES = 20  # longer lists are folded


def write_html(report: Report, path: Path) -> None:
    """Write the report as one page of about 1 MB; missing folders are created.

    Raises:
        ModuleNotFoundError: Without vl-convert-python; the message is one line.
        OSError: If the file cannot be written.
    """
    page = _page(report)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8", newline="\n")


def _page(report: Report) -> str:
    charts: dict[str, Chart] = {}
    for id, chart in (("curve", error_by_depth(report)), ("heat", module_by_step(report))):
        if chart is not None:
            charts[id] = chart
    body = [
        *_summary(report),
        *_path(report),
        *_golden(report.golden),
        *_log_probabilities(report.log_probabilities),
        *_precision(report.lower_precision),
        *(line for id, chart in charts.items() for line in chart.section(id)),
        *module_tree(report),
        *statistics_around_finding(report),
        *_lists(report),
    ]
    plots = {id: chart.plot for id, chart in charts.items()}
    reference, port = recording_names(report)
    return plotted(f"{report.verdict}: {reference} vs. {port}", body, plots)


def _summary(report: Report) -> list[str]:
    """Return the card with the verdict and the first finding."""
    lines = [
        '<header class="card">',
        f'<p><span class="badge {report.verdict}">{report.verdict}</span> '
        f'<span class="faint">{count_summary(report)}</span></p>',
    ]
    if report.first is not None:
        lines += _first_finding(report, report.first)
    elif report.verdict == "match":
        lines.append(
            f"<h1>The port matches the reference.</h1><p>{sentence(closest_to_floor(report))}</p>"
        )
    elif report.verdict == "partial":
        lines.append(f"<h1>{PARTIAL_VERDICT}.</h1>")
        lines += [f"<p>Not compared: {escaped(line)}</p>" for line in report.uncompared]
    else:
        lines.append(
            f"<h1>These recordings cannot be compared.</h1><p>{escaped(report.reason or '')}</p>"
        )
    if report.environment:
        lines.append(f'<p class="warning">{escaped(environment_sentence(report.environment))}</p>')
    if report.setup:
        lines.append(f'<p class="warning">{escaped(setup_sentence(report.setup))}</p>')
    if report.weaker:
        lines.append(f'<p class="warning">{escaped(WEAKER_VERDICT)}</p>')
    reference, port = recording_names(report)
    lines.append(f'<p class="faint">reference {code(reference)} · port {code(port)}</p></header>')
    return lines


def _first_finding(report: Report, first: Finding) -> list[str]:
    lines = [
        f"<h1>{sentence(headline(first, by_tokens=report.by_tokens))}</h1>",
        *code_beside(first, report.operations),
        _location_table(first),
        f"<p>{escaped(error_sentence(first))} {escaped(explanation_sentence(first))}</p>",
        *(f"<p>{escaped(line)}</p>" for line in first.breakdown),
    ]
    return [*lines, *next_commands(report)]


def next_commands(report: Report) -> list[str]:
    """Return the next steps with their commands."""
    return [
        f"<p>{escaped(why)}</p><pre>{escaped(chr(10).join(commands))}</pre>"
        for why, commands in advice(next_steps(report))
    ]


def code_beside(finding: Finding, sides: Iterable[Sequence[ListedOperation]]) -> list[str]:
    """Return the lines of both programs and the operations of their regions, side by side.

    Args:
        sides: The operations of the region in the reference, and those in the port.
    """
    if not finding.has_line:
        return []
    columns = []
    for line, operations in zip((finding.line, finding.port_line), sides, strict=True):
        text = [] if line is None else [f"{line.place}  {line.function}"]
        if line is not None:
            text += [
                f"{'▸' if number == line.line else ' '} {number:>5}  {content}"
                for number, content in around(line)
            ]
        text += ["", *(_listed(operation) for operation in operations[:_OPEN_ENTRIES])]
        if len(operations) > _OPEN_ENTRIES:
            text.append(f"… {len(operations) - _OPEN_ENTRIES:,} more")
        columns.append(f"<pre>{escaped(chr(10).join(text))}</pre>")
    return [f"<div class=wide>{html_table(['reference', 'port'], [columns])}</div>"]


def _listed(operation: ListedOperation) -> str:
    where = "" if operation.line is None else f"  # {Path(operation.line.file).name}"
    number = "" if operation.line is None else f":{operation.line.line}"
    return f"{' ' if operation.is_right else '✗'} {operation.text}{where}{number}"


def _location_table(finding: Finding) -> str:
    """Return where a finding is in both programs."""
    header = ["", "model", "module", "tensor", "side", "loop", "step", "call"]
    reference = [
        "reference",
        escaped(finding.model or "–"),
        code(module_name(finding.module)),
        code(finding.tensor or "–"),
        *map(_cell, (finding.side, finding.loop, finding.step, finding.call)),
    ]
    port = [
        "port",
        escaped(finding.port_model or "–"),
        code(module_name(finding.port_module)),
        code(finding.port_tensor or "–"),
        *map(_cell, (finding.port_side, finding.port_loop, finding.port_step, finding.port_call)),
    ]
    return html_table(header, [reference, port])


def _cell(value: object) -> str:
    return "–" if value is None else str(value)


def _path(report: Report) -> list[str]:
    """Return the pairs on the path from the inputs to the first finding."""
    path = path_to_finding(report)
    if not path:
        return []
    rows = []
    for pair in path[-MAX_ENTRIES:]:
        names = [module_name(pair.module), pair.tensor]
        port_names = [module_name(pair.port_module), pair.port_tensor]
        rows.append(
            [
                f'<span class="{pair.state}">{STATE_MARKS[pair.state]} {pair.state}</span>',
                *map(code, names + port_names),
                format_error(pair.error),
                format_error(pair.floor),
            ]
        )
    header = ["", "reference", "tensor", "port", "tensor", "error", "floor"]
    return [
        "<h2>From the inputs to the finding</h2>",
        f"<details{_open(rows)}><summary>{len(rows):,} pairs</summary>",
        f"<div class=wide>{html_table(header, rows, numbers=2)}</div></details>",
    ]


def _log_probabilities(compared: LogProbabilities | None) -> list[str]:
    """Return how the log-probabilities of the tokens differ."""
    if compared is None:
        return []
    return ["<h2>Log-probabilities</h2>", f"<p>{escaped(log_probabilities_sentence(compared))}</p>"]


def _golden(golden: GoldenComparison | None) -> list[str]:
    """Return how far both programs are from the golden recording."""
    if golden is None:
        return []
    header = ["module", "tensor", "nearer", "reference", "port"]
    rows = [
        [
            code(module_name(row.module)),
            code(row.tensor),
            row.nearer,
            format_error(row.error),
            format_error(row.port_error),
        ]
        for row in golden.modules[:MAX_ENTRIES]
    ]
    return [
        "<h2>Distance from the golden recording</h2>",
        f"<p>{escaped(golden_sentence(golden))} It is {code(golden.recording)}.</p>",
        f"<details{_open(rows)}><summary>{len(rows):,} outputs</summary>",
        f"<div class=wide>{html_table(header, rows, numbers=2)}</div></details>",
    ]


def _precision(precision: LowerPrecision | None) -> list[str]:
    """Return what each module adds to the error of a program in lower precision."""
    if precision is None:
        return []
    rows = [
        [
            code(module_name(row.module)),
            *map(format_error, (row.input_error, row.output_error, row.added)),
        ]
        for row in precision.modules[:MAX_ENTRIES]
    ]
    header = ["module", "input", "output", "added"]
    return [
        "<h2>What lower precision costs</h2>",
        f"<p>{escaped(precision_sentence(precision))}</p>",
        f"<details{_open(rows)}><summary>{len(rows):,} modules</summary>",
        f"<div class=wide>{html_table(header, rows, numbers=3)}</div></details>",
        f"<p>{escaped(GAIN_UNKNOWN)}</p>",
    ]


def _lists(report: Report) -> list[str]:
    """Return every finding, everything that was not compared, and the warnings."""
    unpaired = report.unpaired
    lists: list[tuple[str, list[str]]] = [
        (
            "Findings, each with its own cause",
            [_finding_entry(finding) for finding in report.introduced],
        ),
        (
            "Harmless differences",
            [f"{harmless_kind(finding)}: {_finding_entry(finding)}" for finding in report.harmless],
        ),
        (
            "Only in the reference",
            [_tensor_entry(tensor) for tensor in unpaired.get("reference", [])],
        ),
        ("Only in the port", [_tensor_entry(tensor) for tensor in unpaired.get("port", [])]),
        ("Ambiguous", [_tensor_entry(tensor) for tensor in report.ambiguous]),
        ("Warnings", [escaped(warning) for warning in further_warnings(report)]),
    ]
    return [line for title, entries in lists if entries for line in _list(title, entries)]


def _list(title: str, entries: Sequence[str]) -> Iterator[str]:
    yield f"<h2>{title}: {len(entries):,}</h2><details{_open(entries)}><summary>all</summary><ul>"
    yield from (f"<li>{entry}</li>" for entry in entries[:MAX_ENTRIES])
    if len(entries) > MAX_ENTRIES:
        yield f"<li>and {len(entries) - MAX_ENTRIES:,} more; <code>--json</code> lists all</li>"
    yield "</ul></details>"


def _open(entries: Sequence[object]) -> str:
    return " open" if len(entries) <= _OPEN_ENTRIES else ""


def _finding_entry(finding: Finding) -> str:
    tensor = finding.tensor if finding.module is not None else finding.port_tensor
    port = "nothing" if finding.port_module is None else module_name(finding.port_module)
    error = ""
    if finding.error is not None:
        error = f", error {format_error(finding.error)}, floor {format_error(finding.floor)}"
    return (
        f"{code(place_of(finding))} {code(tensor or '–')}, {finding.kind}, "
        f"{step_name(step_key_of(finding))}{error}; in the port {code(port)}. "
        f"{escaped(finding.explanation)}"
    )


def _tensor_entry(tensor: UncomparedTensor) -> str:
    return f"{escaped(tensor.model)} {code(module_name(tensor.module))} {code(tensor.tensor)}"
