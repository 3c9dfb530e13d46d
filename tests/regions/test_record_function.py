"""`record_function` ranges of an unmodified program become scopes if they are selected."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.profiler import record_function
from torch.utils.data import DataLoader

from otel_torch import session
from otel_torch.regions import record_function as ranges
from otel_torch.regions.entry import region
from tests.support import ListSink, bare_session

CLASS: Any = torch.autograd.profiler.record_function
UNTOUCHED = CLASS.__enter__, CLASS.__exit__


def record(asked: str) -> ListSink:
    seen = bare_session(REGIONS=asked)
    ranges.install()
    return seen


@pytest.fixture(autouse=True)
def _undo() -> Iterator[None]:
    yield
    ranges.uninstall()
    session.become(None)
    assert (CLASS.__enter__, CLASS.__exit__) == UNTOUCHED


def test_nothing_is_touched_unless_a_pattern_asks_for_it() -> None:
    seen = record("registered")
    assert (CLASS.__enter__, CLASS.__exit__) == UNTOUCHED
    with record_function("mine"):
        pass
    assert seen.closed == []


def test_matching_ranges_are_scopes_under_their_own_names() -> None:
    seen = record("mine.*")
    ranges.install()  # twice is once
    with (
        record_function("mine.a"),
        record_function("other"),
        torch.autograd.profiler.record_function("mine.b"),
    ):
        pass
    assert seen.names == ["mine.b", "mine.a"]
    assert seen.closed[0].kind == "region" and seen.closed[0].attributes == {
        "torch.region": "mine.b"
    }
    ranges.uninstall()
    with record_function("mine.c"):
        pass
    assert len(seen.closed) == 2


def test_torchs_own_ranges_are_seen() -> None:
    seen = record("Optimizer.*,enumerate(DataLoader)*")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    for batch in DataLoader(torch.ones(2, 2), batch_size=1):  # type: ignore[arg-type]
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
    assert seen.names.count("Optimizer.step#Adam.step") == 2
    assert seen.names.count("Optimizer.zero_grad#Adam.zero_grad") == 2
    loader = [scope for scope in seen.closed if scope.name.startswith("enumerate(DataLoader)#")]
    assert len(loader) == 3  # two batches, and the end of the loop, which is no error
    assert all(scope.error is None for scope in loader)


def test_an_exception_marks_the_scope_and_passes() -> None:
    seen, error = record("*"), KeyError()
    with pytest.raises(KeyError), record_function("a"):
        raise error
    assert seen.closed[0].error is error


def test_a_decorator_that_recurses_closes_what_it_opened() -> None:
    seen = record("*")

    @record_function("deep")
    def deep(depth: int) -> None:
        if depth:
            deep(depth - 1)

    deep(2)
    assert seen.names == ["deep"] * 3 and len({id(scope) for scope in seen.closed}) == 3


def test_distinct_names_are_bounded() -> None:
    seen = record("*")
    for index in range(102):
        with record_function(f"block {index}"):
            pass
    assert seen.names[:2] == ["block 0", "block 1"] and seen.names[100:] == ["record_function"] * 2
    assert seen.closed[101].attributes["torch.region"] == "block 101"


def test_the_profilers_own_marks_are_no_scopes_and_its_steps_do_not_nest() -> None:
    seen = record("*")
    with (
        record_function("fastvideo.region::profiler_region_model_loading"),
        record_function("ProfilerStep#1"),
    ):
        pass
    assert seen.names == ["ProfilerStep#1"] and not seen.closed[0].lexical


def test_regions_and_ranges_do_not_double() -> None:
    seen = record("registered,*")
    with region("model_loading"):
        pass
    assert len(seen.closed) == 1


def test_the_torch_profiler_shows_the_ranges_as_before() -> None:
    record("*")
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler,
        record_function("range"),
    ):
        torch.ones(2).add(1)
    assert any(event.key == "range" for event in profiler.key_averages())


@pytest.mark.skipif(
    torch.__version__ < "2.13",
    reason="torch 2.12 cannot trace a range that was made outside of the graph",
)
def test_compiled_code_keeps_its_graph_and_its_values() -> None:
    outside = record_function("outside")

    def step(x: torch.Tensor) -> torch.Tensor:
        with record_function("inside"), outside:
            return x * 2

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled, x = torch.compile(step, fullgraph=True, backend=counter), torch.arange(3.0)
    before = compiled(x)
    seen = record("*")
    assert torch.equal(compiled(x), before) and counter.frame_count == 1
    torch._dynamo.reset()
    assert torch.equal(compiled(x), before) and counter.frame_count == 2
    assert "inside" not in seen.names and "outside" not in seen.names


def _scripted(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.profiler.record_function("scripted"):
        return x * 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_still_compiles_a_range() -> None:
    record("*")
    assert torch.equal(torch.jit.script(_scripted)(torch.ones(2)), torch.full((2,), 2.0))
