"""Regions as light spans: full spans of the SDK for whoever uses them, and cheap otherwise.

Programs run in processes of their own, because a provider can be set only once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import Span, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace.propagation import tracecontext

from otel_torch.records import Losses
from otel_torch.regions.closer import RegionCloser, RegionLabel
from otel_torch.telemetry import light_span
from otel_torch.telemetry.light_span import (
    CURRENT,
    LightSpan,
    LightTracer,
    attach,
    detach,
    read_context,
)
from tests.otlp_receiver import Receiver
from tests.support import run_python

REGION = "fastvideo.region::profiler_region_inference_denoising"

PROGRAM = """
import json, os, threading
import torch
from opentelemetry import context, trace
from opentelemetry.sdk.trace import Span, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler, StaticSampler, TraceIdRatioBased
import otel_torch
from otel_torch.telemetry.light_span import LightSpan

def region(name="inference_denoising"):
    return otel_torch.region(name)

def first():
    "The first time that a name is entered takes the long way: what it means is concluded there."
    for name in ("model_loading", "inference_denoising", "training_step", "training_epoch", "training_backward"):
        with region(name):
            pass
    if "exporter" in globals():
        trace.get_tracer_provider().force_flush()
        exporter.clear()

def current():
    return trace.get_current_span()

def is_light():
    return isinstance(current(), LightSpan)
"""

OWN_PROVIDER = (
    PROGRAM
    + """
exporter = InMemorySpanExporter()
def install(processor=BatchSpanProcessor, **settings):
    provider = TracerProvider(**settings)
    provider.add_span_processor(processor(exporter))
    trace.set_tracer_provider(provider)
    first()
    return provider

def spans(name="fastvideo.region::profiler_region_inference_denoising"):
    trace.get_tracer_provider().force_flush()
    return [span for span in exporter.get_finished_spans() if span.name == name]
"""
)


def run(tmp_path: Path, code: str, **variables: str) -> list[str]:
    """Run a program that exports spans only; return the lines that it prints."""
    return run_python(tmp_path, code, OTEL_TORCH_SIGNALS="spans", **variables).stdout.splitlines()


USES = """
with region():
    print(is_light())
    span = current()
    assert isinstance(span, Span) and span.is_recording() and span.get_span_context().is_valid
    span.set_attribute("a", 1); span.set_attributes({"b": "two"})
    span.add_event("happened", {"n": 3}, 1_000)
    try:
        raise KeyError("mine")
    except KeyError as error:
        span.record_exception(error)
    span.set_status(trace.StatusCode.OK)
    span.add_link(trace.SpanContext(1, 2, False))
"""


def test_what_a_program_sets_on_its_current_span_arrives(
    tmp_path: Path, receiver: Receiver
) -> None:
    printed = run(tmp_path, PROGRAM + "first()\n" + USES, **receiver.environment())
    _, span = receiver.spans(REGION)
    assert printed == ["True"]
    assert span["attributes"] == {
        "torch.region": "profiler_region_inference_denoising",
        "a": 1,
        "b": "two",
    }
    assert [event["name"] for event in span["events"]] == ["happened", "exception"]
    assert span["events"][1]["attributes"]["exception.type"] == "KeyError"
    assert span["status"] == "OK" and span["links"] == [(f"{1:032x}", f"{2:016x}")]


def test_what_a_program_sets_arrives_at_its_own_processors(tmp_path: Path) -> None:
    printed = run(
        tmp_path,
        OWN_PROVIDER
        + "provider = install()\n"
        + USES
        + """
(span,) = spans()
print(json.dumps([dict(span.attributes), [event.name for event in span.events], span.status.status_code.name, len(span.links)]))
print(span.instrumentation_scope.name, span.resource is provider.resource, span.start_time <= span.end_time)
print(json.loads(span.to_json())["name"])
""",
    )
    attributes = {"torch.region": "profiler_region_inference_denoising", "a": 1, "b": "two"}
    assert printed[0] == "True"
    assert json.loads(printed[1]) == [attributes, ["happened", "exception"], "OK", 1]
    assert printed[2:] == ["otel_torch True True", REGION]


def test_a_span_may_be_renamed_and_ended_by_the_program(tmp_path: Path) -> None:
    printed = run(
        tmp_path,
        OWN_PROVIDER
        + """
install()
with region():
    current().update_name("mine")
with region():
    current().end(); print(current().is_recording()); current().set_attribute("late", 1)
print(len(spans("mine")), [dict(span.attributes) for span in spans()])
""",
    )
    assert printed == ["False", "1 [{'torch.region': 'profiler_region_inference_denoising'}]"]


NESTING = """
tracer = trace.get_tracer_provider().get_tracer("program")
with region("training_step"):
    outer = current().get_span_context()
    with region():
        inner = current().get_span_context()
        with tracer.start_as_current_span("theirs") as theirs:
            with region("training_backward"):
                below = current()
        carried = {}
        from opentelemetry.propagate import inject
        inject(carried)
    assert current().get_span_context() == outer
here = context.attach(trace.set_span_in_context(trace.NonRecordingSpan(outer)))
with region("training_epoch"):
    again = current()
context.detach(here)
def other():
    assert not current().get_span_context().is_valid
    with region("distillation_loss"):
        pass
    assert not current().get_span_context().is_valid
thread = threading.Thread(target=other); thread.start(); thread.join()
assert below.parent == theirs.get_span_context() and theirs.parent == inner and again.parent == outer
assert carried["traceparent"].split("-")[2] == f"{inner.span_id:016x}"
print(is_light(), isinstance(below, LightSpan), isinstance(again, LightSpan))
"""


def test_spans_of_the_program_and_regions_are_nested(tmp_path: Path) -> None:
    printed = run(tmp_path, OWN_PROVIDER + "install()\n" + NESTING)
    assert printed == ["False True True"]


def test_parents_of_our_own_exporters_spans(tmp_path: Path, receiver: Receiver) -> None:
    run(
        tmp_path,
        PROGRAM
        + """
first()
with region("training_step"):
    with region():
        assert is_light()
def other():
    with region("training_backward"):
        assert is_light()
with region("training_epoch"):
    thread = threading.Thread(target=other); thread.start(); thread.join()
""",
        **receiver.environment(),
    )
    spans = {span["span_id"]: span for span in receiver.spans()}
    later = sorted(spans.values(), key=lambda span: span["start"])[-4:]
    names = [(span["name"], spans[span["parent_id"]]["name"]) for span in later]
    short = "fastvideo.region::profiler_region_"
    assert names == [
        (f"{short}training_step", "torch.run"),
        (f"{short}inference_denoising", f"{short}training_step"),
        (f"{short}training_epoch", "torch.run"),
        (f"{short}training_backward", "torch.run"),
    ]
    assert len({span["trace_id"] for span in receiver.spans()}) == 1


def test_an_exception_marks_the_span_and_is_not_kept(tmp_path: Path) -> None:
    printed = run(
        tmp_path,
        OWN_PROVIDER
        + """
import gc, weakref
install()
class Held: pass
def work():
    held = Held()
    global seen
    seen = weakref.ref(held)
    with region():
        raise ValueError("secret")
try:
    work()
except ValueError:
    pass
gc.collect()
print(seen())
(span,) = spans()
print(span.status.status_code.name, [dict(event.attributes) for event in span.events])
""",
    )
    assert printed == ["None", "ERROR [{'exception.type': 'ValueError'}]"]


@pytest.mark.parametrize(
    ("sampler", "recorded", "light"),
    [
        ("ALWAYS_ON", 2, True),
        ("ALWAYS_OFF", 0, False),
        ("ParentBased(ALWAYS_ON)", 2, True),
        ("ParentBased(ALWAYS_ON, local_parent_sampled=ALWAYS_OFF)", 0, False),
        ("Choosy()", 1, False),
    ],
)
def test_the_sampler_of_the_program_decides(
    tmp_path: Path, sampler: str, recorded: int, light: bool
) -> None:
    printed = run(
        tmp_path,
        OWN_PROVIDER
        + f"""
from opentelemetry.sdk.trace.sampling import Decision, SamplingResult
class Choosy(Sampler):
    asked = []
    def should_sample(self, parent_context, trace_id, name, kind=None, attributes=None, links=None, trace_state=None):
        self.asked.append((name, dict(attributes or {{}})))
        drop = "denoising" in name and [name for name, _ in self.asked].count(name) == 2
        return SamplingResult(Decision.DROP if drop else Decision.RECORD_AND_SAMPLE, attributes)
    def get_description(self):
        return "Choosy"
provider = install(sampler={sampler})
Choosy.asked.clear()
for _ in range(2):
    with region():
        light = is_light()
        child = provider.get_tracer("program").start_span("child")
        child.end()
print(len(spans()), light)
for name, attributes in Choosy.asked:
    if "denoising" in name:
        print(attributes)
""",
    )
    assert printed[0] == f"{recorded} {light}"
    if sampler == "Choosy()":  # asked once a region, and told what it is
        assert printed[1:] == ["{'torch.region': 'profiler_region_inference_denoising'}"] * 2


@pytest.mark.parametrize("processor", ["SimpleSpanProcessor", "BatchSpanProcessor"])
def test_processors_see_start_and_end(tmp_path: Path, processor: str) -> None:
    """This includes a processor that is added later; each is called in the region's thread and at
    its time.
    """
    printed = run(
        tmp_path,
        OWN_PROVIDER
        + f"""
provider = install({processor})
seen = []
class Watching(SpanProcessor):
    def on_start(self, span, parent_context=None):
        span.set_attribute("started", threading.get_ident() == main)
        seen.append(("start", span.name, isinstance(span, Span), span.is_recording(), span.parent is not None))
    def _on_ending(self, span):
        seen.append(("ending", span.name))
    def on_end(self, span):
        seen.append(("end", span.name, threading.get_ident() == main, span.end_time is not None, span.attributes["started"]))
main = threading.get_ident()
with region():
    pass
provider.add_span_processor(Watching())
with region():
    seen.append("inside")
for entry in seen:
    print(entry)
print(len(spans()))
""",
    )
    assert printed == [
        f"('start', '{REGION}', True, True, True)",
        "inside",
        f"('ending', '{REGION}')",
        f"('end', '{REGION}', True, True, True)",
        "2",
    ]


def test_a_program_that_flushes_or_ends_its_provider_itself_loses_nothing(tmp_path: Path) -> None:
    printed = run(
        tmp_path,
        OWN_PROVIDER
        + """
provider = install()
with region():
    pass
provider.shutdown()
print(len([span for span in exporter.get_finished_spans() if span.name.endswith("denoising")]))
""",
    )
    assert printed == ["1"]


def test_limits_of_the_program_hold(tmp_path: Path) -> None:
    printed = run(
        tmp_path,
        OWN_PROVIDER
        + """
install(span_limits=SpanLimits(max_span_attributes=2, max_events=1, max_attribute_length=3))
with region():
    print(is_light())
    current().set_attribute("a", "12345"); current().set_attribute("b", "b")
    current().add_event("one"); current().add_event("two")
(span,) = spans()
print(dict(span.attributes), [event.name for event in span.events], span.dropped_attributes, span.dropped_events)
""",
    )
    assert printed == ["True", "{'a': '123', 'b': 'b'} ['two'] 1 1"]


def test_ids_come_from_the_program_where_it_makes_its_own_and_never_from_its_random_numbers(
    tmp_path: Path,
) -> None:
    printed = run(
        tmp_path,
        OWN_PROVIDER
        + """
import itertools, random
from opentelemetry.sdk.trace.id_generator import IdGenerator
class Counting(IdGenerator):
    numbers = itertools.count(1)
    def generate_span_id(self): return next(self.numbers)
    def generate_trace_id(self): return 7
install(id_generator=Counting())
random.seed(0); expected = random.random(); random.seed(0)
with region():
    print(is_light(), current().get_span_context().span_id < 100)
print(random.random() == expected)
""",
    )
    assert printed == ["True True", "True"]


def test_a_region_closed_out_of_order_or_by_another_context_disturbs_nobody(tmp_path: Path) -> None:
    done = run_python(
        tmp_path,
        OWN_PROVIDER
        + """
import contextvars
install()
one, two = region(), region("training_step")
one.__enter__(); two.__enter__(); one.__exit__(None, None, None); two.__exit__(None, None, None)
def generate():
    with region():
        yield
generator = generate()
contextvars.copy_context().run(next, generator)
generator.close()
print(len(spans()), len(spans("fastvideo.region::profiler_region_training_step")))
""",
        OTEL_TORCH_SIGNALS="spans",
    )
    assert done.stdout.splitlines() == ["2 1"]
    assert "Traceback" not in done.stderr


def test_a_forked_child_sends_its_own_and_never_its_parents(
    tmp_path: Path, receiver: Receiver
) -> None:
    run(
        tmp_path,
        PROGRAM
        + """
first()
with region():
    child = os.fork()
    if child == 0:
        with region("training_step"):
            pass
        with region("training_epoch"):
            pass
        with region("training_epoch"):
            assert is_light()
    else:
        os.waitpid(child, 0)
if child == 0:
    otel_torch.stop()
    os._exit(0)
""",
        **receiver.environment(),
    )
    short = "fastvideo.region::profiler_region_"
    sent = {
        name: len(receiver.spans(short + name))
        for name in ("inference_denoising", "training_step", "training_epoch")
    }
    assert sent == {
        "inference_denoising": 2,
        "training_step": 2,
        "training_epoch": 3,
    }  # each once by `first`


def test_what_is_open_at_the_end_is_marked(tmp_path: Path, receiver: Receiver) -> None:
    run(
        tmp_path,
        PROGRAM + "first()\nopen_one = region()\nopen_one.__enter__()\nassert is_light()\n",
        **receiver.environment(),
    )
    _, span = receiver.spans(REGION)
    assert span["attributes"]["otel_torch.unfinished"] is True


def test_regions_beyond_the_runs_trace_are_traces_of_their_own_linked_both_ways(
    tmp_path: Path, receiver: Receiver
) -> None:
    run(
        tmp_path,
        PROGRAM
        + """
first()
for _ in range(5200):
    with region():
        pass
with region("training_step"):
    with region("training_backward"):
        assert is_light()
otel_torch.session.current().recorder.drain(60)
""",
        **receiver.environment(),
    )
    (run_span,) = receiver.spans("torch.run")
    link = (run_span["trace_id"], run_span["span_id"])
    _, step = sorted(
        receiver.spans("fastvideo.region::profiler_region_training_step"),
        key=lambda span: span["start"],
    )
    _, inside = sorted(
        receiver.spans("fastvideo.region::profiler_region_training_backward"),
        key=lambda span: span["start"],
    )
    assert len(receiver.spans(REGION)) == 5201
    assert (
        step["trace_id"] != run_span["trace_id"]
        and step["links"] == [link]
        and step["parent_id"] == ""
    )
    assert (inside["trace_id"], inside["parent_id"]) == (step["trace_id"], step["span_id"])
    other_spans = [
        span for span in receiver.spans(REGION) if span["trace_id"] != run_span["trace_id"]
    ]
    assert len(run_span["links"]) == 100 and set(run_span["links"]) <= {
        (span["trace_id"], span["span_id"]) for span in other_spans
    }
    assert run_span["attributes"]["otel_torch.linked_traces"] == len(other_spans) + 1


def test_a_provider_that_comes_later_takes_over(tmp_path: Path) -> None:
    printed = run(
        tmp_path,
        OWN_PROVIDER
        + """
for _ in range(3):
    with region():
        print(is_light())
with region("training_epoch"):
    install()
    with region():
        print(is_light())
print(len(spans()))
""",
    )
    assert printed == ["False"] * 3 + ["True", "1"]


# --- the parts that are private to the SDK and the API


def make(**settings: Any) -> tuple[LightTracer, InMemorySpanExporter, TracerProvider]:
    provider, exporter = TracerProvider(shutdown_on_exit=False, **settings), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    light = LightTracer.of(provider.get_tracer("t"))
    assert light is not None
    return light, exporter, provider


def test_the_sdks_span_has_the_parts_that_a_light_one_makes() -> None:
    """With other parts, regions use the SDK's own spans. This test fails first when the SDK
    changes.
    """
    light, _, provider = make()
    assert light_span.has_expected_parts(provider.get_tracer("t"))
    closer = RegionCloser(Losses())
    parent = provider.get_tracer("t").start_span("parent")
    own_span = light.start(closer, RegionLabel("r", "s", True), parent, read_context(), 5)
    sdk_span: Any = provider.get_tracer("t").start_span(
        "s", trace.set_span_in_context(parent), attributes={"torch.region": "r"}
    )
    assert isinstance(own_span, LightSpan) and isinstance(own_span, Span)
    for name in vars(sdk_span):
        assert hasattr(own_span, name), name
    sdk_span._start_time = 5
    light_json, sdk_json = json.loads(own_span.to_json()), json.loads(sdk_span.to_json())
    for document in (light_json, sdk_json):
        del document["context"]["span_id"]
    assert light_json == sdk_json


def test_another_sdk_or_another_kind_of_tracer_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    monkeypatch.setattr(light_span, "_LAZY_PARTS", {})
    assert LightTracer.of(provider.get_tracer("t")) is None
    assert LightTracer.of(trace.NoOpTracer()) is None
    assert LightTracer.of(object()) is None


def test_the_sdks_own_metrics_of_spans_need_its_tracer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED", "true")
    assert LightTracer.of(TracerProvider(shutdown_on_exit=False).get_tracer("t")) is None


def test_the_current_span_is_read_and_set_as_the_api_does() -> None:
    span = trace.NonRecordingSpan(trace.SpanContext(1, 2, False))
    token = attach(trace.set_span_in_context(span))
    assert trace.get_current_span() is span is read_context()[CURRENT]
    detach(token)
    assert trace.get_current_span() is not span
    carried: dict[str, str] = {}
    tracecontext.TraceContextTextMapPropagator().inject(carried)
    assert carried == {}


def test_only_constant_samplers_are_not_asked() -> None:
    closer = RegionCloser(Losses())

    def starts(sampler: Sampler) -> bool:
        light, _, _ = make(sampler=sampler)
        parent = trace.NonRecordingSpan(trace.SpanContext(1, 2, False, trace.TraceFlags(1)))
        return (
            light.start(closer, RegionLabel("r", "s", True), parent, read_context(), 5) is not None
        )

    assert [
        starts(sampler) for sampler in (ParentBased(ALWAYS_OFF), TraceIdRatioBased(1.0), ALWAYS_OFF)
    ] == [True, False, False]


def test_a_batch_processor_of_ones_own_is_called_by_its_on_end() -> None:
    class Mine(BatchSpanProcessor):
        ended = 0

        def on_end(self, span: Any) -> None:
            Mine.ended += 1

    provider = TracerProvider(shutdown_on_exit=False, span_limits=SpanLimits())
    provider.add_span_processor(Mine(InMemorySpanExporter()))
    light = LightTracer.of(provider.get_tracer("t"))
    assert light is not None and light.enqueue is None and not light.can_wait
    closer = RegionCloser(Losses())
    span = light.start(
        closer,
        RegionLabel("r", "s", True),
        provider.get_tracer("t").start_span("p"),
        read_context(),
        5,
    )
    assert span is not None
    light.end(span, 9)
    assert Mine.ended == 1
    provider.shutdown()
