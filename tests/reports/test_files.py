"""Files of every kind that people give to our commands: each is read, or named in one line with
what takes it; and of OTLP nothing is dropped without a word and a status.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from otel_torch.cli.main import main
from otel_torch.recording.metadata import metadata_path
from otel_torch.recording.reader import read_recording
from tests.otlp_receiver import Receiver

ID, SPAN_ID = "5a" * 16, "c3" * 8
RESOURCE = {"attributes": [{"key": "service.name", "value": {"stringValue": "trainer"}}]}


def spans(*names: str, trace: str = ID, span: str = SPAN_ID) -> dict[str, Any]:
    listed = [{"traceId": trace, "spanId": span, "name": name} for name in names]
    return {"resourceSpans": [{"resource": RESOURCE, "scopeSpans": [{"spans": listed}]}]}


def points(number: int) -> dict[str, Any]:
    listed = [{"timeUnixNano": "1", "asDouble": 0.5}] * number
    metric = {"name": "loss", "gauge": {"dataPoints": listed}}
    return {"resourceMetrics": [{"resource": RESOURCE, "scopeMetrics": [{"metrics": [metric]}]}]}


def logs(*bodies: str) -> dict[str, Any]:
    listed = [{"timeUnixNano": "1", "body": {"stringValue": body}} for body in bodies]
    return {"resourceLogs": [{"resource": RESOURCE, "scopeLogs": [{"logRecords": listed}]}]}


def renamed(request: dict[str, Any], **names: str) -> str:
    text = json.dumps(request)
    for name, old in names.items():
        text = text.replace(f'"{name}"', f'"{old}"')
    return f"{text}\n"


BASE64_SPANS = spans("a", trace="WlpaWlpaWlpaWlpaWlpaWg==", span="w8PDw8PDw8M=")
LINE, PRETTY = f"{json.dumps(spans('a'))}\n", f"{json.dumps(spans('a', 'b'), indent=2)}\n"
ROW = {
    "module": "fc", "tensor": "out", "step": 0, "call": 0, "loop": 0, "model": "Net",
    "phase": "forward", "abs_mean": 1.0, "mean": 0.5, "shape": [2],
}  # fmt: skip

# -- send


@pytest.fixture(scope="module")
def shared_receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.fixture
def send(
    shared_receiver: Receiver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[Path], tuple[int, tuple[int, int, int], str, str]]:
    """Return a function that sends a file: status, items that arrive, text on stdout and stderr."""
    for name, value in shared_receiver.environment().items():
        monkeypatch.setenv(name, value)

    def send(path: Path) -> tuple[int, tuple[int, int, int], str, str]:
        for requests in shared_receiver.requests.values():
            requests.clear()
        status = main(["send", str(path)])
        arrived = (
            len(shared_receiver.spans()),
            len(shared_receiver.log_records()),
            len(shared_receiver.metric_points()),
        )
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return status, arrived, out, err

    return send


# text or bytes of a file -> spans, log records and points in it
READ: dict[str, tuple[str | bytes, tuple[int, int, int]]] = {
    "printed over lines": (PRETTY, (2, 0, 0)),
    "metrics over lines": (json.dumps(points(1), indent=4), (0, 0, 1)),
    "logs over lines": (json.dumps(logs("a"), indent="\t"), (0, 1, 0)),
    "without indentation": (json.dumps(spans("a"), indent=0), (1, 0, 0)),
    "several documents": (PRETTY + json.dumps(logs("a"), indent=2) + "\n\n" + PRETTY, (4, 1, 0)),
    "a line after documents": (PRETTY + LINE + PRETTY, (5, 0, 0)),
    "several on a line": (LINE.strip() + " " + LINE.strip() + LINE, (3, 0, 0)),
    "documents that touch": (PRETTY.strip() + PRETTY.strip(), (4, 0, 0)),
    "a list of requests": (json.dumps([spans("a"), spans("b")], indent=1), (2, 0, 0)),
    "carriage returns": (PRETTY.replace("\n", "\r\n") + LINE.replace("\n", "\r\n"), (3, 0, 0)),
    "a byte order mark": (b"\xef\xbb\xbf" + PRETTY.encode(), (2, 0, 0)),
    "blank lines": ("\n\n" + LINE + "\n" + LINE, (2, 0, 0)),
    "gzip": (gzip.compress((LINE * 3).encode()), (3, 0, 0)),
    "gzip over lines": (gzip.compress(PRETTY.encode()), (2, 0, 0)),
    "gzip in parts": (gzip.compress(LINE.encode()) + gzip.compress(LINE.encode()), (2, 0, 0)),
    "bare NaN": (json.dumps(points(1)).replace("0.5", "NaN") + "\n", (0, 0, 1)),
    "names of protobuf": (
        renamed(spans("a"), resourceSpans="resource_spans", scopeSpans="scope_spans"), (1, 0, 0)
    ),
    "spans of a library": (
        renamed(spans("a", "b"), scopeSpans="instrumentationLibrarySpans"), (2, 0, 0)
    ),
    "metrics of a library": (
        renamed(points(2), scopeMetrics="instrumentationLibraryMetrics"), (0, 0, 2)
    ),
    "logs of a library": (
        renamed(logs("a"), scopeLogs="instrumentationLibraryLogs", logRecords="logs"), (0, 1, 0)
    ),
    "of a library and of a scope": (
        json.dumps({"resourceSpans": [{
            "scopeSpans": spans("a")["resourceSpans"][0]["scopeSpans"],
            "instrumentationLibrarySpans": spans("b")["resourceSpans"][0]["scopeSpans"],
        }]}), (2, 0, 0)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_otlp_in_any_form_arrives_once(name: str, tmp_path: Path, send: Any) -> None:
    content, expected = READ[name]
    path = tmp_path / "otlp.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    status, arrived, out, err = send(path)
    assert (status, arrived, err) == (0, expected, ""), out
    assert send(path)[:2] == (0, (0, 0, 0))  # and not again


# a request in protobuf, alone and as the Collector writes it
PROTOBUF = bytes.fromhex("0a1e0a1c0a1a0a0c") + b"service.name" + b"\x12\x0a\x0a\x08trainer!"
UNREAD: dict[str, tuple[str | bytes, tuple[int, int, int], str]] = {
    "ids in base64": (json.dumps(BASE64_SPANS) + "\n", (0, 0, 0), "its ids are in base64"),
    "the last line in base64": (LINE + json.dumps(BASE64_SPANS), (1, 0, 0), "line 2: its traces"),
    "ids that are none": (json.dumps(spans("a", trace="xyz")), (0, 0, 0), "'xyz' is not a hex"),
    "a word at the end": (LINE + "goodbye", (1, 0, 0), "line 2: not JSON"),
    "a number at the end": (LINE + "7", (1, 0, 0), "line 2: 7 is not an object"),
    "an end that is missing": (PRETTY[:-9], (0, 0, 0), "not JSON: it has no end"),
    "an end that is missing inside": (LINE + PRETTY[:-9] + "\n" + PRETTY, (3, 0, 0), "line 2: not JSON: it has no end"),
    "a line that is cut off inside": (LINE + LINE[:60] + "\n" + LINE + LINE, (3, 0, 0), "it has no end"),
    "protobuf": (PROTOBUF, (0, 0, 0), "is OTLP in protobuf"),
    "protobuf with lengths": (struct.pack(">I", len(PROTOBUF)) + PROTOBUF, (0, 0, 0), "is OTLP in protobuf"),
    "a prefix": ("".join(f"[rank0]: {LINE}" for _ in "ab"), (0, 0, 0), "other text before it"),
    "a prefix with a time": (f"2026-01-02T03:04:05Z INFO exporter {LINE}", (0, 0, 0), "other text before it"),
    "a prefix inside": (f"{LINE}worker | {LINE}", (1, 0, 0), "other text before it"),
    "UTF-16": (LINE.encode("utf-16"), (0, 0, 0), "is UTF-16 text; convert it first: iconv"),
    "UTF-16 without a mark": (LINE.encode("utf-16-le"), (0, 0, 0), "is UTF-16 text"),
    "UTF-32": (LINE.encode("utf-32"), (0, 0, 0), "is UTF-32 text"),
    "gzip that is cut off": (gzip.compress((LINE * 50).encode())[:-20], (0, 0, 0), "compressed by gzip and cut off"),
    "xz": (lzma.compress(LINE.encode()), (0, 0, 0), "compressed by xz; decompress it: xz -dk"),
    "zstd": (b"\x28\xb5\x2f\xfd" + bytes(40), (0, 0, 0), "compressed by zstd"),
    "an unknown list": (renamed(spans("a"), scopeSpans="libSpans"), (0, 0, 0), "unknown field 'libSpans'"),
    "an unknown list of points": (renamed(points(1), gauge="intGauge"), (0, 0, 0), "unknown field 'intGauge'"),
    "two signals in an object": (json.dumps(spans("a") | logs("b")), (0, 0, 0), "this line holds several"),
    "two signals in a list": (json.dumps([spans("a"), logs("b")]), (0, 0, 0), "of several signals"),
    "a recording": (json.dumps(ROW) + "\n", (0, 0, 0), "is a recording; `otel-torch show`"),
    "spans of Jaeger": (json.dumps({"data": [{"traceID": ID, "spans": []}]}), (0, 0, 0), "exported from Jaeger"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNREAD)
def test_otlp_that_cannot_be_read_is_named_and_the_status_is_2(
    name: str, tmp_path: Path, send: Any
) -> None:
    content, expected, said = UNREAD[name]
    path = tmp_path / "otlp.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    status, arrived, out, err = send(path)
    assert (status, arrived) == (2, expected)
    assert said in err and len(err.splitlines()) == 1 and "cut off" not in out, (out, err)


def test_two_files_that_begin_alike_are_both_sent(tmp_path: Path, send: Any) -> None:
    """The first line of every document that is printed over lines is the same."""
    for name in "ab":
        (tmp_path / f"{name}.json").write_text(json.dumps(spans(name), indent=2))
        assert send(tmp_path / f"{name}.json")[:2] == (0, (1, 0, 0))


def test_of_a_folder_all_otlp_is_sent_and_what_cannot_be_is_no_success(
    tmp_path: Path, send: Any
) -> None:
    for name, content in {
        "a.json": PRETTY.encode(),
        "b.log": LINE.encode(),
        "c/traces.jsonl.gz": gzip.compress(LINE.encode()),
        "run.jsonl": (json.dumps(ROW) + "\n").encode(),
        "notes.txt": b"hello\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    status, arrived, _, err = send(tmp_path)
    assert (status, arrived) == (0, (4, 0, 0))
    assert "2 files without OTLP skipped, such as notes.txt" in err
    (tmp_path / "d.jsonl").write_text(json.dumps(BASE64_SPANS))
    (tmp_path / "e.pb").write_bytes(PROTOBUF)
    status, arrived, out, err = send(tmp_path)
    assert (status, arrived) == (2, (0, 0, 0))
    assert "d.jsonl: 1 line unreadable" in out
    assert "its ids are in base64" in err and "e.pb: is OTLP in protobuf" in err


# -- commands that take a recording


def _torch_save(legacy: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save({"fc": torch.ones(2)}, buffer, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


def _npz() -> bytes:
    buffer = io.BytesIO()
    numpy.savez(buffer, fc=numpy.ones(2))
    return buffer.getvalue()


def _npy() -> bytes:
    buffer = io.BytesIO()
    numpy.save(buffer, numpy.ones(2))
    return buffer.getvalue()


def _zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a/b.txt", "c")
    return buffer.getvalue()


def _safetensors() -> bytes:
    header = json.dumps({"fc": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4)


HISTORY = [{"epoch": 0.5, "loss": 2.0, "step": 1}]
KINDS: dict[str, tuple[str | bytes, str, str]] = {
    "trainer_state.json": (
        json.dumps({"epoch": 1.0, "global_step": 3, "log_history": HISTORY}, indent=2),
        "a trainer_state.json of transformers", "OTEL_TORCH_CAPTURE=training",
    ),
    "metrics.jsonl": ('{"_step": 0, "loss": 2.0, "_runtime": 1.5}\n' * 3, "metrics of a training", "OTEL_TORCH_CAPTURE"),
    "log.jsonl": ('{"step": 1, "train/loss": 2.0}\n' * 3, "metrics of a training", "OTEL_TORCH_CAPTURE"),
    "dump.pt": (_torch_save(False), "a checkpoint of torch.save", "otel-torch import"),
    "old.pth": (_torch_save(True), "pickled Python data", "otel-torch import"),
    "state.pkl": (pickle.dumps({"a": 1}), "pickled Python data", "otel-torch import"),
    "w.safetensors": (_safetensors(), "a safetensors file", "otel-torch import"),
    "dump.npz": (_npz(), "an .npz archive of arrays", "otel-torch import"),
    "dump.npy": (_npy(), "a single array (.npy)", "otel-torch import"),
    "manifest.json": (json.dumps(["fc", "head"]), "a manifest of dumped tensors", "otel-torch import"),
    "files.zip": (_zip(), "a zip archive", "unzip"),
    "cut.zip": (_npz()[:60], "a zip archive that is cut off", "copy it again"),
    "jaeger.json": (
        json.dumps({"data": [{"traceID": ID, "spans": [], "processes": {}}]}),
        "a trace that was exported from Jaeger", "otel-torch send",
    ),
    "chrome.json": (
        json.dumps({"schemaVersion": 1, "traceEvents": [{"ph": "X", "name": "a", "ts": 1}]}, indent=1),
        "a Chrome trace", "Perfetto",
    ),
    "events.json": (json.dumps([{"ph": "X", "name": "a", "ts": 1}]), "a Chrome trace", "Perfetto"),
    "zipkin.json": (json.dumps([{"traceId": ID, "id": SPAN_ID, "name": "a"}]), "spans of Zipkin", "otel-torch send"),
    "console.txt": (
        json.dumps({"name": "a", "context": {"trace_id": "0x1", "span_id": "0x2"}}, indent=4),
        "spans of OpenTelemetry's console exporter", "otel-torch send",
    ),
    "traces.jsonl": (LINE, "OTLP JSON", "otel-torch send"),
    "pretty.json": (PRETTY, "OTLP JSON", "otel-torch send"),
    "traces.jsonl.gz": (gzip.compress(LINE.encode()), "OTLP JSON", "otel-torch send"),
    "request.pb": (PROTOBUF, "OTLP in protobuf", "otel-torch send"),
    "rows.parquet": (b"PAR1" + bytes(20), "a Parquet file", "recording"),
    "run.h5": (b"\x89HDF\r\n\x1a\n" + bytes(20), "an HDF5 file", "otel-torch import"),
    "events.out.tfevents.1.host": (b"\x18" + bytes(11) + b"\x09brain.Event:2", "an event file of TensorBoard", "OTEL_TORCH_CAPTURE"),
    "config.json": (json.dumps({"architectures": ["A"], "model_type": "b"}), "the configuration of a model", "otel-torch scan"),
    "report.json": (json.dumps({"schema": "otel_torch.diff/1", "verdict": "match"}), "the JSON of `otel-torch diff`", "recording"),
    "table.csv": ("step,loss,lr\n1,2,3\n", "a table (CSV)", "recording"),
    "page.html": ("<!doctype html><html></html>\n", "a page", "recording"),
    "other.json": (json.dumps({"colors": [1, 2]}, indent=2), "JSON of another kind", "recording"),
    "lfs.jsonl": ("version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "a pointer of Git LFS", "git lfs pull"),
    "utf16.jsonl": (json.dumps(ROW).encode("utf-16"), "UTF-16 text", "iconv"),
    "prefixed.jsonl": (f"[rank0]: {json.dumps(ROW)}\n", "JSON with other text before it", "sed"),
    "empty.jsonl": ("", "empty", "nothing was written to it"),
    "blob.bin": (bytes(range(1, 32)) + bytes(64), "binary", "recording"),
}  # fmt: skip


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl"
    rows = [ROW | {"step": step} for step in range(3)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    metadata_path(path).write_text('{"ended_cleanly": true, "rank": 0}')
    return path


def refusals(path: Path, recording: Path) -> list[list[str]]:
    """Return the commands that take a recording, with another file in its place."""
    return [
        ["show", str(path)],
        ["show", str(path), "--json"],
        ["show", str(path), "--step", "0"],
        ["show", str(path), "--html", f"{path}.html"],
        ["show", str(path), "--chrome-trace", f"{path}.trace"],
        ["diff", str(path), str(recording)],
        ["diff", str(recording), str(path)],
        ["diff", str(recording), str(recording), "--noise", str(path)],
        ["diff", str(recording), str(recording), "--golden", str(path)],
        ["watch", str(path), "--once"],
    ]


@pytest.mark.parametrize("name", KINDS)
def test_what_is_no_recording_is_named_with_what_takes_it(
    name: str, tmp_path: Path, recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, what, advice = KINDS[name]
    path = tmp_path / "given" / name
    path.parent.mkdir()
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for arguments in refusals(path, recording):
        if arguments[0] == "watch" and name in ("empty.jsonl", "traces.jsonl.gz"):
            continue  # the one may be written to yet, the other does not grow
        if "--chrome-trace" in arguments and name == "traces.jsonl":
            continue  # its spans are all that is drawn
        assert main(arguments) == 2, arguments
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{path}: is {what}" in line and advice in line, (arguments, line)
        assert len(line) < 250 + len(str(path))


# what `import` takes, or says more about
IMPORTED = {"manifest.json", "dump.npz", "empty.jsonl", "other.json"}


@pytest.mark.parametrize("name", sorted(set(KINDS) - IMPORTED))
def test_import_names_what_is_no_manifest(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, what, _ = KINDS[name]
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["import", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    is_unordered = path.suffix in (".npy", ".safetensors")
    assert ("says nothing of the order" if is_unordered else f"is {what}") in line


@pytest.mark.parametrize("name", ["traces.jsonl", "pretty.json", "traces.jsonl.gz"])
def test_the_spans_of_a_run_are_read_in_any_form(
    name: str, tmp_path: Path, recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    content = KINDS[name][0]
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    page = tmp_path / "page.html"
    assert main(["show", str(recording), "--html", str(page), "--traces", str(path)]) == 0
    assert f"{2 if name == 'pretty.json' else 1} spans" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["dump.pt", "jaeger.json", "metrics.jsonl", "request.pb"])
def test_what_holds_no_spans_is_named(
    name: str, tmp_path: Path, recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, what, _ = KINDS[name]
    path = tmp_path / "given" / name
    path.parent.mkdir()
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    page = str(tmp_path / "page.html")
    assert main(["show", str(recording), "--html", page, "--traces", str(path)]) == 2
    assert f"is {what}" in capsys.readouterr().err


def test_nothing_is_unpickled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    (tmp_path / "a.pkl").write_bytes(pickle.dumps(Runs()))
    torch.save(Runs(), tmp_path / "a.pt")
    for name in ("a.pkl", "a.pt"):
        for command in ("show", "send", "import", "watch"):
            assert main([command, str(tmp_path / name)]) == 2
    assert not (tmp_path / "ran").exists()


def test_a_recording_that_is_compressed_is_read(
    tmp_path: Path, recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = tmp_path / "run.jsonl.gz"
    packed.write_bytes(gzip.compress(recording.read_bytes()))
    assert list(read_recording(packed)) == list(read_recording(recording))
    assert main(["show", str(packed)]) == 0
    assert "ended cleanly" in capsys.readouterr().out  # by the metadata of run.jsonl
    assert main(["diff", str(recording), str(packed)]) == 0
    assert main(["watch", str(packed), "--once"]) == 2
    assert "`otel-torch show` reads it" in capsys.readouterr().err
    packed.write_bytes(packed.read_bytes()[:-10])
    for arguments in refusals(packed, recording):
        if arguments[0] == "watch" or "--chrome-trace" in arguments:
            continue  # which find nothing to draw before
        assert main(arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "is compressed by gzip and cut off" in line and "zcat" in line
