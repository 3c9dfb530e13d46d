"""`otel-torch watch`: follows a recording while its run is under way."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import sys
import time
from collections import deque
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from otel_torch.process.console import say
from otel_torch.recording.growing_file import BLOCK_BYTES, GrowingFile
from otel_torch.recording.input_file import NotReadable
from otel_torch.recording.metadata import METADATA_SUFFIX, metadata_path, read_metadata
from otel_torch.recording.reader import RecordingError
from otel_torch.rendering.live_screen import LiveScreen
from otel_torch.rendering.table import supports_color, terminal_size, write_line
from otel_torch.show.live import LiveRun
from otel_torch.show.live_view import brief_line, view_json, view_lines

# the pace is that of the last so many intervals
_PACE_INTERVALS = 20
# a process that is not to be seen is gone if it has not written for so many seconds
_SILENT_S = 60.0
_WAITING, _RUNNING, _ENDED, _KILLED = "waiting for it", "running", "ended", "killed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `otel-torch watch`."""
    parser.add_argument(
        "recording", metavar="RECORDING", help="a recording (.jsonl), also one that is yet to come"
    )
    parser.add_argument(
        "--interval",
        metavar="SECONDS",
        type=float,
        default=1.0,
        help="how often to look (default: 1)",
    )
    parser.add_argument(
        "--once", action="store_true", help="show what is there now, and do not wait for more"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object each time instead of the view"
    )


def run(arguments: argparse.Namespace) -> int:
    """Follow the recording until its run ends or Ctrl-C is pressed.

    Returns:
        0, or 2 for bad input, which is reported in one line on stderr.
    """
    path = Path(arguments.recording).expanduser()
    if not 0.01 <= arguments.interval <= 3600:
        say(f"--interval {arguments.interval:g}: give 0.01 to 3600 seconds")
        return 2
    if path.is_dir():
        names = sorted(file.name for file in path.glob("*.jsonl"))
        hint = ", ".join(names[:4]) + (", …" if len(names) > 4 else "") or "it holds none"
        say(f"{path}: is a folder; watch one recording in it: {hint}")
        return 2
    if path.name.endswith(METADATA_SUFFIX):
        recording = str(path).removesuffix(METADATA_SUFFIX) + ".jsonl"
        say(f"{path}: is the metadata of a recording; give {recording}")
        return 2
    if arguments.once and not path.exists():
        say(f"{path}: does not exist")
        return 2
    is_terminal = not arguments.json and terminal_size(sys.stdout) is not None
    has_screen = is_terminal and not arguments.once and os.environ.get("TERM") != "dumb"
    screen = LiveScreen(sys.stdout) if has_screen else None
    watch = _RunFollower(path, as_json=arguments.json, is_terminal=is_terminal, screen=screen)
    try:
        if arguments.once:
            watch.look(float("inf"))
        else:
            with screen or nullcontext():
                watch.follow(arguments.interval)
    except KeyboardInterrupt:
        pass
    except (NotReadable, RecordingError) as error:
        say(str(error))
        return 2
    watch.print_last()
    return 0


class _RunFollower:
    """Looks at a recording again and again, and prints what it sees."""

    def __init__(
        self, path: Path, *, as_json: bool, is_terminal: bool, screen: LiveScreen | None
    ) -> None:
        self._file, self._run = GrowingFile(path), LiveRun()
        self._as_json, self._is_terminal, self._screen = as_json, is_terminal, screen
        self._state, self._starts, self._note = _WAITING, 0, ""
        self._metadata: dict[str, Any] = {}
        self._metadata_version: object = None
        self._was_seen_running = False
        # when the recording was looked at, and the steps until then
        self._looks: deque[tuple[float, int]] = deque(maxlen=_PACE_INTERVALS)
        if not path.exists() and screen is None:
            say(f"{path}: does not exist yet; waiting for it")

    def follow(self, interval: float) -> None:
        """Look and print until the run is over."""
        while not self.look(interval):
            self._print()
            if self._is_behind():
                continue
            if self._screen is not None:
                self._screen.wait(interval)
            else:
                time.sleep(interval)

    def look(self, seconds: float) -> bool:
        """Read what was appended, for so many seconds at most; return whether the run is over.

        Raises:
            RecordingError: The file does not begin with a record.
        """
        self._read_metadata()  # first, or lines before the end of the run could be missed
        is_done = self._read(time.monotonic() + seconds)
        if self._starts:
            self._state = self._describe()
        if not is_done or self._state not in (_ENDED, _KILLED):
            return False
        rest = self._file.read_unfinished_line()
        self._add([rest] if rest else [])
        return True

    def print_last(self) -> None:
        """Print the last state, for good."""
        self._print(is_last=True)

    def _read_metadata(self) -> None:
        """Read the metadata if they have changed."""
        try:
            status = os.stat(metadata_path(self._file.path))
        except OSError:
            self._metadata, self._metadata_version = {}, None
            return
        version = (status.st_ino, status.st_mtime_ns, status.st_size)
        if version != self._metadata_version:
            self._metadata, self._metadata_version = read_metadata(self._file.path), version

    def _read(self, deadline: float) -> bool:
        """Add the lines that were appended; return whether those are all."""
        while lines := self._file.read():
            if self._file.starts != self._starts:
                self._begin()
            self._add(lines)
            if time.monotonic() > deadline:
                self._looks.clear()  # this pace is the reader's
                return False
        self._looks.append((time.monotonic(), self._run.steps))
        return True

    def _begin(self) -> None:
        """Forget an earlier run."""
        if self._starts:
            self._note = "begins anew: another run has taken its name"
            if self._screen is None:
                say(f"{self._file.path}: {self._note}")
        self._starts, self._run = self._file.starts, LiveRun()
        self._was_seen_running = False
        self._looks.clear()

    def _add(self, lines: list[bytes]) -> None:
        self._run.add_lines(lines)
        if self._run.damaged and not self._run.records:
            raise RecordingError(f"{self._file.path}: {self._run.first_damage}")

    def _is_behind(self) -> bool:
        """Return whether at least a block was written that is not read yet."""
        return self._file.size - self._file.position > BLOCK_BYTES

    def _describe(self) -> str:
        if self._is_behind():
            return f"{self._file.position / self._file.size:.0%} read"
        if self._metadata.get("ended_cleanly"):
            return _ENDED
        return _KILLED if self._is_gone() else _RUNNING

    def _is_gone(self) -> bool:
        """Return whether the run's process is no longer on this host.

        One that was never seen may run in a container that has the name of this host.
        """
        pid = self._metadata.get("pid")
        if not pid or self._metadata.get("host") != socket.gethostname():
            return False
        if _exists(pid):
            self._was_seen_running = True
            return False
        return self._was_seen_running or self._file.silent_s > _SILENT_S

    def _pace(self) -> float | None:
        """Return the steps a second of the last looks."""
        if len(self._looks) < 2:
            return None
        (since, before), (now, steps) = self._looks[0], self._looks[-1]
        return (steps - before) / (now - since) if now > since else None

    def _print(self, *, is_last: bool = False) -> None:
        name, pace = str(self._file.path), self._pace()
        if self._as_json:
            view = view_json(self._run, name, pace, self._state, self._metadata)
            write_line(sys.stdout, json.dumps(view, allow_nan=False))
        elif not self._is_terminal:
            write_line(sys.stdout, f"{self._state}: {brief_line(self._run, pace)}")
        else:
            columns, rows = shutil.get_terminal_size()
            color = supports_color(sys.stdout)
            state = f"{self._state}, {self._note}" if self._note else self._state
            lines = view_lines(
                self._run, name, pace, state, self._metadata, width=columns, color=color
            )
            if is_last or self._screen is None:
                write_line(sys.stdout, "\n".join(lines))
            else:
                self._screen.draw(lines[: rows - 1])
        sys.stdout.flush()


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # of another user
    return True
