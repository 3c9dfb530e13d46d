"""Recognizes files of other kinds by their first bytes, to say which command or step takes them.

One table serves all commands: a command that cannot read a file asks here what it is. Nothing is
unpickled or executed, and only the first bytes are read.

>>> recognize(b'{"traceEvents": [{"ph": "X"}]}').what
'a Chrome trace, as the torch profiler writes it'
"""

from __future__ import annotations

import os
import re
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from otel_torch.recording.input_file import GZIP_MAGIC

# bytes that are looked at: the keys that tell are among the first ones
_HEAD_BYTES = 1 << 16
# levels of a JSON document whose keys are looked at
_KEY_LEVELS = 3


@dataclass(frozen=True, slots=True)
class FileKind:
    """A kind of file.

    Attributes:
        what: In words.
        advice: Which command or step takes it.
        may_hold_otlp: Whether OTLP that `otel-torch send` reads may come of it.
    """

    what: str
    advice: str
    may_hold_otlp: bool = False


_RECORD_TRAINING = (
    "record the training itself: OTEL_TORCH_ENABLED=1 OTEL_TORCH_CAPTURE=training python train.py"
)
_NOT_UNPICKLED = (
    "nothing is ever unpickled: write its tensors to an .npz file in the order of execution, which "
    "`otel-torch import` takes"
)
_NEEDS_MANIFEST = "list its arrays in a manifest, which `otel-torch import` takes"
_TENSORS_OF_A_RUN = (
    f"{_NEEDS_MANIFEST}; those of a recorded run belong to `otel-torch diff --tensors`"
)
_RECORDS_ONLY = "no command here reads it; give a recording (.jsonl)"
_PERFETTO = "open it in Perfetto (ui.perfetto.dev)"

RECORDING = FileKind("a recording", "`otel-torch show` and `otel-torch diff` read it")
OTLP = FileKind(
    "OTLP JSON",
    "`otel-torch send` delivers it, and `otel-torch show RECORDING --html PAGE --traces FILE` "
    "draws its spans",
    may_hold_otlp=True,
)
MANIFEST = FileKind("a manifest of dumped tensors", "`otel-torch import` makes a recording of it")
NPZ = FileKind("an .npz archive of arrays", "`otel-torch import` makes a recording of it")
EMPTY = FileKind(
    "empty", "nothing was written to it: see what its program printed when it started and ended"
)

# -- bytes

_COMPRESSED = (
    (0, b"\x28\xb5\x2f\xfd", "zstd", "zstd -d"),
    (0, b"\xfd7zXZ\0", "xz", "xz -dk"),
    (0, b"BZh", "bzip2", "bzip2 -dk"),
    (0, b"\x04\x22\x4d\x18", "lz4", "lz4 -d"),
)
_ZSTD_MESSAGES = FileKind(
    "compressed by zstd, message by message", "have its exporter write plain JSON lines", True
)
_HDF5 = FileKind("an HDF5 file", f"write its arrays to an .npz file and {_NEEDS_MANIFEST}")
# where the signature is, the signature, the kind
_SIGNATURES: tuple[tuple[int, bytes, FileKind], ...] = (
    *(
        (at, signature, FileKind(f"compressed by {name}", f"decompress it: {tool} FILE", True))
        for at, signature, name, tool in _COMPRESSED
    ),
    (4, b"\x28\xb5\x2f\xfd", _ZSTD_MESSAGES),
    (0, b"\x93NUMPY", FileKind("a single array (.npy)", _NEEDS_MANIFEST)),
    (0, b"PAR1", FileKind("a Parquet file", _RECORDS_ONLY)),
    (0, b"ARROW1", FileKind("an Arrow file", _RECORDS_ONLY)),
    (0, b"\x89HDF\r\n\x1a\n", _HDF5),
    (0, b"SQLite format 3\0", FileKind("an SQLite database, as nsys exports it", _RECORDS_ONLY)),
    (0, b"GGUF", FileKind("a GGUF model", f"dump the tensors of a run; {_NEEDS_MANIFEST}")),
    (0, b":W&B", FileKind("a run of Weights & Biases", _RECORD_TRAINING)),
    (0, b"7z\xbc\xaf\x27\x1c", FileKind("a 7z archive", "unpack it first: 7z x FILE")),
    (257, b"ustar", FileKind("a tar archive", "unpack it first: tar -xf FILE")),
    (0, b"\x7fELF", FileKind("a compiled program or library", _RECORDS_ONLY)),
    (0, b"\x89PNG", FileKind("a picture", _RECORDS_ONLY)),
    (0, b"%PDF", FileKind("a PDF document", _RECORDS_ONLY)),
    (0, b"version https://git-lfs", FileKind("a pointer of Git LFS", "fetch it: git lfs pull")),
)
_PICKLE = re.compile(rb"\x80[\x02-\x05]")
_EVENTS = FileKind("an event file of TensorBoard", _RECORD_TRAINING)
_UTF_16 = FileKind("UTF-16 text", "convert it first: iconv -f UTF-16 -t UTF-8 FILE > NEW", True)
_UTF_32 = FileKind("UTF-32 text", "convert it first: iconv -f UTF-32 -t UTF-8 FILE > NEW", True)
_PICKLED = FileKind("pickled Python data", _NOT_UNPICKLED)
_SAFETENSORS = FileKind("a safetensors file", _TENSORS_OF_A_RUN)
_PROTOBUF = FileKind(
    "OTLP in protobuf",
    "`otel-torch send` reads OTLP JSON: have the exporter write JSON "
    "(`format: json` of the Collector's file exporter)",
    may_hold_otlp=True,
)
_BINARY = FileKind("binary, of no kind that is known here", _RECORDS_ONLY)

# -- archives: what a name in it ends with, the kind
_MEMBERS = (
    ("constants.pkl", FileKind("a TorchScript archive", f"run it; {_NOT_UNPICKLED}")),
    ("data.pkl", FileKind("a checkpoint of torch.save", _NOT_UNPICKLED)),
    (".npy", NPZ),
)
_ZIP = FileKind("a zip archive", "unpack it first: unzip FILE")

# -- JSON: keys of the document's top level, further keys below it, the kind

_SPANS_ALONE = (
    "`otel-torch send` takes OTLP JSON only: export by OTLP instead, or set OTEL_TORCH_OTLP_FILE"
)
_JAEGER = FileKind("a trace that was exported from Jaeger", _SPANS_ALONE)
_CONSOLE_SPANS = FileKind("spans of OpenTelemetry's console exporter", _SPANS_ALONE)
_CONSOLE_LOGS = FileKind("logs of OpenTelemetry's console exporter", _SPANS_ALONE)
_CHROME = FileKind("a Chrome trace, as the torch profiler writes it", _PERFETTO)
_METRICS = FileKind("metrics of a training, a line a step", _RECORD_TRAINING)
_MODEL = "`otel-torch scan` takes its folder"
_JSON_KINDS: tuple[tuple[set[str], set[str], FileKind | None], ...] = (
    *(({f"resource{name}"}, set[str](), OTLP) for name in ("Spans", "Metrics", "Logs")),
    *(({f"resource_{name}"}, set[str](), OTLP) for name in ("spans", "metrics", "logs")),
    ({"module", "tensor", "phase"}, set(), RECORDING),
    ({"module", "tensor", "abs_mean"}, set(), RECORDING),
    ({"module", "key"}, set(), MANIFEST),
    ({"module"}, set(), None),  # of a recording whose first line is cut off, or of a manifest
    ({"traceEvents"}, set(), _CHROME),
    ({"ph", "ts"}, set(), _CHROME),
    ({"ph", "name"}, set(), _CHROME),
    ({"data"}, {"traceID", "spans"}, _JAEGER),
    ({"traceID", "spans"}, set(), _JAEGER),
    ({"traceID", "operationName"}, set(), FileKind("spans of Jaeger", _SPANS_ALONE)),
    ({"batches"}, {"resource"}, FileKind("a trace that was exported from Tempo", _SPANS_ALONE)),
    ({"traceId", "id"}, set(), FileKind("spans of Zipkin", _SPANS_ALONE)),
    ({"name", "context"}, {"trace_id"}, _CONSOLE_SPANS),
    ({"body", "severity_number"}, set(), _CONSOLE_LOGS),
    ({"traceId", "spanId"}, set(), FileKind("spans without the frame of OTLP", _SPANS_ALONE)),
    ({"log_history"}, set(), FileKind("a trainer_state.json of transformers", _RECORD_TRAINING)),
    ({"weight_map"}, set(), FileKind("the index of a sharded checkpoint", _MODEL)),
    ({"architectures"}, set(), FileKind("the configuration of a model", _MODEL)),
    ({"model_type"}, set(), FileKind("the configuration of a model", _MODEL)),
    ({"_class_name"}, set(), FileKind("the configuration of a model", _MODEL)),
    ({"cells"}, {"cell_type"}, FileKind("a notebook", "run it with OTEL_TORCH_ENABLED=1")),
    ({"tensors"}, set(), MANIFEST),
    ({"steps"}, set(), MANIFEST),
    *(
        ({key}, set[str](), _METRICS)
        for key in ("_step", "_runtime", "loss", "train_loss", "train/loss", "eval_loss", "lr")
    ),
    ({"global_step"}, set(), _METRICS),
    ({"iteration"}, set(), _METRICS),
    ({"epoch"}, set(), _METRICS),
    ({"message", "level"}, set(), FileKind("a log in JSON lines", _RECORDS_ONLY)),
    ({"message", "levelname"}, set(), FileKind("a log in JSON lines", _RECORDS_ONLY)),
)  # fmt: skip
OTHER_JSON = FileKind("JSON of another kind", _RECORDS_ONLY)
# our own files say in `schema` what they are
_SCHEMA = re.compile(rb'"schema"\s*:\s*"otel_torch\.(\w+)/')
_OWN_KINDS = {
    b"recording": FileKind("the metadata of a recording", "give the .jsonl beside it"),
    b"otlp_file": FileKind("the metadata of OTLP files", "give the .jsonl files beside it"),
    b"sent": FileKind("what `otel-torch send` remembers", "give the OTLP file beside it"),
    b"isolation": FileKind("a pairing for OTEL_TORCH_ISOLATE", "give a recording"),
}

# -- text

# each in time that grows with the text: no part may match what the part before it gave up
_PREFIXED = re.compile(rb'\s*[^{\s][^{]*(\{\s*"(?:resource[A-Z_]\w+|module|tensor)"\s*:)')
_HTML = re.compile(rb"\s*<(!doctype|html|\?xml|svg)", re.IGNORECASE)
# the last string may be cut off
_TOKEN = re.compile(rb'"((?:[^"\\]|\\.)*+)(?:"\s*(:?)|\\?\Z)|[{}\[\]]')
_TEXT_KINDS: tuple[tuple[re.Pattern[bytes], FileKind], ...] = (
    (
        _PREFIXED,
        FileKind(
            "JSON with other text before it on its lines, as a logger or a launcher adds it",
            "remove that: sed 's/^[^{]*//' FILE > NEW",
            may_hold_otlp=True,
        ),
    ),
    (_HTML, FileKind("a page, not data", "give the recording that it was made of")),
    (re.compile(rb"[^\n{\[,]*,[^\n{\[,]*,[^\n{\[]*\n"), FileKind("a table (CSV)", _RECORDS_ONLY)),
)


def identify(path: str | Path) -> FileKind | None:
    """Return what a file is; None for text without any sign, and for a file that cannot be read."""
    try:
        if not os.path.isfile(path):
            return None  # a pipe would wait
        with open(path, "rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return None
    if head.startswith(b"PK\x03\x04"):
        return _kind_of_archive(path)
    if "tfevents" in Path(path).name:
        return _EVENTS
    return recognize(head)


def refusal(path: str | Path, *taken: FileKind) -> str | None:
    """Return the line that says what a file is and what takes it.

    Args:
        taken: The kinds that the command reads itself. Of those, or of nothing that is known, its
            own message says more: None.
    """
    kind = identify(path)
    return None if kind is None or kind in taken else f"{path}: is {kind.what}; {kind.advice}"


def recognize(head: bytes) -> FileKind | None:
    """Return what a file is that begins with these bytes and is no zip archive."""
    if head.startswith(GZIP_MAGIC):
        head = _decompress(head)
    if not head:
        return EMPTY
    for offset, signature, kind in _SIGNATURES:
        if head.startswith(signature, offset):
            return kind
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text[:1] in (b"{", b"["):
        if text[1:2] != b"\0":
            return _kind_of_json(text)
    elif _PICKLE.match(head):
        return _PICKLED
    return _kind_of_encoding(head) or _kind_of_binary(head) or _kind_of_text(text)


def _decompress(head: bytes) -> bytes:
    try:
        return zlib.decompressobj(wbits=31).decompress(head, _HEAD_BYTES)
    except zlib.error:
        return head


def _kind_of_archive(path: str | Path) -> FileKind:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return FileKind("a zip archive that is cut off or damaged", "copy it again")
    found = (kind for ending, kind in _MEMBERS if any(name.endswith(ending) for name in names))
    return next(found, _ZIP)


def _kind_of_encoding(head: bytes) -> FileKind | None:
    if head.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")):
        return _UTF_32
    has_zeros = head[:1] == b"\0" or head[1:2] == b"\0"
    is_json = head[:2].strip(b"\0") in (b"{", b"[") and has_zeros
    return _UTF_16 if is_json or head.startswith((b"\xff\xfe", b"\xfe\xff")) else None


def _kind_of_binary(head: bytes) -> FileKind | None:
    if head[8:9] == b"{" and b"\0" in head[:8]:
        return _SAFETENSORS
    if b"brain.Event:" in head[:64]:
        return _EVENTS
    # alone; with the length in front of it, as the Collector writes it; in a frame of gRPC
    if any(_is_otlp_protobuf(head[start:]) for start in (0, 4, 5)):
        return _PROTOBUF
    return _BINARY if b"\0" in head[:512] else None


def _is_otlp_protobuf(data: bytes) -> bool:
    """Return whether bytes are a message in a message and so on, down to the key of an attribute:
    items of a resource, resource, attribute, key.
    """
    position = length = 0
    for _ in range(4 if data[:1] == b"\n" else 0):
        if data[position : position + 1] != b"\n":
            return False
        length = shift = 0
        while True:
            position += 1
            if position >= len(data) or shift > 35:
                return False
            length |= (data[position] & 0x7F) << shift
            shift += 7
            if data[position] < 0x80:
                break
        position += 1
    key = data[position : position + length]
    return 0 < length == len(key) < 256 and key.isascii() and key.decode().isprintable()


def _kind_of_json(text: bytes) -> FileKind | None:
    if schema := _SCHEMA.search(text[:4096]):
        command = schema[1].decode()
        written = FileKind(f"the JSON of `otel-torch {command}`", "give the recording itself")
        return _OWN_KINDS.get(schema[1], written)
    top, below = _keys(text)
    for needed, needed_below, kind in _JSON_KINDS:
        if needed <= top and needed_below <= below:
            return kind
    if "step" in top and len(top) > 1:  # alone, it is what a manifest says of a group
        return _METRICS
    if re.match(rb'\[\s*"', text):
        return MANIFEST
    return _kind_of_text(text) or (OTHER_JSON if top else None)


def _kind_of_text(text: bytes) -> FileKind | None:
    first = text[: text.find(b"\n") + 1] or text
    return next((kind for sign, kind in _TEXT_KINDS if sign.match(first)), None)


def _keys(text: bytes) -> tuple[set[str], set[str]]:
    """Return the keys of the first document: of its object, or of the objects of its list; and
    those of the next levels.

    >>> top, below = _keys(b'[{"a": 1, "b": [{"c": {}}]}] {"d": 1}')
    >>> sorted(top), below
    (['a', 'b'], {'c'})
    """
    top: set[str] = set()
    below: set[str] = set()
    start = 2 if text.startswith(b"[") else 1
    depth = 0
    for token in _TOKEN.finditer(text):
        if token[0] in (b"{", b"["):
            depth += 1
        elif token[0] in (b"}", b"]"):
            depth -= 1
            if depth <= 0:
                break
        elif token[2]:
            key = token[1].decode(errors="replace")
            if depth <= start:
                top.add(key)
            elif depth <= start + _KEY_LEVELS:
                below.add(key)
    return top, below
