"""Scalars in the local database of Trackio: a run for each rank. Nothing is sent anywhere."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

from otel_torch.exporting.exported_recording import ExportedRecording, ExportError
from otel_torch.exporting.scalars import steps_of

# with any of them, Trackio sends what is logged to a server or a Space
_REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
_CONFIG = ("run_id", "rank", "world_size", "start", "end", "ended_cleanly")


def check(destination: str) -> None:
    """Raise if Trackio would not keep the project on this machine, or cannot take its name.

    Raises:
        ExportError: With one line to print.
    """
    for name in _REMOTE:
        if os.environ.get(name):
            raise ExportError(f"--trackio writes to the local database only: unset {name}")
    if not destination.strip():
        raise ExportError("--trackio needs the name of a project")


def write(recordings: Sequence[ExportedRecording], destination: str) -> dict[str, Any]:
    """Add a run for each recording to a project, and return how many scalars they have."""
    import trackio

    count = 0
    with redirect_stdout(io.StringIO()):  # it prints how to start its dashboard
        _reject_known_runs(trackio, destination, recordings)
        for recording in recordings:
            config = {name: recording.metadata.get(name) for name in _CONFIG}
            run = trackio.init(
                destination,
                recording.name,
                config=config,
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
            for scalars in steps_of(recording):
                run.log({scalar.tag: scalar.value for scalar in scalars}, step=scalars[0].step)
                count += len(scalars)
            trackio.finish()
    return {"runs": [recording.name for recording in recordings], "scalars": count}


def _reject_known_runs(trackio: Any, project: str, recordings: Sequence[ExportedRecording]) -> None:
    try:
        known = {run.name for run in trackio.Api().runs(project)}
    except ValueError:
        return  # there is no such project yet
    for recording in recordings:
        if recording.name in known:
            raise ExportError(f"--trackio {project}: holds a run {recording.name} already")
