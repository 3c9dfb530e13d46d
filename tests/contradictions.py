"""Check that a comparison does not contradict itself: no finding names a place whose pair is right."""

from __future__ import annotations

from collections.abc import Iterator

from otel_torch.parity.finding import ComparedPair, Finding, Report

Place = tuple[object, ...]
# states of pairs that are right
RIGHT = ("right", "layout", "dtype")


def contradictions(report: Report) -> list[str]:
    """Return a line for each place that a finding names although all its pairs are right.

    Places of pairs that the report left out (see `Report.compared_left_out`) are not checked.
    """
    states: dict[Place, set[str]] = {}
    for pair in report.compared:
        for place in _places_of_pair(pair):
            states.setdefault(place, set()).add(pair.state)
    findings = [*report.introduced, *(f for f in report.harmless if f.kind != "dtype")]
    if report.first is not None:
        findings.append(report.first)
    return list(
        dict.fromkeys(
            f"{' '.join(map(str, place))} is named, and {', '.join(sorted(states[place]))}"
            for finding in findings
            # a recomputed tensor is compared with the forward of its own program, in no pair
            for place in (_places_of_finding(finding) if finding.phase != "recompute" else ())
            if place in states and states[place] <= set(RIGHT)
        )
    )


def _places_of_pair(pair: ComparedPair) -> Iterator[Place]:
    for tensor in pair.tensor.split("+"):
        yield "reference", pair.model, pair.module, tensor, pair.loop, pair.step, pair.call
    for tensor in pair.port_tensor.split("+"):
        module = pair.port_model, pair.port_module
        yield "port", *module, tensor, pair.port_loop, pair.port_step, pair.port_call


def _places_of_finding(finding: Finding) -> tuple[Place, Place]:
    module, port_module = (finding.model, finding.module), (finding.port_model, finding.port_module)
    time = finding.loop, finding.step, finding.call
    port_time = finding.port_loop, finding.port_step, finding.port_call
    return (
        ("reference", *module, finding.tensor, *time),
        ("port", *port_module, finding.port_tensor, *port_time),
    )
