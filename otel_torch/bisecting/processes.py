"""Runs two commands, each in a process group of its own; nothing but the environment is changed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from otel_torch.bisecting.runs import (
    NothingRecorded,
    ProgramRun,
    RunFailed,
    SideName,
    find_recordings,
)
from otel_torch.process.recorded_child import enable_recording

OUTPUT = "output.txt"
_DONE = "run.json"
# how long a program may take to end after it was asked to
_GRACE_S = 5.0
# how often the time of a run is shown anew
_TICK_S = 0.2
_LAST_LINES = 3


@dataclass(slots=True)
class Surroundings:
    """Where a program runs: working directory (None: the current one), extra variables."""

    folder: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


class CommandPrograms:
    """Two commands.

    Args:
        reference, port: The commands and their arguments.
        folder: Where each run gets a folder.
        timeout: Seconds that one run may take; None for as long as it takes.
        resumes: Whether runs of an earlier call, with the same command and settings, are taken
            over from the folder.
        tell: Called with what is running, often.
    """

    def __init__(
        self,
        reference: Sequence[str],
        port: Sequence[str],
        folder: Path,
        *,
        timeout: float | None = None,
        resumes: bool = False,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._commands: dict[SideName, tuple[str, ...]] = {
            "reference": tuple(reference),
            "port": tuple(port),
        }
        self.folder, self._timeout, self._resumes, self._tell = folder, timeout, resumes, tell
        self.runs: list[ProgramRun] = []
        self.surroundings: dict[SideName, Surroundings] = {
            "reference": Surroundings(),
            "port": Surroundings(),
        }

    def run(self, side: SideName, why: str, settings: Mapping[str, str]) -> ProgramRun:
        """Run a command. Raises RunFailed if it ends otherwise than with 0, and NothingRecorded."""
        command = self._commands[side]
        number = len(self.runs) + 1
        folder = self.folder / f"{number}-{side}"
        mark = _mark(command, {**settings, **self.surroundings[side].variables})
        seconds = _finished(folder / _DONE, mark) if self._resumes else None
        if seconds is None:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            seconds = self._start(
                command, folder, side, f"run {number}, the {side}: {why}", settings
            )
            (folder / _DONE).write_text(json.dumps({"mark": mark, "seconds": seconds}))
        recordings = find_recordings(folder)
        if not recordings:
            raise NothingRecorded(
                f"the {side} recorded no operations: does it compute with torch, in a Python that "
                f"has otel_torch? What it printed is in {folder / OUTPUT}"
            )
        run = ProgramRun(side, why, command, seconds, recordings, folder / OUTPUT)
        self.runs.append(run)
        return run

    def _start(
        self,
        command: Sequence[str],
        folder: Path,
        side: SideName,
        title: str,
        settings: Mapping[str, str],
    ) -> float:
        surroundings = self.surroundings[side]
        environment = _environment(settings, folder, surroundings.variables)
        expected = next((run.seconds for run in reversed(self.runs) if run.side == side), None)
        began = time.monotonic()
        with (folder / OUTPUT).open("wb") as output:
            try:
                process = subprocess.Popen(
                    command,
                    env=environment,
                    cwd=surroundings.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise RunFailed(f"{command[0]}: {error.strerror}") from None
        try:
            status = self._wait(process, title, began, expected)
        finally:
            _end_group(process)
        if status != 0:
            raise RunFailed(_describe_failure(command, status, folder / OUTPUT))
        return time.monotonic() - began

    def _wait(
        self, process: subprocess.Popen[bytes], title: str, began: float, expected: float | None
    ) -> int:
        while True:
            seconds = time.monotonic() - began
            usual = "" if expected is None else f" of about {expected:.0f}"
            self._tell(f"{title} ({seconds:.0f}{usual} s)")
            if self._timeout is not None and seconds > self._timeout:
                raise RunFailed(f"{title}: longer than {self._timeout:g} s, and was ended")
            try:
                return process.wait(_TICK_S)
            except subprocess.TimeoutExpired:
                continue


def _environment(
    settings: Mapping[str, str], folder: Path, variables: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of a recorded run, which sends nothing and takes no other setting."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OTEL_", "FASTVIDEO_TRACE_", "TRACEPARENT"))
    }
    environment |= variables
    enable_recording(environment)
    environment["OTEL_TORCH_JSONL"] = str(folder.resolve() / "recording.jsonl")
    for name, value in settings.items():
        environment[f"OTEL_TORCH_{name.upper()}"] = value
    return environment


def _mark(command: Sequence[str], settings: Mapping[str, str]) -> str:
    """Return what tells runs apart that may not stand for each other."""
    return hashlib.sha256(json.dumps([list(command), dict(settings)]).encode()).hexdigest()


def _finished(file: Path, mark: str) -> float | None:
    """Return how long a finished run took, None if there is none of these settings."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return float(content["seconds"]) if content.get("mark") == mark else None


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End what a program has left running: its group, whoever is still in it."""
    for number, seconds in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):
            return
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue


def _describe_failure(command: Sequence[str], status: int, output: Path) -> str:
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with {status}"
    lines = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    said = " | ".join(line.strip() for line in lines[-_LAST_LINES:])
    return f"{' '.join(command)} {how}: {said or 'it printed nothing'} (all of it: {output})"
