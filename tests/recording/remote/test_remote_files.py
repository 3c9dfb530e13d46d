"""What commands read by URL: fsspec's own store in memory, which every process has for itself."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

import otel_torch
from otel_torch.cli import main as cli
from otel_torch.recording.reader import RecordingError
from otel_torch.recording.remote import remote_files
from otel_torch.recording.remote.remote_files import LocalCopies, RemoteError, while_it_moves

ROW = '{"module": "fc", "tensor": "out", "step": 0, "call": 0, "loop": 0, "model": "Net", "phase": "forward", "mean": %s}\n'


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[fsspec.AbstractFileSystem]:
    """Yield an empty store with two ranks of a run; nothing may stay in the temporary folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    files = fsspec.filesystem("memory")
    for rank in (0, 1):
        files.pipe_file(f"/runs/a.rank{rank}.jsonl", (ROW % rank).encode())
        files.pipe_file(f"/runs/a.rank{rank}.meta.json", b'{"run_id": "a", "rank": %d}' % rank)
    yield files
    files.store.clear()
    assert list(tmp_path.glob("otel_torch.*")) == []


def test_a_recording_is_read_with_its_metadata_and_named_by_its_url(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["show", "memory://runs/a.rank1.jsonl"]) == 0
    heading = capsys.readouterr().out.splitlines()[0]
    assert heading == "memory://runs/a.rank1.jsonl: 1 record, 1 module, step 0, run a, rank 1 of ?"


def test_a_folder_is_read_as_all_its_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", "memory://runs"]) == 0
    out = capsys.readouterr().out
    assert "memory://runs/a.rank0.jsonl: 1 record" in out and "rank 1 of" in out


def test_of_a_folder_only_recordings_are_copied(store: fsspec.AbstractFileSystem) -> None:
    store.pipe_file("/runs/checkpoint.pt", b"large")
    store.pipe_file("/runs/later/b.jsonl", b"another run")
    with LocalCopies() as copies:
        shallow = Path(copies.fetch("memory://runs"))
        assert {path.name for path in shallow.iterdir()} == {
            f"a.rank{rank}.{ending}" for rank in (0, 1) for ending in ("jsonl", "meta.json")
        }
        deep = Path(copies.fetch("memory://runs", with_folders=True))
        assert (deep / "later" / "b.jsonl").exists() and (deep / "checkpoint.pt").exists()


def test_two_recordings_are_compared_and_their_urls_are_in_the_page(
    store: fsspec.AbstractFileSystem, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    names = [f"memory://runs/a.rank{rank}.jsonl" for rank in (0, 1)]
    assert cli.main(["diff", *names, "--json", "-"]) in (0, 1, 2)
    assert str(tmp_path) not in "".join(capsys.readouterr())
    assert cli.main(["show", *names, "--html", str(page)]) == 0
    assert names[0] in page.read_text() and str(tmp_path) not in page.read_text()


def test_python_compares_two_urls_and_names_them(
    store: fsspec.AbstractFileSystem, tmp_path: Path
) -> None:
    reference, port = (f"memory://runs/a.rank{rank}.jsonl" for rank in (0, 1))
    report = otel_torch.diff(reference, port)
    assert (report.reference, report.port) == (reference, port)
    assert report.first is not None and str(tmp_path) not in str(report.as_json())
    store.pipe_file("/runs/b.jsonl", b"no recording\n")
    with pytest.raises(ValueError, match=r"^memory://runs/b\.jsonl"):
        otel_torch.diff(reference, "memory://runs/b.jsonl")
    with pytest.raises(ValueError, match=r"memory://runs/c\.jsonl: no such file"):
        otel_torch.diff(reference, port, noise="memory://runs/c.jsonl")


def test_a_damaged_recording_is_one_line_that_names_the_url(
    store: fsspec.AbstractFileSystem, capsys: pytest.CaptureFixture[str]
) -> None:
    store.pipe_file("/runs/b.jsonl", b"no recording\n" * 3)
    for command in (["show"], ["export", "--pprof", "profile.pb.gz"]):
        assert cli.main([command[0], "memory://runs/b.jsonl", *command[1:]]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("otel_torch: memory://runs/b.jsonl: ")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("memory://runs/none.jsonl", "no such file or folder"),
        ("nothing://runs/a.jsonl", "fsspec knows no such kind of URL"),
        ("memory://runs/../../a.jsonl", "leads out of its folder"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    url: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["show", url]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"otel_torch: {url}: ") and reason in line


def test_a_name_in_a_store_cannot_lead_out_of_the_folder_of_copies(
    store: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = {"/runs/../../../planted.jsonl": {"size": 1}}
    monkeypatch.setattr(type(store), "find", lambda *_, **__: planted)
    with LocalCopies() as copies, pytest.raises(RemoteError, match="leads out of its folder"):
        copies.fetch("memory://runs")


def test_a_connection_that_is_cut_without_an_error_is_noticed(
    store: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = type(store).get_file

    def cut(self: fsspec.AbstractFileSystem, path: str, target: str, **options: object) -> None:
        whole(self, path, target, **options)
        Path(target).write_bytes(Path(target).read_bytes()[:-1])

    monkeypatch.setattr(type(store), "get_file", cut)
    with LocalCopies() as copies, pytest.raises(RemoteError, match="connection was cut"):
        copies.fetch("memory://runs/a.rank0.jsonl")


def test_a_silent_server_is_given_up_and_a_slow_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_files, "PATIENCE_S", 0.5)

    def drip(moved: remote_files.Moved) -> str:
        for _ in range(5):
            time.sleep(0.2)
            moved(0.0)
        return "whole"

    assert while_it_moves(drip) == "whole"
    with pytest.raises(RemoteError, match="no answer"):
        while_it_moves(lambda moved: time.sleep(30))


def test_without_fsspec_one_line_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['fsspec'] = sys.modules['fsspec.core'] = None\n"
        "from otel_torch.cli.main import main; sys.exit(main(['show', 's3://bucket/a.jsonl']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.endswith("s3://bucket/a.jsonl: URLs need fsspec: pip install 'otel-torch[remote]'")


def test_no_command_imports_fsspec_for_a_path(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(ROW % 1)
    code = "import sys; from otel_torch.cli.main import main; main(['show', 'a.jsonl']); sys.exit('fsspec' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=60).returncode == 0


def test_watch_says_that_it_follows_local_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["watch", "memory://runs/a.rank0.jsonl"]) == 2
    assert "follows a local file" in capsys.readouterr().err


def test_the_public_reader_takes_a_url() -> None:
    rows = otel_torch.read_recording("memory://runs/a.rank1.jsonl")
    assert [row["mean"] for row in rows] == [1]
    assert repr(rows).startswith("memory://runs/a.rank1.jsonl: 1 record")
    with pytest.raises(RecordingError, match=r"memory://runs/none\.jsonl: no such file"):
        otel_torch.read_recording("memory://runs/none.jsonl")
