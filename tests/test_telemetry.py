"""The parts of OpenTelemetry's side, each by itself: where to send, ids, bytes, values, the receiver's answers."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from otel_torch.job import Job
from otel_torch.records import Losses
from otel_torch.settings import Settings
from otel_torch.telemetry import build_sinks, outlets
from tests.otlp_receiver import Receiver
from tests.support import JOB
from tests.telemetry_support import drive, make_record

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(("environ", "expected"), [
    ({}, {}),
    ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4317"}, {signal: ["otlp_proto_grpc"] for signal in ("traces", "metrics", "logs")}),
    ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"}, {"traces": ["otlp_proto_grpc"]}),
    ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "True"}, {}),
    ({"OTEL_TRACES_EXPORTER": "otlp,console", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
     {"traces": ["otlp_proto_http", "console"]}),
    ({"OTEL_METRICS_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_LOGS_EXPORTER": "otlp",
      "OTEL_EXPORTER_OTLP_LOGS_PROTOCOL": "http/protobuf"}, {"traces": ["otlp_proto_grpc"], "logs": ["otlp_proto_http"]}),
])  # fmt: skip
def test_outlets_are_what_the_standard_variables_name(environ, expected):
    assert outlets(environ) == expected


def test_an_unknown_protocol_is_named(capsys):
    assert outlets({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}) == {}
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
    assert [job.rank for job in ranks if build_sinks(settings, job, Losses())] == [0, 8, 16, 24]
    assert capsys.readouterr().err.count("only the first of each node exports") == 1


def test_ids_leave_the_programs_random_numbers_alone(tmp_path):
    """The SDK's own exemplars and the exporters' retries draw from them as well."""
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

    found = set()
    for _ in range(2):
        random.seed(0)
        found |= {PrivateIds().generate_span_id(), PrivateIds().generate_trace_id()}
    assert len(found) == 4 and 0 not in found


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
    make_record("", stats={"mean": NAN, "min": -INF, "max": INF, "sum": -0.0, "l2": 1e300, "shape": [], "numel": 0}),
]


def test_bytes_of_a_span_event_are_what_the_sdk_would_have_sent():
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext

    from otel_torch.telemetry import wire
    from otel_torch.telemetry.items import SpanItem

    resource, scope = Resource({"service.name": "s"}), InstrumentationScope("otel_torch", "1")
    span = ReadableSpan("n", SpanContext(1, 2, False), resource=resource, start_time=1, end_time=2, instrumentation_scope=scope)
    item = SpanItem(span, RECORDS, 0)
    expected = encode_spans(item.readable(resource, scope))
    head = expected.resource_spans[0]
    built = wire.request(head.resource.SerializeToString(), head.scope_spans[0].scope.SerializeToString(), item.encode())
    assert ExportTraceServiceRequest.FromString(built) == expected


def test_bytes_of_log_records_are_what_the_sdk_would_have_sent():
    from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
    from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, TraceFlags

    from otel_torch.telemetry.items import LogItem

    for span in (SpanContext(1, 2, False, TraceFlags(1)), None):
        item = LogItem(RECORDS, 0, 5, span)
        expected = encode_logs(item.readable(Resource({}), InstrumentationScope("otel_torch"))).resource_logs[0].scope_logs[0]
        built = [LogRecord.FromString(message) for message in item.encode()]
        for one, other in zip(built, expected.log_records, strict=True):
            if span is None:  # the SDK writes ids of zeros
                other.ClearField("trace_id"), other.ClearField("span_id")
            assert one == other


@pytest.mark.parametrize("with_step", [True, False])
def test_bytes_of_gauges_are_what_the_sdk_would_have_sent(with_step):
    from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
    from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
    from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    from otel_torch.telemetry.items import GaugeItem

    item = GaugeItem(RECORDS, 0, with_step)
    scope = InstrumentationScope("otel_torch")
    readable = MetricsData([ResourceMetrics(Resource({}), [ScopeMetrics(scope, item.readable(Resource({}), scope), "")], "")])
    expected = encode_metrics(readable).resource_metrics[0].scope_metrics[0].metrics
    assert [Metric.FromString(message) for message in item.encode()] == list(expected)
    assert item.counts == {"metric_point": 4}  # two abs_mean, l2 and sum; nothing that is not finite, no numel


def test_the_estimate_of_an_event_is_never_too_small():
    from otel_torch.telemetry import wire
    from otel_torch.telemetry.attributes import estimate

    every = dict.fromkeys(("abs_mean", "sum", "min", "max", "mean", "std", "nonfinite", "rms", "l2", "zeros", "numel"), -INF)
    records = [*RECORDS, make_record("ü" * 500, branch="uncond", stats=every | {"shape": [2**60] * 8, "dtype": "torch.bfloat16"})]
    for record in records:
        assert max(len(wire.span_event(record)), len(wire.log_record(record, 1, 1, 1, 1))) + 6 <= estimate(record)


def test_private_names_of_the_exporters_are_there():
    """What is read of the SDK's exporters; a new version that lacks one falls back, and this says so."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    from otel_torch.telemetry import transport

    for signal in ("traces", "metrics", "logs"):
        for name, kind in (("otlp_proto_grpc", transport.GrpcTransport), ("otlp_proto_http", transport.HttpTransport)):
            made = transport.open_transport(signal, name, Resource({}), InstrumentationScope("otel_torch"))
            assert type(made) is kind
            made.shutdown()


def test_an_exporter_without_those_names_is_used_all_the_same(tmp_path):
    with Receiver("reject") as receiver:
        done = drive(tmp_path, """
from opentelemetry.exporter.otlp.proto.grpc import exporter
made = exporter.OTLPExporterMixin.__init__
def without(self, *args, **kwargs):
    made(self, *args, **kwargs)
    del self._stub
exporter.OTLPExporterMixin.__init__ = without
run_step(0, [record(nonfinite=1, mean=0.5, abs_mean=0.5)])
finish()
""", OTEL_TORCH_SIGNALS="spans,span_events,log_events,metrics", **receiver.environment())  # fmt: skip
    assert (
        len(receiver.events()) == len(receiver.log_records()) == len(receiver.metric_points("torch.module.activation.mean")) == 1
    )
    assert "accepts only in part cannot be known" in done.stderr


@pytest.mark.parametrize(
    ("signal", "name"), [("OTEL_TRACES_EXPORTER", "torch.step"), ("OTEL_METRICS_EXPORTER", "activation.mean")]
)
def test_the_console_exporter_works(tmp_path, signal, name):
    done = drive(tmp_path, "run_step(0, [record()]); finish()", **{signal: "console"})
    assert name in done.stdout and "torch.module.activation" in done.stdout


def test_an_exporter_that_is_not_installed_is_named(tmp_path):
    done = drive(tmp_path, "run_step(0, [record()]); finish()", OTEL_TRACES_EXPORTER="zipkin_")
    assert "OTEL_TRACES_EXPORTER names 'zipkin_', which is not installed" in done.stderr
    assert "(refused)" in done.stderr or "(shutdown)" in done.stderr


def test_importing_our_side_loads_nothing_heavy():
    code = "import sys, otel_torch.telemetry.delivery; print({'opentelemetry', 'torch', 'grpc'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "set()"


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_the_probe_tells_what_was_accepted(monkeypatch, protocol):
    from otel_torch.telemetry.probe import probe

    with Receiver() as receiver:
        results = probe(receiver.environment(protocol))
        assert [(result.signal, result.accepted) for result in results] == [("traces", True), ("metrics", True), ("logs", True)]
        assert (
            len(receiver.spans()) == len(receiver.events()) == len(receiver.metric_points()) == len(receiver.log_records()) == 1
        )
        receiver.mode = "refuse"
        assert not any(result.accepted for result in probe(receiver.environment(protocol)))
    assert probe({}) == []
    assert JOB.run_id == "run-test"


def test_the_probe_names_an_endpoint_without_its_secrets():
    from otel_torch.telemetry.probe import probe

    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://user:secret@127.0.0.1:1/?key=secret", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    for protocol in ("grpc", "http/protobuf"):
        for result in probe(environ | {"OTEL_EXPORTER_OTLP_PROTOCOL": protocol}):
            assert not result.accepted
            assert "secret" not in str(result)
            assert "http://127.0.0.1:1" in result.detail
