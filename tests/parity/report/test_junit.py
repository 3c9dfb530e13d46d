"""JUnit XML of a comparison: one case a module, read back by what CI reads it with."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from otel_torch.parity.finding import Report
from otel_torch.parity.report.junit import junit_xml, write_junit
from tests.parity.report.test_report import diverged, finding, match
from tests.parity.report.test_sarif import REPORTS


def cases_of(report: Report) -> dict[str, ElementTree.Element]:
    suite = ElementTree.fromstring(junit_xml(report)).find("testsuite")
    assert suite is not None
    return {str(case.get("name")): case for case in suite.iter("testcase")}


@pytest.mark.parametrize("name", REPORTS)
def test_another_program_reads_it(tmp_path: Path, name: str) -> None:
    junitparser: Any = pytest.importorskip("junitparser")
    path = tmp_path / "junit.xml"
    write_junit(REPORTS[name], path)
    (suite,) = junitparser.JUnitXml.fromfile(str(path))
    tallies = {"failures": 0, "errors": 0, "skipped": 0}
    kinds = {"Failure": "failures", "Error": "errors", "Skipped": "skipped"}
    for case in suite:
        for result in case.result:
            tallies[kinds[type(result).__name__]] += 1
    assert tallies == {tally: getattr(suite, tally) for tally in tallies}
    assert suite.tests == len(list(suite))
    report = REPORTS[name]
    assert bool(suite.failures) == (report.verdict == "diverged")
    assert suite.failures == len(report.introduced)
    assert bool(suite.errors) == (report.verdict in ("partial", "incomparable"))


def test_the_module_of_a_finding_fails_and_what_inherits_it_is_skipped() -> None:
    cases = cases_of(diverged())
    failure = cases["blocks.1.attn.to_out"].find("failure")
    assert failure is not None and failure.get("type") == "value"
    assert "The relative L2 error is 0.64" in str(failure.get("message"))
    assert cases["blocks.1.attn.to_q"].find("*") is None
    skipped = cases["blocks.2.attn.to_q"].find("skipped")
    assert skipped is not None and str(skipped.get("message")).startswith("inherits an error of ")
    assert cases["blocks.1.attn.to_out"].get("classname") == "LlamaPort"


def test_a_case_has_the_line_of_its_finding() -> None:
    case = cases_of(REPORTS["a line"])["blocks.1.attn.to_out"]
    assert (case.get("file"), case.get("line")) == ("models/port.py", "40")
    assert case.findtext("failure") == (
        "reference: /opt/original.py:49: return scale\nport: models/port.py:40: return b_scale\n"
        "proof: proven"
    )


def test_a_finding_without_a_compared_module_has_a_case_of_its_own() -> None:
    lacking = finding(kind="missing", port_model=None, port_module=None)
    cases = cases_of(Report("diverged", introduced=[lacking]))
    assert cases["model.layers.1.self_attn.o_proj"].find("failure") is not None


def test_a_match_passes_whole() -> None:
    cases = cases_of(match())
    assert len(cases) > 8 and "everything is compared" in cases
    assert not any(
        case.find(tag) is not None
        for case in cases.values()
        for tag in ("failure", "error", "skipped")
    )
