"""Make one model of a recording a recording of its own.

Two models of one run are compared as two recordings, so that nothing else knows of the run that
they share. What the run shared is repeated in each: a tensor that both models were given has its
sketches only in the record of the first one.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np

from otel_torch.parity.recording_source import MadeRecording, RecordingSource, Warn
from otel_torch.recording.reader import RecordingError
from otel_torch.recording.row_batches import RowKinds
from otel_torch.recording.rows import Row
from otel_torch.records import FINGERPRINTS


def one_model(recording: RecordingSource, model: str, warn: Warn) -> MadeRecording:
    """Return the rows and the metadata of one model of a recording.

    Args:
        warn: Called with one line for each problem of the recording.

    Raises:
        RecordingError: The file is not a recording, or has no such model.
    """
    repeated = _find_repeated_values(recording, model)
    made = MadeRecording(recording.path, _metadata_of(recording.metadata(warn), model))
    made.extend(_rows_of(recording, model, repeated, warn))
    return made


def _find_repeated_values(recording: RecordingSource, model: str) -> set[float]:
    """Return the values that records of a model name without their sketch.

    Raises:
        RecordingError: No record is of the model.
    """
    kinds, values = RowKinds(), set[float]()
    for batch in recording.batches(kinds):
        is_bare = np.array([kind.model == model for kind in kinds.kinds])[batch.kinds]
        is_bare[batch.sketched] = False
        values.update(batch.numbers[0, is_bare].tolist())
    models = {kind.model for kind in kinds.kinds}
    if model not in models:
        names = ", ".join(sorted(models - {""})) or "only records that name no model"
        raise RecordingError(f"{recording}: has no model {model!r}; it has {names}")
    return values


def _rows_of(
    recording: RecordingSource, model: str, repeated: set[float], warn: Warn
) -> Iterator[Row]:
    kinds, numbers = RowKinds(), list(repeated)
    sketched: dict[int, Row] = {}  # by value, until the model's first record of it
    for batch in recording.batches(kinds, warn):
        is_read = np.isin(batch.numbers[0], numbers)
        is_read |= np.array([kind.model == model for kind in kinds.kinds])[batch.kinds]
        borders = np.flatnonzero(np.diff(is_read, prepend=False, append=False)).tolist()
        for row in chain.from_iterable(map(batch.rows, borders[::2], borders[1::2])):
            value = row.get("value")
            if row.get("model", "") == model:
                if value in sketched and row.get("sketch") is None:
                    row |= sketched.pop(value)
                yield row
            elif isinstance(value, int) and row.get("sketch") is not None:
                sketched[value] = {name: row[name] for name in FINGERPRINTS if name in row}


def _metadata_of(metadata: dict[str, Any], model: str) -> dict[str, Any]:
    """Return the metadata of a recording with this model only, if there are any."""
    models = {name: facts for name, facts in metadata.get("models", {}).items() if name == model}
    restricted = metadata and metadata | {"models": models}
    restricted.pop("records_written", None)  # it counts those of all models
    return restricted
