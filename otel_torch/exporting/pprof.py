"""The times of a run as a profile for `go tool pprof`, speedscope, Pyroscope and Parca."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from otel_torch.exporting.exported_recording import ExportedRecording, ExportError
from otel_torch.exporting.profile_messages import new_profile
from otel_torch.exporting.times import RunTimes, times_of
from otel_torch.recording.replace_file import replace_bytes
from otel_torch.rendering.writable import check_writable

_NO_TIMES = (
    "holds no times, and its run wrote no spans: also set OTEL_TORCH_OTLP_FILE=FOLDER when you "
    "record"
)
# of each sample
_VALUES = (("calls", "count"), ("time", "nanoseconds"), ("device_time", "nanoseconds"))
_DEFAULT = "time"


def check(destination: str) -> None:
    """Raise OSError if no file can be written there."""
    check_writable(Path(destination))


def write(recordings: Sequence[ExportedRecording], destination: str) -> dict[str, Any]:
    """Write one profile of all recordings, and return how many stacks it has."""
    profile = _Profile()
    for recording in recordings:
        times = times_of(recording)
        if not times.stacks:
            raise ExportError(f"{recording.path}: {_NO_TIMES}")
        if not times.end_ns:
            recording.warn(
                f"{recording.path}: its run wrote no spans: totals of regions, not nested"
            )
        profile.add(times, recording.rank)
    replace_bytes(Path(destination), gzip.compress(profile.finish()))
    return {"recordings": len(recordings), "samples": profile.samples}


class _Profile:
    """A profile in the making. Texts, functions and places are numbered as they appear."""

    def __init__(self) -> None:
        self._message = new_profile()()
        self._texts = {"": 0}
        self._places: dict[str, int] = {}
        self._start_ns = self._end_ns = 0

    @property
    def samples(self) -> int:
        """How many stacks were added."""
        return len(self._message.sample)

    def add(self, times: RunTimes, rank: int) -> None:
        """Add the stacks of a process, with its rank as a label."""
        for stack, taken in times.stacks.items():
            sample = self._message.sample.add(
                # the innermost frame first
                location_id=[self._place_id(frame) for frame in reversed(stack)],
                value=[taken.calls, taken.host_ns, taken.device_ns],
            )
            sample.label.add(key=self._text("rank"), num=rank)
        if times.end_ns:
            self._start_ns = min(self._start_ns or times.start_ns, times.start_ns)
            self._end_ns = max(self._end_ns, times.end_ns)

    def finish(self) -> bytes:
        for kind, unit in _VALUES:
            self._message.sample_type.add(type=self._text(kind), unit=self._text(unit))
        self._message.default_sample_type = self._text(_DEFAULT)
        self._message.time_nanos = self._start_ns
        self._message.duration_nanos = self._end_ns - self._start_ns
        self._message.string_table[:] = self._texts
        content: bytes = self._message.SerializeToString()
        return content

    def _place_id(self, frame: str) -> int:
        number = self._places.get(frame)
        if number is None:
            number = self._places[frame] = len(self._places) + 1
            name = self._text(frame)
            self._message.function.add(id=number, name=name, system_name=name)
            self._message.location.add(id=number).line.add(function_id=number)
        return number

    def _text(self, text: str) -> int:
        return self._texts.setdefault(text, len(self._texts))
