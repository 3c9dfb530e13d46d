"""What a process leaves that ends at a bad moment, on a full disk, or in a folder that it shares with
somebody who means harm.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from otel_torch.process.job import this_job
from otel_torch.recording.metadata import metadata_path
from otel_torch.recording.reader import load_recording
from otel_torch.recording.run_file import claim_path, replace_metadata
from tests.hostile_server import HostileServer, silent
from tests.otlp_receiver import Receiver
from tests.support import PROGRAMS, environment, lines, metadata, run_python

MODEL = (PROGRAMS / "two_layers.py").read_text()


def model_and(code: str) -> str:
    """Return a program that appends `code` to the model of two layers."""
    return MODEL + textwrap.dedent(code)


# interrupts the program while its first message is made, at the end of the first step
INTERRUPTED_START = """
    import opentelemetry.sdk._logs  # which makes a resource when it is imported
    from opentelemetry.sdk.resources import Resource
    create = Resource.create

    def interrupted(*arguments):
        Resource.create = create
        send(signal.SIGINT)

    Resource.create = interrupted
    run(4)
"""


@pytest.mark.parametrize("folder", ["", "otlp"])
def test_an_interrupt_while_telemetry_starts_costs_no_record(tmp_path: Path, folder: str) -> None:
    with Receiver() as receiver:
        done = run_python(
            tmp_path,
            model_and(INTERRUPTED_START),
            check=False,
            is_taken_apart=True,
            OTEL_TORCH_SIGNALS="log_events",
            OTEL_TORCH_OTLP_FILE=folder and str(tmp_path / folder),
            **receiver.environment(),
        )
    assert done.returncode == -signal.SIGINT
    assert "failed" not in done.stderr and "RuntimeError" not in done.stderr
    recorded = lines(tmp_path / "run.jsonl")
    assert [row["module"] for row in recorded] == ["0", "1", ""]
    assert metadata(tmp_path / "run.jsonl")["records_written"] == 3
    (lost,) = metadata(tmp_path / "run.jsonl")["lost"]
    assert lost == {"what": "log_event", "reason": "shutdown", "count": 3}


# steps of microseconds, each of which is told when it is over
SHORT_STEPS = """
    import itertools
    told = open("told", "w", buffering=1)
    with torch.no_grad():
        for step in itertools.count():
            model(x)
            told.write(f"{step}\\n")
            if step == 300:
                threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGTERM)).start()
"""


@pytest.mark.parametrize("attempt", range(4))
def test_every_step_before_a_sigterm_has_its_records(tmp_path: Path, attempt: int) -> None:
    """The silent receiver lets the end take a while, in which the program could go on."""
    with HostileServer(silent) as server:
        done = run_python(
            tmp_path, model_and(SHORT_STEPS), check=False, is_taken_apart=True, **server.environment
        )
    assert done.returncode == -signal.SIGTERM
    recording = load_recording(tmp_path / "run.jsonl")
    assert not recording.ended_early
    last_told = int((tmp_path / "told").read_text().split()[-1])
    per_step: dict[int, int] = {}
    for row in lines(tmp_path / "run.jsonl"):
        per_step[row["step"]] = per_step.get(row["step"], 0) + 1
    assert {step: per_step.get(step) for step in range(last_told + 1)} == dict.fromkeys(
        range(last_told + 1), 3
    )


# a full disk


def run_on_small_disk(tmp_path: Path, code: str, size: str, **variables: str) -> Path:
    """Run a program with a disk of `size` as its folder `disk`; return a copy of the folder."""
    script, disk, copy = tmp_path / "program.py", tmp_path / "disk", tmp_path / "copy"
    script.write_text(code)
    disk.mkdir()
    command = (
        f"mount -t tmpfs -o size={size} tmpfs {shlex.quote(str(disk))} && "
        f"{shlex.quote(sys.executable)} program.py; cp -r disk copy"
    )
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", command],
        env=environment(tmp_path, OTEL_TORCH_JSONL=str(disk / "run.jsonl"), **variables),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    (tmp_path / "stderr").write_text(done.stderr)
    return copy


FILLS_THE_DISK = "run(4000); print('ran to its end', file=sys.stderr)"


@pytest.mark.parametrize("size", ["300k", "48k"])
@pytest.mark.parametrize(
    "filled", ["by the recording", "by somebody else", "and the run is killed"]
)
def test_the_metadata_of_a_full_disk_says_the_end_and_the_loss(
    tmp_path: Path, filled: str, size: str
) -> None:
    code = FILLS_THE_DISK
    if filled == "by somebody else":
        fill = (
            "with open('disk/other', 'wb', buffering=0) as f:\n    while f.write(bytes(4096)): pass"
        )
        code = f"run(10)\ntry:\n    exec({fill!r})\nexcept OSError: pass\n{FILLS_THE_DISK}"
    elif filled == "and the run is killed":
        code = f"{FILLS_THE_DISK}; os.kill(os.getpid(), signal.SIGKILL)"
    copy = run_on_small_disk(tmp_path, MODEL + code, size)
    stderr = (tmp_path / "stderr").read_text()
    assert "the recording ends here, the disk is full" in stderr
    assert "ran to its end" in stderr and "Traceback" not in stderr
    written, meta = lines(copy / "run.jsonl"), metadata(copy / "run.jsonl")
    assert meta["writing_ended"] == "disk"
    assert meta["ended_cleanly"] is (filled != "and the run is killed")
    assert (meta["end"] is None) is (filled == "and the run is killed")
    assert meta["records_written"] == len(written) > 0
    if filled != "and the run is killed":
        lost = {entry["reason"]: entry["count"] for entry in meta["lost"]}
        assert lost["disk"] == (4000 + 10 * (filled == "by somebody else")) * 3 - len(written)
    assert {path.name for path in copy.iterdir()} - {"other"} == {"run.jsonl", "run.meta.json"}


# a shared folder


def plant(folder: Path, *names: str) -> Path:
    """Plant links of these names to a file of somebody; return the file."""
    target = folder / "precious"
    target.write_text("precious")
    for name in names:
        (folder / name).symlink_to(target)
    return target


def test_nothing_is_written_through_a_planted_link(tmp_path: Path) -> None:
    """Links stand where the program's process id would let its files be guessed."""
    code = f"""
        pid = os.getpid()
        for pattern in (".run.meta.json.{{}}", "run.pid{{}}.jsonl", "run.pid{{}}.meta.json"):
            os.symlink({str(tmp_path / "precious")!r}, {str(tmp_path)!r} + "/" + pattern.format(pid))
        run(2)
    """
    precious = plant(tmp_path, "run.jsonl", "run.meta.json", "run.1.jsonl", "run.1.meta.json")
    run_python(tmp_path, model_and(code))
    assert precious.read_text() == "precious"
    assert len(lines(tmp_path / "run.jsonl")) == 6 and not (tmp_path / "run.jsonl").is_symlink()
    assert (tmp_path / "run.2.jsonl").is_symlink()  # what stood there was renamed as any file


def test_tensors_go_into_no_folder_that_was_there(tmp_path: Path) -> None:
    elsewhere, tensors = tmp_path / "elsewhere", tmp_path / "tensors"
    elsewhere.mkdir(), tensors.mkdir()
    (tensors / "mine.rank0").symlink_to(elsewhere)
    code = f"""
        os.symlink({str(elsewhere)!r}, f"{tensors}/mine.rank0.pid{{os.getpid()}}")
        run(2)
    """
    run_python(tmp_path, model_and(code), OTEL_TORCH_TENSORS=str(tensors), OTEL_TORCH_RUN_ID="mine")
    assert list(elsewhere.iterdir()) == []
    (made,) = [path for path in tensors.iterdir() if not path.is_symlink()]
    assert re.fullmatch(r"mine\.rank0\.pid\d+\.1", made.name)
    assert len(list(made.iterdir())) == 2


def test_a_folder_that_is_another_users_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    path = tmp_path / "link" / "run.jsonl"
    _, descriptor = claim_path(path, this_job(), "{}\n")
    os.close(descriptor)
    if os.geteuid() == 0:
        os.lchown(tmp_path / "link", 12345, 12345)
        with pytest.raises(OSError, match="link of another user") as raised:
            claim_path(path, this_job(), "{}\n")
        assert raised.value.errno == errno.ELOOP


def test_a_pipe_in_place_of_the_metadata_keeps_nobody_waiting(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    os.mkfifo(metadata_path(path))
    claimed, descriptor = claim_path(path, this_job(), "{}\n")
    os.close(descriptor)
    assert claimed == path and json.loads(metadata_path(path).read_text()) == {}


def test_a_lock_that_is_never_released_keeps_nobody_waiting(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    path, descriptor = claim_path(tmp_path / "run.jsonl", this_job(), "{}\n")
    assert replace_metadata(path, descriptor, '{"a": 1}\n') == path
    assert json.loads(metadata_path(path).read_text()) == {"a": 1}
    os.close(descriptor), os.close(folder)
