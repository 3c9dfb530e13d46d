"""Check the installation that runs this script: its kernel, its start-up file, its commands.

Usage: python packaging/check_installation.py native|torch

Does what README.md promises first: records two unmodified programs, and finds where the second one
first goes wrong. The argument is what must measure the tensors of a CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAMS = Path(__file__).parents[1] / "examples" / "port"
COMMAND = Path(sys.executable).with_name("otel-torch")
DIVERGES = 1
FINDING = "First divergence: the input `in[0]` of blocks.0.ff has different values"


def run(folder: str, *command: object, status: int = 0, **variables: str) -> str:
    """Run a command in `folder` with no settings but `variables`; return what it printed."""
    ignored = ("OTEL_", "FASTVIDEO_", "PYTHON")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(ignored)}
    line = [str(word) for word in command]
    done = subprocess.run(
        line, cwd=folder, env=environ | variables, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    if done.returncode != status:
        sys.exit(f"{' '.join(line)} ended with status {done.returncode}:\n{done.stdout}")
    return done.stdout


def require(text: str, output: str) -> None:
    """Exit with a message unless `output` contains `text`."""
    if text not in output:
        sys.exit(f"{text!r} is missing in:\n{output}")


def main(kernel: str) -> None:
    with tempfile.TemporaryDirectory() as folder:  # where the source cannot be imported
        home = run(folder, sys.executable, "-c", "import otel_torch; print(otel_torch.__file__)")
        require(str(Path(sys.prefix)), home)
        require(f"statistics by: {kernel}", run(folder, COMMAND, "doctor"))
        settings = {"OTEL_TORCH_ENABLED": "1", "OTEL_TORCH_CAPTURE": "parity"}
        for name in ("original", "port"):
            program = PROGRAMS / f"{name}.py"
            run(folder, sys.executable, program, OTEL_TORCH_JSONL=f"{name}.jsonl", **settings)
        compare = (COMMAND, "diff", "original.jsonl", "port.jsonl")
        require(FINDING, run(folder, *compare, status=DIVERGES))
    print(f"{sys.prefix}: records and compares, statistics by {kernel}")


if __name__ == "__main__":
    main(sys.argv[1])
