"""Event files of TensorBoard: a run for each rank, as `torch.utils.tensorboard` would write it.

A recording has no time stamps, so every event has the time at which its run began.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from datetime import datetime
from typing import Any

from otel_torch.exporting.exported_recording import ExportedRecording
from otel_torch.exporting.new_folder import check_new_folder, new_folder
from otel_torch.exporting.scalars import steps_of

check = check_new_folder


def write(recordings: Sequence[ExportedRecording], destination: str) -> dict[str, Any]:
    """Write a run for each recording, and return how many scalars they have."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    count = 0
    with new_folder(destination) as folder:
        for recording in recordings:
            began = _start_time(recording.metadata)
            with closing(EventFileWriter(str(folder / recording.name))) as writer:
                for scalars in steps_of(recording):
                    summary = Summary(
                        value=[
                            Summary.Value(tag=scalar.tag, simple_value=scalar.value)
                            for scalar in scalars
                        ]
                    )
                    writer.add_event(Event(wall_time=began, step=scalars[0].step, summary=summary))
                    count += len(scalars)
    return {"runs": [recording.name for recording in recordings], "scalars": count}


def _start_time(metadata: dict[str, Any]) -> float:
    try:
        return datetime.fromisoformat(metadata["start"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return 0.0
