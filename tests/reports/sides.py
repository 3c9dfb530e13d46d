"""Records the programs of a case and compares them as a user would, by the commands."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from otel_torch.cli.main import main
from tests.support import run_python

PROGRAMS = Path(__file__).with_name("programs")


@dataclass(frozen=True)
class Answer:
    """What `otel-torch diff` said: its exit status, its text for a person, its JSON."""

    status: int
    text: str
    report: dict[str, Any]

    @property
    def first(self) -> dict[str, Any]:
        return self.report["first"] or {}

    @property
    def verdict(self) -> str:
        return str(self.report["verdict"])


def command(folder: Path, *words: str | Path) -> tuple[int, str, str]:
    """Run `otel-torch` with these arguments in this process, within a folder; return its exit status
    and what it prints.
    """
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        status = main([str(word) for word in words])
    return status, out.getvalue(), err.getvalue()


def record(tmp_path: Path, case: str, side: str, **variables: str) -> Path:
    """Record one side of a case, with whole tensors if nothing else is asked, and return its
    recording.
    """
    folder, recording = PROGRAMS / case, tmp_path / f"{side}.jsonl"
    arguments = () if (folder / f"{side}.py").exists() else (side,)
    script = folder / ("prog.py" if arguments else f"{side}.py")
    settings = {
        "OTEL_TORCH_CAPTURE": "parity",
        "OTEL_TORCH_TENSORS": str(tmp_path / f"{side}-tensors"),
    }
    run_python(
        tmp_path, script, *arguments, OTEL_TORCH_JSONL=str(recording), **settings | variables
    )
    return recording


def compare(tmp_path: Path, case: str, *options: str, **variables: str) -> Answer:
    """Record both sides of a case and compare them."""
    return diff(
        tmp_path,
        record(tmp_path, case, "ref", **variables),
        record(tmp_path, case, "port", **variables),
        *options,
    )


def diff(tmp_path: Path, reference: Path, port: Path, *options: str) -> Answer:
    """Compare two recordings by the command: its text and its JSON, which must agree in status."""
    status, out, err = command(tmp_path, "diff", reference, port, *options)
    machine = command(tmp_path, "diff", reference, port, "--json", "-", *options)
    assert status == machine[0], (out, err, machine)
    assert machine[1], machine[2]
    return Answer(status, out + err, json.loads(machine[1]))
