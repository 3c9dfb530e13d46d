"""One file per process, complete lines only, and metadata that is true at all times."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from otel_torch.process import console
from otel_torch.recorder import Recorder, Sink
from otel_torch.recording import rows
from otel_torch.recording.disk_budget import DiskBudget
from otel_torch.recording.metadata import metadata_path
from otel_torch.recording.reader import load_recording
from otel_torch.recording.recording_sink import RecordingSink
from otel_torch.recording.run_file import claim_path, resolve_path
from otel_torch.records import Batch, Losses, Record, Scope, TensorPosition, json_safe
from tests.support import JOB, Arrived, ListSink, lines, metadata


def record(module: str = "block", step: int = 0, **stats: Any) -> Record:
    return Record(
        module,
        "out",
        step,
        0,
        0,
        "Model",
        "forward",
        None,
        stats or {"mean": 0.5, "shape": [2, 4]},
        0,
    )


def open_sink(
    path: Path, losses: Losses | None = None, *, max_bytes: int = 10**9, **job: Any
) -> RecordingSink:
    return RecordingSink(
        str(path),
        dataclasses.replace(JOB, **job),
        losses or Losses(),
        budget=DiskBudget(max_bytes),
        settings={},
        trace_id="0" * 32,
    )


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_printed", type(console._printed)())


# where it lies


@pytest.mark.parametrize(
    ("template", "world_size", "expected"),
    [
        ("run.jsonl", 1, "run.jsonl"),
        ("run.jsonl", 4, "run.rank3.jsonl"),
        ("run", 4, "run.rank3"),
        ("<run>/<rank>-<pid>.jsonl", 4, "r1/3-7.jsonl"),
        ("<run>.jsonl", 4, "r1.rank3.jsonl"),
        ("<pid>.jsonl", 4, "7.jsonl"),
        ("<rank><rank>.jsonl", 4, "33.jsonl"),
        ("~/run.jsonl", 1, "/home/me/run.jsonl"),
    ],
)
def test_placeholders_are_replaced_and_ranks_told_apart(
    template: str, world_size: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    job = dataclasses.replace(JOB, run_id="r1", rank=3, pid=7, world_size=world_size)
    assert resolve_path(template, job) == Path(expected)


def claim_for(path: Path, run_id: str, pid: int, rank: int = 0) -> Path:
    place, descriptor = claim_path(
        path,
        dataclasses.replace(JOB, run_id=run_id, pid=pid, rank=rank),
        json.dumps({"run_id": run_id, "rank": rank, "pid": pid}),
    )
    os.write(descriptor, f"{run_id} {pid}\n".encode())
    os.close(descriptor)
    return place


def test_the_path_holds_the_newest_run_and_another_process_of_it_gets_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a" / "b" / "run.jsonl"
    assert [
        claim_for(path, "first", 1),
        claim_for(path, "second", 2),
        claim_for(path, "third", 3),
    ] == [path] * 3
    assert claim_for(path, "third", 4) == path.with_name("run.pid4.jsonl")
    assert claim_for(path, "third", 3) == path  # the process itself, in a second session
    assert {each.name: each.read_text() for each in path.parent.glob("*.jsonl")} == {
        "run.1.jsonl": "first 1\n", "run.2.jsonl": "second 2\n", "run.3.jsonl": "third 3\n", "run.jsonl": "third 3\n",
        "run.pid4.jsonl": "third 4\n",
    }  # fmt: skip
    assert [metadata(path.with_name(f"run.{number}.jsonl"))["run_id"] for number in (1, 2, 3)] == [
        "first",
        "second",
        "third",
    ]
    said = capsys.readouterr().err.splitlines()
    assert said == [
        f"otel_torch: {path} is from an earlier run; renamed to run.{number}.jsonl"
        for number in (1, 2, 3)
    ]


def test_many_that_claim_a_path_at_once_each_get_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with ThreadPoolExecutor(16) as pool:
        same_run = list(pool.map(lambda pid: claim_for(path, "same", pid), range(1, 17)))
    assert len(set(same_run)) == 16 and path in same_run
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda pid: claim_for(path, f"run{pid}", pid), range(1, 17)))
    texts = [each.read_text() for each in tmp_path.glob("run.*jsonl")]
    assert sorted(texts) == sorted(
        [f"same {pid}\n" for pid in range(1, 17)] + [f"run{pid} {pid}\n" for pid in range(1, 17)]
    )
    for each in tmp_path.glob("run.*jsonl"):
        assert f"{metadata(each)['run_id']} {metadata(each)['pid']}\n" == each.read_text()


def test_a_run_that_is_renamed_while_it_goes_on_stays_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    older, newer = open_sink(path, run_id="older", pid=1), open_sink(path, run_id="newer", pid=2)
    older.write(Batch([record()], None))
    newer.write(Batch([record()], None))
    older.write(Batch([record(step=1)], None))
    older.finish(math.inf)
    newer.finish(math.inf)
    assert (older.path, newer.path) == (path.with_name("run.1.jsonl"), path)
    for sink, run_id, records in ((older, "older", 2), (newer, "newer", 1)):
        assert sink.path is not None and len(lines(sink.path)) == records
        meta = metadata(sink.path)
        assert (meta["run_id"], meta["records_written"], meta["ended_cleanly"]) == (
            run_id,
            records,
            True,
        )


def test_metadata_of_a_recording_that_was_deleted_overwrites_no_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    older, newer = open_sink(path, run_id="older", pid=1), open_sink(path, run_id="newer", pid=2)
    older.write(Batch([record()], None))
    path.unlink()
    newer.write(Batch([record()], None))
    older.finish(math.inf)
    assert metadata(path)["run_id"] == "newer"
    assert "was deleted" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["folder", "fifo", "under a file"])
def test_what_is_no_file_is_left_alone(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.write_text("")
        path /= "run.jsonl"
    before = sorted(tmp_path.rglob("*"))
    losses = Losses()
    sink = open_sink(path, losses)
    for step in range(2):
        sink.write(Batch([record(step=step)], None))
    sink.finish(math.inf)
    assert sorted(tmp_path.rglob("*")) == before
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line and "OTEL_TORCH_JSONL" in line
    assert losses.items() == [("record", "disk", 2)]


def test_without_a_record_there_is_no_file(tmp_path: Path) -> None:
    sink = open_sink(tmp_path / "run.jsonl")
    sink.close(Scope("region", "region"))
    sink.finish(math.inf)
    assert list(tmp_path.iterdir()) == []


# what is in it


def test_a_line_is_strict_json_with_the_fields_in_their_order(tmp_path: Path) -> None:
    stats: dict[str, Any] = {
        "sum": math.nan,
        "min": -math.inf,
        "max": math.inf,
        "mean": 1e-45,
        "std": 1e300,
        "shape": [],
        "dtype": "torch.float32",
    }
    sink = open_sink(tmp_path / "run.jsonl")
    branch = dataclasses.replace(record("größe\n", **stats), branch="cond")
    sink.write(Batch([branch, record("lone \udcff")], None))
    sink.finish(math.inf)
    first, second = lines(tmp_path / "run.jsonl")
    key = {
        "module": "größe\n",
        "tensor": "out",
        "step": 0,
        "call": 0,
        "loop": 0,
        "model": "Model",
        "phase": "forward",
    }
    spelled = stats | {"sum": "NaN", "min": "-Infinity", "max": "Infinity"}
    assert list(first.items()) == list((key | {"branch": "cond"} | spelled).items())
    assert second["module"] == "lone \udcff"
    assert (tmp_path / "run.jsonl").read_bytes().count(b"\n") == 2


@pytest.mark.parametrize("bad", [None, math.nan], ids=("finite", "not finite"))
def test_a_place_without_a_parent_is_null_and_a_number_that_is_not_finite_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: float | None
) -> None:
    spelled: list[Any] = []
    monkeypatch.setattr(rows, "json_safe", lambda value: spelled.append(value) or json_safe(value))
    positions = [
        TensorPosition("Linear", None, number, None, (number, None), None, None)
        for number in range(3)
    ]
    records = [dataclasses.replace(record(sum=0.5), position=position) for position in positions]
    if bad is not None:
        records[1].stats["sum"] = bad
    sink = open_sink(tmp_path / "run.jsonl")
    sink.write(Batch(records, None))
    sink.finish(math.inf)
    actual = [
        (line["parent"], line["storage"], line["order"], line["sum"])
        for line in lines(tmp_path / "run.jsonl")
    ]
    assert actual == [
        (None, None, [number, None], "NaN" if bad and number == 1 else 0.5) for number in range(3)
    ]
    assert bool(spelled) == (bad is not None)  # encoded once more only where that is needed


def test_a_record_that_cannot_be_written_costs_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = Losses()
    sink = open_sink(tmp_path / "run.jsonl", losses)
    sink.write(Batch([record("a"), record("b", mean=object()), record("c")], None))
    assert [row["module"] for row in lines(tmp_path / "run.jsonl")] == ["a", "c"]
    assert losses.items() == [("record", "unencodable", 1)] and "'b'" in capsys.readouterr().err


def test_the_metadata_is_there_from_the_start_and_says_how_the_run_ended(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    losses = Losses()
    sink = open_sink(path, losses)
    for seconds, device in ((1, 0.25), (3, None), (2, 0.5)):
        sink.close(
            Scope("region", "vae", start_ns=10**9, end_ns=(1 + seconds) * 10**9, device_s=device)
        )
    sink.close(Scope("step", "torch.step", start_ns=1, end_ns=2))
    sink.write(Batch([record()], None))
    started = metadata(path)
    assert (
        started["ended_cleanly"] is False
        and started["end"] is None
        and load_recording(path).ended_early
    )
    losses.count("span_event", "queue_full", 3)
    sink.finish(math.inf)
    meta = metadata(path)
    assert meta["regions"] == {
        "vae": {
            "count": 3,
            "host_total_s": 6,
            "host_longest_s": 3,
            "device_total_s": 0.75,
            "device_longest_s": 0.5,
        }
    }
    assert meta["lost"] == [{"what": "span_event", "reason": "queue_full", "count": 3}]
    assert (
        meta["ended_cleanly"] is True
        and meta["start"] < meta["end"]
        and not load_recording(path).ended_early
    )
    expected = {
        "schema": "otel_torch.recording/1", "run_id": "run-test", "rank": 0, "world_size": 1, "host": "host", "pid": 1,
        "trace_id": "0" * 32, "records_written": 1,
    }  # fmt: skip
    assert meta | expected == meta


def test_a_run_is_recorded_though_nothing_can_be_said_of_its_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = RecordingSink(
        str(tmp_path / "run.jsonl"), JOB, Losses(), budget=DiskBudget(10**9), settings={"OTEL_TORCH_JSONL": "\udcff"},
        trace_id="", facts=lambda: {"versions": 1 / 0},
    )  # fmt: skip
    sink.write(Batch([record()], None))
    sink.finish(math.inf)
    assert metadata(tmp_path / "run.jsonl")["settings"] == {"OTEL_TORCH_JSONL": "\udcff"}
    assert "ZeroDivisionError" in capsys.readouterr().err


# limits


def test_at_the_limit_writing_ends_with_the_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, losses = tmp_path / "run.jsonl", Losses()
    sink = open_sink(path, losses, max_bytes=2 * (len(rows.encode_rows([record()]))))
    steps = [Scope("step", "torch.step") for _ in range(3)]
    for step in (
        0,
        1,
        1,
        1,
    ):  # the second step is read three times, and reaches the limit in the first of them
        sink.write(Batch([record(step=step)], steps[step]))
    assert capsys.readouterr().err == ""
    sink.close(steps[1])
    assert "OTEL_TORCH_MAX_BYTES" in capsys.readouterr().err
    assert metadata(path)["writing_ended"] == "max_bytes"
    for _ in range(2):
        sink.write(Batch([record(step=2)], steps[2]))
    sink.close(steps[2])
    assert capsys.readouterr().err == ""
    sink.finish(math.inf)
    assert [row["step"] for row in lines(path)] == [0, 1, 1, 1]
    assert metadata(path)["lost"] == [{"what": "record", "reason": "max_bytes", "count": 2}]


class Disk:
    """A fake clock, and a disk on which each write takes `seconds`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.now, self.seconds = 1000.0, seconds
        write = os.write

        def slow(descriptor: int, data: memoryview) -> int:
            self.now += self.seconds
            return write(descriptor, data)

        monkeypatch.setattr(os, "write", slow)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.mark.parametrize(("seconds", "said"), [(0.2, 1), (0.05, 0)])
def test_waiting_for_the_disk_is_said_once(
    seconds: float,
    said: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    disk = Disk(monkeypatch, seconds)
    sink = open_sink(tmp_path / "run.jsonl")
    for step in range(100):
        disk.now += 1
        sink.write(Batch([record(step=step)], None))
    assert capsys.readouterr().err.count("more than 10% of the run's time") == said


# what comes in the middle


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    """Return a recorder whose sinks are a recording and a list."""
    losses = Losses()
    yield Recorder(Arrived, lambda: [open_sink(tmp_path / "run.jsonl", losses), ListSink()], losses)


def interrupted(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Make the next write stop after some bytes and raise KeyboardInterrupt."""
    write = os.write

    def stop(descriptor: int, data: memoryview) -> int:
        monkeypatch.setattr(os, "write", write)
        write(descriptor, data[:after])
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "write", stop)


def test_a_write_that_is_interrupted_is_done_again_as_a_whole(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder.add(record(step=0))
    recorder.flush(None)
    recorder.add(record(step=1))
    interrupted(monkeypatch, 20)
    with pytest.raises(KeyboardInterrupt):
        recorder.flush(None)
    assert [row["step"] for row in lines(tmp_path / "run.jsonl")] == [0]
    recorder.add(record(step=2))
    recorder.finish(math.inf)
    assert [row["step"] for row in lines(tmp_path / "run.jsonl")] == [0, 1, 2]
    assert metadata(tmp_path / "run.jsonl")["records_written"] == 3
    assert isinstance(recorder.sinks[1], ListSink) and [
        each.step for each in recorder.sinks[1].records
    ] == [0, 1, 2]


@pytest.mark.parametrize("where", ["reading", "another sink"])
def test_an_interrupt_elsewhere_loses_and_doubles_nothing(where: str, tmp_path: Path) -> None:
    interrupts = [KeyboardInterrupt]

    class Interrupted(Sink):
        def write(self, batch: Batch) -> None:
            if where == "another sink" and interrupts:
                raise interrupts.pop()

    class Read(Arrived):
        def records(self) -> list[Record]:
            if where == "reading" and interrupts:
                raise interrupts.pop()
            return self.pending

    recorder = Recorder(Read, lambda: [open_sink(tmp_path / "run.jsonl"), Interrupted()], Losses())
    recorder.add(record(step=0))
    with pytest.raises(KeyboardInterrupt):
        recorder.flush(None)
    recorder.add(record(step=1))
    recorder.finish(math.inf)
    assert [row["step"] for row in lines(tmp_path / "run.jsonl")] == [0, 1]


def test_what_a_device_still_computes_is_handed_on_later_and_in_order(tmp_path: Path) -> None:
    sink, readings = ListSink(), []

    def read(pending: list[Record]) -> Arrived:
        readings.append(Arrived(pending, arrived=False))
        return readings[-1]

    recorder = Recorder(read, lambda: [sink], Losses())
    first, second = Scope("step", "torch.step"), Scope("step", "torch.step")
    for number, step in enumerate((first, second)):
        recorder.open(step)
        recorder.add(record(step=number))
        recorder.flush(step)
        recorder.close(step)
    assert (sink.records, sink.closed, recorder.is_flush_due) == ([], [], False)
    assert 0 < first.end_ns <= second.start_ns  # when a step ended does not wait
    readings[0].arrived = True
    assert recorder.is_flush_due
    recorder.flush(None)
    assert ([queued.step for queued in sink.records], sink.closed, recorder.is_flush_due) == (
        [0],
        [first],
        False,
    )
    recorder.finish(math.inf)
    assert ([batch.step for batch in sink.batches], sink.closed) == (
        [first, second],
        [first, second],
    )


def test_last_words_are_what_was_read_and_leave_an_open_step_its_records() -> None:
    sink, step = ListSink(), Scope("step", "torch.step")
    recorder = Recorder(lambda pending: Arrived(pending, arrived=False), lambda: [sink], Losses())
    recorder.add(record(step=0))
    recorder.flush(None)
    recorder.add(record(step=1))
    recorder.drain(1)
    assert [queued.step for queued in sink.records] == [0]
    recorder.flush(step, wait=True)
    assert [batch.step for batch in sink.batches] == [None, step]


def test_what_waits_for_a_device_is_bounded() -> None:
    sink = ListSink()
    recorder = Recorder(lambda pending: Arrived(pending, arrived=False), lambda: [sink], Losses())
    for step in range(100):
        recorder.add(record(step=step))
        recorder.flush(None)
    assert [queued.step for queued in sink.records][:50] == list(range(50))


def test_a_handler_that_stops_in_the_middle_of_a_flush_waits_for_its_end(tmp_path: Path) -> None:
    class Handler(Sink):
        finished = 0
        recorder: Recorder

        def write(self, batch: Batch) -> None:
            self.recorder.flush(None)
            self.recorder.finish(math.inf)

        def finish(self, deadline: float) -> None:
            self.finished += 1

    handler = Handler()
    handler.recorder = recorder = Recorder(
        Arrived, lambda: [handler, open_sink(tmp_path / "run.jsonl")], Losses()
    )
    recorder.add(record())
    recorder.flush(None)
    assert len(lines(tmp_path / "run.jsonl")) == 1
    assert metadata(tmp_path / "run.jsonl")["ended_cleanly"] and handler.finished == 1
    recorder.add(record())
    recorder.flush(None)
    assert [path.name for path in tmp_path.glob("*.jsonl")] == ["run.jsonl"]


def test_a_sink_that_fails_is_left_out_and_what_it_does_not_get_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing(Sink):
        def write(self, batch: Batch) -> None:
            raise ValueError("mine")

    recorder = Recorder(Arrived, lambda: [Failing(), open_sink(tmp_path / "run.jsonl")], Losses())
    for step in range(3):
        recorder.add(record(step=step))
        recorder.flush(None)
    recorder.finish(math.inf)
    assert len(lines(tmp_path / "run.jsonl")) == 3
    assert recorder.losses.items() == [("record", "sink_failed", 3)]
    said = capsys.readouterr().err.splitlines()
    assert (
        len([line for line in said if "Failing failed" in line]) == 1
        and "lost: 3 records (sink_failed)" in said[-1]
    )


def test_what_other_sinks_lose_at_the_end_is_in_the_metadata(tmp_path: Path) -> None:
    losses = Losses()

    class Losing(Sink):
        def finish(self, deadline: float) -> None:
            losses.count("span", "shutdown", 2)

    recorder = Recorder(
        Arrived, lambda: [open_sink(tmp_path / "run.jsonl", losses), Losing()], losses
    )
    recorder.add(record())
    recorder.finish(math.inf)
    assert metadata(tmp_path / "run.jsonl")["lost"] == [
        {"what": "span", "reason": "shutdown", "count": 2}
    ]


def test_sinks_that_cannot_be_made_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def connect() -> list[Sink]:
        raise ImportError("no such thing")

    recorder = Recorder(Arrived, connect, Losses())
    recorder.open(Scope("step", "torch.step"))
    recorder.add(record())
    recorder.finish(math.inf)
    (line,) = capsys.readouterr().err.splitlines()
    assert "no such thing" in line


def test_a_metadata_file_is_never_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.jsonl"
    sink = open_sink(path)
    sink.write(Batch([record()], None))
    before = metadata_path(path).read_text()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    sink.finish(math.inf)
    assert json.loads(before) == metadata(path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run.jsonl", "run.meta.json"]
