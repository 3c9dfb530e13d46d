"""Spans as a receiver gets them: names, parents, events, limits."""

from __future__ import annotations

import pytest

from tests.support import run_python
from tests.telemetry_support import drive

# activations as events of spans, which are not the default
SPAN_EVENTS = {"OTEL_TORCH_SIGNALS": "spans,span_events,metrics"}


def parents(receiver):
    """Return the name of each span's parent, or the parent's id if it is not our span."""
    spans = receiver.spans()
    names = {span["span_id"]: span["name"] for span in spans}
    return {span["name"]: names.get(span["parent_id"], span["parent_id"]) for span in spans}


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_scopes_arrive_as_nested_spans_with_their_times_and_events(tmp_path, receiver, protocol):
    drive(tmp_path, """
region = Scope("region", "fastvideo.region::outer", attributes={"torch.region": "outer"}, start_ns=1_000)
recorder.open(region)
inner = Scope("stage", "Decode", attributes={"n": 2}, start_ns=2_000)
recorder.open(inner)
inner.device_s = 0.25
inner.end_ns = 3_000
recorder.close(inner)
region.events.append((3_500, "fastvideo.profiler.enable_collection", {"torch.region": "outer"}))
region.end_ns = 4_000
recorder.close(region)
run_step(3, [record(step=3, mean=0.5, shape=[2], dtype="float32")])
finish()
""", **SPAN_EVENTS, **receiver.environment(protocol))  # fmt: skip
    assert parents(receiver) == {
        "torch.run": "", "fastvideo.region::outer": "torch.run", "Decode": "fastvideo.region::outer", "torch.step": "torch.run",
    }  # fmt: skip
    (outer,) = receiver.spans("fastvideo.region::outer")
    (decode,) = receiver.spans("Decode")
    (step,) = receiver.spans("torch.step")
    assert (outer["start"], outer["end"], outer["attributes"]) == (
        1_000,
        4_000,
        {"torch.region": "outer"},
    )
    event = {
        "name": "fastvideo.profiler.enable_collection",
        "time": 3_500,
        "attributes": {"torch.region": "outer"},
    }
    assert outer["events"] == [event]
    assert decode["attributes"] == {"n": 2, "torch.device.duration": 0.25}
    assert step["attributes"] == {"torch.step": 3, "torch.loop": 0, "torch.model": "Net"}
    assert step["events"][0]["attributes"] == {
        "torch.model": "Net", "torch.module": "layer", "torch.tensor": "out", "torch.phase": "forward", "torch.step": 3,
        "torch.call": 0, "torch.loop": 0, "torch.stat.mean": 0.5, "torch.stat.shape": [2], "torch.stat.dtype": "float32",
    }  # fmt: skip


def test_the_resource_says_who_and_never_how_it_was_called(tmp_path, receiver):
    drive(tmp_path, "run_step(0, []); finish()", RANK="1", LOCAL_RANK="1", WORLD_SIZE="2",
          OTEL_EXPERIMENTAL_RESOURCE_DETECTORS="process", OTEL_RESOURCE_ATTRIBUTES="team=video",
          **receiver.environment())  # fmt: skip
    resource = receiver.spans("torch.run")[0]["resource"]
    expected = {
        "dl.rank": 1,
        "dl.local_rank": 1,
        "dl.world_size": 2,
        "otel_torch.run.id": "test",
        "service.name": "tests",
    }
    assert {key: resource[key] for key in expected} == expected
    assert resource["team"] == "video"
    assert {"service.instance.id", "host.name", "process.pid"} <= resource.keys()
    assert not any("command" in key for key in resource)


def test_more_events_than_a_span_usually_keeps_all_arrive(tmp_path, receiver):
    drive(
        tmp_path,
        "run_step(0, [record(f'layer.{n}') for n in range(5000)]); finish()",
        **SPAN_EVENTS,
        **receiver.environment(),
    )
    assert sorted(event["torch.module"] for event in receiver.events()) == sorted(
        f"layer.{n}" for n in range(5000)
    )
    assert len(receiver.spans("torch.step")[0]["events"]) > 128
    (step,) = receiver.spans("torch.step")
    for span in receiver.spans("torch.step.events"):
        linked = [(step["trace_id"], step["span_id"])]
        assert span["parent_id"] == step["span_id"] or span["links"] == linked


def test_nonfinite_statistics_are_strings(tmp_path, receiver):
    drive(tmp_path, """
nan, inf = float("nan"), float("inf")
run_step(0, [record(mean=nan, min=-inf, max=inf)])
finish()
""", OTEL_TORCH_SIGNALS="spans,span_events,log_events,metrics", **receiver.environment())  # fmt: skip
    expected = {
        "torch.stat.mean": "NaN",
        "torch.stat.min": "-Infinity",
        "torch.stat.max": "Infinity",
    }
    for attributes in (receiver.events()[0], receiver.log_records()[0]["attributes"]):
        assert {
            key: value for key, value in attributes.items() if key.startswith("torch.stat.")
        } == expected


def test_a_numpy_or_torch_scalar_arrives_as_a_number(tmp_path, receiver):
    drive(tmp_path, """
import numpy
scope = Scope("stage", "s", attributes={"a": numpy.float32(0.5), "b": numpy.int64(7), "c": float("nan"), "d": 2**70})
recorder.open(scope); recorder.close(scope); finish()
""", **receiver.environment())  # fmt: skip
    assert receiver.spans("s")[0]["attributes"] == {"a": 0.5, "b": 7, "c": "NaN", "d": str(2**70)}


@pytest.mark.parametrize(("setting", "event"), [
    ("type", {"exception.type": "ValueError"}),
    ("message", {"exception.type": "ValueError", "exception.message": "secret"}),
])  # fmt: skip
def test_an_error_marks_its_span(tmp_path, receiver, setting, event):
    drive(tmp_path, """
scope = Scope("region", "r")
recorder.open(scope); recorder.close(scope, ValueError("secret")); finish()
""", OTEL_TORCH_EXCEPTIONS=setting, **receiver.environment())  # fmt: skip
    (span,) = receiver.spans("r")
    assert span["status"] == "ERROR"
    assert [e["attributes"] for e in span["events"]] == [event]
    assert ("secret" in str(span)) is (setting == "message")


def test_a_forward_is_a_span_unless_a_region_names_it(tmp_path, receiver):
    drive(tmp_path, """
def forward():
    scope = Scope("forward", "torch.forward", attributes={"torch.model": "Net"})
    recorder.open(scope); recorder.close(scope)
forward()
region = Scope("region", "fastvideo.region::named")
recorder.open(region); forward(); recorder.close(region)
natural = Scope("natural", "fastvideo.region::training_step", False)
recorder.open(natural); forward(); recorder.close(natural)
finish()
""", **receiver.environment())  # fmt: skip
    names = {span["span_id"]: span["name"] for span in receiver.spans()}
    assert sorted(names[s["parent_id"]] for s in receiver.spans("torch.forward")) == [
        "fastvideo.region::training_step",
        "torch.run",
    ]


def test_the_programs_spans_in_a_forward_are_children_of_the_step(tmp_path, receiver):
    """Also in a thread without a current span, and if a region prevents a span for the forward."""
    done = drive(tmp_path, """
import threading
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
seen = {}
step = Scope("step", "torch.step", False, {"torch.step": 0})
recorder.open(step)
region = Scope("region", "fastvideo.region::named")
recorder.open(region)
def work():
    scope = Scope("forward", "torch.forward")
    recorder.open(scope)
    with provider.get_tracer("program").start_as_current_span("mine"):
        pass
    recorder.close(scope)
    seen["after"] = trace.get_current_span().get_span_context().span_id
thread = threading.Thread(target=work); thread.start(); thread.join()
recorder.close(region); recorder.close(step)
print(seen["after"])
finish()
""", **receiver.environment())  # fmt: skip
    assert not receiver.spans("torch.forward")
    assert parents(receiver)["mine"] == "torch.step"
    assert done.stdout.strip() == "0"  # nothing is current any more


def test_a_scope_that_is_still_open_is_ended_and_marked(tmp_path, receiver):
    drive(tmp_path, """
scope = Scope("step", "torch.step", False, {"torch.step": 0})
recorder.open(scope); recorder.add(record()); finish(); recorder.close(scope)
""", **receiver.environment())  # fmt: skip
    (step,) = receiver.spans("torch.step")
    assert step["attributes"] == {"torch.step": 0, "otel_torch.unfinished": True}


def test_steps_of_a_training_are_traces_of_their_own_linked_both_ways(tmp_path, receiver):
    drive(
        tmp_path,
        "for n in range(3): run_step(n, [record(step=n)], training=True)\nfinish()",
        **receiver.environment(),
    )
    (run,) = receiver.spans("torch.run")
    steps = receiver.spans("torch.step")
    assert len({span["trace_id"] for span in [run, *steps]}) == 4
    assert [step["links"] for step in steps] == [[(run["trace_id"], run["span_id"])]] * 3
    assert run["links"] == [(step["trace_id"], step["span_id"]) for step in steps]


def test_no_trace_outgrows_four_megabytes(tmp_path, receiver):
    """A denoise loop is one trace until that is full; a single step that is too large is split too."""
    drive(tmp_path, """
for step in range(12):
    run_step(step, [record(f"blocks.{n}.attention", step) for n in range(1000)], bounded=True)
run_step(12, [record(f"blocks.{n}.attention", 12) for n in range(12000)], bounded=True)
finish(60)
""", **SPAN_EVENTS, **receiver.environment())  # fmt: skip
    sizes: dict[str, int] = {}
    for request in receiver.requests["traces"]:
        for resource in request.resource_spans:
            for span in resource.scope_spans[0].spans:
                sizes[span.trace_id.hex()] = sizes.get(span.trace_id.hex(), 0) + span.ByteSize()
    assert max(sizes.values()) <= 4_000_000
    assert len(receiver.events()) == 12 * 1000 + 12000
    (run,) = receiver.spans("torch.run")
    in_run = [
        span["attributes"]["torch.step"]
        for span in receiver.spans("torch.step")
        if span["trace_id"] == run["trace_id"]
    ]
    assert in_run == list(range(len(in_run))) and 2 <= len(in_run) < 12
    own = [span for span in receiver.spans("torch.step") if span["trace_id"] != run["trace_id"]]
    assert all(span["links"] == [(run["trace_id"], run["span_id"])] for span in own)


def test_the_run_joins_the_trace_of_the_environment(tmp_path, receiver):
    carrier = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    done = drive(
        tmp_path,
        "run_step(0, []); print(os.environ['TRACEPARENT']); finish()",
        TRACEPARENT=carrier,
        **receiver.environment(),
    )
    (run,) = receiver.spans("torch.run")
    assert (run["trace_id"], run["parent_id"]) == (
        "0af7651916cd43dd8448eb211c80319c",
        "b7ad6b7169203331",
    )
    assert done.stdout.strip() == carrier


def test_processes_that_the_run_starts_join_its_trace(tmp_path, receiver):
    done = drive(tmp_path, """
run_step(0, [])
from otel_torch.telemetry.run_trace import run_trace_id
print(os.environ["TRACEPARENT"], run_trace_id(job, {}))
finish()
print(os.environ.get("TRACEPARENT"))
""", **receiver.environment())  # fmt: skip
    (run,) = receiver.spans("torch.run")
    handed_on, derived, after = done.stdout.split()
    assert handed_on.startswith(f"00-{run['trace_id']}-{run['span_id']}-")
    assert (derived, after) == (run["trace_id"], "None")


PROVIDER = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, BatchSpanProcessor
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=os.environ["PROGRAM"])))
trace.set_tracer_provider(provider)
tracer = trace.get_tracer("program")
"""


def test_a_configuration_file_takes_the_place_of_the_variables(tmp_path, receiver):
    """Whoever reads the file makes the providers; without them nothing is sent, which is said."""
    file = {"OTEL_CONFIG_FILE": "otel.yaml", **receiver.environment()}
    alone = drive(tmp_path, "run_step(0, [record()])\nfinish()", **file)
    assert "OTEL_CONFIG_FILE takes the place of the OTEL_EXPORTER_… variables" in alone.stderr
    assert receiver.spans("torch.step") == []
    drive(tmp_path, PROVIDER + "run_step(0, [record()])\nfinish()\nprovider.shutdown()",
          PROGRAM=receiver.grpc_endpoint, **file)  # fmt: skip
    assert len(receiver.spans("torch.step")) == 1


def test_the_programs_own_provider_is_used_and_not_replaced(tmp_path, receiver):
    """It is installed after our sinks were built; its event limit drops nothing."""
    done = drive(tmp_path, PROVIDER + """
with tracer.start_as_current_span("program"):
    run_step(0, [record(f"layer.{n}") for n in range(500)])
    region = Scope("region", "fastvideo.region::r")
    recorder.open(region)
    with tracer.start_as_current_span("inside"):
        pass
    recorder.close(region)
finish()
print(trace.get_tracer_provider() is provider)
with tracer.start_as_current_span("after the end"):
    pass
""", PROGRAM=receiver.grpc_endpoint, **SPAN_EVENTS)  # fmt: skip
    assert done.stdout.strip() == "True"
    nested = parents(receiver)
    assert nested["torch.step"] == nested["fastvideo.region::r"] == "program"
    assert nested["inside"] == "fastvideo.region::r"
    assert "after the end" in nested
    assert sorted(event["torch.module"] for event in receiver.events()) == sorted(
        f"layer.{n}" for n in range(500)
    )
    assert sum(span["dropped_events"] for span in receiver.spans()) == 0
    assert "lost" not in done.stderr


def test_the_sampler_of_the_environment_decides(tmp_path, receiver):
    done = drive(
        tmp_path,
        "run_step(0, [record()]); finish()",
        OTEL_TRACES_SAMPLER="always_off",
        **receiver.environment(),
    )
    assert not receiver.spans()
    assert receiver.metric_points("torch.module.activation.mean")
    assert "lost" not in done.stderr


def test_a_provider_of_the_program_gets_even_the_spans_that_end_with_the_program(
    tmp_path, receiver
):
    """The provider's exit function was registered after ours, so it would run first."""
    run_python(tmp_path, "import os\nimport torch\n" + PROVIDER + """
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters())
model(torch.ones(1, 2)).sum().backward()  # the step is never ended
""", PROGRAM=receiver.grpc_endpoint, **SPAN_EVENTS)  # fmt: skip
    (step,) = receiver.spans("torch.step")
    assert [event["attributes"]["torch.tensor"] for event in step["events"]] == ["out"]
    assert receiver.spans("torch.run")
