"""Device time of regions: the program never waits for it, another thread queries it, and a captured
graph contains none of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

import otel_torch
from otel_torch import session
from otel_torch.recorder import Sink
from otel_torch.records import Scope
from otel_torch.regions import device_time, entry
from otel_torch.regions.closer import RegionCloser
from otel_torch.regions.device_time import EventPool
from tests.support import recording

REGION = "inference_denoising"


@pytest.fixture(autouse=True)
def own_call_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        entry, "_explicit", set()
    )  # or natural regions of later tests would step back


class StandInEvent:
    """A device event that a test completes by hand."""

    def __init__(self, device: StandIn) -> None:
        self.device = device
        self.issued_at: float | None = None

    def record(self) -> None:
        self.issued_at = self.device.issued
        self.device.recorded += 1

    def query(self) -> bool:
        return self.issued_at is not None and self.issued_at <= self.device.reached

    def elapsed_time(self, end: StandInEvent) -> float:
        assert (
            self.query()
            and end.query()
            and self.issued_at is not None
            and end.issued_at is not None
        )
        return end.issued_at - self.issued_at


class StandIn:
    """A fake accelerator. Times are in milliseconds of the device's clock."""

    def __init__(self) -> None:
        self.issued = self.reached = 0.0
        self.capturing = False
        self.made = self.recorded = self.number = 0

    def is_ready(self) -> bool:
        return not self.capturing

    def current(self) -> int:
        return self.number

    def make_event(self) -> StandInEvent:
        self.made += 1
        return StandInEvent(self)


@pytest.fixture
def device() -> Iterator[StandIn]:
    stand_in = StandIn()
    device_time.use_accelerator(stand_in)
    yield stand_in
    device_time.use_accelerator(None)


def test_nothing_is_known_until_the_device_is_there(device: StandIn) -> None:
    measured = EventPool(device).start_timer()
    assert measured is not None and not measured.pending
    device.issued = 250
    measured.end()
    assert measured.seconds() is None and measured.pending
    device.reached = 249
    assert measured.seconds() is None and measured.pending
    device.reached = 250
    assert measured.seconds() == 0.25 and not measured.pending
    assert measured.seconds() == 0.25


def test_events_are_used_again(device: StandIn) -> None:
    pool = EventPool(device)
    for _ in range(100):
        measured = pool.start_timer()
        assert measured is not None
        measured.end()
        measured.seconds()
    assert device.made == 2 and device.recorded == 200


def test_nothing_is_recorded_while_a_graph_is_captured(device: StandIn) -> None:
    pool = EventPool(device)
    device.capturing = True
    assert pool.start_timer() is None
    device.capturing = False
    begun = pool.start_timer()
    assert begun is not None
    device.capturing = True  # in the region, and its end would be in the graph
    begun.end()
    assert not begun.pending and begun.seconds() is None and device.recorded == 1


def test_two_devices_are_no_stretch(device: StandIn) -> None:
    begun = EventPool(device).start_timer()
    assert begun is not None
    device.number = 1
    begun.end()
    assert not begun.pending and begun.seconds() is None


def test_a_device_that_fails_is_said_and_left_alone(
    device: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = EventPool(device).start_timer()
    assert measured is not None
    measured.end()
    device.reached = 1
    device.issued = -1
    StandInEvent.elapsed_time, elapsed_time = None, StandInEvent.elapsed_time  # type: ignore[assignment,method-assign]
    try:
        assert measured.seconds() is None and not measured.pending
    finally:
        StandInEvent.elapsed_time = elapsed_time  # type: ignore[method-assign]
    assert "device time of regions is not known" in capsys.readouterr().err


class Waits(Sink):
    """A sink that accepts deferred regions."""

    accepts_deferred_regions = True

    def __init__(self) -> None:
        self.closed: list[Scope] = []

    def close(self, scope: Scope) -> None:
        self.closed.append(scope)


def listen() -> tuple[Waits, RegionCloser]:
    """Add a sink to the current session."""
    running, sink = session.current(), Waits()
    assert running is not None
    running.recorder.sinks[:] = [sink]
    running.recorder.region_closer.connect([sink])
    return sink, running.recorder.region_closer


@pytest.mark.parametrize("natural", [False, True])
def test_a_region_is_handed_on_once_its_device_time_is_known(
    device: StandIn, natural: bool
) -> None:
    from otel_torch.regions.entry import close_region, open_region, region

    with recording(signals=""):
        sink, closer = listen()
        for turn in range(3):
            if natural:
                scope = open_region("training_step", lexical=False)
                device.issued += 500
                close_region(scope)
            else:
                with region(REGION):
                    device.issued += 500
            closer.flush()
            assert len(sink.closed) == turn  # neither waited for nor forgotten
            device.reached = device.issued
            closer.flush()
        assert [scope.device_s for scope in sink.closed] == [0.5] * 3
        assert all(scope.end_ns >= scope.start_ns > 0 for scope in sink.closed)


def test_the_end_waits_for_the_device_but_not_for_ever(device: StandIn) -> None:
    with recording(signals=""):
        sink, closer = listen()
        with otel_torch.region(REGION):
            device.issued = 100
        with otel_torch.region(REGION):
            device.issued = 300
        device.reached = 100
        began = time.monotonic()
        closer.finish(began + 0.2)
        assert time.monotonic() - began < 5
        assert [scope.device_s for scope in sink.closed] == [0.1, None]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_is_measured_without_synchronising() -> None:
    device_time.use_accelerator(None)
    x = torch.randn(2048, 2048, device="cuda")
    with recording(signals=""):
        sink, closer = listen()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with otel_torch.region(REGION):
                for _ in range(20):
                    x = torch.tanh(x @ x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        closer.flush()
        assert sink.closed[0].device_s is not None and 0 < sink.closed[0].device_s < 60


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_captured_graph_holds_no_events_of_ours_and_others_may_be_asked_meanwhile() -> None:
    device_time.use_accelerator(None)
    x = torch.ones(8, device="cuda")
    pending = device_time.start_timer()
    assert pending is not None
    pending.end()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert device_time.start_timer() is None
        y = x * 2
    graph.replay()
    torch.cuda.synchronize()
    assert pending.seconds() is not None and y.sum().item() == 16
