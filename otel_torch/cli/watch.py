"""`otel-torch watch`: follows a recording while its run is under way."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from otel_torch.process.console import say
from otel_torch.recording.growing_file import GrowingFile
from otel_torch.recording.input_file import NotReadable
from otel_torch.recording.metadata import read_metadata
from otel_torch.rendering.table import supports_color, terminal_size, write_line
from otel_torch.show.live import LiveRun
from otel_torch.show.live_view import brief_line, view_json, view_lines

# the pace is that of the last so many intervals
_PACE_INTERVALS = 20
# a process that is gone while its last lines are not seen yet: look again after so many intervals
_SILENT_INTERVALS = 3
_OTHER_SCREEN, _OWN_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
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
    terminal = None if arguments.json else terminal_size(sys.stdout)
    watch = _Watch(path, as_json=arguments.json, is_terminal=terminal is not None)
    try:
        with _screen(terminal is not None):
            while not watch.look():
                time.sleep(arguments.interval)
    except KeyboardInterrupt:
        pass
    except NotReadable as error:
        say(str(error))
        return 2
    watch.print_last()
    return 0


class _Watch:
    """Looks at a recording again and again, and prints what it sees."""

    def __init__(self, path: Path, *, as_json: bool, is_terminal: bool) -> None:
        self._file, self._run = GrowingFile(path), LiveRun()
        self._as_json, self._is_terminal = as_json, is_terminal
        self._state, self._starts, self._silent = _WAITING, 0, 0
        # when the recording was looked at, and the steps until then
        self._looks: deque[tuple[float, int]] = deque(maxlen=_PACE_INTERVALS)
        if not path.exists() and not is_terminal:
            say(f"{path}: does not exist yet; waiting for it")

    def look(self) -> bool:
        """Read what was appended and print the state; return whether the run is over."""
        metadata = read_metadata(self._file.path)  # first, or lines before its end could be missed
        has_grown = self._read()
        self._silent = 0 if has_grown else self._silent + 1
        if self._starts:
            self._state = self._describe(metadata)
        is_over = self._state in (_ENDED, _KILLED)
        if self._is_terminal or not is_over:
            self._print()
        return is_over

    def print_last(self) -> None:
        """Print the last state, for good."""
        self._print(is_last=True)

    def _read(self) -> bool:
        """Add all lines that were appended; return whether there were any."""
        has_grown = False
        while lines := self._file.read():
            if self._file.starts != self._starts:
                if self._starts and not self._is_terminal:
                    say(f"{self._file.path}: begins anew: another run has taken its name")
                self._starts, self._run = self._file.starts, LiveRun()
                self._looks.clear()
            self._run.add_lines(lines)
            has_grown = True
        self._looks.append((time.monotonic(), self._run.steps))
        return has_grown

    def _describe(self, metadata: dict[str, object]) -> str:
        if metadata.get("ended_cleanly"):
            return _ENDED
        pid, is_here = metadata.get("pid"), metadata.get("host") == socket.gethostname()
        if is_here and isinstance(pid, int) and self._silent >= _SILENT_INTERVALS:
            return _RUNNING if _exists(pid) else _KILLED
        return _RUNNING

    def _pace(self) -> float | None:
        """Return the steps a second of the last looks."""
        if len(self._looks) < 2:
            return None
        (since, before), (now, steps) = self._looks[0], self._looks[-1]
        return (steps - before) / (now - since) if now > since else None

    def _print(self, *, is_last: bool = False) -> None:
        name, pace = str(self._file.path), self._pace()
        if self._as_json:
            view = view_json(self._run, name, pace, self._state)
            write_line(sys.stdout, json.dumps(view, allow_nan=False))
        elif not self._is_terminal:
            write_line(sys.stdout, f"{self._state}: {brief_line(self._run, pace)}")
        else:
            columns, rows = shutil.get_terminal_size()
            color = supports_color(sys.stdout)
            lines = view_lines(self._run, name, pace, self._state, width=columns, color=color)
            if is_last:
                write_line(sys.stdout, "\n".join(lines))
            else:
                drawn = "".join(f"{line}{_CLEAR_LINE}\n" for line in lines[: rows - 2])
                write_line(sys.stdout, f"{_HOME}{drawn}{_CLEAR_BELOW}")
        sys.stdout.flush()


@contextmanager
def _screen(is_terminal: bool) -> Iterator[None]:
    """Draw on a screen of its own, and give the terminal back as it was, also after SIGTERM."""
    if not is_terminal:
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.stdout.write(_OTHER_SCREEN)
    try:
        yield
    finally:
        sys.stdout.write(_OWN_SCREEN)
        sys.stdout.flush()
        signal.signal(signal.SIGTERM, before)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # of another user
    return True
