"""Find the forward of the noise recording that belongs to a forward of the reference."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from otel_torch.parity.forwards import ForwardRows, iterate_forwards, read_parameters
from otel_torch.parity.loaded_recording import LoadedRecording, module_paths
from otel_torch.parity.modules import ModulePath
from otel_torch.parity.noise import dtypes_by_module
from otel_torch.parity.recording_source import RecordingSource, Warn
from otel_torch.parity.sides import Sides
from otel_torch.recording.metadata import describe_early_end
from otel_torch.recording.reader import RecordingError

# how many forwards under noise are skipped to find one of the reference
_LOOKAHEAD = 16


class NoiseForwards:
    """The forwards of the reference under noise, in the same order.

    Args:
        source: The noise recording, or None.
        recordings: The two compared recordings.
        read: Called with the number of bytes of each batch.

    Attributes:
        unmatched: How many forwards of the reference have no counterpart.
        dtypes: The dtypes of the parameters of each module.

    Raises:
        RecordingError: The noise recording is of the port.
    """

    def __init__(
        self,
        source: RecordingSource | None,
        recordings: Sides[LoadedRecording],
        warn: Warn,
        read: Callable[[int], None],
    ) -> None:
        self.unmatched = 0
        self.dtypes: dict[ModulePath, set[str]] = {}
        self._waiting: deque[ForwardRows] = deque()
        self._forwards: Iterator[ForwardRows] = iter(())
        if source is not None:
            meta = source.metadata(warn)
            for warning in describe_early_end(source.path, meta):
                warn(warning)
            if _is_of_port(module_paths(meta), recordings):
                raise RecordingError(
                    f"{source}: is a recording of the port ({recordings.port.source}); --noise "
                    "takes the reference, recorded again"
                )
            self.dtypes = dtypes_by_module(read_parameters(source, meta))
            self._forwards = iterate_forwards(
                source,
                recordings.reference.kinds,
                warn,
                read,
                recordings.reference.skipped_phases,
            )

    def matching(self, reference: ForwardRows) -> ForwardRows | None:
        """Return the same forward under noise, or None."""
        for index in range(_LOOKAHEAD):
            if index == len(self._waiting):
                candidate = next(self._forwards, None)
                if candidate is None:
                    break
                self._waiting.append(candidate)
            if self._waiting[index].identity == reference.identity:
                for _ in range(index):
                    self._waiting.popleft()
                return self._waiting.popleft()
        self.unmatched += 1
        return None


def _is_of_port(table: set[tuple[str, str]], recordings: Sides[LoadedRecording]) -> bool:
    """Return whether a table of modules has more in common with the port's."""
    reference, port = recordings.map(lambda recording: recording.module_table)
    if not (table and reference and port):
        return False
    return len(table & reference) < len(table & port)
