"""The recordings that are watched: a file, or those of all ranks of a run in a folder."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from otel_torch.recording.file_kinds import EMPTY, RECORDING, refusal
from otel_torch.recording.growing_file import BLOCK_BYTES, GrowingFile
from otel_torch.recording.input_file import is_compressed
from otel_torch.recording.metadata import metadata_path, read_metadata
from otel_torch.recording.reader import RecordingError
from otel_torch.recording.recordings_folder import recordings_in
from otel_torch.show.live import LiveRun

Notify = Callable[[str], None]

WAITING, RUNNING, ENDED, KILLED = "waiting for it", "running", "ended", "killed"
# the pace is that of the last so many intervals
_PACE_INTERVALS = 20
# a process that is not to be seen is gone if it has not written for so many seconds
_SILENT_S = 60.0


class WatchedRecording:
    """A recording that is looked at again and again.

    Args:
        notify: Called with one line where another run takes the file's name.

    Attributes:
        run: What was read.
        metadata: The newest; {} without any.
        state: What the run is doing, in words.
        note: What has happened to the file; "" without anything.
    """

    def __init__(self, path: Path, notify: Notify) -> None:
        self.path, self.run = path, LiveRun()
        self.metadata: dict[str, Any] = {}
        self.state, self.note = WAITING, ""
        self._file, self._notify, self._starts = GrowingFile(path), notify, 0
        self._metadata_version: object = None
        self._was_seen_running = False
        # when the recording was looked at, and the steps until then
        self._looks: deque[tuple[float, int]] = deque(maxlen=_PACE_INTERVALS)

    @property
    def is_over(self) -> bool:
        """Whether the run has ended and all of it was read."""
        return self.state in (ENDED, KILLED)

    @property
    def is_behind(self) -> bool:
        """Whether at least a block was written that is not read yet."""
        return self._file.size - self._file.position > BLOCK_BYTES

    @property
    def pace(self) -> float | None:
        """The steps a second of the last looks."""
        if len(self._looks) < 2:
            return None
        (since, before), (now, steps) = self._looks[0], self._looks[-1]
        return (steps - before) / (now - since) if now > since else None

    def look(self, seconds: float) -> None:
        """Read what was appended, for so many seconds at most.

        Raises:
            RecordingError: The file does not begin with a record.
        """
        was_over = self.is_over
        self.read_metadata()  # first, or lines before the end of the run could be missed
        is_done = self._read(time.monotonic() + seconds)
        if self._starts:
            self.state = self._describe(is_done)
        if self.is_over and not was_over:
            rest = self._file.read_unfinished_line()
            self._add([rest] if rest else [])

    def read_metadata(self) -> None:
        try:
            status = os.stat(metadata_path(self.path))
        except OSError:
            self.metadata, self._metadata_version = {}, None
            return
        version = (status.st_ino, status.st_mtime_ns, status.st_size)
        if version != self._metadata_version:
            self.metadata, self._metadata_version = read_metadata(self.path), version

    def _read(self, deadline: float) -> bool:
        """Add the lines that were appended; return whether those are all."""
        while lines := self._file.read():
            if self._file.starts != self._starts:
                self._begin()
            self._add(lines)
            if time.monotonic() > deadline:
                self._looks.clear()  # this pace is the reader's
                return False
        if self._file.size and not self._file.position:
            self._refuse_other_kinds()
        self._looks.append((time.monotonic(), self.run.steps))
        return True

    def _begin(self) -> None:
        """Forget an earlier run."""
        if self._starts:
            self.note = "begins anew: another run has taken its name"
            self._notify(f"{self.path}: {self.note}")
        self._starts, self.run = self._file.starts, LiveRun()
        self._was_seen_running = False
        self._looks.clear()

    def _add(self, lines: list[bytes]) -> None:
        self.run.add_lines(lines)
        if self.run.damaged and not self.run.records:
            self._refuse_other_kinds()
            raise RecordingError(f"{self.path}: {self.run.first_damage}")

    def _refuse_other_kinds(self) -> None:
        """Raise RecordingError for a file that is no recording, which may never get a line."""
        if is_compressed(self.path):
            raise RecordingError(
                f"{self.path}: is compressed, so that it does not grow; `otel-torch show` reads it"
            )
        if line := refusal(self.path, RECORDING, EMPTY):
            raise RecordingError(line)

    def _describe(self, is_done: bool) -> str:
        if self.is_behind:
            return f"{self._file.position / self._file.size:.0%} read"
        if not is_done:
            return RUNNING
        if self.metadata.get("ended_cleanly"):
            return ENDED
        return KILLED if self._is_gone() else RUNNING

    def _is_gone(self) -> bool:
        """Return whether the run's process is no longer on this host.

        One that was never seen may run in a container that has the name of this host.
        """
        pid = self.metadata.get("pid")
        if not pid or self.metadata.get("host") != socket.gethostname():
            return False
        if _exists(pid):
            self._was_seen_running = True
            return False
        return self._was_seen_running or self._file.silent_s > _SILENT_S


class WatchedFolder:
    """The recordings of all ranks of the run in a folder that began last.

    Args:
        notify: Called with one line where another run begins.

    Attributes:
        ranks: In order; more of them while the run starts.
    """

    def __init__(self, path: Path, notify: Notify) -> None:
        self.path = path
        self.ranks: list[WatchedRecording] = []
        self._notify = notify
        self._run_id: str | None = None
        self._known: dict[Path, WatchedRecording] = {}

    @property
    def is_over(self) -> bool:
        """Whether the run has ended on all ranks."""
        return bool(self.ranks) and all(rank.is_over for rank in self.ranks)

    @property
    def is_behind(self) -> bool:
        """Whether at least a block of a rank was written that is not read yet."""
        return any(rank.is_behind for rank in self.ranks)

    def look(self, seconds: float) -> None:
        """Read what all ranks have appended, for so many seconds at most.

        Raises:
            RecordingError: A file does not begin with a record.
        """
        self._find_ranks()
        for rank in self.ranks:
            rank.look(seconds / len(self.ranks))

    def _find_ranks(self) -> None:
        for path in recordings_in(self.path):
            if path not in self._known and path.suffix != ".gz":
                self._known[path] = WatchedRecording(path, self._notify)
        found = list(self._known.values())
        for recording in found:
            recording.read_metadata()
        newest = max(found, key=lambda each: each.metadata.get("start", ""), default=None)
        if newest is None:
            return
        run_id = newest.metadata.get("run_id")
        if self._run_id not in (None, run_id):
            self._notify(f"{self.path}: the run {run_id} has begun and is shown from now on")
        self._run_id = run_id
        ranks = [each for each in found if each.metadata.get("run_id") == run_id]
        self.ranks = sorted(ranks, key=lambda each: (each.metadata.get("rank", 0), each.path))


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # of another user
    return True
