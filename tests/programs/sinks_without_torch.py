"""A recorder whose sinks are those of the environment; tests append calls of its functions.

Some imports are for what they append.
"""
# ruff: noqa: F401

import os
import time

from otel_torch.process.console import say
from otel_torch.process.job import this_job
from otel_torch.recorder import Recorder
from otel_torch.records import Batch, Losses, Record, Scope
from otel_torch.settings import Settings
from otel_torch.telemetry.sinks.telemetry_sink import build_telemetry_sinks

job, losses = this_job(), Losses()
settings = Settings.from_env(report=say)


class Arrived:
    def __init__(self, pending):
        self.pending = pending

    def ready(self):
        return True

    def records(self):
        return self.pending


recorder = Recorder(Arrived, lambda: build_telemetry_sinks(settings, job, losses), losses)


def record(module="layer", step=0, call=0, tensor="out", **stats):
    stats = stats or {"abs_mean": 0.5, "mean": 0.25, "shape": [2, 3], "dtype": "float32"}
    return Record(module, tensor, step, call, 0, "Net", "forward", None, stats, time.time_ns())


def run_step(step, records, bounded=False, training=False):
    attributes = {"torch.step": step, "torch.loop": 0, "torch.model": "Net"}
    scope = Scope("step", "torch.step", False, attributes, bounded=bounded, training=training)
    recorder.open(scope)
    for each in records:
        recorder.add(each)
    recorder.flush(scope)
    recorder.close(scope)
    return scope


def wait_for_room(seconds=60):
    """Wait as long as a queue is more than half full, as a step that computes something would."""
    queues = [q for sink in recorder.sinks for qs in sink._pipelines._queues.values() for q in qs]
    deadline = time.monotonic() + seconds
    while any(2 * q._bytes > q._limit for q in queues) and time.monotonic() < deadline:
        time.sleep(0.01)


def finish(seconds=30):
    recorder.finish(time.monotonic() + seconds)
