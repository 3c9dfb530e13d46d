"""A comparison as SARIF 2.1.0, which code hosts show as remarks beside the lines of the port.

One result a finding, at the line of the port where operations were recorded, else at its module.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

from otel_torch import __version__
from otel_torch.parity.finding import CodeLine, Finding, Kind, Report
from otel_torch.parity.report.wording import finding_text, module_name
from otel_torch.records import json_safe
from otel_torch.rendering.table import escape

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_RULES: dict[Kind, str] = {
    "value": "The port computes other values than the reference",
    "layout": "The port has the values of the reference in another order",
    "nonfinite": "One program has NaN or Inf where the other has not",
    "shape": "The port has a tensor of another shape",
    "dtype": "The port has a tensor of another dtype",
    "weights": "The port computes with other weights",
    "missing": "Only one program runs this",
}


def write_sarif(report: Report, path: Path, command: str = "diff") -> None:
    """Write the report as a SARIF file.

    Raises:
        OSError: If the file cannot be written.
    """
    text = json.dumps(sarif_log(report, command), indent=1, allow_nan=False)
    path.write_text(f"{text}\n", encoding="utf-8")


def sarif_log(report: Report, command: str = "diff") -> dict[str, Any]:
    """Return the report as a SARIF log.

    Args:
        command: The one that compared, for people who read the log.
    """
    rules = [
        {"id": kind, "shortDescription": {"text": f"{text}."}} for kind, text in _RULES.items()
    ]
    driver = {"name": f"otel-torch {command}", "version": __version__, "rules": rules}
    run = {
        "tool": {"driver": driver},
        "invocations": [_invocation(report)],
        "results": [_result(finding, report.by_tokens) for finding in report.introduced],
    }
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _invocation(report: Report) -> dict[str, Any]:
    """Return whether everything was compared, and the warnings."""
    is_whole = report.verdict in ("match", "diverged")
    notes = [("warning", warning) for warning in report.warnings]
    if not is_whole:
        notes.insert(0, ("error", f"{report.verdict}: {report.reason}"))
    return {
        "executionSuccessful": is_whole,
        "toolExecutionNotifications": [
            {"level": level, "message": {"text": escape(text)}} for level, text in notes
        ],
    }


def _result(finding: Finding, by_tokens: bool) -> dict[str, Any]:
    location: dict[str, Any] = {}
    if finding.port_line is not None:
        region = None if finding.region is None else finding.region.port
        location["physicalLocation"] = _physical(finding.port_line, region)
    if finding.port_module is not None or finding.port_model is not None:
        name = f"{finding.port_model or ''}.{finding.port_module or ''}".strip(".")
        location["logicalLocations"] = [{"fullyQualifiedName": escape(name), "kind": "module"}]
    result = {
        "ruleId": finding.kind,
        "ruleIndex": list(_RULES).index(finding.kind),
        "level": "error",
        "message": {"text": finding_text(finding, by_tokens=by_tokens)},
        "locations": [location] if location else [],
        "partialFingerprints": {"place/v1": _fingerprint(finding)},
        "properties": {
            "error": json_safe(finding.error),
            "floor": json_safe(finding.floor),
            "step": finding.port_step,
            "proof": finding.proof,
        },
    }
    if finding.line is not None:
        region = None if finding.region is None else finding.region.reference
        message = {"text": f"the reference, in {module_name(finding.module)}"}
        physical = _physical(finding.line, region)
        result["relatedLocations"] = [{"id": 0, "message": message, "physicalLocation": physical}]
    return result


def _physical(line: CodeLine, region: tuple[CodeLine, CodeLine] | None) -> dict[str, Any]:
    """Return a line, and as its context the lines between which the program differs."""
    location: dict[str, Any] = {
        "artifactLocation": {"uri": _uri(line.file)},
        "region": {"startLine": max(line.line, 1), "snippet": {"text": escape(line.text)}},
    }
    if region is not None and {end.file for end in region} == {line.file}:
        numbers = [max(place.line, 1) for place in (*region, line)]
        location["contextRegion"] = {"startLine": min(numbers), "endLine": max(numbers)}
    return location


def _uri(file: str) -> str:
    """Return the URI of a file: below the current folder, as in a checkout, a relative one.

    >>> _uri("models/my port.py"), _uri("/opt/port.py")
    ('models/my%20port.py', 'file:///opt/port.py')
    """
    path = Path(file)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    name = quote(path.as_posix(), errors="replace")
    return f"file://{name}" if path.is_absolute() else name


def _fingerprint(finding: Finding) -> str:
    """Return what stays the same when lines above the place come and go."""
    line = "" if finding.port_line is None else finding.port_line.text
    place = finding.port_model, finding.port_module, finding.port_tensor, finding.kind, line
    text = "\n".join(map(str, place))
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]
