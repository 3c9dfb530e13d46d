"""Real runs, and the pages that the commands make of them: what the tests look at, and what the
pictures show.

The program is the one of docs/show.md, taken from there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.support import run_command, run_python

ROOT = Path(__file__).parents[2]
STATISTICS = "abs_mean,min,max,std,nonfinite,histogram"


@dataclass(frozen=True)
class Recorded:
    """Where the pages lie: of a run that ceases to be finite, and of a comparison that finds
    something.
    """

    show: Path
    diff: Path


def program() -> str:
    """The program of the documentation."""
    text = (ROOT / "docs" / "show.md").read_text()
    match = re.search(r"<<'END'\n(.*?)END\n", text, re.S)
    assert match is not None
    return match[1]


def record(folder: Path) -> Recorded:
    """Run the program, and a port of it with a bug, and have pages made of both."""
    code = program()
    asked = {
        "OTEL_TORCH_CAPTURE": "inputs,outputs",
        "OTEL_TORCH_STATS": STATISTICS,
        "OTEL_TORCH_OTLP_FILE": "otlp",
    }
    run_python(folder, code, OTEL_TORCH_JSONL="run.jsonl", **asked)
    command(folder, "show", "run.jsonl", "--html", "show.html")
    shorter = (
        code.replace(".half()", "")
        .replace("torch.float16", "torch.float32")
        .replace("range(30)", "range(4)")
    )
    assert shorter != code
    for name, text in (("reference", shorter), ("port", shorter.replace("gelu(", "silu("))):
        run_python(folder, text, OTEL_TORCH_CAPTURE="parity", OTEL_TORCH_JSONL=f"{name}.jsonl")
    command(folder, "diff", "reference.jsonl", "port.jsonl", "--html", "diff.html", status=1)
    return Recorded(folder / "show.html", folder / "diff.html")


def command(folder: Path, *words: str, status: int = 0) -> None:
    """Run `otel-torch` as a person does."""
    done = run_command(*words, cwd=folder)
    assert done.returncode == status, done.stdout + done.stderr
