"""Nothing is lost at the end of a process, and nobody waits for it, however the process ends."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.otlp_receiver import Receiver
from tests.support import run_python
from tests.telemetry.otlp.test_delivery import lost

COUNT = 1000
# the beginning of a program: `work` makes a span for each of COUNT regions, milliseconds ago
WORK = f"""
import multiprocessing, os, signal, sys, threading
import otel_torch, torch

def work():
    for _ in range({COUNT}):
        with otel_torch.region("training_step"):
            pass

def send_sigterm():
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(60)

def in_child(end):
    if (child := os.fork()) == 0:
        work()
        end()
    sys.exit(max(0, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))

def wait_for(event):
    work()
    event.set()
    threading.Event().wait(60)
"""
# name: (program, exit status)
ENDS = {
    "os._exit": ("work(); os._exit(3)", 3),
    "os._exit in a forked child": ("in_child(lambda: os._exit(3))", 3),
    "os._exit in a thread": (
        "work(); threading.Thread(target=os._exit, args=[3]).start(); threading.Event().wait(60)",
        3,
    ),
    "os._exit in a spawned process": (
        """
def end():
    work()
    os._exit(3)
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=end)
    process.start()
    process.join()
    sys.exit(process.exitcode)
""",
        3,
    ),
    "SIGTERM": ("work(); send_sigterm()", -signal.SIGTERM),
    "SIGTERM in a forked child": ("in_child(send_sigterm)", 0),
    "SIGTERM that a handler ends": (
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(3)); work(); send_sigterm()",
        3,
    ),
    # code in C that exits is not observed: what was sent before the handler has to be enough
    "SIGTERM that a handler turns into SIGKILL": (
        "signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))\n"
        "work(); send_sigterm()",
        -signal.SIGKILL,
    ),
    # as uvicorn does it in a worker: the handler is set before the program is imported
    "SIGTERM that is raised again with the default": (
        """
otel_torch.stop()
raised = []
signal.signal(signal.SIGTERM, lambda *arguments: raised.append(arguments))
otel_torch.start()
work()
os.kill(os.getpid(), signal.SIGTERM)
assert len(raised) == 1
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.raise_signal(signal.SIGTERM)
""",
        -signal.SIGTERM,
    ),
    # as the workers of celery's pool do it
    "SIGTERM after its default was restored": (
        "signal.signal(signal.SIGTERM, signal.SIG_DFL); work(); send_sigterm()",
        -signal.SIGTERM,
    ),
    "a pool's terminate": (
        """
context = multiprocessing.get_context("fork")
event = context.Event()
pool = context.Pool(1, initializer=wait_for, initargs=[event])
event.wait(60)
pool.terminate()
pool.join()
""",
        0,
    ),
}


def run(tmp_path: Path, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    variables = {"OTEL_TORCH_JSONL": "off", "OTEL_TORCH_SIGNALS": "spans"} | variables
    return run_python(tmp_path, WORK + code, check=False, is_taken_apart=True, **variables)


@pytest.mark.parametrize("how", ENDS)
def test_a_thousand_spans_just_before_the_end_arrive(tmp_path: Path, how: str) -> None:
    code, status = ENDS[how]
    protocol = "grpc" if how in ("os._exit", "SIGTERM") else "http"
    with Receiver() as receiver:
        done = run(tmp_path, code, **receiver.environment(protocol))
    assert done.returncode == status, done.stderr
    assert "otel_torch" not in done.stderr and "Traceback" not in done.stderr
    assert len(receiver.spans("fastvideo.region::profiler_region_training_step")) == COUNT
    ends_by_itself = "SIGKILL" not in how
    assert len(receiver.spans("torch.run")) == ends_by_itself


@pytest.mark.parametrize("how", ["os._exit", "SIGTERM", "a pool's terminate"])
def test_what_a_silent_collector_does_not_confirm_is_counted_and_the_end_comes(
    tmp_path: Path, how: str
) -> None:
    """The collector answers once the program has ended: without a bound this would hang."""
    code, status = ENDS[how]
    with Receiver("never") as receiver:
        done = run(tmp_path, code, OTEL_EXPORTER_OTLP_TIMEOUT="600", **receiver.environment("http"))
    assert done.returncode == status
    counts = lost(done)
    assert sum(counts.values()) == COUNT + 1 and {what for what, _ in counts} == {"span"}


# what the program sees of handlers and of `os._exit` is what it sees without recording
SEEN = """
import functools, inspect, pickle
seen = []
see = lambda value: seen.append(str(value))
def first(*_): see("first")
def second(*_): see("second")
for handler in (first, second, signal.SIG_IGN, signal.SIG_DFL, 0, first):
    see(signal.signal(signal.SIGTERM, handler) in (first, second, 0, 1))
    see(signal.getsignal(signal.SIGTERM))
    if callable(handler):
        signal.raise_signal(signal.SIGTERM)
see(signal.signal(signalnum=signal.SIGTERM, handler=second))
for wrong in ("text", 5, None):
    try:
        signal.signal(signal.SIGTERM, wrong)
    except (TypeError, ValueError) as error:
        see(repr(error))
try:
    threading.Thread(target=lambda: signal.signal(signal.SIGTERM, first)).run()
except ValueError as error:
    see(repr(error))
see(signal.getsignal(signal.SIGTERM))
see(signal.signal.__name__ + str(inspect.signature(signal.signal)) + os._exit.__name__)
see(pickle.loads(pickle.dumps(os._exit)) is os._exit)
def replaced(status, bare=os._exit): see("replaced"); bare(status)
os._exit = replaced
print("\\n".join(re.sub(" at 0x[0-9a-f]+", "", line) for line in seen), flush=True)
"""


def test_a_program_sees_its_own_handlers_and_statuses(tmp_path: Path) -> None:
    code = "import re\n" + SEEN + "os._exit(4)\n"
    bare = run(tmp_path, code, OTEL_TORCH_ENABLED="0")
    recorded = run(tmp_path, "work()\n" + code)
    assert recorded.stdout == bare.stdout and "first" in bare.stdout
    assert (recorded.returncode, bare.returncode) == (4, 4)


def test_stop_restores_what_was_observed(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
otel_torch.stop()
bare = os._exit, signal.signal, signal.getsignal, signal.getsignal(signal.SIGTERM)
otel_torch.start()
print([now is before for now, before in zip((os._exit, signal.signal, signal.getsignal), bare)])
handler = lambda *_: None
signal.signal(signal.SIGTERM, handler)
otel_torch.stop()
print((os._exit, signal.signal, signal.getsignal) == bare[:3], bare[3] is signal.SIG_DFL)
print(signal.getsignal(signal.SIGTERM) is handler)
""",
    )
    assert done.stdout.splitlines() == ["[False, False, False]", "True True", "True"], done.stderr


# -- exporters that the program has set up

# providers of the program that send to WHERE, and nothing that makes items of its own
PROVIDERS = """
from importlib import import_module
from opentelemetry import _logs, metrics, trace
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
import os

PROTOCOL, WHERE = os.environ["PROTOCOL"], os.environ["WHERE"]

def exporter(module, name, path):
    cls = getattr(import_module(f"opentelemetry.exporter.otlp.proto.{PROTOCOL}.{module}"), name)
    where = {"endpoint": WHERE} if PROTOCOL == "grpc" else {"endpoint": f"{WHERE}/v1/{path}"}
    return cls(**where, headers={"x-team": "video"}, timeout=600)

tracers = TracerProvider()
loggers = LoggerProvider()
if "traces" in os.environ["PROVIDERS"]:
    make = globals()[os.environ.get("PROCESSOR", "BatchSpanProcessor")]
    tracers.add_span_processor(make(exporter("trace_exporter", "OTLPSpanExporter", "traces")))
    trace.set_tracer_provider(tracers)
if "logs" in os.environ["PROVIDERS"]:
    loggers.add_log_record_processor(
        BatchLogRecordProcessor(exporter("_log_exporter", "OTLPLogExporter", "logs"))
    )
    _logs.set_logger_provider(loggers)
if "metrics" in os.environ["PROVIDERS"]:
    made = exporter("metric_exporter", "OTLPMetricExporter", "metrics")
    metrics.set_meter_provider(MeterProvider([PeriodicExportingMetricReader(made)]))
flushes = []
for provider in (tracers, loggers, metrics.get_meter_provider()):
    provider.force_flush = lambda *arguments: flushes.append(arguments)
"""
MODEL = """
import atexit
atexit.register(lambda: print(flushes))
import torch
for _ in range(5):
    torch.nn.Linear(2, 2)(torch.ones(1, 2))
"""


def run_with_providers(
    tmp_path: Path,
    receiver: Receiver,
    protocol: str,
    providers: str,
    code: str = MODEL,
    **more: str,
) -> subprocess.CompletedProcess[str]:
    where = receiver.grpc_endpoint if protocol == "grpc" else receiver.http_endpoint
    return run_python(
        tmp_path,
        PROVIDERS + code,
        is_taken_apart=True,
        PROTOCOL=protocol,
        PROVIDERS=providers,
        WHERE=where,
        OTEL_TORCH_SIGNALS="spans,span_events,log_events,metrics",
        **more,
    )


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("providers", ["traces", "traces,metrics,logs"])
def test_the_programs_exporters_keep_nobody_waiting(
    tmp_path: Path, protocol: str, providers: str
) -> None:
    """The collector is silent until the program has ended, and a request may take 600 s."""
    with Receiver("never") as receiver:
        done = run_with_providers(tmp_path, receiver, protocol, providers)
    assert done.stdout == "[]\n"
    counts = lost(done)
    assert counts["span", "unconfirmed"] == 11 and counts["span_event", "unconfirmed"] == 5
    assert counts.get(("log_event", "unconfirmed"), 0) == 5 * ("logs" in providers)
    assert (counts.get(("metric_point", "unconfirmed"), 0) > 0) is ("metrics" in providers)


def test_a_processor_that_exports_at_once_keeps_no_step_waiting(tmp_path: Path) -> None:
    more = {"PROCESSOR": "SimpleSpanProcessor"}
    with Receiver("never") as receiver:
        done = run_with_providers(tmp_path, receiver, "http", "traces", **more)
    assert lost(done)["span", "unconfirmed"] == 11


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_what_the_programs_exporters_would_send_arrives_with_their_settings(
    tmp_path: Path, protocol: str
) -> None:
    with Receiver() as receiver:
        done = run_with_providers(tmp_path, receiver, protocol, "traces,metrics,logs")
    assert lost(done) == {} and done.stdout == "[]\n"
    assert len(receiver.spans("torch.forward")) == len(receiver.events()) == 5
    assert len(receiver.log_records()) == 5
    assert len(receiver.metric_points("torch.module.activation.mean")) == 5
    assert {headers.get("x-team") for headers in receiver.headers} == {"video"}
    # the program's own resource, without ours
    assert not any("dl.rank" in span["resource"] for span in receiver.spans())


OTHERS = """
from opentelemetry.sdk.trace import SpanLimits, SpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

class Stamp(SpanProcessor):
    def on_start(self, span, parent_context=None):
        span.set_attribute("stamp", "mine")

memory = InMemorySpanExporter()
tracers._span_limits = SpanLimits(max_events=2)
tracers.add_span_processor(Stamp())
"""
LATER = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh(), torch.nn.Tanh())
model(torch.ones(1, 2))
tracers.add_span_processor(SimpleSpanProcessor(memory))
model(torch.ones(1, 2))
import atexit
atexit.register(lambda: print(len([s for s in memory.get_finished_spans() if s.name == "torch.forward"])))
"""


def test_other_processors_of_the_program_are_called_as_ever(tmp_path: Path) -> None:
    """One sets an attribute at the start, another is added while the program runs."""
    with Receiver() as receiver:
        done = run_with_providers(tmp_path, receiver, "http", "traces", OTHERS + LATER)
    assert done.stdout == "1\n"
    forwards = receiver.spans("torch.forward")
    assert [span["attributes"]["stamp"] for span in forwards] == ["mine", "mine"]
    # of the program's two events a span, one is left to others
    assert max(len(span["events"]) for span in receiver.spans()) == 1
    assert len(receiver.events()) == 8 and lost(done) == {}
