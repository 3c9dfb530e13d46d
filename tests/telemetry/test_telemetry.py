"""The parts of the OpenTelemetry export, one by one: endpoints, ids, encoding, values, responses."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from otel_torch.process.job import Job
from otel_torch.records import Losses
from otel_torch.settings import Settings
from otel_torch.telemetry.otlp.exporters import exporters_by_signal
from otel_torch.telemetry.sinks.telemetry_sink import build_telemetry_sinks
from tests.otlp_receiver import Receiver
from tests.support import JOB
from tests.telemetry_support import drive, make_record

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(("environ", "expected"), [
    ({}, {}),
    ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4317"}, {signal: ["otlp_proto_grpc"] for signal in ("traces", "metrics", "logs")}),
    ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"}, {"traces": ["otlp_proto_grpc"]}),
    ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "True"}, {}),
    ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_CONFIG_FILE": "otel.yaml"}, {}),
    ({"OTEL_TRACES_EXPORTER": "otlp,console", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
     {"traces": ["otlp_proto_http", "console"]}),
    ({"OTEL_METRICS_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_LOGS_EXPORTER": "otlp",
      "OTEL_EXPORTER_OTLP_LOGS_PROTOCOL": "http/protobuf"}, {"traces": ["otlp_proto_grpc"], "logs": ["otlp_proto_http"]}),
])  # fmt: skip
def test_outlets_are_what_the_standard_variables_name(environ, expected):
    assert exporters_by_signal(environ) == expected


def test_an_unknown_protocol_is_named(capsys):
    assert (
        exporters_by_signal(
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}
        )
        == {}
    )
    assert "OTEL_EXPORTER_OTLP_PROTOCOL='http/json'" in capsys.readouterr().err


def test_without_an_outlet_nothing_of_opentelemetry_is_loaded(tmp_path):
    done = drive(tmp_path, """
import sys, threading
run_step(0, [record()])
finish()
loaded = [name for name in sys.modules if name.startswith(("opentelemetry", "grpc"))]
print(loaded, threading.active_count(), "TRACEPARENT" in os.environ)
""")  # fmt: skip
    assert done.stdout.strip() == "[] 1 False"


def test_a_rank_that_does_not_export_has_no_sink(monkeypatch, capsys):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    settings = Settings.from_env({})
    ranks = [Job("r", rank, rank % 8, 32, "h", 1) for rank in range(32)]
    assert [job.rank for job in ranks if build_telemetry_sinks(settings, job, Losses())] == [
        0,
        8,
        16,
        24,
    ]
    assert capsys.readouterr().err.count("only the first rank of each node exports") == 1


def test_ids_leave_the_programs_random_numbers_alone(tmp_path):
    """The SDK's exemplars and the exporters' retries use the random module too."""
    with Receiver("unavailable") as receiver:
        done = drive(tmp_path, """
import random
random.seed(0)
expected = [random.random() for _ in range(3)]
random.seed(0)
seen = [random.random()]
run_step(0, [record(nonfinite=1, abs_mean=1.0)])
seen.append(random.random())
finish(3)
seen.append(random.random())
print(seen == expected)
""", OTEL_TORCH_SIGNALS="spans,span_events,log_events,metrics", **receiver.environment())  # fmt: skip
    assert done.stdout.strip() == "True"


def test_seeded_programs_do_not_repeat_their_ids():
    from otel_torch.telemetry.ids import PrivateIds

    ids = set()
    for _ in range(2):
        random.seed(0)
        ids |= {PrivateIds().generate_span_id(), PrivateIds().generate_trace_id()}
    assert len(ids) == 4 and 0 not in ids


def test_a_forked_child_has_ids_of_its_own(tmp_path):
    done = drive(tmp_path, """
from otel_torch.telemetry.ids import PrivateIds
if os.fork() == 0:
    print(PrivateIds().generate_span_id(), flush=True)
    os._exit(0)
os.wait()
print(PrivateIds().generate_span_id(), flush=True)
""")  # fmt: skip
    assert len(set(done.stdout.split())) == 2


RECORDS = [
    make_record(),
    make_record("blocks.0.ü", step=-1, branch="cond", call=300, loop=2**40),
    make_record(
        "",
        stats={
            "mean": NAN,
            "min": -INF,
            "max": INF,
            "sum": -0.0,
            "l2": 1e300,
            "shape": [],
            "numel": 0,
        },
    ),
    make_record("", stats={}),
    *(
        make_record(
            f"block.{n}", step=n, stats={"mean": n / 3, "shape": [n], "histogram": [*range(n)]}
        )
        for n in range(20)
    ),
    make_record(stats={"mean": 1, "min": True, "sketch": "A" * 99, "l2": 1e308, "sum": 2**70}),
    make_record(stats={"mean": 1.0, "min": 2.0, "sketch": "B" * 99, "l2": 1e308, "sum": 1}),
    make_record(stats={"mean": 1.0, "min": NAN, "sketch": "B" * 99, "l2": 1.0, "sum": -1}),
]
# runs of records whose columns are each of one kind, as they are in a model
SAME = [
    make_record(f"block.{n}", stats={"mean": n / 3, "zeros": n % 2, "dtype": "bfloat16"})
    for n in range(1500)
]


def from_sdk(signal, item):
    """Return the SDK's encoding of an item, and a receiver's reading of ours."""
    from importlib import import_module

    from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
    from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    from otel_torch.telemetry.otlp import otlp_protobuf
    from otel_torch.telemetry.otlp.otlp_transport import encode_head

    resource, scope = Resource({"service.name": "s"}), InstrumentationScope("otel_torch", "1")
    readable = item.to_sdk_objects(resource, scope)
    if signal == "metrics":
        readable = MetricsData([ResourceMetrics(resource, [ScopeMetrics(scope, readable, "")], "")])
    expected = {"trace": encode_spans, "logs": encode_logs, "metrics": encode_metrics}[signal](
        readable
    )
    service = import_module(f"opentelemetry.proto.collector.{signal}.v1.{signal}_service_pb2")
    request = getattr(service, f"Export{signal.title()}ServiceRequest")
    return expected, request.FromString(
        otlp_protobuf.request(*encode_head(resource, scope), item.encode())
    )


def make_span(**fields):
    """Return a span with the tests' resource and scope."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext

    fields = {"context": SpanContext(1, 2, False), "start_time": 1, "end_time": 2} | fields
    resource, scope = Resource({"service.name": "s"}), InstrumentationScope("otel_torch", "1")
    return ReadableSpan("n", resource=resource, instrumentation_scope=scope, **fields)


@pytest.mark.parametrize("records", [RECORDS, SAME, []])
def test_bytes_of_span_events_are_what_the_sdk_would_have_sent(records):
    from otel_torch.telemetry.otlp.queue_items import SpanItem

    expected, sent = from_sdk("trace", SpanItem(make_span(), records, 0))
    assert sent == expected


def test_bytes_of_a_span_are_what_the_sdk_would_have_sent():
    """The span has all that a program may set on it."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import (
        Link,
        SpanContext,
        SpanKind,
        Status,
        StatusCode,
        TraceFlags,
        TraceState,
    )

    from otel_torch.telemetry.otlp.queue_items import SpanItem

    state = TraceState([("vendor", "a"), ("other", "b")])
    remote = SpanContext(2**127, 2**63, True, TraceFlags(1), state)
    attributes = {"text": "ü" * 200, "flag": True, "no": False, "number": -5, "large": 2**62, "real": 0.5, "nan": NAN,
                  "texts": ["a", "b"], "numbers": (1, 2), "mixed": (None, "x"), "none": [], "bytes": b"\x00\xff",
                  "nested": {"a": {"b": [1, 2.5]}}}  # fmt: skip
    tracer = TracerProvider().get_tracer("t")
    span = tracer.start_span("made", links=[Link(remote, attributes), Link(SpanContext(5, 6, False))], start_time=10,
                             kind=SpanKind.CLIENT)  # fmt: skip
    for n in range(200):
        span.add_event(f"e{n}", {f"a{m}": m for m in range(n)}, n)
        span.set_attribute(f"attribute{n}", n)
    span.set_status(Status(StatusCode.ERROR, "why"))
    span.end(20)
    spans = [
        make_span(attributes=attributes, parent=remote, status=Status(StatusCode.OK)),
        make_span(
            attributes={},
            parent=SpanContext(1, 7, False),
            context=SpanContext(1, 2**64 - 1, False, trace_state=state),
        ),
        make_span(kind=SpanKind.CONSUMER, start_time=None, end_time=None),
    ]
    for one in spans:
        expected, sent = from_sdk("trace", SpanItem(one, RECORDS[:2], 0))
        assert sent == expected
    expected, sent = from_sdk("trace", SpanItem(span, [], 0))
    expected_bytes, ours = (
        request.resource_spans[0].scope_spans[0].spans[0] for request in (expected, sent)
    )
    for name in (
        "attributes",
        "events",
        "links",
    ):  # `readable` makes a new span, which forgets what was dropped
        assert getattr(ours, f"dropped_{name}_count") == getattr(span, f"dropped_{name}")
        ours.ClearField(f"dropped_{name}_count"), expected_bytes.ClearField(f"dropped_{name}_count")
    assert ours == expected_bytes and len(ours.events) == len(ours.attributes) == 128


@pytest.mark.parametrize("records", [RECORDS, SAME])
def test_bytes_of_log_records_are_what_the_sdk_would_have_sent(records):
    from opentelemetry.trace import SpanContext, TraceFlags

    from otel_torch.telemetry.otlp.queue_items import LogItem

    for span in (SpanContext(1, 2, False, TraceFlags(1)), None):
        expected, sent = from_sdk("logs", LogItem(records, 0, 5, span))
        if span is None:  # the SDK writes ids of zeros
            for one in expected.resource_logs[0].scope_logs[0].log_records:
                one.ClearField("trace_id"), one.ClearField("span_id")
        assert sent == expected


@pytest.mark.parametrize("with_step", [True, False])
@pytest.mark.parametrize(("records", "points"), [(RECORDS, 35), (SAME, 3000)])
def test_bytes_of_gauges_are_what_the_sdk_would_have_sent(with_step, records, points):
    """NaN, Inf, numel and text are not sent."""
    from otel_torch.telemetry.otlp.queue_items import GaugeItem

    item = GaugeItem(records, 0, with_step)
    assert item.counts == {"metric_point": points}
    expected, sent = from_sdk("metrics", item)
    assert sent == expected
    assert item.counts == {"metric_point": points}


def test_bytes_of_a_number_are_what_the_sdk_would_have_sent():
    from otel_torch.telemetry.otlp.queue_items import IntegerGaugeItem

    for item in (
        IntegerGaugeItem("torch.step", {"torch.model": "Net"}, 7, 2**40),
        IntegerGaugeItem("torch.step", {}, 7, -1),
    ):
        expected, sent = from_sdk("metrics", item)
        assert sent == expected


def test_the_estimate_of_an_event_is_never_too_small():
    from otel_torch.telemetry.attributes import estimate_event_bytes, estimate_total_bytes
    from otel_torch.telemetry.otlp import otlp_protobuf

    every = dict.fromkeys(
        (
            "abs_mean",
            "sum",
            "min",
            "max",
            "mean",
            "std",
            "nonfinite",
            "rms",
            "l2",
            "zeros",
            "numel",
        ),
        -INF,
    )
    largest = dict.fromkeys(every, -(2**63)) | {
        "shape": [2**60] * 8,
        "dtype": "torch.bfloat16",
        "histogram": [2**62] * 99,
    }
    names = {"module": "ü" * 500, "branch": "uncond", "step": 2**62, "call": 2**62, "loop": 2**62}
    records = [*RECORDS, make_record(**names, stats=every), make_record(**names, stats=largest)]
    for record in records:
        sizes = [
            sum(map(len, pieces))
            for pieces in (
                otlp_protobuf.encode_span_events([record]),
                otlp_protobuf.encode_log_records([record], 1, 1, 1, 1),
            )
        ]
        assert max(sizes) <= estimate_event_bytes(record)
    assert estimate_total_bytes([]) == 0
    assert estimate_total_bytes(SAME) >= sum(map(len, otlp_protobuf.encode_span_events(SAME)))


def test_what_is_kept_of_encoded_names_is_bounded():
    from otel_torch.telemetry.otlp.otlp_protobuf import _EncodedCache

    cache = _EncodedCache(str.encode, limit=10)
    assert [cache[str(n)] for n in range(25)] == [str(n).encode() for n in range(25)]
    assert len(cache) == 5


def test_private_names_of_the_exporters_are_there():
    """Without one of these names the code falls back; this test reports a new version that lacks
    it.
    """
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    from otel_torch.telemetry.otlp import transport
    from otel_torch.telemetry.otlp.grpc_transport import GrpcTransport
    from otel_torch.telemetry.otlp.http_transport import HttpTransport

    for signal in ("traces", "metrics", "logs"):
        for name, kind in (
            ("otlp_proto_grpc", GrpcTransport),
            ("otlp_proto_http", HttpTransport),
        ):
            made = transport.open_transport(
                signal, name, Resource({}), InstrumentationScope("otel_torch")
            )
            assert type(made) is kind
            assert made.has_connected is False
            made.shutdown()


def test_an_exporter_without_those_names_is_used_all_the_same(tmp_path):
    with Receiver("reject") as receiver:
        done = drive(tmp_path, """
from opentelemetry.exporter.otlp.proto.grpc import exporter
made = exporter.OTLPExporterMixin.__init__
def without(self, *args, **kwargs):
    made(self, *args, **kwargs)
    del self._channel
exporter.OTLPExporterMixin.__init__ = without
exporter.OTLPExporterMixin.shutdown = lambda self: None
run_step(0, [record(nonfinite=1, mean=0.5, abs_mean=0.5)])
finish()
""", OTEL_TORCH_SIGNALS="spans,span_events,log_events,metrics", **receiver.environment())  # fmt: skip
    assert (
        len(receiver.events())
        == len(receiver.log_records())
        == len(receiver.metric_points("torch.module.activation.mean"))
        == 1
    )
    assert "partial success cannot be detected" in done.stderr


@pytest.mark.parametrize(
    ("signal", "name"),
    [
        ("OTEL_TRACES_EXPORTER", "torch.step"),
        ("OTEL_METRICS_EXPORTER", "activation.mean"),
        ("OTEL_LOGS_EXPORTER", "torch.stat.mean"),
    ],
)
def test_the_console_exporter_works(tmp_path, signal, name):
    every = {"OTEL_TORCH_SIGNALS": "spans,span_events,log_events,metrics"}
    done = drive(tmp_path, "run_step(0, [record()]); finish()", **{signal: "console"}, **every)
    assert name in done.stdout and "torch.module.activation" in done.stdout


def test_an_exporter_that_is_not_installed_is_named(tmp_path):
    done = drive(tmp_path, "run_step(0, [record()]); finish()", OTEL_TRACES_EXPORTER="zipkin_")
    assert "OTEL_TRACES_EXPORTER names 'zipkin_', which is not installed" in done.stderr
    assert "(refused)" in done.stderr or "(shutdown)" in done.stderr


def test_importing_our_side_loads_nothing_heavy():
    code = "import sys, otel_torch.telemetry.sinks.telemetry_sink; print({'opentelemetry', 'torch', 'grpc'} & set(sys.modules))"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "set()"
    )


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_the_probe_tells_what_was_accepted(monkeypatch, protocol):
    from otel_torch.telemetry.probe import probe

    with Receiver() as receiver:
        results = probe(receiver.environment(protocol))
        assert [(result.signal, result.accepted) for result in results] == [
            ("traces", True),
            ("metrics", True),
            ("logs", True),
        ]
        assert (
            len(receiver.spans())
            == len(receiver.events())
            == len(receiver.metric_points())
            == len(receiver.log_records())
            == 1
        )
        receiver.mode = "refuse"
        assert not any(result.accepted for result in probe(receiver.environment(protocol)))
    assert probe({}) == []
    assert JOB.run_id == "run-test"


def test_the_probe_names_an_endpoint_without_its_secrets():
    from otel_torch.telemetry.probe import probe

    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://user:secret@127.0.0.1:1/?key=secret",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
    }
    for protocol in ("grpc", "http/protobuf"):
        for result in probe(environ | {"OTEL_EXPORTER_OTLP_PROTOCOL": protocol}):
            assert not result.accepted
            assert "secret" not in str(result)
            assert "http://127.0.0.1:1" in result.detail
