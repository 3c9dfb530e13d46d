"""The compiled scanner reads recordings as Python does: the same rows, warnings and errors."""

from __future__ import annotations

import importlib.util
import json
import random
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import msgspec
import pytest

from otel_torch.parity.compare import compare
from otel_torch.recording import row_batches, scanner
from otel_torch.recording.read_ahead import iterate_ahead
from otel_torch.recording.reader import RecordingError
from otel_torch.recording.row_batches import RowKinds, iterate_batches
from otel_torch.recording.row_schema import KNOWN_FIELDS

ROOT = Path(__file__).parents[2]
PROGRAM = "denoise_with_context.py"
ROW = b'{"module":"fc","tensor":"out","step":0}'
TWO_IN_A_LINE = ROW + b"\n" + ROW + ROW + b"\n\n"
needs_library = pytest.mark.skipif(scanner.load() is None, reason="the library was not built")
Contents = tuple[list[object], list[str], int]


@pytest.fixture
def recorded(recorded_program) -> Callable[[str, str], Path]:
    return lambda program, capture: recorded_program(PROGRAM, program, capture=capture)


@pytest.fixture
def accepted(monkeypatch) -> list[bool]:
    """Collect for each block whether the scanner accepted it."""
    blocks: list[bool] = []
    read = scanner.Scanner.read

    def read_and_note(*arguments, **options):
        lines = read(*arguments, **options)
        blocks.append(lines.text is None)
        return lines

    monkeypatch.setattr(scanner.Scanner, "read", read_and_note)
    return blocks


def contents(path: Path) -> Contents:
    """Return all that batches hold, the warnings or the error, and how many bytes were read."""
    kinds = RowKinds()
    problems: list[str] = []
    sizes: list[int] = []
    rows: list[object] = []
    try:
        for batch in iterate_batches(path, kinds, problems.append, sizes.append):
            every = range(len(batch.kinds))
            sketches = dict(zip(batch.sketched.tolist(), batch.sketches, strict=True))
            statistics = batch.statistics(every)
            for row in every:
                rows.append(
                    (
                        kinds.kinds[int(batch.kinds[row])],
                        repr(batch.numbers[:, row].tolist()),
                        batch.place(row),
                        repr(statistics[:, row].tolist()),
                        batch.order[row].tolist(),
                        sketches.get(row),
                        repr(msgspec.structs.astuple(batch.record(row))),
                        repr(batch.rows(row, row + 1)),
                    )
                )
    except RecordingError as error:
        problems.append(f"error: {error}")
    return rows, problems, sum(sizes)


def contents_in_python(path: Path) -> Contents:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scanner, "load", lambda: None)
        return contents(path)


def unusual(recording: Path, path: Path, kind: str) -> Path:
    """Write a recording again, in a form that people's own tools write."""
    text = recording.read_bytes()
    rows = text.splitlines(keepends=True)
    changed = {
        "byte order mark": b"\xef\xbb\xbf" + text,
        "blank lines": b"\n".join(rows),
        "bare NaN": b"".join(
            row.replace(b'"max":', b'"max":NaN,"former":') if number % 7 == 3 else row
            for number, row in enumerate(rows)
        ),
        "cut off": text[:-30],
        "no last newline": text.rstrip(b"\n"),
        "carriage returns": text.replace(b"\n", b"\r\n"),
        "spaces": b"".join(json.dumps(json.loads(row)).encode() + b"\n" for row in rows),
        "sketches of other lengths": text.replace(b'"sketch":"', b'"sketch":"AAAA', 1),
    }
    path.write_bytes(changed[kind])
    return path


@needs_library
@pytest.mark.parametrize("capture", ["outputs", "inputs,updates,gradients", "parity"])
def test_recordings_are_read_the_same(recorded, accepted, capture):
    path = recorded("reference", capture)
    assert contents(path) == contents_in_python(path)
    assert accepted == [True]


@needs_library
@pytest.mark.parametrize(
    ("kind", "is_accepted"),
    [
        ("byte order mark", False),
        ("blank lines", False),
        ("bare NaN", False),
        ("cut off", False),
        ("no last newline", True),
        ("carriage returns", True),
        ("spaces", True),
        ("sketches of other lengths", True),
    ],
)
def test_unusual_files_are_read_the_same(recorded, accepted, tmp_path, kind, is_accepted):
    path = unusual(recorded("reference", "parity"), tmp_path / "unusual.jsonl", kind)
    rows, problems, size = contents(path)
    assert (rows, problems, size) == contents_in_python(path)
    assert bool(problems) == (kind == "cut off")
    assert accepted == [is_accepted]


def scanner_fields() -> list[str]:
    """Return the names of the fields in the scanner's source."""
    source = (scanner.FOLDER / "scanner.c").read_text()
    names = source.partition("NAMES[FIELDS] = {")[2].partition("}")[0]
    return [name.strip(' \n"') for name in names.split(",") if name.strip()]


# their rows are decoded in Python
FIELDS_OF_OPERATIONS = {
    "op", "args", "reads", "makes", "moves", "casts", "random", "collective", "group", "line", "forward_line",
    "inside", "leaf", "name", "end",
}  # fmt: skip


def test_the_scanner_knows_the_fields_of_the_schema():
    assert set(scanner_fields()) == KNOWN_FIELDS - FIELDS_OF_OPERATIONS


VALUES = (
    b"null", b"true", b"0", b"-0", b"01", b"7", b"-7", b"1.5", b"1.", b".5", b"1e5", b"1E-7", b"1e400",
    b"9007199254740993", b"9007199254740992", b"123456789012345678901", b"0.1234567890123456789",
    b"2.2250738585072014e-308", b"5e-324", b"0x10", b"1_0", b"NaN", b"Infinity", b'"NaN"',
    b'"Infinity"', b'"-Infinity"', b'"nan"', b'""', b'"text"', b'"\\u0041"', b'"\xc3\xa9"', b'"\xff"',
    b'"a\tb"', b'"AAAA"', b'"AAA="', b'"AA=="', b'"AB=="', b'"A==="', b'"AAAAA"', b'"AA=A"', b'"A-_A"',
    b"[]", b"[1,2]", b"[ 1 , null ]", b"[null,null]", b"[1]", b"[1,2,3]", b"[-1,2]", b"[1,]", b"{}",
    b'{"a":[{}]}', b'{"a"}', b'{"shape":[2],"offset":[0],"partial":false}', b"[" * 40 + b"]" * 40,
)  # fmt: skip


@needs_library
@pytest.mark.parametrize("first", [b"", 2 * (ROW[:-1] + b',"sketch":"AAAA","order":[0,1]}\n')])
def test_any_value_of_any_field_is_read_the_same(tmp_path, monkeypatch, first):
    """Read a row in which one field has an arbitrary value; after sketches, only headers are checked."""
    path = tmp_path / "run.jsonl"
    if first:  # a block of their own
        monkeypatch.setattr(scanner, "BLOCK_BYTES", len(first) + 1)
        monkeypatch.setattr(row_batches, "_BLOCK_BYTES", len(first))
    different = []
    for name in [*scanner_fields(), "unknown"]:
        for value in VALUES:
            row = ROW[:-1] + b',"' + name.encode() + b'":' + value + b"}\n"
            path.write_bytes(first + row)
            if contents(path) != contents_in_python(path):
                different.append(row)
    assert not different


@needs_library
@pytest.mark.parametrize("seed", range(20))
def test_damaged_lines_are_read_the_same(recorded, tmp_path, seed):
    draw = random.Random(seed)
    lines = recorded("reference", "parity").read_bytes().splitlines(keepends=True)
    text = bytearray(b"".join(draw.sample(lines, 30)))
    for _ in range(draw.choice([1, 1, 2, 5])):
        place = draw.randrange(len(text))
        damage = draw.choice(
            [b"", b"\0", b'"', b"\\", b",", b"}", b"{", b"\n", b"9", b"\xe9", b" "]
        )
        text[place : place + draw.choice([0, 1, 1, 3])] = damage
    path = tmp_path / "run.jsonl"
    path.write_bytes(text)
    assert contents(path) == contents_in_python(path)


@needs_library
@pytest.mark.parametrize("size", [100, 3000, 20_000])
def test_blocks_of_any_size_give_the_same(recorded, accepted, monkeypatch, size):
    """Also of fewer bytes than a line has."""
    path = recorded("reference", "parity")
    expected = contents_in_python(path)
    monkeypatch.setattr(scanner, "BLOCK_BYTES", size)
    monkeypatch.setattr(row_batches, "_WORTH_THREAD_BYTES", 0)
    assert contents(path) == expected
    assert len(accepted) > 3
    assert all(accepted)


@needs_library
def test_kinds_of_a_refused_block_are_known_later(recorded, accepted, monkeypatch, tmp_path):
    lines = recorded("reference", "parity").read_bytes().splitlines(keepends=True)
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"".join(lines) + b"\n" + b"".join(reversed(lines)))
    monkeypatch.setattr(scanner, "BLOCK_BYTES", sum(map(len, lines)) + 10)
    assert contents(path) == contents_in_python(path)
    assert accepted == [False, True]


@needs_library
def test_reports_are_the_same(recorded, accepted, monkeypatch):
    paths = recorded("reference", "parity"), recorded("port", "parity")
    monkeypatch.setattr(row_batches, "_WORTH_THREAD_BYTES", 0)
    scanned = compare(*paths)
    assert accepted
    assert scanned.pairs
    monkeypatch.setattr(scanner, "load", lambda: None)
    assert repr(scanned) == repr(compare(*paths))


@needs_library
@pytest.mark.parametrize(
    "text", [b'{"module":"fc"}\n', b"neither rows\n", b"", b"\n\n", TWO_IN_A_LINE]
)
def test_a_file_that_is_no_recording_is_the_same_error(tmp_path, text):
    path = tmp_path / "no.jsonl"
    path.write_bytes(text)
    _, (problem,), _ = expected = contents_in_python(path)
    assert problem.startswith("error: ")
    assert contents(path) == expected


@needs_library
def test_a_file_that_vanishes_is_one_line(recorded, tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_bytes(recorded("reference", "parity").read_bytes())
    batch = next(iterate_batches(path, RowKinds()))
    path.unlink()
    with pytest.raises(RecordingError, match="No such file"):
        batch.record(0)


@needs_library
def test_a_file_that_cannot_be_read_is_one_line(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(5, "Input/output error")

    path = tmp_path / "run.jsonl"
    path.write_bytes(ROW)
    monkeypatch.setattr(scanner.Scanner, "read", fail)
    with pytest.raises(RecordingError, match=f"{path}: Input/output error"):
        list(iterate_batches(path, RowKinds()))


def test_a_stale_or_missing_library_is_not_used(monkeypatch, tmp_path):
    load = scanner.load.__wrapped__  # type: ignore[attr-defined]
    (tmp_path / "scanner.c").write_text("another version")
    monkeypatch.setattr(scanner, "FOLDER", tmp_path)
    assert load() is None
    monkeypatch.setattr(scanner, "LIBRARY", tmp_path / "missing.so")
    assert load() is None


def test_the_library_is_built_where_there_is_a_compiler():
    pytest.importorskip("hatchling", reason="hatchling builds the library")
    spec = importlib.util.spec_from_file_location("build", ROOT / "packaging" / "build_kernel.py")
    assert spec is not None
    assert spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    assert ROOT / build.SCANNER.path == scanner.LIBRARY
    assert build.SCANNER.sources == scanner.SOURCES
    assert scanner.load() is not None or build.compiler() is None


# -- the thread that reads ahead


def is_reading() -> bool:
    return any(thread.name == "otel_torch-read" for thread in threading.enumerate())


def test_an_error_in_the_thread_is_raised_after_the_items():
    def items() -> Iterator[int]:
        yield 1
        raise RecordingError("broken")

    ahead = iterate_ahead(items(), most=1)
    assert next(ahead) == 1
    with pytest.raises(RecordingError, match="broken"):
        next(ahead)
    assert not is_reading()


def test_a_thread_reads_only_some_items_ahead_and_ends_when_nobody_reads_on():
    made: list[int] = []
    closed = threading.Event()

    def items() -> Iterator[int]:
        try:
            for number in range(1000):
                made.append(number)
                yield number
        finally:
            closed.set()

    ahead = iterate_ahead(items(), most=2)
    assert list(islice(ahead, 3)) == [0, 1, 2]
    assert is_reading()
    ahead.close()
    assert closed.is_set()
    assert not is_reading()
    assert len(made) <= 3 + 2 + 2


@needs_library
@pytest.mark.parametrize("worth", [0, 1 << 60])
def test_a_long_file_is_read_in_a_thread(recorded, monkeypatch, worth):
    monkeypatch.setattr(scanner, "BLOCK_BYTES", 3000)
    monkeypatch.setattr(row_batches, "_WORTH_THREAD_BYTES", worth)
    batches = iterate_batches(recorded("reference", "parity"), RowKinds())
    assert len(next(batches).kinds)
    assert is_reading() == (worth == 0)
    del batches
    assert not is_reading()
