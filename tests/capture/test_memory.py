"""A thousand traces of one model leave no tensor, hook, thread, file, folder or setting behind,
however each of them ended.
"""

from __future__ import annotations

import copy
import gc
import os
import pickle
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import otel_torch
from otel_torch import (
    Cache,
    ModuleHookManager,
    enable_layerwise_offload,
    interleave,
    lockstep,
    scan,
    track,
)
from otel_torch.capture.cache import CacheFull
from otel_torch.capture.interleaving.interleave_error import InterleaveError
from otel_torch.sources.tensors import compiled

pytestmark = pytest.mark.scoreboard  # a thousand traces take long
TRACES = 1000


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return x


X, WRONG = torch.linspace(-1, 1, 8).reshape(2, 4), torch.ones(2, 5)


def make() -> Net:
    torch.manual_seed(0)
    return Net()


def hooks(model: nn.Module) -> dict[str, list[int]]:
    """Return every hook table of every module and parameter, and torch's global ones, by owner."""
    tables = {
        f"{name}.{key}": table
        for name, module in model.named_modules()
        for key, table in vars(module).items()
        if "_hooks" in key
    }
    for name, parameter in model.named_parameters():
        for key in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            tables[f"{name}.{key}"] = getattr(parameter, key)
    tables |= {
        key: table
        for key, table in vars(nn.modules.module).items()
        if key.startswith("_global") and "_hooks" in key
    }
    return {
        name: list(table or ()) for name, table in tables.items() if not isinstance(table, bool)
    }


def census(model: nn.Module) -> dict[str, Any]:
    """Count everything that a trace may leave behind."""
    gc.collect()
    config = sys.modules.get("torch._dynamo.config")
    return {
        "tensors": sum(issubclass(type(item), Tensor) for item in gc.get_objects()),
        "hooks": hooks(model),
        "managers": sum(
            ModuleHookManager.get_from(module) is not None for module in model.modules()
        ),
        "numbers in compiled graphs": len(compiled._sites),
        "threads": [thread for thread in threading.enumerate() if thread.is_alive()],
        "files": os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else [],
        "folders": sorted(Path(tempfile.gettempdir()).iterdir()),
        "session": otel_torch.session.current(),
        "hook guards": getattr(config, "skip_nnmodule_hook_guards", None),
    }


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import torch._dynamo.config  # noqa: F401  (so that its setting is looked at)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield


def check(trace: Callable[[Net], object], traces: int = TRACES) -> None:
    """Check that counts after `traces` traces equal those after three, and the model is the same."""
    model = make()
    exact = model(X).detach()
    state = copy.deepcopy(model.state_dict())
    guards = census(model)["hook guards"]
    for _ in range(3):
        trace(model)
    before = census(model)
    objects = [len(gc.get_objects())]
    kept = census(model)
    objects.append(len(gc.get_objects()))  # what a census itself holds is the difference
    for _ in range(traces):
        trace(model)
    assert census(model) == before == kept and before["hook guards"] == guards
    objects.append(len(gc.get_objects()))
    assert objects[2] - objects[1] - (objects[1] - objects[0]) < max(
        traces, 100
    )  # not an object for every trace
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    for copied in (model, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(copied(X), exact)
        assert not any(hooks(copied).values())


# -- Cache


def cached(model: Net) -> None:
    with Cache(include_inputs=True).attach(model) as cache:
        model(X)
    assert len(cache) == 5


def cached_twice_at_once(model: Net) -> None:
    """Detach the one that was attached first."""
    first, second = Cache("h.0").attach(model), Cache(detach=False).attach(model)
    model(X).sum().backward()
    first.detach()
    second.detach()
    model.zero_grad()


def cached_while_the_forward_raises(model: Net) -> None:
    with (
        Cache(include_inputs=True).attach(model),
        pytest.raises(RuntimeError, match="mat1 and mat2"),
    ):
        model(WRONG)


def cached_beyond_its_budget(model: Net) -> None:
    with pytest.raises(CacheFull), Cache(max_bytes=40, include_inputs=True).attach(model):
        model(X)


def cached_of_no_such_module(model: Net) -> None:
    with pytest.raises(ValueError, match="no module of Net"):
        Cache(["h.0", "nowhere"]).attach(model)


def cached_on_disk(model: Net) -> None:
    with torch.no_grad(), Cache("h.0", max_bytes=0, overflow="disk").attach(model) as cache:
        model(X)
    assert cache.h[0].output.shape == (2, 4)


# -- interleave


def invoked(model: Net) -> None:
    with interleave(model).invoke(X) as run:
        run.h[0].output = run.h[0].output + 1
        run.result.sum().backward()
        assert run.h[0].grad is not None
    model.zero_grad()


def invoked_by_a_body_that_raises(model: Net) -> None:
    with pytest.raises(KeyError), interleave(model).invoke(X) as run:
        run.h[0].output  # noqa: B018
        raise KeyError


def invoked_by_a_body_that_raises_at_once(model: Net) -> None:
    with pytest.raises(KeyError), interleave(model).invoke(X):
        raise KeyError


def invoked_while_the_forward_raises(model: Net) -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"), interleave(model).invoke(WRONG) as run:
        run.h[1].output  # noqa: B018


def invoked_for_a_call_that_never_comes(model: Net) -> None:
    with pytest.raises(InterleaveError, match="never came"), interleave(model).invoke(X) as run:
        run.h[1].next().output  # noqa: B018


def invoked_for_a_call_that_has_passed(model: Net) -> None:
    with pytest.raises(InterleaveError, match="already passed"), interleave(model).invoke(X) as run:
        run.h[1].input  # noqa: B018
        run.h[0].linear.output  # noqa: B018


def two_live_runs(model: Net) -> None:
    it = interleave(model)
    with it.invoke(X) as a, it.invoke(X * 2) as b:
        a.h[1].output = b.h[0].output
        assert a.result is not None and b.result is not None


def two_live_runs_of_which_one_raises(model: Net) -> None:
    it = interleave(model)
    with (
        pytest.raises(RuntimeError, match="mat1 and mat2"),
        it.invoke(X) as a,
        it.invoke(WRONG) as b,
    ):
        a.h[0].output  # noqa: B018
        b.h[0].output  # noqa: B018


def bodies_at_a_barrier(model: Net) -> None:
    it = interleave(model)
    meet, lonely = it.barrier(2), it.barrier(3)
    seen = {}

    def give(run: Any) -> None:
        seen["hidden"] = run.h[0].output
        meet()
        lonely()

    def take(run: Any) -> Tensor:
        meet()
        run.h[0].output = seen["hidden"]
        return run.result

    giver, taker = it.invoke(X).do(give), it.invoke(X * 2).do(take)
    with pytest.raises(InterleaveError, match=r"barrier\(3\) was reached by 1 bodies"):
        giver.wait()
    assert torch.equal(taker.wait(), model(X))


def compiled_body_with_caches(model: Net) -> None:
    it = interleave(model)
    caches = it.cache("h.0"), it.cache(include_inputs=True)
    body = it.compile(lambda run: run.h[1].output.sum())
    assert torch.equal(body(X), body(X)) and [len(cache.h[0].calls) for cache in caches] == [2, 2]


def test_one_interleaver_for_all_runs() -> None:
    of: dict[int, Any] = {}

    def trace(model: Net) -> None:
        it = of.setdefault(id(model), interleave(model))
        it.barrier(2)
        with it.invoke(X) as run:
            run.h[1].output  # noqa: B018
        with it.execute(model, X):
            pass

    check(trace)


# -- track, scan, lockstep, offload


def tracked(model: Net) -> None:
    with track(model, parameters=True) as tracker:
        model(X).sum().backward()
    assert len(tracker) == 2 * 5 + 2 * 4 and tracker.lost == 0
    model.zero_grad()


def tracked_without_a_backward_pass(model: Net) -> None:
    with track(model, stash_value=lambda tensor: tensor) as tracker:
        model(X)
    assert len(tracker) == 5


def tracked_while_the_forward_raises(model: Net) -> None:
    with track(model, parameters=True), pytest.raises(RuntimeError, match="mat1 and mat2"):
        model(WRONG)


def tracked_by_a_stash_that_raises(model: Net) -> None:
    def stash(event: otel_torch.Event) -> otel_torch.Stash:
        raise KeyError(event.name)

    with track(model, stash=stash) as tracker:
        model(X).sum().backward()
    assert len(tracker) == 0 and tracker.lost == 10
    model.zero_grad()


def scanned(model: Net) -> None:
    assert len(scan(model, X).calls) == 5


def scanned_to_an_error(model: Net) -> None:
    assert "RuntimeError" in str(scan(model, WRONG).ended)


def in_lockstep(model: Net) -> None:
    port = copy.deepcopy(model)
    port.h[1].linear.bias.data += 1
    assert [fault.module for fault in lockstep(model, port, X, heal=True).faults] == ["h.1.linear"]


def in_lockstep_until_the_first_fault(model: Net) -> None:
    port = copy.deepcopy(model)
    port.h[0].linear.bias.data += 1
    assert len(lockstep(model, port, X).faults) == 1


def in_lockstep_with_inputs_that_do_not_fit(model: Net) -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        lockstep(model, copy.deepcopy(model), WRONG)


def offloaded(model: Net) -> None:
    enable_layerwise_offload(model, device="cpu")
    with torch.inference_mode():
        model(X)
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            model(WRONG)
    for layer in model.h:
        ModuleHookManager.get_from(layer).remove_forward_hook("LayerwiseOffloadHook")


QUICK = (
    cached, cached_twice_at_once, cached_while_the_forward_raises, cached_beyond_its_budget,
    cached_of_no_such_module, cached_on_disk,
    invoked, invoked_by_a_body_that_raises, invoked_by_a_body_that_raises_at_once,
    invoked_while_the_forward_raises, invoked_for_a_call_that_never_comes,
    invoked_for_a_call_that_has_passed, two_live_runs, two_live_runs_of_which_one_raises,
    bodies_at_a_barrier, compiled_body_with_caches,
    tracked, tracked_without_a_backward_pass, tracked_while_the_forward_raises,
    tracked_by_a_stash_that_raises,
    scanned, scanned_to_an_error, offloaded,
)  # fmt: skip
# each is two sessions, which look through all of the interpreter's objects, and a comparison
SLOW = in_lockstep, in_lockstep_until_the_first_fault, in_lockstep_with_inputs_that_do_not_fit


@pytest.mark.parametrize("trace", [*QUICK, *SLOW], ids=lambda trace: trace.__name__)
def test_a_trace_leaves_nothing_behind(trace: Callable[[Net], None]) -> None:
    check(trace, 5 if trace in SLOW else TRACES)
