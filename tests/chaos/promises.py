"""The checks of what is promised (docs/promises.md). Each raises `BrokenPromise` with what it has seen."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.chaos.arena import BrokenPromise, Run

# two seconds are promised; the rest is for a machine that does other things meanwhile
EXIT_S = 2.0 + 3.0
_KEY = ("model", "module", "tensor", "loop", "step", "call", "phase", "branch")
_CRASHES = ("INTERNAL ASSERT", "Fatal Python error", "Segmentation fault", "terminate called")

_INTERRUPTED = re.compile(r"^Traceback .*\n(?: .*\n)*KeyboardInterrupt$", re.MULTILINE)


def require(condition: object, text: str) -> None:
    """Raise unless the condition holds."""
    if not condition:
        raise BrokenPromise(text)


def outputs_are_those_of(bare: Run, run: Run, *, whole: bool) -> None:
    """Check that every step computed what the bare program computed.

    Args:
        whole: no step may be missing.
    """
    for role, expected in bare.told.items():
        told = run.told.get(role, [])
        same = told == (expected if whole else expected[: len(told)])
        require(same, f"{role} computed something else, or less: {len(told)} steps told")


def exit_is_in_time(bare: Run, run: Run) -> None:
    """Check that the end took at most what is promised longer than that of the bare program."""
    extra = run.exit_s - bare.exit_s
    require(extra < EXIT_S, f"the end took {extra:.1f} s longer than without recording")


def messages_are_clear(stderr: str, *, interrupted: bool = False) -> None:
    """Check that there is no traceback through our code, and few lines, each short.

    Args:
        interrupted: by a Ctrl-C, whose own traceback names whatever was running, also ours.
    """
    messages = _INTERRUPTED.sub("", stderr) if interrupted else stderr
    require("otel_torch/" not in messages.replace("tests/", ""), f"a traceback of ours: {stderr}")
    require(not any(crash in stderr for crash in _CRASHES), f"a crash: {stderr}")
    ours = [line for line in stderr.splitlines() if line.startswith("otel_torch")]
    require(len(ours) <= 20, f"{len(ours)} lines: {ours}")
    long = [line for line in ours if len(line) > 600 or not line.isprintable()]
    require(not long, f"a line that nobody can read: {long}")


def recording_is_whole(path: Path, *, may_be_cut: bool = False) -> list[dict[str, Any]]:
    """Check that all lines are strict JSON with unique keys, and return the rows.

    Args:
        may_be_cut: the process was killed, so the last line may lack its end.
    """
    data = path.read_bytes() if path.exists() else b""
    lines = data.split(b"\n")
    last = lines.pop()
    require(not last or may_be_cut, f"{path.name}: the last line is cut off")
    try:
        rows = [json.loads(line, parse_constant=_refuse) for line in lines]
    except ValueError as error:
        raise BrokenPromise(f"{path.name}: {error}") from None
    keys = [tuple(row.get(name) for name in _KEY) for row in rows]
    require(len(set(keys)) == len(keys), f"{path.name}: {len(keys) - len(set(keys))} equal keys")
    return rows


def _refuse(token: str) -> Any:
    raise ValueError(f"{token} is not strict JSON")


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata beside a recording."""
    target = path.with_name(path.name.removesuffix(".jsonl") + ".meta.json")
    try:
        metadata: dict[str, Any] = json.loads(target.read_text())
    except (OSError, ValueError) as error:
        raise BrokenPromise(f"{target.name}: {error}") from None
    return metadata


def counts_are_true(path: Path, rows: list[dict[str, Any]], *, cleanly: bool) -> dict[str, Any]:
    """Check the metadata against the lines, and return it."""
    if not rows and not path.exists():
        return {}
    metadata = read_metadata(path)
    require(
        metadata["ended_cleanly"] is cleanly,
        f"ended_cleanly is {metadata['ended_cleanly']}, but the run ended {cleanly=}",
    )
    if cleanly or metadata["writing_ended"]:
        written = metadata["records_written"]
        require(written == len(rows), f"{written} records by the metadata, {len(rows)} lines")
    return metadata


def is_start_of(path: Path, calm: Path) -> None:
    """Check that a recording is the beginning of that of an undisturbed run, byte by byte."""
    data = path.read_bytes() if path.exists() else b""
    require(calm.read_bytes().startswith(data), "the lines are not those of an undisturbed run")


def steps_are_recorded(rows: list[dict[str, Any]], calm: list[dict[str, Any]], told: int) -> None:
    """Check that every step that the program has ended has all of its records."""
    expected = sum(row["step"] < told for row in calm)
    recorded = sum(row["step"] < told for row in rows)
    require(
        recorded == expected, f"{told} steps were over, with {expected} records, not {recorded}"
    )


def command_is_clear(command: str, status: int, stderr: bytes, allowed: Iterable[int]) -> None:
    """Check a command's exit status and its messages."""
    text = stderr.decode(errors="replace")
    require(status in tuple(allowed), f"{command} ended with {status}: {text[-2000:]}")
    require("Traceback" not in text, f"{command} prints a traceback: {text[-2000:]}")
    require(len(text.splitlines()) <= 40, f"{command} prints {len(text.splitlines())} lines")
    unclear = [
        name
        for name in ("TypeError", "KeyError", "IndexError", "AttributeError", "MemoryError")
        if name in text
    ]
    require(not unclear, f"{command} names an error of Python: {text[-2000:]}")
