"""A comparison as JUnit XML, which every CI shows: a test case for each compared module.

A module fails that has a finding, and one is skipped whose inputs were wrong already: its own work
was not tested.
"""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from otel_torch.parity.finding import Finding, Report
from otel_torch.parity.report.wording import (
    count_summary,
    finding_text,
    format_error,
    module_name,
    recording_names,
)
from otel_torch.rendering.table import escape

_Place = tuple[str | None, str | None]  # the port's model and module; the reference's without them


def write_junit(report: Report, path: Path, command: str = "diff") -> None:
    """Write the report as a JUnit file.

    Raises:
        OSError: If the file cannot be written.
    """
    path.write_bytes(junit_xml(report, command))


def junit_xml(report: Report, command: str = "diff") -> bytes:
    """Return the report as JUnit XML.

    Args:
        command: The one that compared; it names the suite.
    """
    name = "otel-torch {}: {}, {}".format(command, *map(escape, recording_names(report)))
    suite = ElementTree.Element("testsuite", name=name)
    suite.append(_whole_case(report))
    findings: dict[_Place, list[Finding]] = {}
    for finding in report.introduced:
        findings.setdefault(_place(finding), []).append(finding)
    largest = _inherited_errors(report)
    for place in {**_compared_places(report), **dict.fromkeys(findings)}:
        case = _case(place)
        for finding in findings.get(place, ()):
            _fail(case, finding, report.by_tokens)
        if place in largest and place not in findings:
            text = f"inherits an error of {format_error(largest[place])}"
            ElementTree.SubElement(case, "skipped", message=text)
        suite.append(case)
    counted = {"tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped"}
    for attribute, tag in counted.items():
        suite.set(attribute, str(len(list(suite.iter(tag)))))
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    content: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return content


def _whole_case(report: Report) -> ElementTree.Element:
    """Return the case of the comparison itself, in error unless everything was compared."""
    case = ElementTree.Element("testcase", classname="comparison", name="everything is compared")
    if report.verdict in ("incomparable", "partial"):
        message = escape(f"{report.verdict}: {report.reason}")
        ElementTree.SubElement(case, "error", message=message, type=report.verdict)
    ElementTree.SubElement(case, "system-out").text = "\n".join(
        map(escape, [count_summary(report), *report.warnings])
    )
    return case


def _place(finding: Finding) -> _Place:
    if finding.port_module is None:
        return finding.model, finding.module
    return finding.port_model, finding.port_module


def _compared_places(report: Report) -> dict[_Place, None]:
    return dict.fromkeys((pair.port_model, pair.port_module) for pair in report.compared)


def _inherited_errors(report: Report) -> dict[_Place, float | None]:
    """Return the places with an error that an earlier one causes, and the first such error."""
    errors: dict[_Place, float | None] = {}
    for pair in report.compared:
        if pair.state == "inherited":
            errors.setdefault((pair.port_model, pair.port_module), pair.error)
    return errors


def _case(place: _Place) -> ElementTree.Element:
    model, module = place
    return ElementTree.Element("testcase", classname=escape(model or "–"), name=module_name(module))


def _fail(case: ElementTree.Element, finding: Finding, by_tokens: bool) -> None:
    text = finding_text(finding, by_tokens=by_tokens)
    failure = ElementTree.SubElement(case, "failure", message=text, type=finding.kind)
    lines = [
        f"{program}: {escape(line.place)}: {escape(line.text)}"
        for program, line in (("reference", finding.line), ("port", finding.port_line))
        if line is not None
    ]
    proof = [] if finding.proof is None else [f"proof: {finding.proof}"]
    failure.text = "\n".join([*lines, *proof, *map(escape, finding.breakdown)])
    if finding.port_line is not None:
        case.set("file", escape(finding.port_line.file))
        case.set("line", str(finding.port_line.line))
