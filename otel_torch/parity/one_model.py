"""Write one model of a recording as a recording of its own.

Two models of one run are compared as two recordings, so that nothing else knows of the run that
they share. What the run shared is repeated in each: a tensor that both models were given has its
sketches only in the record of the first one.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from otel_torch.parity.sides import Sides
from otel_torch.recording.metadata import encode_metadata, metadata_path, read_metadata
from otel_torch.recording.reader import RecordingError, iterate_line_batches
from otel_torch.recording.row_schema import (
    UNREADABLE,
    RowRecord,
    decode_dict,
    decode_record,
    record_of,
)
from otel_torch.recording.rows import Row
from otel_torch.records import FINGERPRINTS, json_safe

Warn = Callable[[str], None]


@dataclass(slots=True)
class WrittenModels:
    """Recordings of one model each.

    Attributes:
        sides, noise: Those of the reference, the port and the noise, if any.
        warnings: The problems of the recordings, one line each.
        given: The recording that each was made of.
    """

    sides: Sides[Path]
    noise: Path | None
    warnings: list[str]
    given: dict[Path, Path]


@contextmanager
def write_models(
    sides: Sides[Path], noise: Path | None, models: Sides[str]
) -> Iterator[WrittenModels]:
    """Write one model of each recording into a temporary folder; the noise is the reference's.

    Raises:
        RecordingError: A file is not a recording, or has no such model.
    """
    wanted = [(sides.reference, models.reference), (sides.port, models.port)]
    if noise is not None:
        wanted.append((noise, models.reference))
    warnings: list[str] = []
    with tempfile.TemporaryDirectory(prefix="otel-torch-models-") as folder:
        given: dict[Path, Path] = {}
        for number, (recording, model) in enumerate(wanted):
            target = Path(folder) / str(number)
            target.mkdir()
            given[_write_model(recording, model, target, warnings.append)] = recording
        reference, port, *noises = given
        once = list(dict.fromkeys(warnings))  # both sides may be one file
        yield WrittenModels(Sides(reference, port), noises[0] if noises else None, once, given)


def _write_model(recording: Path, model: str, folder: Path, warn: Warn) -> Path:
    """Write the rows and the metadata of one model into a folder; return the new recording.

    Args:
        warn: Called with one line for each problem of the recording.

    Raises:
        RecordingError: The file is not a recording, or has no such model.
        OSError: The folder cannot be written to.
    """
    shared = _find_repeated_values(recording, model)
    path = folder / recording.name
    sketched: dict[int, Row] = {}  # by value, until the model's first record of it
    with open(path, "wb") as file:
        for record, line in _iterate_lines(recording, warn):
            if record.model == model:
                if record.value in sketched and record.sketch is None:
                    line = _encode(decode_dict(line) | sketched.pop(record.value))
                file.write(line)
            elif record.value in shared and record.sketch is not None:
                row = decode_dict(line)
                sketched[record.value] = {name: row[name] for name in FINGERPRINTS if name in row}
    _write_metadata(recording, model, path, warn)
    return path


def _find_repeated_values(recording: Path, model: str) -> set[int]:
    """Return the values that records of a model name without their sketch.

    Raises:
        RecordingError: No record is of the model.
    """
    models: set[str] = set()
    values: set[int] = set()
    for record, _ in _iterate_lines(recording):
        models.add(record.model)
        if record.model == model and record.value is not None and record.sketch is None:
            values.add(record.value)
    if model not in models:
        names = ", ".join(sorted(models - {""})) or "only records that name no model"
        raise RecordingError(f"{recording}: has no model {model!r}; it has {names}")
    return values


def _iterate_lines(
    recording: Path, warn: Warn = lambda message: None
) -> Iterator[tuple[RowRecord, bytes]]:
    """Yield each record with its line."""
    for batch in iterate_line_batches(recording, warn):
        lines = batch.lines
        try:
            records = list(map(decode_record, lines))
        except UNREADABLE:  # what only the slower parser reads, or reports with its line
            rows = batch.parse()
            records, lines = list(map(record_of, rows)), list(map(_encode, rows))
        yield from zip(records, lines, strict=True)


def _encode(row: Row) -> bytes:
    spelled = {name: json_safe(value) for name, value in row.items()}
    return json.dumps(spelled).encode() + b"\n"


def _write_metadata(recording: Path, model: str, path: Path, warn: Warn) -> None:
    """Write the metadata of a recording with this model only, if there are any."""
    metadata = read_metadata(recording, warn)
    if not metadata:
        return
    models = {name: facts for name, facts in metadata.get("models", {}).items() if name == model}
    settings = dict(metadata.get("settings", {}))
    tensors = settings.get("OTEL_TORCH_TENSORS")
    if tensors is not None and (folder := recording.parent / tensors).is_dir():
        settings["OTEL_TORCH_TENSORS"] = str(folder.absolute())  # it was beside the recording
    restricted = metadata | {"models": models, "settings": settings}
    restricted.pop("records_written", None)  # it counts those of all models
    metadata_path(path).write_text(encode_metadata(restricted), encoding="utf-8")
