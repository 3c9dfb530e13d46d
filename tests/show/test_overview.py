"""`otel-torch show`: the text report of a recording."""

from __future__ import annotations

import io
import json

import pytest
import torch

from otel_torch.cli import main as cli
from otel_torch.rendering.table import Line, escape, format_table, supports_color, write_line
from otel_torch.statistics.measure import measure
from otel_torch.statistics.read_rows import read_rows
from otel_torch.statistics.table import derive
from tests.support import in_terminal, progress_in_terminal, run_command


def row(module="block", step=0, **fields):
    return {
        "module": module, "tensor": "out", "step": step, "call": 0, "loop": 0, "model": "M", "phase": "forward",
        "abs_mean": 1.0, "min": -1.0, "max": 1.0, "nonfinite": 0, "shape": [2, 3], "dtype": "torch.float32", **fields,
    }  # fmt: skip


@pytest.fixture
def recording(tmp_path):
    def make(*rows, meta=None, end=""):
        path = tmp_path / "run.jsonl"
        path.write_text("".join(json.dumps(shown_row) + "\n" for shown_row in rows) + end)
        if meta is not None:
            (tmp_path / "run.meta.json").write_text(json.dumps(meta))
        return str(path)

    return make


def run(*words):
    return cli.main(["show", *words])


def table(text):
    """Return the words of the lines below the heading, by module."""
    body = text.split("\n\n", 1)[1].splitlines()
    header = body[0].split()
    return header, [
        dict(zip(header, line.removeprefix("!").split(), strict=True)) for line in body[1:]
    ]


def test_a_row_describes_all_records_of_a_tensor(recording, capsys):
    path = recording(row(min=-5.0, abs_mean=7.0), row(step=1, max=9.0, abs_mean=8.0), row("other"))
    assert run(path) == 0
    header, lines = table(capsys.readouterr().out)
    assert header == [
        "module",
        "tensor",
        "records",
        "abs_mean",
        "min",
        "max",
        "nonfinite",
        "shape",
        "dtype",
    ]
    assert lines[0] == {
        "module": "block", "tensor": "out", "records": "2", "abs_mean": "7.5", "min": "-5", "max": "9",
        "nonfinite": "0", "shape": "2x3", "dtype": "float32",
    }  # fmt: skip
    assert [line["module"] for line in lines] == ["block", "other"]


def test_every_statistic_of_a_row_is_that_of_all_values_together(recording, capsys):
    """Also if the records have different shapes."""
    names = ("abs_mean", "sum", "min", "max", "mean", "std", "rms", "l2", "zeros", "numel")
    tensors = [torch.randn(3, 4), torch.randn(7) * 5 + 2, torch.zeros(2, 2), torch.randn(5, 1, 2)]

    def fields(tensor):
        measured = measure(tensor)
        return {**derive(names, read_rows([measured])[0], measured), "shape": list(tensor.shape)}

    path = recording(*[row(step=step, **fields(tensor)) for step, tensor in enumerate(tensors)])
    assert run(path, "--json") == 0
    (shown,) = json.loads(capsys.readouterr().out)["rows"]
    expected = fields(torch.cat([tensor.flatten() for tensor in tensors]))
    assert {name: shown[name] for name in names} == pytest.approx(
        {name: expected[name] for name in names}, rel=1e-6
    )
    assert "step" not in shown and shown["records"] == 4


def test_values_that_overflow_are_infinite(recording, capsys):
    huge = {"std": 1e300, "mean": -1e300, "rms": 1e300, "l2": 1e300}
    assert run(recording(row(**huge), row(step=1, **{**huge, "mean": 1e300}))) == 0
    _, (line,) = table(capsys.readouterr().out)
    assert (line["std"], line["rms"]) == ("inf", "inf")


def test_the_tensor_that_turned_bad_first_is_first(recording, capsys):
    layers = ["embed", "layer.0", "layer.1", "head"]
    bad_since = {"embed": 9, "layer.0": 3, "layer.1": 2, "head": 2}
    path = recording(
        *[
            row(name, step, nonfinite=int(step >= bad_since[name]))
            for step in range(5)
            for name in layers
        ]
    )
    assert run(path) == 0
    out = capsys.readouterr().out
    modules = [line.removeprefix("!").split()[0] for line in out.split("\n\n")[1].splitlines()[1:]]
    assert modules == ["layer.1", "head", "layer.0", "embed"]
    assert "! first NaN or Inf: M layer.1 out, loop 0, step 2, call 0 (in 3 of 4 tensors)" in out


@pytest.mark.parametrize(
    ("rows", "meta", "status"),
    [
        ([row()], {"ended_cleanly": True}, "ended cleanly, no NaN or Inf in what is shown"),
        (
            [row(max="NaN")],
            {"ended_cleanly": True},
            "! first NaN or Inf: M block out, loop 0, step 0",
        ),
        ([row()], {"ended_cleanly": False}, "killed or still running, no NaN or Inf"),
        ([row()], None, "no metadata, no NaN or Inf"),
    ],
)
def test_the_line_below_the_heading_says_what_matters(recording, capsys, rows, meta, status):
    assert run(recording(*rows, meta=meta)) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith(status)


def test_what_is_not_finite_comes_first_marked_and_named(recording, capsys):
    path = recording(
        row("fine"),
        row("bad"),
        row("bad", step=3, nonfinite=2, max="NaN"),
        row("bad", step=4, max=2.0),
        row("inf", step=5, min="-Infinity"),
    )
    assert run(path) == 0
    out = capsys.readouterr().out
    assert "! first NaN or Inf: M bad out, loop 0, step 3, call 0" in out
    marked = [line.split()[:2] for line in out.splitlines() if line.startswith("!  ")]
    assert marked == [["!", "bad"], ["!", "inf"]]
    bad = next(line for line in out.splitlines() if line.startswith("!  bad"))
    assert "step 3" in bad and "nan" in bad
    body = out.split("\n\n", 1)[1].splitlines()
    assert body[3].split()[0] == "fine"


def test_fastvideos_own_recording_without_a_count_is_judged_by_its_values(recording, capsys):
    path = recording(
        {"module": "a", "tensor": "out", "step": None, "abs_mean": 1.0},
        {"module": "b", "tensor": "out", "step": 0, "abs_mean": float("nan")},
    )
    assert run(path) == 0
    out = capsys.readouterr().out
    assert "first NaN or Inf: b out, step 0" in out


def test_steps_and_modules_are_selected_and_each_record_has_its_line(recording, capsys):
    path = recording(
        *[
            row(f"layer.{n}", step, call=call)
            for step in range(5)
            for n in range(3)
            for call in range(2)
        ]
    )
    assert run(path, "--module", r"\.1$", "--step", "2,4") == 0
    header, lines = table(capsys.readouterr().out)
    assert header[:4] == ["module", "tensor", "step", "call"]
    assert [(line["module"], line["step"], line["call"]) for line in lines] == [
        ("layer.1", step, call) for step in "24" for call in "01"
    ]


def test_models_phases_and_branches_are_told_apart_where_there_are_several(recording, capsys):
    path = recording(
        row(model="A"), row(model="B", phase="eval"), row(model="B", phase="eval", branch="cond")
    )
    assert run(path) == 0
    body = capsys.readouterr().out.split("\n\n", 1)[1].splitlines()
    assert body[0].split()[:5] == ["model", "module", "tensor", "phase", "branch"]
    assert len(body) == 4


def test_the_heading_says_what_became_of_the_run(recording, capsys):
    path = recording(
        row(), end='{"module": "cut',
        meta={"run_id": "r7", "rank": 3, "world_size": 8, "ended_cleanly": False,
              "lost": [{"what": "record", "reason": "disk", "count": 4}]},
    )  # fmt: skip
    assert run(path) == 0
    out = capsys.readouterr().out
    assert "1 record," in out and "run r7, rank 3 of 8" in out
    assert "lost: 4 records (disk)" in out
    assert "killed" in out and "line 2 was cut off" in out


def test_json_is_one_strict_object(recording, capsys):
    def refuse(token):
        raise AssertionError(token)

    path = recording(row(max="Infinity"), row("b"), meta={"run_id": "r", "odd": float("nan")})
    assert run(path, "--json") == 0
    shown = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert shown["schema"] == "otel_torch.show/1"
    assert [
        (shown_row["module"], shown_row["max"], shown_row["finite"]) for shown_row in shown["rows"]
    ] == [
        ("block", "Infinity", False),
        ("b", 1.0, True),
    ]
    assert shown["first_nonfinite"]["module"] == "block"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--module", "("), "--module '(' is not a regular expression"),
        (("--step", "x"), "--step"),
        (
            ("--module", "nothing"),
            "none of its 1 records is selected; it has 1 modules (block) and steps 0 to 0",
        ),
    ],
)
def test_bad_input_is_one_line_and_status_2(recording, capsys, words, message):
    assert run(recording(row()), *words) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err.splitlines()[-1]


def test_names_cannot_command_the_terminal(recording, capsys):
    assert run(recording(row("a\x1b[2Jb"))) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_text_that_the_stream_cannot_encode_is_escaped():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    write_line(stream, "blöck")
    stream.flush()
    assert stream.buffer.getvalue() == b"bl\\xf6ck\n"  # type: ignore[attr-defined]


def test_colours_only_in_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert supports_color(Terminal()) and not supports_color(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not supports_color(Terminal())
    assert "\x1b[31m" in format_table(["a"], [Line(["1"], "red")], color=True)
    assert "\x1b" not in format_table(["a"], [Line(["1"], "red")])


LONG_NAMES = [f"model.decoder.layers.{n}.self_attention.query_projection.lora_A" for n in range(30)]


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_in_a_terminal_no_row_is_wider_than_it(recording, columns):
    numbers = {"mean": 0.123456, "std": 1.23456, "sum": -1234567.0, "rms": 1.5, "l2": 40.5}
    path = recording(
        *[row(name, model="LlamaForCausalLM", **numbers) for name in LONG_NAMES], row(model="Other")
    )
    shown = in_terminal(columns, 50, "show", path)
    body = shown[shown.index("") + 1 :]
    rows = body[: body.index("")] if "" in body else body
    assert max(map(len, rows)) <= columns
    assert len(rows) == 32 and {"module", "min", "max"} <= set(rows[0].split())
    hidden = {"sum", "std", "mean", "rms", "l2", "dtype"} - set(rows[0].split())
    notes = [line for line in shown if line.startswith("no room for")]
    assert all(name in notes[0] for name in hidden) if hidden else not notes


def test_in_a_pipe_names_are_whole_and_no_column_is_left_out(recording):
    path = recording(*[row(name, mean=0.5, std=1.0) for name in LONG_NAMES])
    shown = run_command("show", path, COLUMNS="40")
    assert all(name in shown.stdout for name in LONG_NAMES)
    assert "std" in shown.stdout and "no room" not in shown.stdout


def test_what_matters_is_below_a_table_that_scrolls_it_away(recording):
    path = recording(*[row(name) for name in LONG_NAMES], row("bad", max="NaN"))
    last = in_terminal(200, 20, "show", path)[-5:]
    assert last[0].startswith("! first NaN or Inf: M bad out")
    assert last[2].startswith("Next: ")
    assert not in_terminal(200, 60, "show", path)[-1].startswith("!")


def test_how_far_it_is_stands_in_a_terminal_only_and_is_gone_at_the_end(recording):
    path = recording(*[row(f"layer.{n}") for n in range(9000)])
    out, shown = progress_in_terminal("show", path, "--json")
    assert "\x1b" not in out
    assert "4,096 records read" in shown and shown.endswith("\r\x1b[K") and "\n" not in shown
    assert run_command("show", path, "--json").stderr == ""


def test_columns_line_up_whatever_the_script():
    lines = format_table(["module", "max"], [Line(["层", "1"]), Line(["block", "20"])]).splitlines()
    assert [escape(line) for line in lines] == ["module  max", "层        1", "block    20"]


# -- folders


@pytest.fixture
def ranks(tmp_path):
    """Return a folder with the recordings of two ranks, and what else a run writes."""
    folder = tmp_path / "ranks"
    (folder / "inner").mkdir(parents=True)
    losses = [row("", 3, tensor="loss", phase="train", mean=2.0)]
    for number, rows in enumerate(([row(), *losses], [row("head", max="NaN"), *losses])):
        path = folder / f"r.rank{number}.jsonl"
        path.write_text("".join(json.dumps(shown_row) + "\n" for shown_row in rows))
        meta = {"run_id": "r7", "rank": number, "world_size": 2, "ended_cleanly": not number}
        path.with_suffix("").with_suffix(f".rank{number}.meta.json").write_text(json.dumps(meta))
    (folder / "r.rank0.1.jsonl").write_text("an earlier run\n")
    (folder / "traces.rank0.jsonl").write_text('{"resourceSpans": []}\n')
    (folder / "metrics.jsonl").write_text('{"_step": 0, "loss": 1.0}\n')
    return folder


def test_a_folder_shows_its_recordings_and_all_of_them_in_a_table(ranks, capsys):
    assert run(str(ranks)) == 0
    out = capsys.readouterr().out
    first, second, together = (out.index(f"{ranks}{name}: ") for name in (
        "/r.rank0.jsonl", "/r.rank1.jsonl", "",
    ))  # fmt: skip
    assert first < second < together
    assert "rank 1 of 2" in out[second:together] and "ended cleanly" in out[first:second]
    heading, header, *lines = out[together:].splitlines()
    assert heading == f"{ranks}: 2 recordings"
    assert header.split()[:4] == ["recording", "rank", "steps", "loss"]
    assert lines[3].startswith("Next: ")
    assert [line.split()[:7] for line in lines[:2]] == [
        ["r.rank0.jsonl", "0", "0", "to", "3", "2", "1"],
        ["r.rank1.jsonl", "1", "0", "to", "3", "2", "1"],
    ]
    assert "M head out" in lines[1] and "killed or still running" in lines[1]


def test_the_options_of_show_take_a_folder(ranks, tmp_path, capsys):
    assert run(str(ranks), "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["schema"], shown["recording"]) == ("otel_torch.show/1", str(ranks))
    assert [rank["meta"]["rank"] for rank in shown["ranks"]] == [0, 1]
    assert run(str(ranks), "--step", "0") == 0
    assert run(str(ranks), "--html", str(tmp_path / "page.html")) == 0
    capsys.readouterr()
    assert run(str(ranks), "--module", "head") == 0
    captured = capsys.readouterr()
    assert "head" in captured.out and "block" not in captured.out
    assert captured.err == f"otel_torch: {ranks}: nothing is selected in 1 of its 2 recordings\n"
    assert run(str(ranks), "--module", "none") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "none of its 1 records is selected" in line
    assert run(str(ranks), "--chrome-trace", str(tmp_path / "a.json")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "draws one recording: give one of" in line and "r.rank1.jsonl" in line


def test_a_rank_that_cannot_be_read_does_not_hide_the_others(ranks, capsys):
    (ranks / "r.rank2.jsonl").write_text('{"module": "a", "tensor": "out", "step": "x"}\n')
    assert run(str(ranks)) == 2
    captured = capsys.readouterr()
    assert "rank 1 of 2" in captured.out and f"{ranks}: 2 recordings" in captured.out
    (line,) = captured.err.splitlines()
    assert "r.rank2.jsonl: line 1 is not a record: `step`" in line


def test_a_folder_of_one_recording_is_that_recording(ranks, capsys):
    (ranks / "r.rank1.jsonl").unlink()
    assert run(str(ranks)) == 0
    out = capsys.readouterr().out
    assert run(str(ranks / "r.rank0.jsonl")) == 0
    assert capsys.readouterr().out == out


def test_a_folder_without_recordings_says_where_there_are_some(ranks, tmp_path, capsys):
    assert run(str(tmp_path)) == 2
    assert capsys.readouterr().err == (
        f"otel_torch: {tmp_path}: holds no recording (*.jsonl); {ranks} holds some\n"
    )
    assert run(str(ranks / "inner")) == 2
    assert capsys.readouterr().err == f"otel_torch: {ranks}/inner: holds no recording (*.jsonl)\n"
