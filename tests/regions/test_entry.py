"""Regions: how names resolve, when a region becomes a scope, and that programs do not notice."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from otel_torch import session
from otel_torch.recorder import Sink
from otel_torch.records import Scope
from otel_torch.regions import entry, registry
from otel_torch.regions.entry import (
    close_region,
    is_entered_explicitly,
    open_region,
    profile_region,
    profiler_region,
    region,
)
from otel_torch.regions.nvtx import nvtx_range
from otel_torch.regions.registry import (
    ProfilerRegion,
    list_profiler_regions,
    register_profiler_region,
    resolve_profiler_region,
)
from tests.support import bare_session

IN_FASTVIDEOS_CODE = [
    "model_loading",
    "inference_denoising",
    "training_save_checkpoint",
    "training_validation",
    "training_train_one_step",
    "training_train",
    "distillation_teacher_forward",
    "distillation_student_forward",
    "distillation_loss",
    "distillation_update",
]
IN_ITS_DOCUMENTS = [
    "model_loading",
    "inference_pre_denoising",
    "inference_denoising",
    "inference_post_denoising",
    "training_checkpoint_saving",
    "training_dit",
    "training_validation",
    "training_epoch",
    "training_step",
    "training_backward",
    "training_optimizer",
    "distillation_teacher_forward",
    "distillation_student_forward",
    "distillation_loss",
    "distillation_update",
]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(entry, "_explicit", set())
    registered = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(registered)
    registry.choose.cache_clear()
    registry.clear_unregistered_names()
    session.become(None)
    entry.set_collector(None)


# --- names


@pytest.mark.parametrize("name", sorted({*IN_FASTVIDEOS_CODE, *IN_ITS_DOCUMENTS}))
def test_every_name_of_fastvideo_resolves_in_both_forms(name: str) -> None:
    for form in (
        name,
        f"profiler_region_{name}",
        f"  {name.upper()} ",
        name.replace("_", " ").title(),
    ):
        resolved = resolve_profiler_region(form)
        assert resolved is not None and resolved.name == f"profiler_region_{name}"


def test_the_registry_is_sorted_and_holds_the_union() -> None:
    names = [region_info.name for region_info in list_profiler_regions()]
    assert names == sorted(names) and len(names) == 18
    assert all(region_info.description for region_info in list_profiler_regions())


def test_unknown_names_resolve_to_none() -> None:
    assert resolve_profiler_region("denoising") is None
    assert resolve_profiler_region("") is None


@pytest.mark.parametrize(
    "name", ["", "   ", "model_loading", " Profiler_Region_Model_Loading", "Model Loading"]
)
def test_a_taken_or_empty_name_cannot_be_registered(name: str) -> None:
    with pytest.raises(ValueError):
        register_profiler_region(name, "x")
    assert resolve_profiler_region("model_loading").name == "profiler_region_model_loading"  # type: ignore[union-attr]


def test_a_short_registered_name_is_taken_for_the_long_one_too() -> None:
    register_profiler_region(" My Stage", "mine")
    assert resolve_profiler_region("my_stage") == ProfilerRegion("my_stage", "mine")
    with pytest.raises(ValueError):
        register_profiler_region("profiler_region_my_stage", "again")


@pytest.mark.parametrize("name", ["", " x", "Upper"])
def test_a_region_validates_its_name(name: str) -> None:
    with pytest.raises(ValueError):
        ProfilerRegion(name, "x")


# --- scopes


@pytest.mark.parametrize("enter", [region, profiler_region])
def test_a_region_is_a_scope_under_its_registered_name(enter: Any) -> None:
    seen = bare_session()
    with enter(" Model_Loading"):
        pass
    [scope] = seen.closed
    assert (scope.kind, scope.name) == ("region", "fastvideo.region::profiler_region_model_loading")
    assert scope.attributes == {"torch.region": "profiler_region_model_loading"}
    assert 0 < scope.start_ns <= scope.end_ns and scope.lexical and scope.error is None


def test_the_prefix_is_a_setting() -> None:
    seen = bare_session(REGION_PREFIX="acme/")
    with region("model_loading"):
        pass
    assert seen.names == ["acme/profiler_region_model_loading"]


def test_without_a_session_nothing_happens_and_nothing_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with region("no such region anywhere"):
        pass
    assert capsys.readouterr().err == ""
    assert not is_entered_explicitly("model_loading")


def test_an_exception_marks_the_scope_and_is_raised_unchanged() -> None:
    seen, error = bare_session(), KeyError("mine")
    with pytest.raises(KeyError) as caught, region("model_loading"), region("inference_denoising"):
        raise error
    assert caught.value is error
    assert [scope.error for scope in seen.closed] == [error, error]


def test_an_unknown_name_is_said_once_and_the_block_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen, runs = bare_session(), 0
    for _ in range(3):
        with region("model_laoding"):
            runs += 1
    stderr = capsys.readouterr().err
    assert runs == 3 and seen.opened == []
    assert (
        stderr.count("'model_laoding' is not registered") == 1
        and "did you mean 'model_loading'?" in stderr
    )


def test_a_name_that_is_no_string_disturbs_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    bare_session()
    with region(3):  # type: ignore[arg-type]
        done = True
    assert done and "could not be opened" in capsys.readouterr().err
    assert session.current().losses.items() == [("span", "region_failed", 1)]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("registered", ["a", "b"]),
        ("training_*", ["b"]),
        ("inference_*", []),
        ("model_loading", ["a"]),
        ("profiler_region_MODEL_loading", ["a"]),
        ("training_checkpoint_saving", ["b"]),
        ("mine*", ["mine.step"]),
        ("registered,mine*", ["a", "b", "mine.step"]),
    ],
)
def test_selection(asked: str, expected: list[str]) -> None:
    seen = bare_session(REGIONS=asked)
    for name in ("model_loading", "training_save_checkpoint", "mine.step"):
        with region(name):
            pass
    full = {
        "a": "fastvideo.region::profiler_region_model_loading",
        "b": "fastvideo.region::profiler_region_training_save_checkpoint",
    }
    assert seen.names == [full.get(name, name) for name in expected]


def test_names_of_ones_own_are_bounded() -> None:
    seen = bare_session(REGIONS="mine.*")
    for index in range(103):
        with region(f"mine.{index}"):
            pass
    assert len(set(seen.names)) == 101 and seen.names[100:] == ["record_function"] * 3
    assert seen.closed[102].attributes == {"torch.region": "mine.102"}


def test_one_object_may_be_entered_again_and_by_threads() -> None:
    seen, shared = bare_session(), region("model_loading")
    inside, go = threading.Barrier(2), threading.Event()

    def work() -> None:
        with shared:
            inside.wait(10)
            go.wait(10)

    thread = threading.Thread(target=work)
    with shared, shared:
        thread.start()
        inside.wait(10)
    # the thread's scope was opened last and is still open: this thread has closed its own
    assert seen.closed == [seen.opened[1], seen.opened[0]]
    go.set()
    thread.join(10)
    assert seen.closed[2] is seen.opened[2]


def test_a_session_that_begins_or_ends_in_between_leaves_pairs_intact() -> None:
    shared = region("model_loading")
    with shared:
        seen = bare_session()
        with shared:
            session.become(None)
        assert len(seen.closed) == 1
    assert len(seen.opened) == len(seen.closed) == 1


def test_decorated_functions_run_inside_the_region_each_time() -> None:
    seen = bare_session()

    @region("distillation_loss")
    def loss(depth: int) -> int:
        """Doc."""
        return depth if depth == 0 else loss(depth - 1)

    assert loss(2) == 0 and loss.__doc__ == "Doc."
    assert len(seen.closed) == 3 and seen.closed == seen.opened[::-1]


def test_a_decorated_coroutine_is_inside_until_it_is_done() -> None:
    seen = bare_session()

    @region("model_loading")
    async def load() -> bool:
        await asyncio.sleep(0)
        return bool(seen.opened) and not seen.closed

    assert asyncio.run(load())
    assert len(seen.closed) == 1


def test_methods_are_decorated_as_in_fastvideo() -> None:
    seen, entered = bare_session(), []

    class Controller:
        def region(self, name: str) -> Any:
            entered.append(name)
            return region(name)

    class Pipeline:
        @profile_region("training_train")
        def train(self, count: int) -> int:
            return count

    pipeline: Any = Pipeline()
    assert pipeline.train(count=2) == 2 and entered == []
    pipeline.profiler_controller = Controller()
    assert pipeline.train(3) == 3 and entered == ["training_train"]
    assert seen.names == ["fastvideo.region::profiler_region_training_train"] * 2


def test_a_failing_sink_does_not_reach_the_program() -> None:
    class Broken(Sink):
        def open(self, scope: Scope) -> None:
            raise RuntimeError("sink")

    bare_session(Broken())
    with region("model_loading"):
        pass


# --- natural regions


def test_a_natural_region_ends_at_the_time_it_was_given() -> None:
    seen = bare_session()
    scope = open_region("inference_denoising", lexical=False)
    assert scope is not None and scope.kind == "natural" and not scope.lexical
    scope.end_ns = end_ns = scope.start_ns + 4
    close_region(scope, error := ValueError())
    close_region(scope)
    close_region(None)
    assert seen.closed == [scope] and (scope.end_ns, scope.error) == (end_ns, error)
    assert scope.name == "fastvideo.region::profiler_region_inference_denoising"


def test_natural_regions_of_training_have_plain_names_until_a_region_is_registered() -> None:
    seen = bare_session()
    close_region(open_region("training_backward"))
    with region("training_optimizer"):  # entered by name: it is the registered region
        pass
    register_profiler_region("my_stage", "mine")
    close_region(open_region("training_backward"))
    assert [(scope.name, scope.attributes["torch.region"]) for scope in seen.closed] == [
        ("torch.backward", "torch.backward"),
        (
            "fastvideo.region::profiler_region_training_optimizer",
            "profiler_region_training_optimizer",
        ),
        (
            "fastvideo.region::profiler_region_training_backward",
            "profiler_region_training_backward",
        ),
    ]


def test_a_call_site_inside_a_region_of_a_plain_name_has_its_own_span() -> None:
    seen = bare_session()
    natural = open_region("training_backward")
    with region("training_backward"):
        pass
    close_region(natural)
    assert [scope.name for scope in seen.closed] == [
        "fastvideo.region::profiler_region_training_backward",
        "torch.backward",
    ]


def test_a_plain_name_selects_its_region() -> None:
    bare_session(REGIONS="torch.backward")
    assert open_region("training_backward") is not None
    assert open_region("training_optimizer") is None


def test_a_natural_region_steps_back_for_call_sites() -> None:
    seen = bare_session()
    with region("profiler_region_training_step"):
        assert is_entered_explicitly("training_step") and open_region("training_step") is None
    assert open_region("training_step") is None
    assert not is_entered_explicitly("training_epoch") and len(seen.opened) == 1


def test_a_call_site_inside_its_natural_region_does_not_double_it() -> None:
    seen = bare_session()
    natural = open_region("inference_denoising")
    with region("inference_denoising"):
        pass
    close_region(natural)
    assert seen.opened == seen.closed == [natural]
    with region("inference_denoising"):
        pass
    assert [scope.kind for scope in seen.closed] == ["natural", "region"]


def test_natural_regions_respect_the_selection() -> None:
    bare_session(REGIONS="training_*")
    assert open_region("inference_denoising") is None
    assert open_region("training_step") is not None
    session.become(None)
    assert open_region("training_epoch") is None


# --- compiled code


def test_regions_in_compiled_code_do_nothing_and_break_no_graph() -> None:
    seen = bare_session(REGIONS="registered,mine")

    @region("inference_denoising")
    def inner(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def outer(x: torch.Tensor) -> torch.Tensor:
        with region("model_loading"), nvtx_range("a"):
            x = x * 2
        with region("nobody knows this"):
            return inner(x)

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(outer, fullgraph=True, backend=counter)
    x = torch.arange(3.0)
    for _ in range(3):
        assert torch.equal(compiled(x), x * 2 + 1)
    assert counter.frame_count == 1 and seen.opened == []
    outer(x)
    assert len(seen.closed) == 2


# --- NVTX


class Ranges:
    """A fake NVTX library; only CUDA builds have one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cuda: bool = True) -> None:
        self.calls: list[str] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        stand_in = SimpleNamespace(
            range_push=self.calls.append, range_pop=lambda: self.calls.append("pop")
        )
        monkeypatch.setattr(torch.cuda, "nvtx", stand_in)


@pytest.mark.parametrize("variable", ["OTEL_TORCH_NVTX", "FASTVIDEO_NVTX_PROFILE"])
@pytest.mark.parametrize(
    ("value", "cuda", "expected"), [("1", True, ["a", "pop"]), ("0", True, []), ("1", False, [])]
)
def test_nvtx_ranges_need_the_switch_and_cuda(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, cuda: bool, expected: list[str]
) -> None:
    monkeypatch.setenv(variable, value)
    ranges = Ranges(monkeypatch, cuda)
    with nvtx_range("a"):
        pass
    assert ranges.calls == expected


def test_an_nvtx_range_is_popped_when_the_block_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TORCH_NVTX", "on")
    ranges = Ranges(monkeypatch)
    with pytest.raises(KeyError), nvtx_range("a"):
        raise KeyError
    assert ranges.calls == ["a", "pop"]


def test_regions_open_nvtx_ranges_too(monkeypatch: pytest.MonkeyPatch) -> None:
    bare_session(NVTX="on")
    ranges = Ranges(monkeypatch)
    with region("model_loading"):
        pass
    assert ranges.calls == ["fastvideo.region::profiler_region_model_loading", "pop"]
