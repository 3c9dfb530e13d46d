"""`otel-torch export --pprof`: `go tool pprof` reads the times, and they are those of the spans."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from otel_torch.cli.main import main
from otel_torch.exporting.profile_messages import new_profile
from tests.pages.spans import line, span
from tests.support import metadata, run_python


def export(recording: Path, path: Path) -> dict[tuple[str, ...], list[int]]:
    """Return the values of each stack, the outermost frame first, with the rank before it."""
    assert main(["export", str(recording), "--pprof", str(path)]) == 0
    profile = new_profile().FromString(gzip.decompress(path.read_bytes()))
    texts = profile.string_table
    names = {function.id: texts[function.name] for function in profile.function}
    frames = {place.id: names[place.line[0].function_id] for place in profile.location}
    return {
        (sample.label[0].num, *(frames[place] for place in reversed(sample.location_id))): list(
            sample.value
        )
        for sample in profile.sample
    }


def pprof(path: Path, *options: str) -> str:
    words = ["go", "tool", "pprof", *options, str(path)]
    env = os.environ | {"PPROF_TMPDIR": str(path.parent)}
    return subprocess.run(
        words, capture_output=True, text=True, check=True, timeout=300, env=env
    ).stdout


@pytest.mark.e2e  # Go builds the tool when it is first called, which takes longer than all other tests of exports
@pytest.mark.skipif(shutil.which("go") is None, reason="needs go tool pprof")
def test_pprof_reads_regions_steps_and_modules(ranks, tmp_path):
    path = tmp_path / "run.pb.gz"
    export(ranks, path)
    printed = pprof(path, "-top", "-nodefraction=0", "-sample_index=calls")
    calls = {
        name: int(count)
        for count, name in re.findall(
            r"^ +(\d+) +[\d.]+% +[\d.]+% +\d+ +[\d.]+% +(.+)$", printed, re.M
        )
    }
    assert calls["torch.step"] == calls["Sequential.0"] == calls["Sequential"] == 24
    assert (
        calls["torch.optimizer.step"] == calls["torch.backward"] == 24 and calls["torch.run"] == 2
    )
    assert "Type: time" in pprof(path, "-top")
    of_rank = pprof(path, "-top", "-tagfocus=rank=1", "-sample_index=calls", "-nodefraction=0")
    assert re.search(r"^ +12 .* torch\.step$", of_rank, re.M)


def test_the_times_of_a_process_add_up_to_those_of_its_run(ranks, tmp_path):
    stacks = export(ranks, tmp_path / "run.pb.gz")
    for rank in (0, 1):
        spans = json.loads((ranks / f"traces.rank{rank}.jsonl").read_text().splitlines()[-1])
        every = [
            span
            for resource in spans["resourceSpans"]
            for scope in resource["scopeSpans"]
            for span in scope["spans"]
        ]
        (run,) = [span for span in every if span["name"] == "torch.run"]
        took = int(run["endTimeUnixNano"]) - int(run["startTimeUnixNano"])
        assert sum(values[1] for stack, values in stacks.items() if stack[0] == rank) == took
    forward = ("torch.run", "torch.step", "torch.forward Sequential", "Sequential", "Sequential.2")
    assert stacks[0, *forward][0] == 12 and stacks[0, *forward][1] > 0


ACTIVATION = "torch.module.activation"


def output(seconds: float, module: str, **more: Any) -> tuple[str, float, dict[str, Any]]:
    fields = {"model": "Net", "module": module, "tensor": "out", "phase": "forward"} | more
    return ACTIVATION, seconds, {f"torch.{name}": value for name, value in fields.items()}


def test_a_module_takes_the_time_since_the_one_before(tmp_path):
    """The example of `times.py`, with a region inside of the second module and one beside it."""
    (tmp_path / "run.jsonl").write_text('{"module": "", "tensor": "out", "step": 0}\n')
    events = [
        output(3, "body.0"),
        output(4.5, "body.1", tensor="in[0]"),
        output(5, "body.1"),
    ]
    more = [output(6, "body"), output(8, "loss", phase="backward")]  # fmt: skip
    (tmp_path / "traces.jsonl").write_text(
        line(
            span("torch.step", 0, 10, id="aa", events=events),
            span("torch.step.events", 6, 8, id="ee", parent="aa", events=more),
            span("torch.forward", 0, 7, id="bb", parent="aa"),
            span("region", 3.5, 4, id="cc", parent="bb"),
            span("torch.backward", 7, 9, id="dd", parent="aa"),
        )
        + "\n"
    )
    stacks = export(tmp_path / "run.jsonl", tmp_path / "run.pb.gz")
    forward = (0, "torch.step", "torch.forward")
    assert {stack: [calls, ns / 1e9] for stack, (calls, ns, _) in stacks.items()} == {
        (0, "torch.step"): [1, 1],
        forward: [1, 1],
        (*forward, "region"): [1, 0.5],
        (*forward, "Net", "Net.body", "Net.body.0"): [1, 3],
        (*forward, "Net", "Net.body", "Net.body.1"): [1, 1.5],
        (*forward, "Net", "Net.body"): [1, 1],
        (0, "torch.step", "torch.backward"): [1, 2],
    }


def test_spans_that_are_each_others_parents_are_left_out(tmp_path):
    (tmp_path / "run.jsonl").write_text('{"module": "", "tensor": "out", "step": 0}\n')
    circle = [
        span("torch.step", 0, 9, id="aa", parent="bb", events=[output(5, "body")]),
        span("torch.step", 0, 9, id="bb", parent="aa"),
    ]
    (tmp_path / "traces.jsonl").write_text(line(span("torch.run", 0, 10, id="cc"), *circle))
    stacks = export(tmp_path / "run.jsonl", tmp_path / "run.pb.gz")
    assert {stack: ns / 1e9 for stack, (_, ns, _) in stacks.items()} == {
        (0, "torch.run"): 5,
        (0, "torch.run", "Net", "Net.body"): 5,
    }


REGIONS = """
import otel_torch, torch

for name in ("load", "infer"):
    otel_torch.register_profiler_region(name, "A region.")
with otel_torch.region("load"):
    model = torch.nn.Linear(2, 2)
for _ in range(3):
    with otel_torch.region("infer"):
        model(torch.ones(1, 2))
"""


def test_without_spans_there_are_the_totals_of_regions(tmp_path, capsys):
    run_python(tmp_path, REGIONS)
    stacks = export(tmp_path / "run.jsonl", tmp_path / "run.pb.gz")
    regions = metadata(tmp_path / "run.jsonl")["regions"]
    assert len(regions) == 2 and {stack[1] for stack in stacks} == set(regions)
    for (_, name), (calls, host_ns, device_ns) in stacks.items():
        assert (calls, device_ns) == (regions[name]["count"], 0)
        assert host_ns == pytest.approx(regions[name]["host_total_s"] * 1e9, abs=1)
    assert (
        "run.jsonl: its run wrote no spans: totals of regions, not nested"
        in capsys.readouterr().err
    )


def test_without_times_it_says_what_to_record(graph, tmp_path, capsys):
    path = tmp_path / "run.pb.gz"
    assert main(["export", str(graph), "--pprof", str(path)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "holds no times, and its run wrote no spans: also set OTEL_TORCH_OTLP_FILE" in said
    assert not list(tmp_path.iterdir())
