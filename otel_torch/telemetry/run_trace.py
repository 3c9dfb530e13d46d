"""Derives the trace id of a run, without importing OpenTelemetry."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from otel_torch.process.job import Job


def run_trace_id(job: Job, environ: Mapping[str, str] = os.environ) -> str:
    """Return the trace id of the run's spans, as 32 hex digits: the one in TRACEPARENT if that is
    set and valid, else the run's own.

    >>> parent = {"TRACEPARENT": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    >>> run_trace_id(Job("run", 0, 0, 1, "host", 1), parent)
    '0af7651916cd43dd8448eb211c80319c'
    """
    parts = environ.get("TRACEPARENT", "").split("-")
    if len(parts) == 4:
        trace_id = parts[1]
        if re.fullmatch("[0-9a-f]{32}", trace_id) and int(trace_id, 16):
            return trace_id
    return f"{job.trace_id:032x}"
