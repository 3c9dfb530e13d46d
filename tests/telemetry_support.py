"""Records without torch, and child processes that pass them through the sinks to OpenTelemetry."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from otel_torch.records import Record
from tests.interpreters import OPENTELEMETRY
from tests.support import PROGRAMS, run_python

# the beginning of a child's program
DRIVER = (PROGRAMS / "sinks_without_torch.py").read_text()


def drive(
    tmp_path: Path, code: str, check: bool = True, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the driver and `code` in a child process; `variables` on top of a clean environment."""
    variables = {"OTEL_TORCH_RUN_ID": "test", "OTEL_SERVICE_NAME": "tests"} | variables
    return run_python(tmp_path, DRIVER + code, check=check, modules=OPENTELEMETRY, **variables)


def make_record(module: str = "layer", **changes: Any) -> Record:
    """Return a record of an output, with the given fields changed."""
    fields: dict[str, Any] = {
        "module": module, "tensor": "out", "step": 0, "call": 0, "loop": 0, "model": "Net", "phase": "forward", "branch": None,
        "stats": {"abs_mean": 0.5, "nonfinite": 0, "shape": [2, 3], "dtype": "float32"}, "time_ns": 1_700_000_000_000_000_001,
    }  # fmt: skip
    return Record(**(fields | changes))
