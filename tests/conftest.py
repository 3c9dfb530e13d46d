"""Fixtures for every test: a test that leaves torch changed fails itself, not the tests after it."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import sampling
from tests.interpreters import heed_signals

if TYPE_CHECKING:
    from xdist.scheduler import LoadFileScheduling

    from otel_torch.parity.finding import Report

# files that share fixtures which take half a minute each: one worker runs all of them
TOGETHER = dict.fromkeys(
    (f"tests/fastvideo/test_{name}.py" for name in ("delivery", "generation", "workers")),
    "runs of FastVideo",
)
# files with few tests that take long: begun last, one worker would run them while the others are done
LONG = (
    "runs of FastVideo",
    "tests/fastvideo/test_training.py",
    "tests/fastvideo/test_diff_ports.py",
    "tests/fastvideo/test_diff_generation.py",
    "tests/fastvideo/ports/test_corpus.py",
    "tests/benchmarks/test_benchmarks.py",
    "tests/process/test_processes.py",
    "tests/sources/operations/test_kernel_launches.py",
    "tests/sources/tensors/test_compiled.py",
    "tests/sources/tensors/test_compiled_functions.py",
    "tests/telemetry/otlp/test_delivery.py",
    "tests/test_docs.py",
    "tests/test_end_to_end.py",
)


def pytest_configure() -> None:
    heed_signals()
    # for all workers and programs of this run, though midnight may pass between two of them
    os.environ[sampling.VARIABLE] = sampling.seed_of_this_run()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while all modules are imported, which takes a fifth of that time:
    `a_small_heap` does it before the first test.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_report_header() -> str:
    return f"cases of long corpora: {sampling.VARIABLE}={os.environ[sampling.VARIABLE]}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Give whole files to the workers, as `--dist loadfile` does: those of `TOGETHER` at once, those of
    `LONG` first, and then those with the most tests.
    """
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope = super()._split_scope(nodeid)
            return TOGETHER.get(scope, scope)

        def _assign_work_unit(self, node: Any) -> None:
            if scope := next((scope for scope in LONG if scope in self.workqueue), None):
                self.workqueue.move_to_end(scope, last=False)
            super()._assign_work_unit(node)

    return Scheduling(config, log)


# how many modules were imported when the heap was frozen last
_imported_when_frozen = 0
# a test that imports so many more has imported a framework or a compiler: a hundred thousand objects
MANY_MODULES = 100


def freeze_the_heap() -> None:
    global _imported_when_frozen
    gc.collect()
    gc.freeze()
    _imported_when_frozen = len(sys.modules)


@pytest.fixture(scope="module", autouse=True)
def a_small_heap() -> None:
    """Keep the garbage collector, and what else walks the heap, away from the million objects of the
    imported frameworks: many tests collect, each session looks for models, and so does the compiler.
    """
    freeze_the_heap()


@pytest.fixture(autouse=True)
def a_heap_that_stays_small(a_small_heap: None) -> None:
    """Freeze again what a test before this one has imported: a session would take 0.1 s more to begin."""
    if len(sys.modules) > _imported_when_frozen + MANY_MODULES:
        freeze_the_heap()


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
    """Fail a test of a comparison in which a finding names a place whose own pair is right."""
    if not {"parity", "test_diff.py"} & set(request.path.parts):
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


@pytest.fixture(scope="session")
def recorded_program(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that gives the recording of a program of `tests/programs`, made once."""
    from tests.support import PROGRAMS, run_python

    @functools.cache
    def record(program: str, *arguments: str, capture: str = "parity", **variables: str) -> Path:
        folder = tmp_path_factory.mktemp("recorded")
        variables["OTEL_TORCH_CAPTURE"] = capture
        run_python(folder, PROGRAMS / program, *arguments, **variables)
        return folder / "run.jsonl"

    return record
