"""OTEL_TORCH_OTLP_FILE: the files contain what would be sent, in the format of OpenTelemetry's file
exporter.
"""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from otel_torch.telemetry.otlp.otlp_json import NotOtlp, read_line, write_line
from otel_torch.telemetry.otlp.otlp_requests import count_items, take_items
from tests.e2e.ports import free_port
from tests.otlp_contents import CLASSES, items, parse, read
from tests.otlp_receiver import Receiver
from tests.support import PROGRAMS, environment, lines, run_command, run_python
from tests.telemetry.otlp.test_delivery import lost
from tests.telemetry_support import drive

ALL = {"OTEL_TORCH_SIGNALS": "spans,span_events,log_events,metrics"}

PROGRAM = PROGRAMS / "training/train_then_evaluate_nan.py"


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_the_files_hold_what_is_sent_with_all_ids_and_times(tmp_path: Path, protocol: str) -> None:
    with Receiver() as receiver:
        done = run_python(
            tmp_path,
            PROGRAM,
            OTEL_TORCH_OTLP_FILE=str(tmp_path / "otlp"),
            **ALL,
            **receiver.environment(protocol),
        )
    assert lost(done) == {}
    written = read(tmp_path / "otlp")
    for kind in CLASSES:
        actual = items(kind, written[kind])
        assert actual == items(kind, receiver.requests[kind]), kind
        assert set(actual.values()) == {1} and len(actual) >= (5 if kind == "traces" else 10)


def test_no_endpoint_is_needed_and_no_record_is_missing(tmp_path: Path) -> None:
    done = run_python(tmp_path, PROGRAM, OTEL_TORCH_OTLP_FILE="otlp", **ALL)
    assert lost(done) == {}
    rows = lines(tmp_path / "run.jsonl")
    expected = sorted(
        (row["step"], row["module"], str(row["mean"])) for row in rows if row["phase"] != "train"
    )
    written = read(tmp_path / "otlp")
    spans = [
        span
        for item in written["traces"]
        for group in item.resource_spans[0].scope_spans
        for span in group.spans
    ]
    logs = [
        log
        for item in written["logs"]
        for group in item.resource_logs[0].scope_logs
        for log in group.log_records
    ]
    events = [
        event for span in spans for event in span.events if event.name == "torch.module.activation"
    ]
    for actual in (events, logs):
        assert sorted(_place(item.attributes) for item in actual) == expected
    assert written["metrics"]


def _place(attributes: Any) -> tuple[int, str, str]:
    actual = {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in attributes}
    return actual["torch.step"], actual["torch.module"], str(actual["torch.stat.mean"])


def test_only_the_chosen_signals_are_written_and_a_process_that_records_nothing_writes_none(
    tmp_path: Path,
) -> None:
    run_python(tmp_path, PROGRAM, OTEL_TORCH_OTLP_FILE="otlp", OTEL_TORCH_SIGNALS="log_events")
    assert sorted(path.name for path in (tmp_path / "otlp").iterdir()) == [
        "logs.jsonl",
        "logs.meta.json",
    ]
    run_python(tmp_path, "import torch", OTEL_TORCH_OTLP_FILE="none")
    assert not (tmp_path / "none").exists()


def test_the_metadata_says_whose_they_are_and_how_they_ended(tmp_path: Path) -> None:
    signals = {"OTEL_TORCH_SIGNALS": "spans,span_events"}
    drive(tmp_path, "run_step(0, [record()]); finish()", OTEL_TORCH_OTLP_FILE="otlp", **signals)
    actual = json.loads((tmp_path / "otlp" / "traces.meta.json").read_text())
    assert (actual["run_id"], actual["rank"], actual["signal"]) == ("test", 0, "traces")
    assert actual["ended_cleanly"] and actual["writing_ended"] is None
    assert actual["lines"] == len((tmp_path / "otlp" / "traces.jsonl").read_bytes().splitlines())
    assert actual["written"] == {"span": 2, "span_event": 1}


def test_an_earlier_run_is_renamed(tmp_path: Path) -> None:
    for run in ("first", "second"):
        code = f"run_step(0, [record({run!r})]); finish()"
        done = drive(
            tmp_path,
            code,
            OTEL_TORCH_OTLP_FILE="otlp",
            OTEL_TORCH_RUN_ID=run,
            OTEL_TORCH_SIGNALS="log_events",
        )
    assert "is from an earlier run; renamed to logs.1.jsonl" in done.stderr
    names = [("logs.1", "first"), ("logs", "second")]
    for name, run in names:
        assert f'"{run}"' in (tmp_path / "otlp" / f"{name}.jsonl").read_text()
        assert json.loads((tmp_path / "otlp" / f"{name}.meta.json").read_text())["run_id"] == run


def test_ranks_and_placeholders_are_those_of_the_recording(tmp_path: Path) -> None:
    code = "run_step(0, [record()]); finish()"
    many = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "OTEL_TORCH_SIGNALS": "log_events"}
    drive(tmp_path, code, OTEL_TORCH_OTLP_FILE="a", **many)
    drive(tmp_path, code, OTEL_TORCH_OTLP_FILE="b/<run>-<rank>", **many)
    drive(tmp_path, code, OTEL_TORCH_OTLP_FILE="c", OTEL_TORCH_JSONL_RANKS="0", **many)
    # which ranks export is another question
    with Receiver() as receiver:
        drive(
            tmp_path,
            code,
            OTEL_TORCH_OTLP_FILE="d",
            OTEL_TORCH_RANKS="0",
            **many,
            **receiver.environment(),
        )
        drive(
            tmp_path,
            code,
            OTEL_TORCH_OTLP_FILE="e",
            OTEL_TORCH_JSONL_RANKS="0",
            **many,
            **receiver.environment(),
        )
    actual = [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("logs*.jsonl"))]
    assert actual == ["a/logs.rank1.jsonl", "b/test-1/logs.jsonl", "d/logs.rank1.jsonl"]
    assert len(receiver.log_records()) == 1


def test_a_forked_child_writes_a_file_of_its_own(tmp_path: Path) -> None:
    drive(tmp_path, """
run_step(0, [record("parent")])
child = os.fork()
if child == 0:
    job, losses = this_job(), Losses()
    recorder.restart(losses)
    run_step(1, [record("child", 1)])
    finish()
    os._exit(0)
os.waitpid(child, 0)
run_step(2, [record("parent", 2)])
finish()
""", OTEL_TORCH_OTLP_FILE="otlp", OTEL_TORCH_SIGNALS="log_events")  # fmt: skip
    actual = {
        path.name.count("pid"): path.read_text() for path in (tmp_path / "otlp").glob("logs*.jsonl")
    }
    texts = sorted((text.count('"child"'), text.count('"parent"')) for text in actual.values())
    assert texts == [(0, 2), (1, 0)]


def test_a_killed_process_leaves_its_lines(tmp_path: Path) -> None:
    """It is killed while it writes, once its first steps are on disk."""
    done = drive(
        tmp_path,
        """
import pathlib, signal, threading
paths = [pathlib.Path("otlp/traces.jsonl"), pathlib.Path("otlp/logs.jsonl")]
def found():
    return all(path.exists() and b"\\n" in path.read_bytes() for path in paths)
step = 0
while not found():
    run_step(step, [record(f"layer.{n}", step) for n in range(200)], training=True)
    step += 1
    threading.Event().wait(0.02)
os.kill(os.getpid(), signal.SIGKILL)
""",
        check=False,
        OTEL_TORCH_OTLP_FILE="otlp",
        **ALL,
    )
    assert done.returncode == -signal.SIGKILL
    for kind in ("traces", "logs"):
        *whole, _ = (tmp_path / "otlp" / f"{kind}.jsonl").read_bytes().split(b"\n")
        assert whole  # a kill may come in the middle of the last one
        assert all(count_items(kind, parse(kind, line)) for line in whole)
        assert (
            json.loads((tmp_path / "otlp" / f"{kind}.meta.json").read_text())["ended_cleanly"]
            is False
        )


def test_a_folder_that_cannot_be_written_is_one_line_and_counted_and_everything_arrives(
    tmp_path: Path,
) -> None:
    (tmp_path / "otlp").write_text("a file")
    with Receiver() as receiver:
        done = drive(
            tmp_path,
            "run_step(0, [record()]); finish()",
            OTEL_TORCH_OTLP_FILE="otlp",
            **ALL,
            **receiver.environment(),
        )
    assert [line for line in done.stderr.splitlines() if "OTLP files" in line] == [
        "otel_torch: no OTLP files: otlp cannot be written (Not a directory); set OTEL_TORCH_OTLP_FILE to another folder. "
        "Items that are not written are counted as lost; the program continues"
    ]
    counts = lost(done)
    assert (
        counts["span_event", "disk"] == counts["log_event", "disk"] == 1
        and counts["span", "disk"] == 2
    )
    assert {reason for _, reason in counts} == {"disk"}
    assert len(receiver.events()) == len(receiver.log_records()) == 1 and receiver.metric_points(
        "torch.step"
    )


FULL = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
for step in range(10): run_step(step, [record(f"layer.{n}", step) for n in range(500)])
finish()
"""


def test_a_full_disk_leaves_whole_lines_and_everything_arrives(tmp_path: Path) -> None:
    with Receiver() as receiver:
        done = drive(
            tmp_path,
            FULL,
            OTEL_TORCH_OTLP_FILE="otlp",
            OTEL_TORCH_SIGNALS="log_events",
            **receiver.environment(),
        )
    assert "the disk is full or failed (File too large)" in done.stderr
    text = (tmp_path / "otlp" / "logs.jsonl").read_bytes()
    assert not text or text.endswith(b"\n")
    written = sum(count_items("logs", parse("logs", line)) for line in text.splitlines())
    assert lost(done) == {("log_event", "disk"): 5000 - written} and written < 5000
    assert len(receiver.log_records()) == 5000
    meta = json.loads((tmp_path / "otlp" / "logs.meta.json").read_text())
    assert meta["writing_ended"] == "disk"


def test_the_limit_of_bytes_ends_writing_and_says_so(tmp_path: Path) -> None:
    done = drive(tmp_path, """
for step in range(10): run_step(step, [record(f"layer.{n}", step) for n in range(500)])
finish()
""", OTEL_TORCH_OTLP_FILE="otlp", OTEL_TORCH_SIGNALS="log_events", OTEL_TORCH_MAX_BYTES="1MB")  # fmt: skip
    assert done.stderr.count("OTEL_TORCH_MAX_BYTES (1000000 bytes) is reached") == 1
    written = sum(count_items("logs", item) for item in read(tmp_path / "otlp")["logs"])
    assert 0 < written < 5000 and lost(done) == {("log_event", "max_bytes"): 5000 - written}


def test_the_recordings_bytes_count_as_well(tmp_path: Path) -> None:
    done = run_python(
        tmp_path, PROGRAM, OTEL_TORCH_OTLP_FILE="otlp", OTEL_TORCH_MAX_BYTES="1kB", **ALL
    )
    assert "OTEL_TORCH_MAX_BYTES" in done.stderr and not list((tmp_path / "otlp").glob("*.jsonl"))
    assert ("log_event", "max_bytes") in lost(done)


def test_an_endpoint_that_is_gone_costs_the_files_nothing(tmp_path: Path) -> None:
    done = drive(tmp_path, """
for step in range(5): run_step(step, [record(f"layer.{n}", step) for n in range(100)])
finish(1.8)
""", OTEL_TORCH_OTLP_FILE="otlp", OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{free_port()}", **ALL)  # fmt: skip
    assert {reason for _, reason in lost(done)} <= {"refused", "shutdown"} and lost(done)
    written = read(tmp_path / "otlp")
    assert sum(count_items("logs", item) for item in written["logs"]) == 500
    assert sum(count_items("traces", item) for item in written["traces"]) == 6


def test_the_end_waits_for_files_that_are_behind(tmp_path: Path) -> None:
    """The deadline at exit holds for a collector, not for a disk."""
    done = drive(tmp_path, """
for step in range(5): run_step(step, [record(f"layer.{n}", step) for n in range(1000)])
finish(0.01)
""", OTEL_TORCH_OTLP_FILE="otlp", OTEL_TORCH_SIGNALS="log_events")  # fmt: skip
    assert lost(done) == {}
    assert sum(count_items("logs", item) for item in read(tmp_path / "otlp")["logs"]) == 5_000


def test_what_is_given_up_is_counted_once(tmp_path: Path) -> None:
    """After the end the thread may still try to write a message."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    from otel_torch.recording.disk_budget import DiskBudget
    from otel_torch.records import Losses
    from otel_torch.telemetry.otlp.otlp_file import OtlpFiles
    from otel_torch.telemetry.otlp.queue_items import LogItem
    from tests.support import JOB
    from tests.telemetry_support import make_record

    losses = Losses()
    files = OtlpFiles(str(tmp_path), JOB, losses, DiskBudget(10**9))
    transport = files.open(
        "logs", Resource.get_empty(), InstrumentationScope("s"), [], keep_items=False
    )
    payload, _ = transport.encode(LogItem([make_record()], 100, 0, None))
    assert transport.send(payload).kind == "accepted"
    transport.shutdown()
    assert transport.send(payload).kind == "shutdown"
    assert losses.items() == [] and len((tmp_path / "logs.jsonl").read_bytes().splitlines()) == 1


def test_with_files_the_programs_own_provider_is_not_used(tmp_path: Path) -> None:
    done = drive(tmp_path, """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
run_step(0, [record()])
finish()
print(len(exporter.get_finished_spans()))
""", OTEL_TORCH_OTLP_FILE="otlp")  # fmt: skip
    assert done.stdout.strip() == "0"
    assert done.stderr.count("instead of to the program's own providers") == 1
    assert sum(count_items("traces", item) for item in read(tmp_path / "otlp")["traces"]) == 2


def test_exporters_that_take_objects_get_them_too(tmp_path: Path) -> None:
    done = drive(
        tmp_path, "run_step(0, [record()]); finish()", OTEL_TORCH_OTLP_FILE="otlp", OTEL_TRACES_EXPORTER="console",
        OTEL_TORCH_SIGNALS="spans,span_events",
    )  # fmt: skip
    assert '"name": "torch.step"' in done.stdout and '"torch.module.activation"' in done.stdout
    assert sum(count_items("traces", item) for item in read(tmp_path / "otlp")["traces"]) == 2


def test_lines_stay_short_where_they_can(tmp_path: Path) -> None:
    """By default the Collector's receiver reads lines of up to 1 MiB."""
    drive(tmp_path, """
for step in range(30): run_step(step, [record(f"layer.{n}", step) for n in range(500)])
finish()
""", OTEL_TORCH_OTLP_FILE="otlp", OTEL_TORCH_SIGNALS="log_events")  # fmt: skip
    sizes = [len(line) for line in (tmp_path / "otlp" / "logs.jsonl").read_bytes().splitlines()]
    assert sum(sizes) > 5 * 2**20 and max(sizes) < 2**20


def test_a_disabled_sdk_writes_nothing(tmp_path: Path) -> None:
    run_python(tmp_path, PROGRAM, OTEL_TORCH_OTLP_FILE="otlp", OTEL_SDK_DISABLED="true")
    assert not (tmp_path / "otlp").exists()


# -- the format


def fill(message: Any, chance: random.Random, depth: int = 0) -> Any:
    """Set random values in random fields of a message."""
    for field in message.DESCRIPTOR.fields:
        if chance.random() < 0.35 or (depth > 8 and field.type == field.TYPE_MESSAGE):
            continue
        if field.type == field.TYPE_MESSAGE:
            for _ in range(chance.randint(0, 3) if field.is_repeated else 1):
                inner = getattr(message, field.name)
                fill(inner.add() if field.is_repeated else inner, chance, depth + 1)
                if not field.is_repeated:
                    inner.SetInParent()
        elif field.is_repeated:
            getattr(message, field.name).extend(
                _any_value(field, chance) for _ in range(chance.randint(0, 4))
            )
        else:
            setattr(message, field.name, _any_value(field, chance))
    return message


def _any_value(field: Any, chance: random.Random) -> Any:
    low, high = {
        field.TYPE_INT32: (-(2**31), 2**31 - 1), field.TYPE_SINT32: (-(2**31), 2**31 - 1),
        field.TYPE_UINT32: (0, 2**32 - 1), field.TYPE_FIXED32: (0, 2**32 - 1),
        field.TYPE_UINT64: (0, 2**64 - 1), field.TYPE_FIXED64: (0, 2**64 - 1),
    }.get(field.type, (-(2**63), 2**63 - 1))  # fmt: skip
    if field.type == field.TYPE_ENUM:
        return chance.choice([item.number for item in field.enum_type.values])
    if field.type == field.TYPE_STRING:
        return chance.choice(
            ["", "a", 'é"\\\n\x00\x7f', "\U0001f600", "x" * 200, "\x12\x09!01234567"]
        )
    if field.type == field.TYPE_BYTES:
        return chance.randbytes(chance.choice([0, 8, 16, 300]))
    if field.type == field.TYPE_BOOL:
        return chance.random() < 0.5
    if field.type in (field.TYPE_DOUBLE, field.TYPE_FLOAT):
        return chance.choice(
            [0.0, -0.0, 1.5, 1e-320, -1e300, 0.1, float("nan"), float("inf"), float("-inf")]
        )
    return chance.choice([0, 1, low, high, chance.randint(low, high)])


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("seed", range(20))
def test_any_message_is_written_as_protobufs_own_json_and_read_back(kind: str, seed: int) -> None:
    message = fill(CLASSES[kind](), random.Random(seed))
    if not message.ByteSize():
        return
    line = write_line(kind, message.SerializeToString())
    assert line.count(b"\n") == 1
    # NaN equals nothing, so bytes are compared
    assert parse(kind, line).SerializeToString(deterministic=True) == message.SerializeToString(
        deterministic=True
    )
    actual, request = read_line(line)
    assert actual == kind and request.SerializeToString(
        deterministic=True
    ) == message.SerializeToString(deterministic=True)


@pytest.mark.parametrize("kind", CLASSES)
def test_a_message_in_parts_holds_the_same(kind: str) -> None:
    chance = random.Random(7)
    message = CLASSES[kind]()
    while count_items(kind, message) < 12:
        fill(message, chance)
    number = count_items(kind, message)
    for cut in (0, 1, number // 2, number):
        parts = [take_items(kind, message, 0, cut), take_items(kind, message, cut, number)]
        assert [count_items(kind, part) for part in parts] == [cut, number - cut]
        assert items(kind, parts) == items(kind, [message])


LENIENT = """{"resourceSpans": [{"resource": null, "unknown": {"x": [1]}, "scopeSpans": [{"spans": [{
"trace_id": "0AF7651916CD43DD8448EB211C80319C", "spanId": "b7ad6b7169203331", "parentSpanId": "", "status": {},
"kind": "SPAN_KIND_SERVER",
"startTimeUnixNano": 5, "endTimeUnixNano": "7", "attributes": [{"key": "a", "value": {"doubleValue": "Infinity"}},
{"key": "b", "value": {"doubleValue": NaN}}, {"key": "c", "value": {"intValue": 3}}, {"key": "d", "value": {"bytesValue": "_-8"}}
]}]}]}]}""".replace("\n", " ")


def test_what_others_write_is_read() -> None:
    kind, request = read_line(LENIENT)
    (span,) = request.resource_spans[0].scope_spans[0].spans
    assert (kind, span.trace_id.hex(), span.kind) == (
        "traces",
        "0af7651916cd43dd8448eb211c80319c",
        2,
    )
    assert (span.start_time_unix_nano, span.end_time_unix_nano) == (5, 7)
    values = [item.value for item in span.attributes]
    assert (values[0].double_value, str(values[1].double_value), values[2].int_value) == (
        float("inf"),
        "nan",
        3,
    )
    assert values[3].bytes_value == b"\xff\xef"


@pytest.mark.parametrize(
    "line",
    ["", "no", "[]", "3", "{}", '{"resourceSpans": 3}', '{"resourceSpans": [3]}', '{"resourceProfiles": []}',
     '{"resourceSpans": [], "resourceLogs": []}', '{"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "xy"}]}]}]}',
     '{"resourceSpans": [{"scopeSpans": [{"spans": [{"startTimeUnixNano": -1}]}]}]}',
     '{"resourceSpans": [{"scopeSpans": [{"spans": [{"startTimeUnixNano": true}]}]}]}',
     '{"resourceSpans": [{"scopeSpans": [{"spans": [{"name": 3}]}]}]}', "[" * 100_000, "\udcff"],
)  # fmt: skip
def test_what_is_no_otlp_is_one_line_that_says_why(line: str) -> None:
    with pytest.raises(NotOtlp, match=r"^[^\n]+$"):
        read_line(line)


def test_descriptors_of_an_older_protobuf_tell_lists_too() -> None:
    from types import SimpleNamespace

    from otel_torch.telemetry.otlp.otlp_json import _is_repeated

    assert [_is_repeated(SimpleNamespace(label=label, LABEL_REPEATED=3)) for label in (1, 3)] == [
        False,
        True,
    ]


def test_the_folder_is_among_what_the_doctor_looks_at(tmp_path: Path) -> None:
    done = run_command("doctor", **environment(tmp_path, OTEL_TORCH_OTLP_FILE=os.devnull))
    assert done.returncode == 2 and f"NO otlp files {os.devnull}" in done.stdout
