"""Delivery to receivers that are healthy, broken, slow or gone: everything arrives or is counted as
lost.
"""

from __future__ import annotations

import gc
import re
import socket
import threading
import time
import weakref

import pytest
import urllib3.util.connection
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from otel_torch.records import Losses
from otel_torch.telemetry.otlp.answer import Answer
from otel_torch.telemetry.otlp.export_queue import BATCH_BYTES, BackpressureBudget, ExportQueue
from otel_torch.telemetry.otlp.http_transport import HttpTransport
from otel_torch.telemetry.otlp.queue_items import DeferredItems
from tests.e2e.ports import free_port
from tests.hostile_server import HostileServer, answers
from tests.otlp_receiver import Receiver
from tests.sampling import sample
from tests.telemetry_support import drive

ALL = {"OTEL_TORCH_SIGNALS": "spans,span_events,log_events,metrics"}


def lost(done):
    """Return {(item, reason): number} from the line that reports losses."""
    (line,) = re.findall(r"otel_torch: lost: (.*)", done.stderr) or [""]
    counts = re.findall(r"(\d+) ([a-z ]+?)s? \((\w+)\)", line)
    return {
        (item_kind.replace(" ", "_"), reason): int(number) for number, item_kind, reason in counts
    }


# As fast as the receiver takes it. Without the wait a slow machine would lose some, and count them.
BURST = """
STATS = {"abs_mean": 0.5, "sum": 1.5, "min": -1.0, "max": 1.0, "mean": 0.25, "std": 0.125, "nonfinite": 0}
STATS |= {"shape": [2, 3], "dtype": "float32"}
for step in range(100):
    run_step(step, [record(f"blocks.{n}.attention.to_out", step, **STATS) for n in range(1000)])
    wait_for_room()
"""


@pytest.mark.scoreboard
@pytest.mark.parametrize("protocol", sample(["grpc", "http"], 2))
def test_a_burst_of_a_hundred_thousand_records_arrives_whole_and_fits_into_messages(
    tmp_path, protocol
):
    with Receiver() as receiver:
        done = drive(tmp_path, BURST + "finish(60)", **ALL, **receiver.environment(protocol))
    assert lost(done) == {}
    assert len(receiver.events()) == 100_000
    assert len(receiver.log_records()) == 100_000
    assert len(receiver.metric_points("torch.module.activation.mean")) == 100_000
    assert max(receiver.sizes) < 4 * 2**20
    assert receiver.metric_points("torch.module.activation.magnitude")[-1]["count"] == 100


def test_records_arrive_while_the_program_runs(tmp_path):
    """The program waits until the receiver has answered."""
    with Receiver() as receiver:
        done = drive(tmp_path, """
run_step(0, [record()], training=True)
import threading
deadline = time.monotonic() + 60
queues = [q for sink in recorder.sinks for qs in sink._pipelines._queues.values() for q in qs]
while time.monotonic() < deadline and not all(q.sent for q in queues):
    threading.Event().wait(0.05)
print([sorted(q.sent) for q in queues], flush=True)
os._exit(0)
""", **receiver.environment())  # fmt: skip
    assert "'log_event'" in done.stdout and "'metric_point'" in done.stdout
    assert len(receiver.log_records()) == 1


@pytest.mark.parametrize("is_shared", [True, False])
def test_signals_of_one_endpoint_share_what_is_known_of_its_pace(tmp_path, is_shared):
    """Metrics may be sent only once, at the end, to an endpoint that has answered spans slowly."""
    with Receiver() as receiver:
        variables = receiver.environment("http")
        if not is_shared:
            variables["OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"] = "http://127.0.0.1:1/v1/metrics"
        done = drive(tmp_path, """
run_step(0, [record()])
(sink,) = recorder.sinks
(traces,), (metrics,) = (sink._pipelines._queues[name] for name in ("traces", "metrics"))
before = metrics._patience.answer_s
traces._patience.learn(100.0)
print(metrics._patience.answer_s - before > 100.0)
""", **variables)  # fmt: skip
    assert done.stdout == f"{is_shared}\n"


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_without_a_collector_everything_is_counted_and_one_line_says_why(tmp_path, protocol):
    endpoint = (
        f"http://127.0.0.1:{free_port()}/?key=secret"
        if protocol != "grpc"
        else f"http://127.0.0.1:{free_port()}"
    )
    done = drive(tmp_path, """
for step in range(10): run_step(step, [record(f"layer.{n}", step) for n in range(100)])
started = time.monotonic()
finish(1.8)
assert time.monotonic() - started < 20
""", **ALL, OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, OTEL_EXPORTER_OTLP_PROTOCOL=protocol)  # fmt: skip
    counts: dict[str, int] = {}
    for (item_kind, _), number in lost(done).items():
        counts[item_kind] = counts.get(item_kind, 0) + number
    assert (counts["span"], counts["span_event"], counts["log_event"]) == (11, 1000, 1000)
    assert counts["metric_point"] >= 2 * 1000 + 10
    lines = [line for line in done.stderr.splitlines() if "127.0.0.1" in line]
    assert len(lines) == 1 and "start a collector there" in lines[0] and "secret" not in done.stderr
    assert "Traceback" not in done.stderr and "Transient" not in done.stderr


class SlowReceiver(Receiver):
    """Answers after 2.3 s."""

    def store(self, *request):
        time.sleep(2.3)
        super().store(*request)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_first_answer_that_takes_more_than_half_of_the_end_is_waited_for(tmp_path, protocol):
    """The connection stands and the request is under way, so the collector may be slow, not dead."""
    with SlowReceiver() as receiver:
        done = drive(
            tmp_path,
            "run_step(0, [record()]); finish(4)",
            OTEL_TORCH_SIGNALS="log_events",
            **receiver.environment(protocol),
        )
        assert (lost(done), len(receiver.log_records())) == ({}, 1)


@pytest.mark.parametrize(
    ("variable", "path", "is_said"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "/v1/logs", "takes no signal path: leave out its /v1/logs"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "/v1/traces/", "signal path: leave out its /v1/traces"),
        ("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", "", "its address has to end in /v1/logs"),
        ("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", "/v1/logs", "give it a pipeline"),
    ],
)
def test_a_path_that_no_receiver_has_is_explained(tmp_path, variable, path, is_said):
    with HostileServer(answers("404 Not Found")) as server:
        variables = server.environment | {variable: server.endpoint + path}
        done = drive(
            tmp_path,
            "run_step(0, [record()]); finish()",
            OTEL_TORCH_SIGNALS="log_events",
            **variables,
        )
    assert is_said in done.stderr
    assert ("pipeline" in done.stderr) is ("pipeline" in is_said)
    assert lost(done) == {("log_event", "refused"): 1}


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_what_a_receiver_rejects_is_counted_and_said(tmp_path, protocol):
    with Receiver("reject", rejecting=2) as receiver:
        done = drive(tmp_path, "run_step(0, [record(f'layer.{n}') for n in range(9)]); finish()",
                     OTEL_TORCH_SIGNALS="log_events", **receiver.environment(protocol))  # fmt: skip
    assert lost(done) == {("log_event", "rejected"): 2}
    assert "accepts only a part of the data (2 of the logs rejected: not all of it)" in done.stderr


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_receiver_that_refuses_is_not_asked_again(tmp_path, protocol):
    with Receiver("refuse") as receiver:
        done = drive(
            tmp_path,
            "run_step(0, [record()]); finish()",
            OTEL_TORCH_SIGNALS="log_events",
            **receiver.environment(protocol),
        )
    assert lost(done) == {("log_event", "refused"): 1}
    assert "refuses the data" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_what_an_unavailable_receiver_did_not_take_is_sent_again(tmp_path, protocol):
    """The receiver recovers once a request has failed."""
    with Receiver("unavailable") as receiver:
        receiver.recover_after_failures = 4
        done = drive(tmp_path, """
import threading
run_step(0, [record()])
(queue,) = [q for sink in recorder.sinks for qs in sink._pipelines._queues.values() for q in qs]
deadline = time.monotonic() + 120
while time.monotonic() < deadline and not queue.sent:
    threading.Event().wait(0.05)
finish()
""", OTEL_TORCH_SIGNALS="log_events", **receiver.environment(protocol))  # fmt: skip
    assert lost(done) == {}
    assert len(receiver.log_records()) == 1


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_tls_mismatch_is_explained(tmp_path, protocol):
    with Receiver() as receiver:
        endpoint = (
            receiver.grpc_endpoint if protocol == "grpc" else receiver.http_endpoint
        ).replace("http:", "https:")
        done = drive(tmp_path, "run_step(0, [record()]); finish(1.8)", OTEL_EXPORTER_OTLP_ENDPOINT=endpoint,
                     OTEL_EXPORTER_OTLP_PROTOCOL=protocol)  # fmt: skip
    assert "does not use TLS" in done.stderr or "TLS handshake" in done.stderr
    assert lost(done)["log_event", "refused"] == 1


def test_compression_and_headers_of_the_standard_variables_are_used(tmp_path):
    with Receiver() as receiver:
        drive(tmp_path, "run_step(0, [record()]); finish()", OTEL_EXPORTER_OTLP_COMPRESSION="gzip",
              OTEL_EXPORTER_OTLP_HEADERS="x-team=video", **receiver.environment("http"))  # fmt: skip
    assert len(receiver.log_records()) == 1
    assert {(headers["content-encoding"], headers["x-team"]) for headers in receiver.headers} == {
        ("gzip", "video")
    }


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_forked_child_sends_its_own_and_nothing_of_its_parent(tmp_path, protocol):
    with Receiver() as receiver:
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
finish()
""", **receiver.environment(protocol))  # fmt: skip
    modules = [record["attributes"]["torch.module"] for record in receiver.log_records()]
    assert sorted(modules) == ["child", "parent"]
    assert len({span["resource"]["process.pid"] for span in receiver.spans("torch.run")}) == 2
    assert (
        len({span["resource"]["service.instance.id"] for span in receiver.spans("torch.run")}) == 2
    )
    assert len({span["trace_id"] for span in receiver.spans()}) == 1


def test_the_programs_own_exporters_keep_their_warnings(tmp_path):
    done = drive(tmp_path, """
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
recorder.open(Scope("stage", "ours"))
time.sleep(0)
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(timeout=0.5)))
with provider.get_tracer("program").start_as_current_span("s"): pass
finish(1)
""", OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{free_port()}", OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf")  # fmt: skip
    assert "Failed to export spans" in done.stderr or "Transient error" in done.stderr


class Sized:
    """An item with the given numbers of records and bytes."""

    def __init__(self, records):
        self.records, self.size = records, 100

    @property
    def counts(self):
        return {"log_event": len(self.records)}

    def expand(self):
        return (self,)

    def split(self):
        middle = len(self.records) // 2
        return (Sized(self.records[:middle]), Sized(self.records[middle:])) if middle else ()

    def encode(self):
        return self.records


def accept(payload):
    return Answer("accepted")


class BlockedSend:
    """Answers a message only once it is released."""

    def __init__(self, answer="accepted"):
        self.answer, self.started, self.release = answer, threading.Event(), threading.Event()

    def __call__(self, payload):
        self.started.set()
        assert self.release.wait(60)
        return Answer(self.answer)


def queue_with(encoded=lambda item: 10, send=accept, **options):
    """Return a queue, the list of what its sender gets, and the losses.

    Args:
        encoded: gives the bytes of an item's message.
        send: answers a message.
    """
    sent = []

    class Sender:
        connected_at = 0.0
        has_connected = False

        def encode(self, item):
            return list(item.encode()), encoded(item)

        def send(self, payload):
            sent.append(payload)
            return send(payload)

        def report_silence(self):
            pass

        def cancel(self):
            pass

        def shutdown(self):
            pass

    losses = Losses()
    return ExportQueue("logs", Sender, losses, **options), sent, losses


def numbered(count):
    return [Sized([str(n)]) for n in range(count)]


def end(queue, seconds=30):
    queue.close(time.monotonic() + seconds)
    queue.wait()
    queue.finish()


def test_a_full_queue_drops_the_new_and_counts_them():
    """The sender blocks in its first message; the queue fills up to its limit."""
    send, items = BlockedSend(), numbered(30)
    queue, sent, losses = queue_with(send=send, limit=1000)
    queue.put(items[:1], BackpressureBudget())
    assert send.started.wait(60)
    queue.put(items[1:], BackpressureBudget())
    assert losses.items() == [("log_event", "queue_full", 19)]
    send.release.set()
    end(queue)
    assert [record for payload in sent for record in payload] == [str(n) for n in range(11)]
    assert queue.sent == {"log_event": 11}


def test_a_message_that_a_receiver_finds_too_large_is_halved():
    accepted = []

    def send(payload):
        if len(payload) > 3 or "7" in payload:
            return Answer("too_large")
        accepted.extend(payload)
        return Answer("accepted")

    queue, _, losses = queue_with(send=send)
    queue.put(numbered(20), BackpressureBudget())
    end(queue)
    assert accepted == [str(n) for n in range(20) if n != 7]
    assert losses.items() == [("log_event", "too_large", 1)]


def test_what_makes_too_large_a_message_is_halved_before_it_is_sent():
    queue, sent, losses = queue_with(
        lambda item: len(item.records) * 2**20 + ("4" in item.records) * 2**23
    )
    queue.put([Sized([str(n) for n in range(10)])], BackpressureBudget())
    end(queue)
    assert [record for payload in sent for record in payload] == list("012356789")
    assert losses.items() == [("log_event", "too_large", 1)]
    assert queue.sent == {"log_event": 9}


def test_records_that_are_encoded_are_let_go_before_they_are_sent():
    """As objects, the program's garbage collector would scan them again and again."""
    send, items = BlockedSend(), numbered(20)
    queue, _, losses = queue_with(send=send)
    references = [weakref.ref(item) for item in items]
    queue.put(items, BackpressureBudget())
    items.clear()
    assert send.started.wait(60)
    gc.collect()
    assert not any(ref() for ref in references)
    send.release.set()
    end(queue)
    assert queue.sent == {"log_event": 20} and losses.items() == []


def test_what_was_encoded_and_never_sent_is_counted_as_such():
    """The first message has no answer, so it may have arrived; the queued ones have not."""
    send = BlockedSend("unconfirmed")
    queue, _, losses = queue_with(lambda item: BATCH_BYTES // 2 - 1, send)
    queue.put(numbered(5), BackpressureBudget())
    assert send.started.wait(60)
    end(queue, seconds=0.5)
    send.release.set()
    assert losses.items() == [("log_event", "shutdown", 3), ("log_event", "unconfirmed", 2)]


def test_what_is_made_late_is_made_once_and_counted_where_it_is_lost():
    made = []

    def make():
        made.append(1)
        return [Sized(["a", "b"]), Sized(["c"])]

    late = DeferredItems(2000, make)
    queue, sent, losses = queue_with(limit=1000)
    second_queue, sent_by_other, _ = queue_with()
    queue.put([late], BackpressureBudget())
    second_queue.put([late], BackpressureBudget())
    end(queue), end(second_queue)
    assert sent == [] and losses.items() == [("log_event", "queue_full", 3)]
    assert sent_by_other == [["a", "b", "c"]]
    assert made == [1]


def test_what_is_left_of_an_endpoint_that_fails_is_refused():
    in_turn = iter([Answer("refused"), Answer("shutdown")])
    queue, sent, losses = queue_with(lambda item: 2**20, lambda payload: next(in_turn))
    queue.put(numbered(2), BackpressureBudget())
    while len(sent) < 2:
        time.sleep(0.01)
    end(queue)
    assert losses.items() == [("log_event", "refused", 2)]


def make_http_transport():
    return HttpTransport("logs", Resource.create({}), InstrumentationScope("test"))


def test_a_message_that_found_no_connection_when_the_program_ended_is_refused(monkeypatch):
    """The end comes between two attempts, or while one of them connects: nothing was sent."""
    transport = make_http_transport()

    def end_while_connecting(*args, **options):
        transport.cancel()
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(urllib3.util.connection, "create_connection", end_while_connecting)
    assert transport.send([b""]).kind == "unavailable"
    assert transport.send([b""]).kind == "shutdown"


def test_a_message_cut_while_it_waited_for_its_answer_is_unconfirmed(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv(
            "OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}"
        )
        transport = make_http_transport()

        def end_while_waiting():
            connection, _ = server.accept()
            connection.recv(1)
            transport.cancel()

        thread = threading.Thread(target=end_while_waiting)
        thread.start()
        assert transport.send([b""]).kind == "unconfirmed"
        thread.join()
