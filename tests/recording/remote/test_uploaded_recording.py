"""A recording whose place is a URL: written locally, uploaded whole, and kept where that fails."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch

import otel_torch
from otel_torch.bootstrap import start, stop
from otel_torch.process.job import Job
from otel_torch.recording.disk_budget import DiskBudget
from otel_torch.recording.remote.upload import check_place
from otel_torch.recording.remote.uploaded_recording import UploadedRecording
from otel_torch.records import Losses
from tests.support import JOB

Store = fsspec.AbstractFileSystem


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Store]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    files = fsspec.filesystem("memory")
    yield files
    files.store.clear()


def local(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.glob("otel_torch.*/**/*.json*"))


def record(url: str) -> None:
    model = torch.nn.Linear(2, 2)
    assert start(jsonl=url)
    model(torch.ones(1, 2))
    stop()


def test_it_is_uploaded_with_its_metadata_and_nothing_stays(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record("memory://runs/<rank>.jsonl")
    begin, end = capsys.readouterr().err.splitlines()
    assert "memory://runs/0.jsonl: recorded in " in begin and "uploaded at the end" in begin
    assert end.endswith(" records in memory://runs/0.jsonl")
    assert sorted(store.find("/runs")) == ["/runs/0.jsonl", "/runs/0.meta.json"]
    assert otel_torch.read_recording("memory://runs/0.jsonl")
    assert b'"ended_cleanly": true' in store.cat_file("/runs/0.meta.json")
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_run_is_renamed_as_on_a_disk(store: Store) -> None:
    record("memory://runs/run.jsonl")
    first = store.cat_file("/runs/run.meta.json")
    record("memory://runs/run.jsonl")
    record("memory://runs/run.jsonl")
    assert sorted(store.find("/runs")) == [
        f"/runs/run.{part}"
        for part in ("1.jsonl", "1.meta.json", "2.jsonl", "2.meta.json", "jsonl", "meta.json")
    ]
    assert store.cat_file("/runs/run.1.meta.json") == first


def test_without_a_record_there_is_no_folder_and_no_upload(store: Store, tmp_path: Path) -> None:
    sink = UploadedRecording(
        "memory://runs/a.jsonl", JOB, Losses(), budget=DiskBudget(10**9), settings={}, trace_id="0"
    )
    sink.finish(0.0)
    assert list(tmp_path.iterdir()) == [] and store.find("/") == []


@pytest.mark.parametrize(
    ("template", "url"),
    [
        ("memory://runs/<rank>/run.jsonl", "memory://runs/3/run.jsonl"),
        ("memory://runs/run.jsonl", "memory://runs/run.rank3.jsonl"),
        ("memory://<run>.<pid>.jsonl", "memory://r1.7.jsonl"),
    ],
)
def test_placeholders_are_those_of_paths(template: str, url: str) -> None:
    job = Job("r1", rank=3, local_rank=3, world_size=4, host="h", pid=7)
    sink = UploadedRecording(
        template, job, Losses(), budget=DiskBudget(10**9), settings={}, trace_id="0"
    )
    assert sink._url() == url


def test_what_cannot_be_uploaded_stays_and_is_counted_and_said(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(type(store), "_open", refuse)
    record("memory://runs/run.jsonl")
    said = capsys.readouterr().err.splitlines()
    assert any("memory://runs/run.jsonl: not uploaded (not allowed" in line for line in said)
    count, _, path = said[-2].removeprefix("otel_torch: ").partition(" records in ")
    assert said[-1] == f"otel_torch: lost: {count} record (not_uploaded)"
    assert len(otel_torch.read_recording(path)) == int(count)
    assert local(tmp_path) == ["run.jsonl", "run.meta.json"]


def test_a_place_is_checked_without_a_trace(store: Store) -> None:
    assert check_place("memory://runs/run.jsonl") is None
    assert store.find("/") == []
    assert check_place("nothing://runs/run.jsonl") == "fsspec knows no such kind of URL"
