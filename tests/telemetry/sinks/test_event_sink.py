"""Log events as a receiver gets them."""

from __future__ import annotations

import pytest

from tests.otlp_receiver import Receiver
from tests.telemetry_support import drive


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_each_record_is_a_log_event_in_the_trace_of_its_step(tmp_path, protocol):
    with Receiver() as receiver:
        done = drive(tmp_path, """
one = record("layer.7", step=2, mean=0.5)
run_step(2, [one])
print(one.time_ns)
finish()
""", OTEL_TORCH_SIGNALS="spans,log_events", **receiver.environment(protocol))  # fmt: skip
    (step,) = receiver.spans("torch.step")
    (event,) = receiver.log_records()
    assert (event["trace_id"], event["span_id"]) == (step["trace_id"], step["span_id"])
    assert (event["event_name"], event["body"]) == (
        "torch.module.activation",
        "torch.module.activation",
    )
    assert event["time"] == int(done.stdout)
    assert event["attributes"] == {
        "torch.model": "Net", "torch.module": "layer.7", "torch.tensor": "out", "torch.phase": "forward", "torch.step": 2,
        "torch.call": 0, "torch.loop": 0, "torch.stat.mean": 0.5,
    }  # fmt: skip
    assert event["resource"]["otel_torch.run.id"] == "test"
    assert not step["events"]


def test_the_programs_own_logger_provider_is_used(tmp_path):
    with Receiver() as receiver:
        drive(tmp_path, """
from opentelemetry._logs import get_logger_provider, set_logger_provider
from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.resources import Resource
provider = LoggerProvider(Resource({"service.name": "the program"}))
provider.add_log_record_processor(BatchLogRecordProcessor(OTLPLogExporter(endpoint=os.environ["PROGRAM"])))
set_logger_provider(provider)
run_step(0, [record()])
finish()
assert get_logger_provider() is provider
""", OTEL_TORCH_SIGNALS="log_events", PROGRAM=receiver.grpc_endpoint)  # fmt: skip
    (event,) = receiver.log_records()
    assert (event["resource"], event["event_name"]) == (
        {"service.name": "the program"},
        "torch.module.activation",
    )


TRACER_PROVIDER = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
trace.set_tracer_provider(TracerProvider())
run_step(0, [record()])
run_step(1, [record(step=1)])
finish()
"""


@pytest.mark.parametrize(
    "variables",
    [
        {},  # the program has a tracer provider, but none for logs
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9"},
    ],
)
def test_log_events_that_nothing_takes_are_reported_once(tmp_path, variables):
    done = drive(tmp_path, TRACER_PROVIDER, **variables)
    (line,) = [line for line in done.stderr.splitlines() if "activations are not sent" in line]
    assert line.endswith("set OTEL_TORCH_SIGNALS=spans,span_events")


@pytest.mark.parametrize("signals", ["spans,metrics", "spans,span_events,log_events"])
def test_spans_without_log_events_are_no_reason_for_a_message(tmp_path, signals):
    done = drive(tmp_path, TRACER_PROVIDER, OTEL_TORCH_SIGNALS=signals)
    assert "activations are not sent" not in done.stderr
