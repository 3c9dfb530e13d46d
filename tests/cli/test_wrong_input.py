"""Wrong input of every kind to the commands that read files: one line that says what, where and
what to do, exit status 2, and no command waits without a word.
"""

from __future__ import annotations

import json
import os
import random
import re
import select
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from otel_torch.cli.main import main
from otel_torch.recording.metadata import metadata_path
from otel_torch.recording.reader import RecordingError, iterate_rows, read_recording
from otel_torch.recording.row_schema import KNOWN_FIELDS
from tests.support import lines

BIG = 2**70
DEEP: Any = None
for _ in range(900):
    DEEP = [DEEP]
VALUES = {
    "object": {"a": 1}, "list": [1], "nested list": [[1], [2]], "list of texts": ["a", "b"], "text": "x",
    "number": 0.5, "beyond 64 bits": BIG, "beyond a double": 10**400, "pair beyond 64 bits": [0, BIG],
    "flag": True, "900 levels": DEEP, "negative": -1, "NaN": "NaN",
}  # fmt: skip
NUMBERS = ("abs_mean", "sum", "min", "max", "mean", "std", "rms", "l2")
TEXTS = (
    "module",
    "tensor",
    "model",
    "phase",
    "branch",
    "class",
    "argument",
    "dtype",
    "op",
    "leaf",
    "name",
    "end",
)
# what each field takes of these values, beside its own kind
TAKEN = {
    **dict.fromkeys(NUMBERS, ("text", "number", "beyond 64 bits", "negative", "NaN")),
    **dict.fromkeys(TEXTS, ("text", "NaN")),
    **dict.fromkeys(("step", "call", "loop"), ("negative",)),
    **dict.fromkeys(("nonfinite", "zeros", "numel", "updates"), ("negative", "text", "NaN")),
    **dict.fromkeys(("shape", "histogram"), ("list", "text", "NaN")),
    **dict.fromkeys(("ids", "positions", "requests", "reads", "group"), ("list",)),
    **dict.fromkeys(("moves", "casts", "random", "collective"), ("flag",)),
    "args": ("list", "nested list", "list of texts", "pair beyond 64 bits", "900 levels"),
}  # fmt: skip


@pytest.fixture(scope="module")
def real(recorded_program) -> tuple[list[dict[str, Any]], str]:
    """Return the rows and the metadata of a program's recording."""
    path = recorded_program("denoise_with_context.py", "reference")
    return lines(path), metadata_path(path).read_text()


@pytest.fixture
def write(tmp_path):
    def write(name: str, rows: list[Any], meta: str | None = None) -> Path:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        if meta is not None:
            metadata_path(path).write_text(meta)
        return path

    return write


def commands(path: Path, good: Path) -> dict[str, list[str]]:
    """Return each command that reads the recording at `path`."""
    return {
        "show": ["show", str(path)],
        "show --json": ["show", str(path), "--json"],
        "show --step": ["show", str(path), "--step", "0-9"],
        "show --html": ["show", str(path), "--html", str(path.with_suffix(".html"))],
        "export": ["export", str(path), "--parquet", tempfile.mkdtemp(dir=path.parent)],
        "diff reference": ["diff", str(path), str(good)],
        "diff port": ["diff", str(good), str(path)],
        "diff noise": ["diff", str(good), str(good), "--noise", str(path)],
    }


def one_line(capsys, arguments: list[str]) -> tuple[int, str]:
    """Run a command; return its status and its line on stderr, "" if it printed none."""
    capsys.readouterr()
    status = main(arguments)
    reported = capsys.readouterr().err.splitlines()
    assert len(reported) <= 1, reported
    return status, "".join(reported)


# -- rows


def wrong(row: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (field, name of a value) for each field that does not take this value."""
    fields = sorted(KNOWN_FIELDS)
    return [
        (field, name) for field in fields for name in VALUES if name not in TAKEN.get(field, ())
    ]


def test_every_wrong_field_is_one_line_with_file_line_field_and_what_was_expected(real, write):
    rows = real[0][:3]
    cases = wrong(rows[1])
    assert len(cases) > 300
    for field, name in cases:
        path = write("wrong", [rows[0], {**rows[1], field: VALUES[name]}, rows[2]])
        with pytest.raises(RecordingError) as raised:
            read_recording(path)
        expected = (
            rf"wrong.jsonl: line 2 is not (a record: `{field}` is not (a|an|text)\b.*: |JSON$)"
        )
        assert re.search(expected, str(raised.value)), (field, name, str(raised.value))
        assert len(str(raised.value)) < 300 + len(str(path)) and "\n" not in str(raised.value)


def test_every_command_says_the_same(real, write, capsys):
    """A random choice of fields and values, each with every command."""
    rows, meta = real
    good = write("good", rows, meta)
    dice = random.Random(5)
    for field, name in dice.sample(wrong(rows[0]), 12):
        at = dice.randrange(len(rows))
        path = write(
            "wrong", [*rows[:at], {**rows[at], field: VALUES[name]}, *rows[at + 1 :]], meta
        )
        for command, arguments in commands(path, good).items():
            status, line = one_line(capsys, arguments)
            assert status == 2, (command, field, name)
            assert f"wrong.jsonl: line {at + 1} is not " in line, (command, field, name, line)


def test_what_a_field_takes_is_read_by_every_command(real, write, capsys):
    rows, meta = real
    good = write("good", rows, meta)
    for field, names in TAKEN.items():
        for name in names:
            changed = [
                {**row, field: VALUES[name]} if row["phase"] != "attach" else row for row in rows
            ]
            path = write("taken", changed, meta)
            assert len(read_recording(path)) == len(rows)
            for arguments in (["show", str(path), "--json"], ["diff", str(good), str(path)]):
                _, line = one_line(capsys, arguments)
                assert "Error" not in line, (field, name, arguments, line)


def test_fields_of_another_version_are_kept_and_deep_ones_refused(real, write, capsys):
    rows, meta = real
    added = [{**row, "later": {"a": [1, {"b": None}]}} for row in rows]
    path = write("later", added, meta)
    assert read_recording(path)[0]["later"] == {"a": [1, {"b": None}]}
    assert one_line(capsys, ["diff", str(path), str(path)])[0] == 0
    assert one_line(capsys, ["show", str(path)])[0] == 0
    deep = write("deep", [rows[0], {**rows[1], "later": DEEP}], meta)
    assert one_line(capsys, ["show", str(deep), "--json"]) == (
        2,
        f"otel_torch: {deep}: line 2 is not a record: 'later' is nested over 64 levels deep",
    )


def test_a_null_is_an_absent_field(real, write, capsys):
    """Some tools write a null for each field that another row has."""
    rows, meta = real
    fields = {field: None for row in rows for field in row}
    path, good = write("nulls", [fields | row for row in rows], meta), write("good", rows, meta)
    assert one_line(capsys, ["diff", str(good), str(path)]) == (0, "")
    assert one_line(capsys, ["show", str(path)]) == (0, "")


def test_a_wrong_row_far_into_a_long_recording_is_named(real, write, capsys):
    rows, meta = real
    long = [rows[0]] * 20 + [row for row in rows if row["phase"] != "attach"] * 60
    at = len(long) - 7
    for field in ("call", "model", "shape"):
        changed = [*long[:at], {**long[at], field: {}}, *long[at + 1 :]]
        path = write("wrong", changed, meta)
        assert path.stat().st_size > 3 * 2**18
        with pytest.raises(RecordingError, match=f"line {at + 1} .*`{field}`"):
            read_recording(path)
        status, line = one_line(capsys, ["diff", str(path), str(path)])
        assert (status, f"line {at + 1} " in line) == (2, True) or field == "call", line


def test_ranks_with_shards_name_the_wrong_line(real, write, tmp_path, capsys):
    pytest.importorskip("duckdb")
    shard = {"shape": [2, 2], "offset": [0, 0], "partial": False}
    row = {**real[0][0], "shape": [2, 2], "numel": 4, "shard": shard}
    good = write("good", real[0], real[1])
    for field in ("step", "shape", "class", "shard", "sum"):
        folder = tmp_path / field
        folder.mkdir()
        for rank in (0, 1):
            text = "".join(
                json.dumps(line) + "\n" for line in (row, {**row, "module": "b", field: {}})
            )
            (folder / f"run.rank{rank}.jsonl").write_text(text)
        status, line = one_line(capsys, ["diff", str(good), str(folder)])
        assert status == 2 and "run.rank0.jsonl" in line and f"2 is not a record: `{field}`" in line


# -- metadata

WRONG_META: dict[str, Any] = {
    **{f"{name} {kind}": {name: value} for name in (
        "schema", "run_id", "rank", "world_size", "host", "pid", "trace_id", "versions", "kernels", "models", "settings",
        "start", "end", "records_written", "lost", "regions", "isolated", "budget", "writing_ended", "ended_cleanly",
    ) for kind, value in (("object in list", [{}]), ("list in object", {"a": [{}]}), ("text", "x"), ("number", 7))
       if not (kind == "text" and name in ("schema", "run_id", "host", "trace_id", "kernels", "start", "end", "writing_ended"))
       and not (kind == "number" and name in ("rank", "world_size", "pid", "records_written"))
       and not (kind == "list in object" and name in ("budget", "isolated"))},
    "unhashable loss": {"lost": [{"what": {"a": 1}, "reason": "disk", "count": 1}]},
    "table of texts": {"models": {"Model": {"table": ["fc"]}}},
    "module that is a list": {"models": {"Model": {"table": [{"module": ["fc"]}]}}},
    "forwards as text": {"models": {"Model": {"forwards": "3"}}},
    "parameters as a number": {"models": {"Model": {"table": [{"module": "fc", "parameters": 3}]}}},
    "rule without a target": {"models": {"Model": {"param_names_mapping": [3]}}},
    "settings of lists": {"settings": {"OTEL_TORCH_STEPS": [0]}},
    "time beyond a double": {"regions": {"a": {"count": 1, "host_total_s": 10**400}}},
    "stayed": {"isolated": {"inputs": 1, "outputs": 1, "stayed": [[{}, [], 3, 4]]}},
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_META)
def test_wrong_metadata_is_a_warning_that_names_the_field(real, write, capsys, name):
    rows, meta = real
    (field,) = WRONG_META[name]
    path = write("wrong", rows, json.dumps(json.loads(meta) | WRONG_META[name]))
    good = write("good", rows, meta)
    assert one_line(capsys, ["show", str(path)]) == (0, "")
    main(["diff", str(good), str(path), "--json", "-"])
    told = capsys.readouterr()
    warnings = json.loads(told.out)["warnings"]
    assert any(f"wrong.meta.json: `{field}` ignored: " in warning for warning in warnings), warnings
    assert told.err == ""


def test_metadata_that_is_wrong_throughout_is_no_reason_to_fail(real, write, capsys):
    rows, meta = real
    good = write("good", rows, meta)
    for value in ([{}], {"a": [{}]}, 10**400, DEEP):
        path = write("wrong", rows, json.dumps(dict.fromkeys(json.loads(meta), value)))
        for command, arguments in commands(path, good).items():
            assert one_line(capsys, arguments) == (0, ""), command


def test_metadata_nested_without_end_is_left_out(real, write, capsys):
    rows, meta = real
    path = write("deep", rows, json.dumps(json.loads(meta) | {"later": DEEP}))
    assert one_line(capsys, ["show", str(path), "--json"]) == (0, "")


# -- files of other kinds


def readers(path: Path, good: Path) -> list[list[str]]:
    return [*commands(path, good).values(), ["send", str(path)]]


@pytest.mark.parametrize("kind", ["device", "socket", "unreadable", "missing", "endless"])
def test_what_is_no_file_is_refused_by_every_command(kind, real, write, tmp_path, capsys):
    good, path = write("good", *real), tmp_path / "special.jsonl"
    if kind == "device":
        path.symlink_to("/dev/null")
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind(os.path.relpath(path))
    elif kind == "unreadable":
        path.write_text("{}")
        path.chmod(0)
    if kind == "unreadable" and os.access(path, os.R_OK):
        path.unlink()  # root may read everything: a link to nowhere stands in
        path.symlink_to(tmp_path / "nowhere")
    for arguments in readers(path, good):
        status, line = one_line(capsys, arguments)
        assert status == 2 and str(path) in line, (arguments, line)


def test_a_pipe_is_refused_where_a_file_is_read_twice(real, write, tmp_path, capsys):
    good, path = write("good", *real), tmp_path / "pipe.jsonl"
    os.mkfifo(path)
    folder = tmp_path / "ranks"
    folder.mkdir()
    os.mkfifo(folder / "run.rank0.jsonl")
    for arguments in (
        ["diff", path, good],
        ["diff", good, path],
        ["diff", good, folder],
        ["send", path],
    ):
        status, line = one_line(capsys, [str(argument) for argument in arguments])
        assert status == 2 and "is a pipe" in line, (arguments, line)


def test_show_says_that_it_waits_for_a_pipe_and_reads_it(real, write, tmp_path):
    good, path = write("good", *real), tmp_path / "pipe.jsonl"
    os.mkfifo(path)
    command = [sys.executable, "-m", "otel_torch", "show", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as shown:
        assert shown.stderr is not None and shown.stdout is not None
        assert select.select([shown.stderr], [], [], 60)[0]
        assert b"pipe.jsonl is a pipe; waiting" in shown.stderr.readline()
        path.write_bytes(good.read_bytes())
        assert f"{len(real[0])} records".encode() in shown.stdout.read()
    assert shown.returncode == 0


def test_metadata_that_is_a_pipe_does_not_block(real, write, capsys):
    path = write("run", real[0])
    os.mkfifo(metadata_path(path))
    assert one_line(capsys, ["show", str(path)]) == (0, "")


def test_a_file_that_grows_while_it_is_read_ends_where_it_ended(real, write):
    """The writer completes a half-written line between two reads."""
    path = write("growing", real[0])
    whole = path.read_bytes()
    for cut in (len(whole) - 1, len(whole) - 40, 70_000):
        path.write_bytes(whole[:cut])
        warnings: list[str] = []
        rows = iterate_rows(path, warnings.append)
        read = [next(rows)]
        with path.open("ab") as file:
            file.write(whole[cut:])
        read += rows
        assert read == real[0][: len(read)] and len(read) >= whole[:cut].count(b"\n")


def test_the_metadata_in_place_of_the_recording_is_recognized(real, write, capsys):
    good = write("good", *real)
    for arguments in commands(metadata_path(good), good).values():
        status, line = one_line(capsys, arguments)
        assert status == 2 and line.endswith(f"is the metadata of a recording; give {good}")


@pytest.mark.parametrize(
    ("command", "hint"),
    [("shwo", "did you mean show?"), ("dif", "did you mean diff?"), ("x", "choose from run")],
)
def test_a_misspelt_command_gets_a_suggestion(command, hint, capsys):
    assert one_line(capsys, [command, "a"])[0] == 2
    main([command])
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "diff a b --jsno -",
            "unrecognized arguments: --jsno; did you mean --json?; see otel-torch diff",
        ),
        (
            "diff --htlm=x",
            "unrecognized arguments: --htlm; did you mean --html?; see otel-torch diff",
        ),
        (
            "show a --modle x",
            "unrecognized arguments: --modle; did you mean --module?; see otel-torch show",
        ),
        ("run --verbose python a.py", "unrecognized arguments: --verbose; see otel-torch run"),
        (
            "--versoin diff",
            "unrecognized arguments: --versoin; did you mean --version?; see otel-torch ",
        ),
    ],
)
def test_a_misspelt_option_gets_a_suggestion(words, line, capsys):
    assert one_line(capsys, words.split()) == (2, f"otel_torch: {line.rstrip()} --help")


def test_options_of_the_command_that_run_starts_are_its_own(capfd):
    words = ["run", sys.executable, "-c", "import sys; print(sys.argv[1:])", "--jsno"]
    subprocess.run([sys.executable, "-m", "otel_torch", *words], check=False)
    assert "['--jsno']" in capfd.readouterr().out
