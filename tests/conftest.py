"""Fixtures for every test: a test that leaves torch changed fails itself, not the tests after it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.interpreters import heed_signals

if TYPE_CHECKING:
    from xdist.scheduler import LoadFileScheduling

    from otel_torch.parity.finding import Report

# files that share fixtures which take half a minute each: one worker runs all of them
TOGETHER = dict.fromkeys(
    (f"tests/fastvideo/test_{name}.py" for name in ("delivery", "generation", "workers")),
    "runs of FastVideo",
)


def pytest_configure() -> None:
    heed_signals()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Give whole files to the workers, as `--dist loadfile` does, and those of `TOGETHER` at once."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope = super()._split_scope(nodeid)
            return TOGETHER.get(scope, scope)

    return Scheduling(config, log)


def pytest_collection_finish() -> None:
    """Keep the garbage collector away from the million objects of the imported frameworks: many
    tests collect, and so does the compiler.
    """
    gc.collect()
    gc.freeze()


def torch_state() -> list[Any] | None:
    """Return torch's settings of the process, or None while torch is not loaded."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    device = torch.get_default_device()
    return [
        device,
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_grad_enabled(),
        torch.is_anomaly_enabled(),
        torch.get_num_threads(),
    ]


@pytest.fixture(autouse=True)
def torch_stays_as_it_is() -> Iterator[None]:
    before = torch_state()
    yield
    assert before is None or torch_state() == before, "this test leaves torch changed"


@pytest.fixture(autouse=True)
def comparisons_do_not_contradict_themselves(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail a test of `diff` in which a finding names a place whose own pair is right."""
    if not request.path.name.startswith("test_diff"):
        return
    from otel_torch.parity import compare
    from tests.contradictions import contradictions

    run = compare._Comparison.run

    def run_and_check(comparison: compare._Comparison) -> Report:
        report = run(comparison)
        assert not contradictions(report)
        return report

    monkeypatch.setattr(compare._Comparison, "run", run_and_check)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Start with an empty compiler, and leave it empty."""
    import torch
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
