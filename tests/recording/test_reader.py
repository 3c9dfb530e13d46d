"""The reader of recordings: ours, FastVideo's, truncated files, and files of other kinds."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys

import pytest

from otel_torch.recording.metadata import metadata_path
from otel_torch.recording.reader import RecordingError, iterate_rows, load_recording, read_recording

ROW = {
    "module": "block", "tensor": "out", "step": 0, "call": 0, "loop": 0, "model": "M", "phase": "forward",
    "abs_mean": 0.5, "nonfinite": 0, "shape": [2, 3], "dtype": "torch.float32",
}  # fmt: skip


def lines(*rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def write(tmp_path):
    def write(content, meta=None):
        path = tmp_path / "run.jsonl"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        if meta is not None:
            metadata_path(path).write_text(meta if isinstance(meta, str) else json.dumps(meta))
        return path

    return write


def test_rows_come_back_as_written(write):
    rows = [{**ROW, "step": step, "abs_mean": step / 3} for step in range(2500)]
    assert read_recording(write(lines(*rows))) == rows
    assert list(iterate_rows(write(lines(*rows)))) == rows


def test_spelled_and_bare_non_finite_numbers_are_floats_and_names_stay_text(write):
    ours = lines(
        {"module": "NaN", "tensor": "Infinity", "step": 0, "max": "Infinity", "min": "-Infinity",
         "mean": "NaN", "list": ["NaN", 1]}
    )  # fmt: skip
    bare_row = '{"module": "a", "tensor": "out", "step": null, "max": Infinity, "min": -Infinity, "mean": NaN}\n'
    first, second = read_recording(write(ours + bare_row))
    assert (first["module"], first["tensor"]) == ("NaN", "Infinity")
    assert math.isnan(first["list"][0])
    for row in (first, second):
        assert (row["max"], row["min"]) == (math.inf, -math.inf)
        assert math.isnan(row["mean"])
    assert second["step"] is None


def test_a_file_of_fastvideos_own_trace(write):
    rows = [
        {
            "module": "blocks.0",
            "tensor": "out[0]",
            "step": step,
            "abs_mean": 0.1,
            "std": "<error: RuntimeError()>",
        }
        for step in range(3)
    ]
    recording = load_recording(write(lines(*rows)))
    assert recording.rows == rows
    assert (recording.meta, recording.warnings, recording.ended_early) == ({}, [], False)


@pytest.mark.parametrize("complete", [1, 999, 1000, 1001])
@pytest.mark.parametrize(
    "tail",
    [
        '{"module": "bl',
        '{"module": "block", "tensor": "ou\\',
        '{"module": "é'.encode()[:-1],
        b"\0\0\0",
    ],
    ids=repr,
)
def test_a_line_that_a_kill_cut_off_is_left_out_and_said(write, complete, tail):
    tail = tail if isinstance(tail, bytes) else tail.encode()
    recording = load_recording(write(lines(*[ROW] * complete).encode() + tail))
    assert len(recording.rows) == complete
    assert recording.ended_early
    assert f"line {complete + 1} was cut off" in recording.warnings[0]


def test_a_last_line_that_lacks_only_its_end_is_complete(write):
    recording = load_recording(write(lines(ROW, ROW).removesuffix("\n")))
    assert len(recording.rows) == 2
    assert not recording.ended_early


def test_the_metadata_says_that_a_run_was_killed(write):
    recording = load_recording(write(lines(ROW), {"run_id": "r", "ended_cleanly": False}))
    assert recording.ended_early and "killed" in recording.warnings[0]
    assert not load_recording(write(lines(ROW), {"run_id": "r", "ended_cleanly": True})).ended_early


@pytest.mark.parametrize("meta", ["{", "[1]", "[" * 100_000], ids=["half", "list", "deep"])
def test_broken_metadata_is_a_warning(write, meta):
    recording = load_recording(write(lines(ROW), meta))
    assert recording.rows == [ROW] and recording.meta == {}
    assert "run.meta.json" in recording.warnings[0]


@pytest.mark.parametrize(
    ("content", "where"),
    [
        ("", "is empty; nothing was written to it"),
        ("\n\n", "holds no record"),
        ("hello\n", "line 1 is not JSON"),
        ("hello", "line 1 is not JSON"),
        ('{"module": "bl', "line 1 is not JSON"),
        (lines(ROW) + "{broken\n" + lines(ROW), "line 2 is not JSON"),
        (lines(ROW) + "{broken\n", "line 2 is not JSON"),
        (lines(*[ROW] * 1500) + "{broken\n" + lines(ROW), "line 1501 is not JSON"),
        (lines(ROW) + "[1]\n", "line 2 is not a JSON object"),
        (lines(ROW, {"resourceSpans": []}), "line 2 is not a record"),
        (lines({**ROW, "step": "0"}), "`step` is not an integer"),
        (lines({**ROW, "call": 1.5}), "`call` is not an integer"),
        (b"\xff{}\n", "line 1 is not UTF-8"),
        (
            lines(ROW) + '{"module": "a", "tensor": "out", "step": ' + "9" * 10_000 + "}\n",
            "line 2 is not JSON",
        ),
        (lines(ROW) + "[" * 100_000 + "\n", "line 2 is not JSON"),
        (
            '{"module": "a"\n"tensor": "b", "step": 0}\n'
            + ", ".join(['{"module": "a", "tensor": "b", "step": 0}'] * 2)
            + "\n",
            "line 1",
        ),
    ],
    ids=str,
)
def test_what_is_no_recording_is_one_line_that_says_where(write, content, where):
    with pytest.raises(RecordingError, match=where) as raised:
        load_recording(write(content))
    assert "run.jsonl" in str(raised.value) and "\n" not in str(raised.value)


def test_a_missing_file_and_a_folder(tmp_path):
    for path in (tmp_path / "none.jsonl", tmp_path, "a\0b"):
        with pytest.raises(RecordingError):
            read_recording(path)


def test_a_byte_order_mark_and_windows_line_ends_are_read(write):
    assert read_recording(
        write(b"\xef\xbb\xbf" + lines(ROW, ROW).replace("\n", "\r\n").encode())
    ) == [ROW, ROW]


def test_any_bytes_are_read_or_refused(write):
    dice = random.Random(7)
    good = lines(ROW, {**ROW, "max": "NaN"}).encode()
    pieces = [
        b"{",
        b"}",
        b'"',
        b"[",
        b"]",
        b",",
        b":",
        b"\n",
        b"NaN",
        b"null",
        b"1e999",
        b"\\u0000",
        b'"step"',
        b'"module"',
        b"\xc3",
        b"\0",
    ]
    refused = 0
    for _ in range(1500):
        content = bytearray(good * dice.randint(0, 3))
        for _ in range(dice.randint(1, 2)):
            offset = dice.randint(0, len(content))
            if dice.random() < 0.5:
                content[offset:offset] = dice.choice([dice.choice(pieces), dice.randbytes(3)])
            else:
                del content[offset : offset + dice.randint(1, 30)]
        path = write(bytes(content))
        try:
            recording = load_recording(path)
        except RecordingError as error:
            refused += 1
            assert len(str(error).splitlines()) == 1
        else:
            assert recording.rows and all(isinstance(row["module"], str) for row in recording.rows)
    assert 100 < refused < 1400


def test_as_a_dataframe(write):
    pandas = pytest.importorskip("pandas")
    frame = read_recording(write(lines(ROW, {**ROW, "step": 1, "abs_mean": "NaN"})), dataframe=True)
    assert isinstance(frame, pandas.DataFrame)
    assert frame["step"].tolist() == [0, 1] and math.isnan(frame["abs_mean"][1])


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_without_its_library_one_line_says_what_to_do(write, monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModuleNotFoundError, match=f"needs {library}: pip install {library}$"):
        read_recording(write(lines(ROW)), dataframe=library)


def test_another_dataframe_is_refused(write):
    with pytest.raises(ValueError, match=r"^dataframe='arrow': give 'pandas' or 'polars'$"):
        read_recording(write(lines(ROW)), dataframe="arrow")


def test_reading_needs_neither_torch_nor_the_sdk():
    code = "import sys, otel_torch.recording.reader, otel_torch.show; sys.exit(len({'torch', 'opentelemetry.sdk'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
