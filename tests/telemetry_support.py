"""What the tests of OpenTelemetry share: records and scopes without torch, driven through the sinks
in a child process.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from otel_torch.records import Record
from tests.support import run_python

# a child's program begins with this: a recorder whose sinks are those of the environment
DRIVER = """
import os, time
from otel_torch.console import say
from otel_torch.job import this_job
from otel_torch.recorder import Recorder
from otel_torch.records import Batch, Losses, Record, Scope
from otel_torch.settings import Settings
from otel_torch.telemetry.telemetry_sink import build_telemetry_sinks

job, losses = this_job(), Losses()
settings = Settings.from_env(report=say)

class Arrived:
    def __init__(self, pending):
        self.pending = pending

    def ready(self):
        return True

    def records(self):
        return self.pending

recorder = Recorder(Arrived, lambda: build_telemetry_sinks(settings, job, losses), losses)

def record(module="layer", step=0, call=0, tensor="out", **stats):
    stats = stats or {"abs_mean": 0.5, "mean": 0.25, "shape": [2, 3], "dtype": "float32"}
    return Record(module, tensor, step, call, 0, "Net", "forward", None, stats, time.time_ns())

def run_step(step, records, bounded=False, training=False):
    attributes = {"torch.step": step, "torch.loop": 0, "torch.model": "Net"}
    scope = Scope("step", "torch.step", False, attributes, bounded=bounded, training=training)
    recorder.open(scope)
    for one in records:
        recorder.add(one)
    recorder.flush(scope)
    recorder.close(scope)
    return scope

def finish(seconds=30):
    recorder.finish(time.monotonic() + seconds)
"""


def drive(
    tmp_path: Path, code: str, check: bool = True, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the driver and `code` in a child process; `variables` on top of a clean environment.

    In a fresh interpreter: without torch it starts as quickly as a forked one.
    """
    variables = {"OTEL_TORCH_RUN_ID": "test", "OTEL_SERVICE_NAME": "tests"} | variables
    return run_python(tmp_path, DRIVER + code, check=check, fresh=True, **variables)


def make_record(module: str = "layer", **changes: Any) -> Record:
    """A record of this process."""
    fields: dict[str, Any] = {
        "module": module, "tensor": "out", "step": 0, "call": 0, "loop": 0, "model": "Net", "phase": "forward", "branch": None,
        "stats": {"abs_mean": 0.5, "nonfinite": 0, "shape": [2, 3], "dtype": "float32"}, "time_ns": 1_700_000_000_000_000_001,
    }  # fmt: skip
    return Record(**(fields | changes))
