"""A long recording is read in another process, with the same rows, warnings and errors."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from otel_torch.parity.compare import compare
from otel_torch.recording import read_ahead
from otel_torch.recording.read_ahead import iterate_batches_ahead
from otel_torch.recording.reader import RecordingError
from otel_torch.recording.row_batches import RowBatch, RowKinds, iterate_batches
from tests.support import PROGRAMS, run_python

PROGRAM = PROGRAMS / "denoise_with_context.py"
ROW = b'{"module":"fc","tensor":"out","step":0}'
TWO_IN_A_LINE = ROW + b"\n" + ROW + ROW + b"\n\n"
Readers = list["subprocess.Popen[bytes]"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Callable[[str, str], Path]:
    """Return a function that gives a program's recording, made once."""
    made: dict[tuple[str, str], Path] = {}

    def record(program: str, capture: str) -> Path:
        if (program, capture) not in made:
            folder = tmp_path_factory.mktemp(program)
            run_python(folder, PROGRAM, program, OTEL_TORCH_CAPTURE=capture)
            made[program, capture] = folder / "run.jsonl"
        return made[program, capture]

    return record


@pytest.fixture
def readers(monkeypatch) -> Readers:
    """Read files of any size in another process; return these processes."""
    started: Readers = []
    start = subprocess.Popen

    def start_and_keep(*arguments, **options):
        process = start(*arguments, **options)
        if "send_batches" in str(arguments):
            started.append(process)
        return process

    monkeypatch.setattr(read_ahead, "_WORTH_BYTES", 0)
    monkeypatch.setattr(read_ahead.subprocess, "Popen", start_and_keep)
    return started


def contents(
    iterate: Callable[..., Iterator[RowBatch]], path: Path
) -> tuple[list[object], list[str], int]:
    """Return all that batches hold, the warnings, and how many bytes were read."""
    kinds = RowKinds()
    problems: list[str] = []
    sizes: list[int] = []
    rows: list[object] = []
    for batch in iterate(path, kinds, problems.append, sizes.append):
        every = range(len(batch.kinds))
        rows += [kinds.kinds[kind] for kind in batch.kinds.tolist()]
        arrays = batch.numbers, batch.order, batch.statistics(every)
        rows += [np.array_str(array, precision=17) for array in arrays]
        rows += [*batch.sketched, *batch.sketches]
        rows += [repr(batch.record(index)) for index in every]
        rows += list(map(repr, batch.rows(0, len(every))))
    return rows, problems, sum(sizes)


def unusual(recording: Path, path: Path, kind: str) -> Path:
    """Write a recording again, in a form that people's own tools write."""
    text = recording.read_bytes()
    rows = text.splitlines(keepends=True)
    changed = {
        "byte order mark": b"\xef\xbb\xbf" + text,
        "blank lines": b"\n".join(rows),
        "bare NaN": b"".join(
            row.replace(b'"max":', b'"max":NaN,"former":') if number % 7 == 3 else row
            for number, row in enumerate(rows)
        ),
        "cut off": text[:-30],
        "no last newline": text.rstrip(b"\n"),
    }
    path.write_bytes(changed[kind])
    return path


@pytest.mark.parametrize("capture", ["outputs", "inputs,updates,gradients", "parity"])
def test_another_process_reads_the_same(recorded, readers, capture):
    path = recorded("reference", capture)
    assert contents(iterate_batches_ahead, path) == contents(iterate_batches, path)
    assert [reader.poll() is not None for reader in readers] == [True]


@pytest.mark.parametrize(
    "kind", ["byte order mark", "blank lines", "bare NaN", "cut off", "no last newline"]
)
def test_unusual_files_are_read_the_same(recorded, readers, tmp_path, kind):
    path = unusual(recorded("reference", "parity"), tmp_path / "unusual.jsonl", kind)
    rows, problems, size = contents(iterate_batches_ahead, path)
    assert (rows, problems, size) == contents(iterate_batches, path)
    assert bool(problems) == (kind == "cut off")
    assert len(readers) == 1


def test_reports_are_the_same(recorded, readers, monkeypatch):
    paths = recorded("reference", "parity"), recorded("port", "parity")
    ahead = compare(*paths)
    assert len(readers) == 2
    monkeypatch.setattr(read_ahead, "_WORTH_BYTES", 1 << 60)
    here = compare(*paths)
    assert len(readers) == 2
    assert here.pairs
    assert repr(ahead) == repr(here)


def test_short_files_are_read_here(recorded, readers, monkeypatch):
    monkeypatch.setattr(read_ahead, "_WORTH_BYTES", 1 << 25)
    assert list(iterate_batches_ahead(recorded("reference", "parity"), RowKinds()))
    assert not readers


@pytest.mark.parametrize(
    "text", [b'{"module":"fc"}\n', b"neither rows\n", b"", b"\n\n", TWO_IN_A_LINE]
)
def test_a_file_that_is_no_recording_is_the_same_error(readers, tmp_path, text):
    path = tmp_path / "no.jsonl"
    path.write_bytes(text)
    errors = []
    for iterate in (iterate_batches, iterate_batches_ahead):
        with pytest.raises(RecordingError) as error:
            list(iterate(path, RowKinds()))
        errors.append(str(error.value))
    assert errors[0] == errors[1]
    assert len(readers) == 1


def long_recording(recorded: Callable[[str, str], Path], path: Path) -> Path:
    """Write a file that no pipe holds as a whole."""
    text = recorded("reference", "parity").read_bytes()
    path.write_bytes(text * (1 + (24 << 20) // len(text)))
    return path


def test_a_reader_that_is_killed_is_one_line(recorded, readers, tmp_path):
    path = long_recording(recorded, tmp_path / "long.jsonl")
    batches = iterate_batches_ahead(path, RowKinds())
    next(batches)
    readers[0].kill()
    with pytest.raises(RecordingError) as error:
        list(batches)
    expected = f"{path}: the process that read it ended with status {-signal.SIGKILL}"
    assert str(error.value).startswith(expected)


def test_a_reader_ends_when_nobody_reads_on(recorded, readers, tmp_path):
    path = long_recording(recorded, tmp_path / "long.jsonl")
    batches = iterate_batches_ahead(path, RowKinds())
    assert len(list(islice(batches, 2))) == 2
    assert readers[0].poll() is None
    batches.close()
    assert readers[0].poll() is not None


def test_a_reader_ends_when_its_program_is_killed(recorded, tmp_path):
    path = long_recording(recorded, tmp_path / "long.jsonl")
    code = "from otel_torch.recording.read_ahead import send_batches; send_batches()"
    with subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        reader.stdout.read(1)
        reader.stdout.close()
        assert reader.wait(60) == 1


def test_an_interrupt_is_for_the_program_alone(recorded, readers, tmp_path):
    path = long_recording(recorded, tmp_path / "long.jsonl")
    batches = iterate_batches_ahead(path, RowKinds())
    first = next(batches)
    readers[0].send_signal(signal.SIGINT)
    count = len(first.kinds) + sum(len(batch.kinds) for batch in batches)
    assert count == path.read_bytes().count(b"\n")


@pytest.mark.parametrize("interpreter", ["", "missing", "fails"])
def test_without_another_process_the_file_is_read_here(
    recorded, readers, tmp_path, monkeypatch, interpreter
):
    fails = tmp_path / "fails"
    fails.write_text("#!/bin/sh\nexit 3\n")
    fails.chmod(fails.stat().st_mode | stat.S_IXUSR)
    path = recorded("reference", "parity")
    monkeypatch.setattr(sys, "executable", interpreter and str(tmp_path / interpreter))
    assert contents(iterate_batches_ahead, path) == contents(iterate_batches, path)


def test_a_file_that_vanishes_is_one_line(recorded, readers, tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_bytes(recorded("reference", "parity").read_bytes())
    batch = next(iterate_batches_ahead(path, RowKinds()))
    path.unlink()
    with pytest.raises(RecordingError, match="No such file"):
        batch.record(0)
