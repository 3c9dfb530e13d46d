"""Reads a recording: ours, or the file of FastVideo's own trace.

A recording may end in the middle of a line, because its process was killed, and may write NaN
and Inf as bare tokens (FastVideo) or as strings (ours); both are read. A file that is not a
recording is an error of one line that names the file and the position.
"""

from __future__ import annotations

import codecs
import importlib
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, overload

from otel_torch.process.console import as_given
from otel_torch.recording.file_kinds import RECORDING, refusal
from otel_torch.recording.input_file import NotReadable, open_once
from otel_torch.recording.metadata import METADATA_SUFFIX, describe_early_end, read_metadata
from otel_torch.recording.remote.remote_files import LocalCopies, RemoteError, is_url
from otel_torch.recording.rows import UNPARSABLE, Row, parse_line, parse_lines
from otel_torch.records import FINGERPRINTS
from otel_torch.rendering.words import plural

if TYPE_CHECKING:
    import pandas
    import polars

# bytes parsed at a time: few enough that everything made from them stays in the CPU's cache
_BLOCK_BYTES = 1 << 16
# lines read again at a time, where single ones are asked for
_WINDOW_LINES = 32
_TENSOR = ("model", "module", "tensor", "phase", "branch")
# Library -> arguments of its DataFrame. polars infers types from the first rows only, unless told.
_DATAFRAMES: dict[str, dict[str, Any]] = {
    "pandas": {},
    "polars": {"infer_schema_length": None, "strict": False},
}
# fields that no person can read
_UNREADABLE = FINGERPRINTS | {"histogram"}


class RecordingError(ValueError):
    """A file that is not a recording, or a broken one; one line that names file and position."""


@dataclass(slots=True)
class Recording:
    """A recording in memory.

    Attributes:
        rows: one dict per record, in the file's order; NaN and Inf as floats.
        meta: the metadata beside the file, {} if it has none.
        warnings: what a user should know about the file, one line each.
        ended_early: the run was killed or is still running, so records may follow the last one.
    """

    path: Path
    rows: list[Row]
    meta: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    ended_early: bool = False


class RecordedRows(list[Row]):
    """The rows of a recording: a list of dicts that prints what it holds, not its numbers."""

    def __init__(self, path: str | Path, rows: Iterable[Row]) -> None:
        super().__init__(rows)
        self._path = path

    def __repr__(self) -> str:
        tensors = {tuple(map(row.get, _TENSOR)) for row in self}
        steps = sorted({row["step"] for row in self if row["step"] is not None})
        parts = [f"{self._path}: {plural(len(self), 'record')} of {plural(len(tensors), 'tensor')}"]
        if steps:
            parts.append(f"steps {steps[0]} to {steps[-1]}")
        return ", ".join(parts)

    def _repr_html_(self) -> str:
        from otel_torch.rendering.notebook import MAX_ROWS, notebook_html

        shown = self[:MAX_ROWS]
        names = dict.fromkeys(name for row in shown for name in row)
        header = [name for name in names if name not in _UNREADABLE]
        rows = [[_format_cell(row.get(name)) for name in header] for row in shown]
        return notebook_html([repr(self)], header, rows, count=len(self))

    def __reduce__(self) -> Any:
        return RecordedRows, (self._path, list(self))


def _format_cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@overload
def read_recording(path: str | Path, *, dataframe: Literal[False] = False) -> list[Row]: ...
@overload
def read_recording(path: str | Path, *, dataframe: Literal[True, "pandas"]) -> pandas.DataFrame: ...
@overload
def read_recording(path: str | Path, *, dataframe: Literal["polars"]) -> polars.DataFrame: ...
def read_recording(path: str | Path, *, dataframe: bool | str = False) -> Any:
    """Return the rows of a recording as dicts, or as a DataFrame with a column per field.

    A last line that was cut off by a kill is skipped.

    Args:
        path: The recording, or its URL.
        dataframe: `"pandas"` or True, `"polars"`, or False for dicts.

    Raises:
        RecordingError: the file is missing or not a recording; a ValueError of one line.
        ValueError: `dataframe` is another word.
        ModuleNotFoundError: a DataFrame is asked for and its library is not installed.
    """
    if is_url(str(path)):
        try:
            with LocalCopies() as copies:
                return _read(copies.fetch(str(path)), dataframe)
        except RemoteError as error:
            raise RecordingError(str(error)) from None
        except RecordingError as error:
            raise RecordingError(as_given(str(error))) from None
    return _read(path, dataframe)


def _read(path: str | Path, dataframe: bool | str) -> Any:
    if not dataframe:
        return RecordedRows(as_given(str(path)), load_recording(path).rows)
    library = "pandas" if dataframe is True else str(dataframe)
    if library not in _DATAFRAMES:
        raise ValueError(f"dataframe={dataframe!r}: give {' or '.join(map(repr, _DATAFRAMES))}")
    try:
        frame = importlib.import_module(library).DataFrame
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"read_recording(dataframe={dataframe!r}) needs {library}: pip install {library}"
        ) from None
    return frame(load_recording(path).rows, **_DATAFRAMES[library])


def load_recording(path: str | Path) -> Recording:
    """Read a recording with its metadata and warnings. Raises RecordingError."""
    warnings: list[str] = []
    rows = list(iterate_rows(path, warnings.append))
    is_cut_off = bool(warnings)
    metadata = read_metadata(path, warnings.append)
    early_end = describe_early_end(path, metadata)
    warnings += early_end
    return Recording(
        Path(path), rows, metadata, warnings, ended_early=is_cut_off or bool(early_end)
    )


def _ignore(message: str) -> None:
    """Drop a warning."""


def iterate_rows(path: str | Path, warn: Callable[[str], None] = _ignore) -> Iterator[Row]:
    """Yield the rows of a recording in bounded memory.

    Args:
        warn: called with one line if the file was cut: its last line, which is then skipped, or
            records that its run wrote.

    Raises:
        RecordingError: a line is not a record, or there is no record at all.
    """
    for batch in iterate_line_batches(path, warn):
        yield from parse_lines(batch.lines) or batch.parse()


@dataclass(slots=True)
class LineBatch:
    """Neighboring lines of a recording.

    Attributes:
        number: Of the first line, from 1.
        offset: Of the first line in the file, in bytes.
        size: Of all lines, in bytes.
        follows_rows: Whether a line before them is not blank.
        warn: Called with one line if the last line is cut off.
        starts: Where each line begins, from the first one, and where the last one ends. Of lines
            that are not in memory: of these, only those that are asked for are read.
    """

    path: str | Path
    number: int = 1
    offset: int = 0
    size: int = 0
    follows_rows: bool = False
    warn: Callable[[str], None] = _ignore
    starts: Sequence[int] | None = None
    _lines: list[bytes] | None = None
    _window: tuple[int, list[bytes]] = (0, [])  # the last lines read again, from this one on

    @property
    def lines(self) -> list[bytes]:
        """Each line with its line feed, read from the file again unless it is in memory.

        Raises:
            RecordingError: The file cannot be read again.
        """
        return self._read_again(0, self.size) if self._lines is None else self._lines

    def between(self, start: int, stop: int) -> list[bytes]:
        """Return some of the lines. Raises as `lines` does."""
        if self.starts is None:
            return self.lines[start:stop]
        return self._read_again(self.starts[start], self.starts[stop])

    def line(self, index: int) -> bytes:
        """Return a line; read some of the next ones, too. Raises as `lines` does."""
        if self.starts is None:
            return self.lines[index]
        first, lines = self._window
        if not first <= index < first + len(lines):
            stop = min(index + _WINDOW_LINES, len(self.starts) - 1)
            first, lines = self._window = index, self.between(index, stop)
        return lines[index - first]

    def _read_again(self, start: int, stop: int) -> list[bytes]:
        try:
            with open(self.path, "rb", buffering=0) as file:
                file.seek(self.offset + start)
                return io.BytesIO(file.read(stop - start)).readlines()
        except OSError as error:
            raise RecordingError(f"{self.path}: {error.strerror}") from None

    def parse(self, start: int = 0, stop: int | None = None) -> list[Row]:
        """Return the rows of some lines; a last line that was cut off is skipped.

        Raises:
            RecordingError: A line is not a record.
        """
        lines = self.lines[start:] if stop is None else self.between(start, stop)
        rows: list[Row] = []
        for number, line in enumerate(lines, self.number + start):
            row = parse_line(line)
            if isinstance(row, dict):
                rows.append(row)
                continue
            fault = row
            is_cut_off = not line.endswith(b"\n") and (self.follows_rows or start or rows)
            if fault in UNPARSABLE and is_cut_off:
                self.warn(
                    f"{self.path}: line {number} was cut off and is skipped; "
                    "the recording ends early"
                )
            elif fault:
                is_first = not (self.follows_rows or start or rows)
                other = refusal(self.path, RECORDING) if is_first else None
                raise RecordingError(other or f"{self.path}: line {number} {fault}")
        return rows


def iterate_line_batches(
    path: str | Path, warn: Callable[[str], None] = _ignore, size: int = _BLOCK_BYTES
) -> Iterator[LineBatch]:
    """Yield about `size` bytes of lines at a time.

    A caller with a faster decoder need not call `LineBatch.parse`. Lines that its decoder rejects
    must go through it: it knows the line numbers and reports what is wrong. Warns and raises as
    `iterate_rows` does.
    """
    reject_metadata(path)
    reader = LineReader(path, warn)
    try:
        with open_once(path) as file:
            yield from reader.batches(file, size)
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror}") from None
    except NotReadable as error:
        raise RecordingError(str(error)) from None
    reader.finish()


def reject_metadata(path: str | Path) -> None:
    """Raise RecordingError for the metadata of a recording."""
    if str(path).endswith(METADATA_SUFFIX):
        recording = str(path).removesuffix(METADATA_SUFFIX) + ".jsonl"
        raise RecordingError(f"{path}: is the metadata of a recording; give {recording}")


@dataclass(slots=True)
class LineReader:
    """Splits a recording into lines, and knows where in the file they are.

    Attributes:
        number: Of the next line, from 1.
        offset: Of the next line in the file, in bytes.
        has_rows: Whether a line so far is not blank.
        is_torn: Whether the last line has no line feed.
    """

    path: str | Path
    warn: Callable[[str], None] = _ignore
    number: int = 1
    offset: int = 0
    has_rows: bool = False
    is_torn: bool = False

    def batches(self, file: BinaryIO, size: int) -> Iterator[LineBatch]:
        """Yield the next lines of the file, about `size` bytes at a time."""
        while text := file.read(size):
            if not text.endswith(b"\n"):
                text += file.readline()
            if not self.offset and text.startswith(codecs.BOM_UTF8):
                text = text.removeprefix(codecs.BOM_UTF8)
                self.offset = len(codecs.BOM_UTF8)
            lines = io.BytesIO(text).readlines()
            yield replace(self._next_batch(len(lines), len(text)), _lines=lines)
            self.has_rows = self.has_rows or not text.isspace()
            if not text.endswith(b"\n"):
                self.is_torn = True
                break  # the file may be growing: the rest of this line is no line

    def skip(self, starts: Sequence[int], size: int) -> LineBatch:
        """Return lines that were read by other means, of which all are rows."""
        batch = self._next_batch(len(starts) - 1, size)
        self.has_rows = self.has_rows or len(starts) > 1
        batch.starts = starts
        return batch

    def _next_batch(self, count: int, size: int) -> LineBatch:
        batch = LineBatch(self.path, self.number, self.offset, size, self.has_rows, self.warn)
        self.number += count
        self.offset += size
        return batch

    def finish(self) -> None:
        """Warn if the file has fewer rows than its run wrote.

        Raises:
            RecordingError: The file holds no row.
        """
        if not self.has_rows:
            raise RecordingError(refusal(self.path, RECORDING) or f"{self.path}: holds no record")
        count, written = self.number - 1, read_metadata(self.path).get("records_written", 0)
        if count < written and not self.is_torn:  # of a torn line, its own warning tells
            self.warn(
                f"{self.path}: was cut: it has {count:,} of the {written:,} records that its run "
                "wrote"
            )


def iterate_attach_rows(path: str | Path, models: Iterable[str] = ()) -> Iterator[Row]:
    """Yield the rows of phase `attach`; all other lines are skipped without parsing them.

    Args:
        models: all models of the recording, if known. Each is attached once, so reading stops after
            the rows of the last one.
    """
    unseen_models = set(models)
    can_stop = bool(unseen_models)
    for batch in iterate_line_batches(path):
        for line in batch.lines:
            if b'"attach"' in line:
                row = parse_line(line)
                if isinstance(row, dict) and row.get("phase") == "attach":
                    unseen_models.discard(row.get("model", ""))
                    yield row
            elif can_stop and not unseen_models:
                return
