"""`otel-torch watch` follows a recording while it is written."""

from __future__ import annotations

import json
import math
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from otel_torch.cli import watch
from otel_torch.cli.main import main
from otel_torch.recording import growing_file
from otel_torch.recording.growing_file import GrowingFile
from otel_torch.show import live, live_ranks
from otel_torch.show import watched as watched_module
from otel_torch.show.live import LiveRun
from otel_torch.show.live_view import brief_lines, view_json, view_lines
from otel_torch.show.watched import WatchedRecording
from tests.interpreters import command_of_tests
from tests.support import environment, in_terminal, run_command, run_python

HOSTILE = "block\x1b[2J"
TRAIN = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(6):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""


def line(module: str = "block", step: int = 0, **fields: Any) -> bytes:
    row = {"module": module, "tensor": "out", "step": step, "call": 0, "loop": 0, "model": "Net"}
    return json.dumps(row | {"phase": "forward", "abs_mean": 1.0} | fields).encode()


def loss(step: int, value: float | str, **fields: Any) -> bytes:
    return line("", step, tensor="loss", phase="train", mean=value, **fields)


def folded(*lines: bytes) -> LiveRun:
    run = LiveRun()
    run.add_lines(list(lines))
    return run


def watched(*lines: bytes, state: str = "running", **metadata: Any) -> WatchedRecording:
    recording = WatchedRecording(Path("run.jsonl"), print)
    recording.run, recording.state, recording.metadata = folded(*lines), state, metadata
    return recording


@contextmanager
def watching(*words: str | Path) -> Iterator[subprocess.Popen[str]]:
    command = [command_of_tests("otel-torch"), "watch", "--interval", "0.02", *map(str, words)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(
    process: subprocess.Popen[str], is_wanted: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """Return the first JSON object that is wanted."""
    assert process.stdout is not None
    for text in process.stdout:
        view: dict[str, Any] = json.loads(text)
        if is_wanted(view):
            return view
    raise AssertionError(process.stderr and process.stderr.read())


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


# -- following a file


def test_a_growing_recording_is_followed_until_its_run_ends(tmp_path: Path) -> None:
    path, metadata = tmp_path / "run.jsonl", tmp_path / "run.meta.json"
    with watching("--json", path) as process:
        assert read_until(process, lambda view: view["state"] == "waiting for it")["records"] == 0
        metadata.write_text(json.dumps({"ended_cleanly": False}))
        append(path, line(step=0) + b"\n" + loss(0, 2.0) + b"\n")
        view = read_until(process, lambda view: view["records"] == 2)
        assert view["state"] == "running" and view["training"] == {"Net": {"loss": 2.0}}

        half = loss(1, 1.5) + b"\n"
        append(path, half[:20])
        append(path, half[20:] + b"{damaged\n" + line(step=2, nonfinite=3) + b"\n")
        view = read_until(process, lambda view: view["records"] == 4)
        assert view["training"] == {"Net": {"loss": 1.5}} and view["damaged"] == 1
        assert view["step"] == {"loop": 0, "number": 2}
        first = "Net block out, loop 0, step 2, call 0"
        assert view["nonfinite"] == {"records": 1, "first": first, "most_in": "Net block out"}

        metadata.write_text(json.dumps({"ended_cleanly": True}))
        assert read_until(process, lambda view: view["state"] == "ended")["records"] == 4
        assert process.wait(60) == 0


def test_a_new_run_of_the_same_name_is_followed_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    append(path, b"".join(line(step=step) + b"\n" for step in range(9)))
    with watching("--json", path) as process:
        read_until(process, lambda view: view["records"] == 9)
        new = tmp_path / "new.jsonl"
        append(new, line(step=0) + b"\n")
        new.replace(path)
        view = read_until(process, lambda view: view["records"] == 1)
        assert view["step"] == {"loop": 0, "number": 0}
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert "begins anew: another run has taken its name" in process.stderr.read()


def test_a_file_that_is_cut_short_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"first\nsecond\nthi")
    file = GrowingFile(path)
    assert file.read() == [b"first", b"second"] and file.read() == []
    append(path, b"rd\n")
    assert file.read() == [b"third"] and file.starts == 1
    path.write_bytes(b"new\n")
    assert file.read() == [b"new"] and file.starts == 2


@pytest.mark.parametrize("new", [b"", b"b\n", b"quite different lines\n" * 9])
def test_a_file_that_was_rewritten_is_read_again(tmp_path: Path, new: bytes) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"first\nsecond\n")
    file = GrowingFile(path)
    file.read()
    path.write_bytes(new)
    assert (file.read(), file.starts) == (new.split(b"\n")[:-1], 2)
    file.close()


def test_a_line_that_its_writer_takes_back_was_never_read(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"first\nhal")
    file = GrowingFile(path)
    assert file.read() == [b"first"] and file.read_unfinished_line() == b"hal"
    os.truncate(path, len(b"first\n"))
    append(path, b"second\n")
    assert (file.read(), file.starts) == ([b"second"], 1)
    file.close()


def test_a_replaced_file_is_read_to_its_end_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"one\n")
    file = GrowingFile(path)
    file.read()
    with path.open("ab") as writer:
        path.rename(tmp_path / "run.1.jsonl")
        assert file.read() == []  # there is no other file yet
        path.write_bytes(b"new\n")
        writer.write(b"two\n")
    assert (file.read(), file.starts) == ([b"two"], 1)
    assert (file.read(), file.starts) == ([b"new"], 2)
    file.close()


def test_of_a_line_without_an_end_little_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growing_file, "BLOCK_BYTES", 100)
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"x" * 1000)
    file = GrowingFile(path)
    assert file.read() == [b"x" * 64] and file.read() == [] and file.position == 1000
    append(path, b"x\nnext\n")
    assert file.read() == [b"next"] and file.read() == []
    file.close()


def test_a_run_that_was_killed_is_over(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    path = tmp_path / "run.jsonl"
    append(path, line() + b"\n")
    os.utime(path, (1, 1))  # so long ago that it is no run in another container
    owner = {"ended_cleanly": False, "pid": ended.pid, "host": os.uname().nodename}
    (tmp_path / "run.meta.json").write_text(json.dumps(owner))
    with watching("--json", path) as process:
        assert read_until(process, lambda view: view["state"] == "killed")["records"] == 1
        assert process.wait(60) == 0


# -- what is said


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("watched")
    run_python(folder, TRAIN)
    return folder / "run.jsonl"


def test_a_pipe_gets_a_line(trained: Path) -> None:
    with watching(trained) as process:
        (text,) = process.communicate(timeout=60)[0].splitlines()
    assert text.startswith("ended: ") and "step 5, " in text and "loss " in text


def test_a_terminal_gets_a_view_that_fits_it(trained: Path) -> None:
    shown = in_terminal(60, 12, "watch", str(trained))
    own_screen = next(i for i, text in enumerate(shown) if "\x1b[?1049l" in text)
    assert "\x1b[?25h" in shown[own_screen]
    drawn, last = shown[:own_screen], shown[own_screen:]
    assert len(drawn) <= 12
    assert all(len(text) <= 60 for text in last[1:])
    assert any(text.startswith("loss ") for text in last)


def test_names_cannot_control_the_terminal() -> None:
    recording = watched(
        line(HOSTILE, 0, abs_mean=1.0), line(HOSTILE, 1, abs_mean=1.0),
        line(HOSTILE, 2, abs_mean=9.0, nonfinite=1, model=HOSTILE),
        line("", 2, tensor=f"lr[{HOSTILE}]", phase="train", mean=0.1, model=HOSTILE),
    )  # fmt: skip
    recording.path = Path(HOSTILE)
    lines = view_lines(recording, width=80, color=False)
    assert not any("\x1b" in text for text in [*lines, *brief_lines(recording)])


def test_losses_of_a_step_are_their_mean_and_a_nan_is_drawn() -> None:
    recording = watched(loss(0, 1.0), loss(0, 3.0, call=1), loss(1, 1.0), loss(2, "NaN"))
    health = recording.run.training["Net"]
    assert list(health.losses)[:2] == [2.0, 1.0] and math.isnan(health.values["loss"])
    text = next(
        text for text in view_lines(recording, width=80, color=False) if text.startswith("loss")
    )
    assert text.endswith("█▁!") and "nan" in text


def test_the_tensor_that_changes_most_comes_first() -> None:
    sizes = {"steady": (1, 1, 1, 1.1), "grows": (1, 1, 1, 50), "vanishes": (1, 1, 1, 0.001)}
    rows = [
        line(module, step, abs_mean=values[step])
        for step in range(4)
        for module, values in sizes.items()
    ]
    changes = folded(*rows).largest_changes(2)
    assert [(change.where, round(change.ratio, 4)) for change in changes] == [
        ("Net vanishes out", 0.001),
        ("Net grows out", 50),
    ]


def test_nonfinite_values_are_found_without_a_count_and_in_the_loss() -> None:
    recording = watched(
        line("counted", nonfinite=1), line("b", 1, abs_mean="NaN"), line("b", 2, abs_mean="Infinity"),
        b'{"module": "bare", "tensor": "out", "step": 2, "model": "Net", "abs_mean": NaN}',
        line("failed", abs_mean="<error: no>", nonfinite="<error: no>"),
        line("", 2, tensor="grad_norm", phase="train", mean="Infinity"),  # the scaler may skip it
        loss(3, "NaN"),
    )  # fmt: skip
    run = recording.run
    assert run.nonfinite == 5 and run.worst_tensor() == ("Net b out", 2)
    assert run.first_nonfinite.startswith("Net counted out")
    shown = view_lines(recording, width=80, color=False)
    assert "most of them in Net b out: 2" in shown


def test_damaged_lines_are_counted_and_the_first_one_is_named() -> None:
    recording = watched(line(), b"{broken", b"", line(), b'{"module": 3}')
    run = recording.run
    assert (run.records, run.damaged, run.first_damage) == (2, 2, "line 2 is not JSON")
    (text,) = brief_lines(recording)
    assert text.endswith("2 damaged lines left out, the first: line 2 is not JSON")


def test_tensors_beyond_the_limit_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_MAX_TENSORS", 2)
    recording = watched(*(line(name, nonfinite=1) for name in "abcd"))
    assert (recording.run.unfollowed, recording.run.nonfinite) == (2, 4)
    shown = view_lines(recording, width=80, color=False)
    assert "changes not seen: 2 records of too many tensors" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--interval", "0"], "--interval 0: give 0.01 to 3600 seconds"),
        (["--once", "FOLDER"], "holds no recording (*.jsonl)"),
        (["/dev/zero"], "is a device and holds no records"),
        (["run.meta.json"], "is the metadata of a recording; give run.jsonl"),
        (["NOTES"], "notes.jsonl: line 1 is not JSON"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(line())
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "notes.jsonl").write_text("not a recording\n")
    (tmp_path / "empty").mkdir()
    places = {"FOLDER": str(tmp_path / "empty"), "NOTES": str(notes / "notes.jsonl")}
    words = [places.get(word, word) for word in words]
    words = words if "--interval" not in words else [*words, str(tmp_path / "a.jsonl")]
    done = run_command("watch", *words)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1


def test_once_shows_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(line() + b"\n" + line(step=3) + b"\n")
    assert main(["watch", str(path), "--once"]) == 0
    assert capsys.readouterr().out.startswith("running: 2 records, step 3")
    assert main(["watch", str(path), "--once", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["records"] == 2
    assert main(["watch", str(tmp_path / "missing.jsonl"), "--once"]) == 2
    assert "missing.jsonl: does not exist" in capsys.readouterr().err


def test_a_long_recording_is_shown_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (growing_file, watched_module):
        monkeypatch.setattr(module, "BLOCK_BYTES", 1000)
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"".join(line(step=step) + b"\n" for step in range(100)))
    (tmp_path / "run.meta.json").write_text(json.dumps({"ended_cleanly": True}))
    follower = watch._View(path, as_json=False, is_terminal=False, screen=None)
    assert not follower.look(-1)  # as if a block took longer than an interval
    follower.print_last()
    assert "8% read: 8 records" in capsys.readouterr().out
    assert follower.look(600)
    follower.print_last()
    assert "ended: 100 records" in capsys.readouterr().out


def test_the_slowest_regions_are_those_of_the_metadata() -> None:
    regions = {"fast": {"count": 2, "host_total_s": 3.0, "host_longest_s": 2.0}}
    regions["slow"] = {"count": 1, "host_total_s": 9.0, "host_longest_s": 9.0}
    regions[HOSTILE] = {"count": 1, "host_total_s": 1.0}
    recording = watched(line(), regions=regions)
    lines = view_lines(recording, width=80, color=False)
    assert lines[-3].split() == ["slow", "1", "9", "9"] and lines[-2].split()[0] == "fast"
    assert "\x1b" not in "".join(lines)
    shown = view_json(recording)
    assert list(shown["regions"])[:2] == ["slow", "fast"]


# -- a folder of ranks


def write_rank(folder: Path, rank: int, *lines: bytes, **fields: Any) -> Path:
    path = folder / f"run.rank{rank}.jsonl"
    append(path, b"".join(each + b"\n" for each in lines))
    metadata = {"run_id": "a", "rank": rank, "start": "2026-01-01T00:00:00"} | fields
    (folder / f"run.rank{rank}.meta.json").write_text(json.dumps(metadata))
    return path


def test_every_rank_has_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rank(tmp_path, 10, loss(7, 0.5), ended_cleanly=True)
    write_rank(tmp_path, 2, loss(6, 0.25), line("bad", 6, nonfinite=1), ended_cleanly=False)
    (tmp_path / "run.rank2.1.jsonl").write_bytes(line() + b"\n")  # of an earlier run
    assert main(["watch", str(tmp_path), "--once"]) == 0
    second, tenth = capsys.readouterr().out.splitlines()
    assert second.startswith("rank 2: running: 2 records, step 6, loss 0.25, 1 with NaN or Inf")
    assert tenth == "rank 10: ended: 1 record, step 7, loss 0.5"
    assert main(["watch", str(tmp_path), "--once", "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert [(each["rank"], each["records"]) for each in ranks] == [(2, 2), (10, 1)]

    folder = watched_module.WatchedFolder(tmp_path, print)
    folder.look(60)
    heading, trouble, _, header, *cells = live_ranks.view_lines(folder, width=100, color=False)
    assert heading == f"{tmp_path}: 1 running, 1 ended"[:100] or heading.endswith("…")
    assert trouble.startswith("rank 2: the first NaN or Inf: Net bad out, loop 0, step 6")
    assert header.split()[:3] == ["rank", "state", "step"]
    assert [each.split()[:4] for each in cells] == [
        ["rank", "2", "running", "6"],
        ["rank", "10", "ended", "7"],
    ]


def test_the_run_that_began_last_is_watched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rank(tmp_path, 0, line(), ended_cleanly=False)
    folder = watched_module.WatchedFolder(tmp_path, print)
    folder.look(60)
    assert [rank.path.name for rank in folder.ranks] == ["run.rank0.jsonl"]
    write_rank(tmp_path, 1, line(), run_id="b", start="2026-01-01T00:01:00", ended_cleanly=False)
    folder.look(60)
    assert [rank.path.name for rank in folder.ranks] == ["run.rank1.jsonl"]
    assert "the run b has begun and is shown from now on" in capsys.readouterr().out
    assert not folder.is_over
    write_rank(tmp_path, 1, run_id="b", start="2026-01-01T00:01:00", ended_cleanly=True)
    folder.look(60)
    assert folder.is_over


def test_a_folder_that_is_yet_to_come_is_followed_until_all_ranks_have_ended(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "ranks"
    with watching("--json", folder) as process:
        assert read_until(process, lambda view: view["state"] == "waiting for it")
        folder.mkdir()
        assert read_until(process, lambda view: view.get("ranks") == [])
        write_rank(folder, 0, line(), ended_cleanly=False)
        write_rank(folder, 1, line(), ended_cleanly=True)
        view = read_until(process, lambda view: len(view["ranks"]) == 2)
        write_rank(folder, 0, line(step=1), ended_cleanly=True)
        view = read_until(process, lambda view: {r["state"] for r in view["ranks"]} == {"ended"})
        assert [rank["records"] for rank in view["ranks"]] == [2, 1]
        assert process.wait(60) == 0


# -- in a terminal


# makes the terminal of its output that of its session, so that Ctrl-C and a resize arrive
IN_SESSION = (
    "import fcntl, sys, termios; fcntl.ioctl(1, termios.TIOCSCTTY, 0)\n"
    "from otel_torch.cli.main import main; sys.exit(main())"
)


class Terminal:
    """A watch in a terminal of its own: what it draws, and what is typed."""

    def __init__(self, tmp_path: Path, *words: str, **variables: str) -> None:
        self._leader, follower = pty.openpty()
        self.resize(80, 24)
        environ = environment(tmp_path, OTEL_TORCH_ENABLED="0", TERM="xterm", **variables)
        for name in ("COLUMNS", "LINES"):
            environ.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", IN_SESSION, "watch", "run.jsonl", *words],
            cwd=tmp_path,
            env=environ,
            stdin=follower,
            stdout=follower,
            stderr=follower,
            start_new_session=True,
        )
        os.close(follower)
        self._drawn = b""

    def resize(self, columns: int, lines: int) -> None:
        termios.tcsetwinsize(self._leader, (lines, columns))

    def type(self, text: bytes) -> None:
        os.write(self._leader, text)

    def until(self, text: bytes) -> bytes:
        """Return what was drawn up to a text."""
        while text not in self._drawn:
            self._drawn += os.read(self._leader, 65536)
        drawn, self._drawn = self._drawn.split(text, 1)
        return drawn + text

    def rest(self) -> tuple[bytes, int]:
        """Return what is drawn until the end, and the exit status."""
        try:
            while piece := os.read(self._leader, 65536):
                self._drawn += piece
        except OSError:
            pass  # the program has ended
        os.close(self._leader)
        return self._drawn, self.process.wait(60)


OPENS, LEAVES = b"\x1b[?1049h\x1b[?25l", b"\x1b[?25h\x1b[?1049l"


def test_a_terminal_is_drawn_over_resized_and_left_as_it_was(tmp_path: Path) -> None:
    rows = [line(f"l.{n}", step, abs_mean=3.0**step) for step in range(6) for n in range(30)]
    (tmp_path / "run.jsonl").write_bytes(b"\n".join([*rows, line(step=5, nonfinite=1), b""]))
    terminal = Terminal(tmp_path, "--interval", "600")
    drawn = terminal.until(b"\x1b[J")
    assert drawn.startswith(OPENS) and b"largest changes" in drawn
    assert b"\x1b[31m1 record with NaN or Inf, the first: Net block out" in drawn
    terminal.resize(40, 4)  # an interval is ten minutes: only the resize can wake it
    drawn = terminal.until(b"\x1b[J")
    assert drawn.count(b"\r\n") == 2 and b"largest changes" not in drawn
    terminal.type(b"\x03")
    rest, status = terminal.rest()
    _, after = rest.split(LEAVES)
    assert status == 0 and b"1 record with" in after and b"\x1b[H" not in after


def test_a_terminal_without_colors_says_that_the_file_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    terminal = Terminal(tmp_path, "--interval", "0.02", NO_COLOR="1")
    terminal.until(b"run.jsonl: waiting for it")
    path.write_bytes(line(step=7, nonfinite=1) + b"\n")
    terminal.until(b"step 7")
    path.write_bytes(loss(3, "NaN") + b"\n")
    assert b"\x1b[3" not in terminal.until(b"begins anew: another run has taken its name")
    (tmp_path / "run.meta.json").write_text(json.dumps({"ended_cleanly": True}))
    rest, status = terminal.rest()
    assert status == 0 and b"run.jsonl: ended" in rest.split(LEAVES)[1]


def test_a_terminated_watch_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_bytes(line() + b"\n")
    terminal = Terminal(tmp_path, "--interval", "600")
    terminal.until(b"\x1b[J")
    terminal.process.terminate()
    rest, status = terminal.rest()
    assert rest.endswith(LEAVES) and status == 128 + signal.SIGTERM


def test_a_file_that_turns_out_to_be_none_leaves_the_terminal_too(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, "--interval", "0.02")
    terminal.until(b"waiting for it")
    (tmp_path / "run.jsonl").write_text("notes\n")
    rest, status = terminal.rest()
    assert status == 2 and b"line 1 is not JSON" in rest.split(LEAVES)[1]
