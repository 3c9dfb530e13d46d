"""Reads a recording: ours, or the file that FastVideo's own trace writes.

A recording may end in the middle of a line (its process was killed), hold non-finite numbers as
bare tokens (FastVideo) or as strings (ours), or be no recording at all. The first two are read; the
last is one line that says where.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

Row = dict[str, Any]

# the fields whose text is text, even where it says "NaN"
_NAMES = frozenset({"module", "tensor", "model", "phase", "branch", "dtype", "class", "sketch"})
_NON_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
_WHOLE_NUMBERS = ("step", "call", "loop")


class RecordingError(ValueError):
    """The file is no recording, or a broken one; the message is one line that names the file and
    where in it.
    """


@dataclass(slots=True)
class Recording:
    """A recording in memory.

    rows: one dict a record, in the file's order, as written, non-finite numbers as floats. meta:
    the metadata beside it, {} where there is none. warnings: what the reader wants a person to
    know, a line each. ended_early: the run was killed, or goes on: its last record is not the last
    that it would have written.
    """

    path: Path
    rows: list[Row]
    meta: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    ended_early: bool = False


def read_recording(path: str | Path, *, dataframe: bool = False) -> list[Row] | pandas.DataFrame:
    """The rows of a recording as dicts, or as a pandas DataFrame with a column for each field.

    Raises RecordingError, a ValueError of one line, for a file that is missing or no recording, and
    ModuleNotFoundError where a DataFrame is asked for without pandas. A line that a kill cut off is
    left out; `load_recording` says so.
    """
    if not dataframe:
        return load_recording(path).rows
    try:
        import pandas
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "read_recording(dataframe=True) needs pandas: pip install 'otel-torch[pandas]'"
        ) from None
    return pandas.DataFrame(load_recording(path).rows)


def load_recording(path: str | Path) -> Recording:
    """Read a recording with its metadata. Raises RecordingError."""
    warnings: list[str] = []
    rows = list(iterate_rows(path, warnings.append))
    cut_off = bool(warnings)
    meta = read_metadata(path, warnings.append)
    ended = endings(path, meta)
    warnings += ended
    return Recording(Path(path), rows, meta, warnings, ended_early=cut_off or bool(ended))


def endings(path: str | Path, meta: dict[str, Any]) -> list[str]:
    """Why a recording ends before its run did, by its metadata: a line each, none where it does
    not.
    """
    found = []
    if meta.get("ended_cleanly") is False:
        found.append(f"{path}: the run was killed, or is still going on; the recording ends early")
    if stopped := meta.get("writing_ended"):
        why = {
            "disk": "the disk took no more",
            "max_bytes": "OTEL_TORCH_MAX_BYTES was reached",
        }.get(stopped, str(stopped))
        found.append(f"{path}: writing ended before the run did: {why}")
    return found


def metadata_path(path: str | Path) -> Path:
    """Where the metadata of a recording lies.

    >>> metadata_path("runs/ref.jsonl").as_posix()
    'runs/ref.meta.json'
    """
    path = Path(path)
    return path.with_name(path.name.removesuffix(".jsonl") + ".meta.json")


def read_metadata(
    path: str | Path, problem: Callable[[str], None] = lambda message: None
) -> dict[str, Any]:
    """The metadata beside the recording `path`, {} where there is none; what is unreadable is a
    line to `problem`.
    """
    if Path(path).is_dir():
        return {}  # reading its rows says what is wrong
    beside = metadata_path(path)
    try:
        meta = json.loads(beside.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        problem(f"{beside}: not readable as metadata and left out ({_reason(error)})")
        return {}
    if not isinstance(meta, dict):
        problem(f"{beside}: not an object and left out")
        return {}
    return meta


def iterate_rows(
    path: str | Path, problem: Callable[[str], None] = lambda message: None
) -> Iterator[Row]:
    """The rows of a recording one after the other, in bounded memory.

    A last line that was cut off is left out and told to `problem`. Raises RecordingError for
    anything else that is not a record, and for a file without any.
    """
    for texts, tolerant in iterate_texts(path, problem):
        yield from _parse_at_once(texts) or tolerant()


def iterate_texts(
    path: str | Path, problem: Callable[[str], None] = lambda message: None, size: int = 1 << 20
) -> Iterator[tuple[list[bytes], Callable[[], list[Row]]]]:
    """Some neighbouring lines at a time, of about `size` bytes, with a function that reads them as
    tolerantly as can be.

    Who decodes lines faster than that function need not call it; lines that cannot be decoded
    otherwise must be read by it: it knows the number of each, and says what is wrong. Tells
    `problem`, and raises, as `iterate_rows` does.
    """
    found = False
    number = 1
    try:
        with open(path, "rb") as file:
            while texts := file.readlines(size):
                if number == 1:
                    texts[0] = texts[0].removeprefix(b"\xef\xbb\xbf")
                yield texts, functools.partial(_parse_each, path, texts, number, found, problem)
                number += len(texts)
                found = found or any(map(bytes.strip, texts))
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror or _reason(error)}") from None
    except ValueError as error:
        if isinstance(error, RecordingError):
            raise
        raise RecordingError(f"{str(path)!r}: not a path ({_reason(error)})") from None
    if not found:
        raise RecordingError(f"{path}: holds no record")


def _parse_each(
    path: str | Path, texts: list[bytes], start: int, found: bool, problem: Callable[[str], None]
) -> list[Row]:
    """The rows of some lines. start: the number of the first one. found: whether there are rows
    before it.
    """
    rows: list[Row] = []
    for number, text in enumerate(texts, start):
        row = parse_line(text)
        if isinstance(row, dict):
            rows.append(row)
        elif row and not text.endswith(b"\n") and (found or rows):  # only the last one has no end
            problem(f"{path}: line {number} was cut off and is left out; the recording ends early")
        elif row:
            raise RecordingError(f"{path}: line {number} {row}")
    return rows


def _parse_at_once(texts: list[bytes]) -> list[Row] | None:
    """The rows of some lines, None unless each of them is a record."""
    import msgspec

    try:
        rows: list[Row] = list(map(_decoder(msgspec).decode, texts))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if any(map(_fault, rows)):
        return None
    for row, text in zip(rows, texts, strict=True):
        if b'NaN"' in text or b'Infinity"' in text:
            _restore(row)
    return rows


@functools.cache
def _decoder(msgspec: Any) -> Any:
    return msgspec.json.Decoder()


def parse_line(line: bytes) -> Row | str:
    """The record in a line, or what is wrong with it: "" for a blank one."""
    try:
        text = line.decode("utf-8")
        if not text.strip():
            return ""
        row = json.loads(text)
    except UnicodeDecodeError:
        return "is not UTF-8"
    except (ValueError, RecursionError):
        return "is not JSON"
    fault = _fault(row)
    if fault:
        return fault
    _restore(row)
    record: Row = row
    return record


def _fault(row: Any) -> str:
    """Why a JSON value is no record, "" if it is one."""
    if type(row) is not dict:
        return "is not a JSON object"
    if (
        type(row.get("module")) is not str
        or type(row.get("tensor")) is not str
        or "step" not in row
    ):
        return "is not a record: it needs `module`, `tensor` and `step`"
    for name in _WHOLE_NUMBERS:
        number = row.get(name)
        if number is not None and type(number) is not int:
            return f"is not a record: `{name}` is not a whole number"
    return ""


def _restore(row: Row) -> None:
    """Turn the spelled non-finite numbers of a row into floats."""
    for name, value in row.items():
        if name in _NAMES:
            continue
        if type(value) is str:
            row[name] = _NON_FINITE.get(value, value)
        elif type(value) is list:
            row[name] = [
                _NON_FINITE.get(item, item) if type(item) is str else item for item in value
            ]


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())


def iterate_attached(path: str | Path, models: Iterable[str] = ()) -> Iterator[Row]:
    """The rows of phase `attach` alone: all other lines are passed over unread.

    models: all that there are, where that is known: each is attached once, so behind the last one's
    rows nothing is looked for.
    """
    left = set(models)
    known = bool(left)
    for texts, _ in iterate_texts(path):
        for text in texts:
            if b'"attach"' in text:
                row = parse_line(text)
                if isinstance(row, dict) and row.get("phase") == "attach":
                    left.discard(row.get("model", ""))
                    yield row
            elif known and not left:
                return
