"""The steps after a comparison: what each outcome asks for, as data that a program can follow."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from otel_torch.cli.main import make_parser
from otel_torch.parity.finding import Cause, CodeLine, Report
from otel_torch.parity.report.next_steps import next_steps
from otel_torch.parity.report.text import render_text
from otel_torch.settings import Settings
from tests.parity.report.test_report import diverged, finding

RANKS = {"reference": "runs/ref", "port": "runs/port"}
ONE_RUN = {"reference": "runs/both.jsonl", "port": "runs/both.jsonl", "models": ("Net", "Net#2")}
LINE = CodeLine("port.py", 7, "forward", "return x")
SCALED = Cause("scaled", True, "it is twice as large")


def commands_of(report: Report) -> list[list[str]]:
    return [list(step.command) for step in next_steps(report)]


def captures_of(report: Report) -> list[str]:
    return [
        step.environment["OTEL_TORCH_CAPTURE"] for step in next_steps(report) if step.environment
    ]


# -- modules of two programs, each recorded by one process


def test_a_divergence_of_modules_is_followed_to_its_line() -> None:
    bisect, reference, port, compare = next_steps(diverged())
    assert bisect.line == "otel-torch bisect -- REFERENCE_COMMAND -- PORT_COMMAND"
    assert reference.as_json() == {
        "command": ["REFERENCE_COMMAND"],
        "why": "or record every operation of both programs, and compare, which names the line of "
        "each",
        "expects": "the recording is written",
        "environment": {
            "OTEL_TORCH_ENABLED": "1",
            "OTEL_TORCH_CAPTURE": "graph",
            "OTEL_TORCH_JSONL": "ref-graph.jsonl",
        },
    }
    assert port.environment["OTEL_TORCH_JSONL"] == "port-graph.jsonl"
    assert compare.line == "otel-torch diff ref-graph.jsonl port-graph.jsonl"


def test_the_step_that_differs_is_the_one_that_is_recorded() -> None:
    late = finding(step=3, port_step=4)
    _, reference, port, _ = next_steps(diverged(first=late, introduced=[late]))
    assert reference.environment["OTEL_TORCH_STEPS"] == "2,3"
    assert port.environment["OTEL_TORCH_STEPS"] == "3,4"
    absent = finding(kind="missing", module=None, step=None, port_step=4)
    _, reference, port, *_ = next_steps(diverged(first=absent))
    assert (
        reference.environment["OTEL_TORCH_STEPS"] == port.environment["OTEL_TORCH_STEPS"] == "3,4"
    )


@pytest.mark.parametrize("kind", ["value", "layout", "nonfinite", "shape"])
@pytest.mark.parametrize("cause", [None, SCALED])
def test_what_is_computed_has_a_line(kind: Any, cause: Cause | None) -> None:
    first = finding(kind=kind, cause=cause)
    assert captures_of(diverged(first=first)) == ["graph", "graph"]


def test_a_line_is_mended_and_recorded_as_it_was() -> None:
    first = finding(port_line=LINE)
    selections = {}, {"OTEL_TORCH_STEPS": "2"}
    report = diverged(first=first, by_operations=True, selections=selections)
    again, compare = next_steps(report)
    assert again.why.startswith("mend this") and again.command == ["PORT_COMMAND"]
    assert (again.environment["OTEL_TORCH_CAPTURE"], again.environment["OTEL_TORCH_STEPS"]) == (
        "graph",
        "2",
    )
    assert compare.line == "otel-torch diff ref.jsonl port.jsonl"
    assert "status 0" in compare.expects


def test_operations_without_a_line_are_not_recorded_once_more() -> None:
    assert captures_of(diverged(by_operations=True)) == ["graph"]


@pytest.mark.parametrize("phase", ["loss", "backward", "update"])
def test_a_training_without_a_known_cause_is_followed_to_its_line(phase: str) -> None:
    assert captures_of(diverged(first=finding(phase=phase))) == ["graph", "graph"]
    first = finding(phase=phase, cause=SCALED)
    assert captures_of(diverged(first=first)) == ["training"]
    ranks = diverged(first=finding(phase=phase), **RANKS)
    assert captures_of(ranks) == ["training"] * (2 if phase == "update" else 1)


# -- outcomes that operations do not explain


@pytest.mark.parametrize(
    ("fields", "why", "words"),
    [
        ({"kind": "weights", "cause": SCALED}, "mend how this weight", "ref.jsonl port.jsonl"),
        ({"kind": "dtype"}, "run both sides in the same dtype", "ref.jsonl port.jsonl"),
        (
            {"cause": Cause("other_inputs", True, "the prompts differ")},
            "give both programs the same inputs",
            "ref.jsonl port.jsonl",
        ),
    ],
)
def test_other_outcomes_have_steps_of_their_own(
    fields: dict[str, Any], why: str, words: str
) -> None:
    steps = next_steps(diverged(first=finding(**fields)))
    assert all(step.why.startswith(why) for step in steps)
    assert words in steps[-1].line


def test_a_weight_without_a_cause_is_bisected_or_recorded_whole() -> None:
    bisect, *steps = next_steps(diverged(first=finding(kind="weights")))
    assert bisect.command[1] == "bisect"
    assert all(step.why.startswith("record whole tensors") for step in steps)
    assert "--tensors ref-tensors" in steps[-1].line


def test_what_only_one_program_runs_may_have_another_name_in_the_other() -> None:
    missing = finding(kind="missing")
    bisect, *_, pairing, compare = next_steps(diverged(first=missing))
    assert bisect.command[1] == "bisect"
    assert pairing.why.startswith("find out why only one side runs this")
    assert compare.command[-2:] == ["--map", "pairs.toml"]
    assert commands_of(diverged(first=missing, **RANKS))[-1] == [
        "otel-torch", "diff", "runs/ref", "runs/port", "--map", "pairs.toml"
    ]  # fmt: skip


def test_without_a_finding_there_is_no_step() -> None:
    for verdict in ("match", "partial", "incomparable"):
        assert next_steps(Report(verdict, reference="ref.jsonl", port="port.jsonl")) == []


def test_what_only_ranks_have_is_compared_by_bisect() -> None:
    (step,) = next_steps(Report("partial", **RANKS))
    assert step.line == "otel-torch bisect -- REFERENCE_COMMAND -- PORT_COMMAND"
    assert next_steps(Report("match", **RANKS)) == []


# -- ranks, models of one run, tokens, dumps: what cannot be compared by operations


def test_what_was_kept_is_not_recorded_again() -> None:
    report = diverged(tensors=("whole/ref", None), **RANKS)
    bisect, port, compare = next_steps(report)
    assert bisect.command[1] == "bisect"
    assert port.environment["OTEL_TORCH_TENSORS"] == "runs/port-tensors"
    assert compare.line == (
        "otel-torch diff runs/ref runs/port-near --tensors whole/ref runs/port-tensors"
    )
    report = diverged(tensors=("whole/ref", "whole/port"), **RANKS)
    _, reference, show, *_ = next_steps(report)
    assert "operations" in reference.why and "OTEL_TORCH_TENSORS" not in reference.environment
    pattern = "^model\\.layers\\.1\\.self_attn$"
    assert reference.environment["OTEL_TORCH_OPERATIONS"] == pattern
    assert show.command[3:] == ["--module", pattern, "--step", "0"]
    report.first = finding(cause=SCALED)
    assert next_steps(report)[-1].line == "otel-torch diff runs/ref runs/port"


def test_where_rows_are_tokens_no_whole_tensors_are_recorded() -> None:
    report = diverged(by_tokens=True)
    steps = next_steps(report)
    assert steps[0].command[1] == "bisect"
    assert "operations" in steps[1].why and captures_of(report) == ["tokens", "tokens"]
    assert not any("OTEL_TORCH_TENSORS" in step.environment for step in steps)
    report.first = finding(cause=SCALED)
    assert captures_of(report) == ["tokens"]
    report.first = finding(kind="weights", side="parameter", port_side="parameter")
    again = next_steps(report)[1]
    assert again.environment["OTEL_TORCH_CAPTURE"] == "tokens"
    assert "OTEL_TORCH_TENSORS" in again.environment


def test_two_models_of_one_run_are_recorded_again_by_one_command() -> None:
    report = diverged(**ONE_RUN)
    again, compare = next_steps(report)
    assert again.command == ["PROGRAM_COMMAND"]
    assert again.environment["OTEL_TORCH_MODULES"].count("|^") == 1
    assert compare.command[2:6] == ["runs/both-near.jsonl", "--models", "Net", "Net#2"]
    report.first = finding(port_module="model.layers.1.self_attn.o_proj")
    report.chain = []
    assert "|^" not in next_steps(report)[0].environment["OTEL_TORCH_MODULES"]


def test_a_recording_of_ranks_is_recorded_again_as_a_folder() -> None:
    _, reference, port, compare = next_steps(diverged(**RANKS))
    assert reference.environment["OTEL_TORCH_JSONL"] == "runs/ref-near/reference.jsonl"
    assert port.environment["OTEL_TORCH_JSONL"] == "runs/port-near/port.jsonl"
    assert compare.line.startswith("otel-torch diff runs/ref-near runs/port-near --tensors ")


def test_a_dump_is_imported_again_and_its_program_never_run() -> None:
    report = diverged(imported=(True, False), first=finding(kind="dtype"))
    assert commands_of(report)[0] == ["PORT_COMMAND"]
    report.first = finding(cause=Cause("other_inputs", True, "the prompts differ"))
    assert commands_of(report)[0][:4] == ["otel-torch", "import", "MANIFEST", "--output"]


def test_the_zoom_selects_the_neighborhood_and_nothing_else() -> None:
    report = diverged(**RANKS)
    pattern = next_steps(report)[1].environment["OTEL_TORCH_MODULES"]
    chosen = {pair.module for pair in report.compared if re.search(pattern, pair.module)}
    assert chosen == {f"model.layers.1.self_attn.{part}_proj" for part in "qkvo"}
    report.first = finding(module="blocks.0", port_module="it's [0]")
    report.chain = report.chain[-1:]
    pattern = next_steps(report)[2].environment["OTEL_TORCH_MODULES"]
    assert re.search(pattern, "it's [0].norm") and re.search(pattern, "blocks.1.attn.to_v")
    assert not re.search(pattern, "blocks.1.attn")


def test_several_faults_are_separated_by_isolation() -> None:
    first = finding()
    report = diverged(introduced=[first, replace(first, step=1)], **ONE_RUN)
    whole, pairing, isolated, compare = next_steps(report)[-4:]
    assert whole.environment["OTEL_TORCH_TENSORS"] == "runs/both-whole-tensors"
    assert pairing.command[-2:] == ["--save-isolation", "runs/both-whole-tensors"]
    assert isolated.environment["OTEL_TORCH_ISOLATE"] == "runs/both-whole-tensors"
    assert compare.command[2:4] == ["runs/both-whole.jsonl", "runs/both-isolated.jsonl"]
    report.isolated = True
    assert len(next_steps(report)) == 2


# -- laws of every list


def reports() -> Iterator[Report]:
    findings = [
        finding(kind=kind, cause=cause, phase=phase, step=step)
        for kind in ("value", "weights", "missing", "dtype")
        for cause in (None, SCALED, Cause("other_inputs", True, "other"))
        for phase in ("forward", "backward", "update")
        for step in (0, 5)
    ]
    shapes: list[dict[str, Any]] = [
        {},
        RANKS,
        ONE_RUN,
        {"by_tokens": True},
        {"imported": (True, False)},
        {"by_operations": True},
    ]
    for first in findings:
        for fields in shapes:
            yield diverged(first=first, introduced=[first, finding()], **fields)


def test_every_step_can_be_followed_by_a_program() -> None:
    for report in reports():
        steps = next_steps(report)
        assert steps
        for step in steps:
            assert step.why and step.expects and not step.why.endswith((".", ":"))
            assert set(step.environment) <= set(Settings.names())
            program, *words = step.command
            if program == "otel-torch":
                make_parser(words[0]).parse_args(words)
            else:
                assert re.fullmatch("(REFERENCE|PORT|PROGRAM)_COMMAND", program) and not words


def test_what_people_read_is_made_from_the_data() -> None:
    for report in reports():
        text = render_text(report, color=False, width=400).splitlines()
        document = json.loads(json.dumps(report.as_json()))
        lines = [step.line for step in next_steps(report)]
        assert [line.strip() for line in text if line.strip() in lines] == lines
        assert [entry["command"] for entry in document["next"]] == commands_of(report)
