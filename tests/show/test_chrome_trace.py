"""`otel-torch show --chrome-trace` writes the run's spans as a trace that Perfetto opens."""

from __future__ import annotations

import json

import pytest

from otel_torch.cli.main import main
from tests.pages.spans import line, span, step, write
from tests.parity.report.test_report import HOSTILE
from tests.show.test_overview import recording, row  # noqa: F401  # a fixture
from tests.support import run_python


@pytest.fixture
def trace(tmp_path, capsys):
    """Run the command; return the events of the trace, and the output."""

    def make(*words):
        path = tmp_path / "trace.json"
        status = main(["show", *map(str, words), "--chrome-trace", str(path)])
        captured = capsys.readouterr()
        if status:
            assert not path.exists() and captured.out == ""
            return status, captured.err
        return json.loads(path.read_text(), parse_constant=pytest.fail)["traceEvents"], captured.out

    return make


def of(events, phase):
    return [event for event in events if event["ph"] == phase]


RUN = line(
    span("torch.run", 0, 10),
    span("fastvideo.region::denoising", 1, 9, torch_region="denoising", id="aa", parent="bb"),
    step(0, 2, 4, events=[("fastvideo.profiler.enable_collection", 2.5, {})]),
    step(1, 5, 8.000001),
)


def test_regions_and_steps_are_complete_events_in_microseconds(recording, tmp_path, trace):
    events, stderr = trace(recording(row()), "--traces", write(tmp_path / "traces.jsonl", RUN))
    drawn = [(event["name"], event["cat"], event["ts"], event["dur"]) for event in of(events, "X")]
    assert drawn == [
        ("torch.run", "other", 0.0, 10e6),
        ("fastvideo.region::denoising", "region", 1e6, 8e6),
        ("torch.step 0", "step", 2e6, 2e6),
        ("torch.step 1", "step", 5e6, 3_000_001.0),
    ]
    region = of(events, "X")[1]["args"]
    assert region["torch.region"] == "denoising" and (
        region["span_id"],
        region["parent_span_id"],
    ) == ("aa", "bb")
    assert {(event["pid"], event["tid"]) for event in of(events, "X")} == {(1, 1)}
    assert "4 spans of 1 process" in stderr


def test_what_happened_in_a_span_is_an_instant(recording, tmp_path, trace):
    activation = (
        "torch.module.activation",
        3,
        {"torch.module": "a.b", "torch.tensor": "out", "torch.stat.max": "NaN"},
    )
    traces = write(tmp_path / "traces.jsonl", RUN, line(step(2, 2, 4, events=[activation])))
    events, _ = trace(recording(row()), "--traces", traces)
    instants = [(event["name"], event["ts"], event["args"]) for event in of(events, "i")]
    assert instants[0] == ("fastvideo.profiler.enable_collection", 2.5e6, {})
    assert instants[1][:2] == ("a.b out", 3e6) and instants[1][2]["torch.stat.max"] == "NaN"


def test_processes_and_threads_are_called_by_rank_and_stand_in_their_order(
    recording, tmp_path, trace
):
    ranks = [line(span("torch.run", rank, 10), rank=rank, pid=100 - rank) for rank in (2, 0, 11)]
    traces = [
        write(tmp_path / "otlp" / f"traces.rank{rank}.jsonl", text)
        for rank, text in enumerate(ranks)
    ]
    for given in (
        ["--traces", tmp_path / "otlp"],
        [word for path in traces for word in ("--traces", path)],
    ):
        events, _ = trace(recording(row()), *given)
        names = [
            (event["pid"], event["args"]["name"])
            for event in of(events, "M")
            if event["name"] == "process_name"
        ]
        assert names == [
            (1, "rank 0 (process 100 on node)"), (2, "rank 2 (process 98 on node)"), (3, "rank 11 (process 89 on node)"),
        ]  # fmt: skip
        assert "rank 11: regions and steps" in [
            event["args"]["name"] for event in of(events, "M") if event["name"] == "thread_name"
        ]
        assert [(event["pid"], event["ts"]) for event in of(events, "X")] == [
            (2, 2e6),
            (1, 0.0),
            (3, 11e6),
        ]


def test_spans_that_overlap_without_nesting_have_threads_of_their_own(recording, tmp_path, trace):
    """A training step begins in its first forward and ends in the optimizer; viewers draw overlaps
    within a thread wrong.
    """
    traces = line(
        span("region a", 0, 4), step(0, 2, 6), span("region b", 5, 9), span("inner", 5.5, 7)
    )
    events, _ = trace(recording(row()), "--traces", write(tmp_path / "traces.jsonl", traces))
    drawn = of(events, "X")
    for event in drawn:
        for later in drawn:
            if event["tid"] == later["tid"] and event["ts"] < later["ts"]:
                begins, ends = later["ts"], later["ts"] + later["dur"]
                assert begins >= event["ts"] + event["dur"] or ends <= event["ts"] + event["dur"], (
                    event["name"],
                    later["name"],
                )
    assert len({event["tid"] for event in drawn}) == 2


def test_counters_come_only_when_asked_for_and_stand_at_the_ends_of_steps(
    recording, tmp_path, trace
):
    traces = write(tmp_path / "traces.jsonl", RUN)
    rows = [
        row(step=step, abs_mean=value, max=1.0) for step, value in ((0, 0.5), (1, 0.25), (7, 3.0))
    ]
    rows.append(row("last", step=1, call=0, abs_mean=1.0))
    rows.append(row("last", step=1, call=1, abs_mean=2.0))
    path = recording(*rows)
    events, stderr = trace(path, "--traces", traces)
    assert of(events, "C") == [] and "have no counter" not in stderr
    events, stderr = trace(
        path, "--traces", traces, "--counters", "abs_mean", "--counters", "max", "--module", "block"
    )
    assert [(event["name"], event["ts"], event["args"]) for event in of(events, "C")] == [
        ("M block out abs_mean", 4e6, {"abs_mean": 0.5}),
        ("M block out max", 4e6, {"max": 1.0}),
        ("M block out abs_mean", 8_000_001.0, {"abs_mean": 0.25}),
        ("M block out max", 8_000_001.0, {"max": 1.0}),
    ]
    assert "1 records have no counter" in stderr
    events, _ = trace(path, "--traces", traces, "--counters", "abs_mean", "--module", "last")
    assert [event["args"] for event in of(events, "C")] == [{"abs_mean": 2.0}]


def test_what_is_not_finite_is_no_counter_but_an_instant_that_says_so(recording, tmp_path, trace):
    path = recording(
        row("a", abs_mean="NaN"), row("b", abs_mean=2.0), row("c", abs_mean="-Infinity")
    )
    events, _ = trace(
        path, "--traces", write(tmp_path / "traces.jsonl", RUN), "--counters", "abs_mean"
    )
    assert [event["name"] for event in of(events, "C")] == ["M b out abs_mean"]
    assert [
        (event["name"], event["ts"], event["args"])
        for event in of(events, "i")
        if event["cat"] == "nonfinite"
    ] == [
        (
            "abs_mean is NaN or Inf: M a out and 1 more",
            4e6,
            {"M a out": "NaN", "M c out": "-Infinity"},
        )
    ]


def test_any_name_is_a_name_of_a_counter(recording, tmp_path, trace):
    path = recording(row(HOSTILE))
    events, _ = trace(
        path, "--traces", write(tmp_path / "traces.jsonl", RUN), "--counters", "abs_mean"
    )
    (counter,) = of(events, "C")
    assert "alert(1)" in counter["name"] and counter["name"].isprintable()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            (),
            "no spans to draw; a recording has no timestamps: also set OTEL_TORCH_OTLP_FILE=FOLDER when you record, then pass --traces",
        ),
        (("--traces", "missing.jsonl"), "missing.jsonl: No such file"),
        (("--traces", "."), "this folder holds no traces.jsonl"),
        (("--traces", "run.jsonl"), "run.jsonl: is a recording"),
        (
            ("--traces", "traces/traces.jsonl", "--counters", "l3"),
            "--counters l3: no such statistic; recorded are: abs_mean, min",
        ),
        (("--json",), "ask for one of them"),
    ],
)
def test_without_spans_to_draw_one_line_says_why_and_the_status_is_2(
    recording, tmp_path, monkeypatch, trace, words, message
):
    recording(row())
    write(tmp_path / "traces" / "traces.jsonl", RUN)
    monkeypatch.chdir(tmp_path)
    status, err = trace("run.jsonl", *words)
    assert status == 2 and message in err and len(err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_counters_without_a_trace_are_refused(recording, capsys):
    assert main(["show", recording(row()), "--counters", "max"]) == 2
    assert "give --chrome-trace FILE too" in capsys.readouterr().err


def test_a_traces_file_that_a_kill_cut_off_is_drawn_up_to_there_and_said(
    recording, tmp_path, trace
):
    traces = write(tmp_path / "traces.jsonl", RUN, '{"resourceSpans": [{"reso')
    events, stderr = trace(recording(row()), "--traces", traces)
    assert len(of(events, "X")) == 4 and "line 2 was cut off" in stderr


@pytest.mark.parametrize("otlp", ["otlp", "elsewhere/<run>.<rank>"])
def test_spans_are_found_from_any_folder_also_after_a_move(tmp_path, trace, otlp):
    """A relative folder is one of the program's working directory, which is not ours."""
    before = tmp_path / "before"
    before.mkdir()
    run_python(
        before,
        "import torch\ntorch.nn.Linear(4, 4)(torch.ones(1, 4))",
        OTEL_TORCH_JSONL="runs/run.jsonl",
        OTEL_TORCH_OTLP_FILE=otlp,
    )
    events, _ = trace(before / "runs" / "run.jsonl")
    assert "torch.run" in {event["name"] for event in of(events, "X")}
    moved = before.rename(tmp_path / "after")
    assert trace(moved / "runs" / "run.jsonl")[0] == events


def test_an_unmodified_program_is_drawn_without_saying_where_its_spans_are(tmp_path, trace):
    """The metadata of a run names the files that it wrote."""
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\nfrom torch import nn\nimport otel_torch\n"
        "model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())\n"
        "for number in range(3):\n    with otel_torch.trace_step(number), torch.no_grad():\n        model(torch.ones(1, 4))\n"
    )
    run_python(
        tmp_path,
        program,
        OTEL_TORCH_OTLP_FILE=str(tmp_path / "otlp"),
        OTEL_TORCH_SIGNALS="spans,span_events",
    )
    events, _ = trace(tmp_path / "run.jsonl", "--counters", "abs_mean")
    names = [event["name"] for event in of(events, "X")]
    assert [name for name in names if name.startswith("torch.step")] == [
        f"torch.step {number}" for number in range(3)
    ]
    assert "torch.run" in names
    ends = {
        event["ts"] + event["dur"]
        for event in of(events, "X")
        if event["name"].startswith("torch.step")
    }
    counters = of(events, "C")
    assert len(counters) == 3 * 3 and {round(event["ts"], 3) for event in counters} == {
        round(end, 3) for end in ends
    }
    assert "0 out" in {event["name"] for event in of(events, "i")}
