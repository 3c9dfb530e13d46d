"""A program that makes a model for every step pays the same for each, and no model is kept."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support import lines, metadata, recording, run_python, work_of

X = torch.ones(1, 4)


@pytest.mark.parametrize("capture", ["outputs", "parity,gradients"])
def test_a_model_costs_the_same_however_many_there_were(capture: str) -> None:
    def step() -> None:
        nn.Linear(4, 4)(X).sum().backward()

    with recording(capture=capture) as sink:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])

        def batch(count: int) -> tuple[int, int]:
            for _ in range(count):
                step()
            optimizer.step()
            for kept in (sink.records, sink.batches, sink.opened, sink.closed):
                kept.clear()
            gc.collect()
            work = work_of(lambda: (step(), optimizer.step()))
            assert not work["get_referrers"]
            return work.total(), len(gc.get_objects())

        batch(10)
        early_work, early_objects = batch(300)  # more losses than wait for an optimizer
        late_work, late_objects = batch(600)
    assert late_work <= early_work * 1.05
    assert late_objects - early_objects < 200


def test_a_model_that_is_dropped_is_gone_before_the_garbage_collector_runs() -> None:
    with recording(capture="parity"):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        reference = weakref.ref(model)
        gc.collect()
        gc.disable()
        try:
            model(X)
            del model
            assert reference() is None
        finally:
            gc.enable()


def test_models_that_are_gone_are_counted(tmp_path: Path) -> None:
    run_python(
        tmp_path,
        "import torch\n"
        "kept = torch.nn.Linear(4, 4)\n"
        "kept(torch.ones(1, 4))\n"
        "for _ in range(300):\n"
        "    torch.nn.Linear(4, 4)(torch.ones(1, 4))\n",
    )
    names = ["Linear", *(f"Linear#{number}" for number in range(2, 302))]
    assert [row["model"] for row in lines(tmp_path / "run.jsonl")] == names
    facts = metadata(tmp_path / "run.jsonl")
    described = list(facts["models"])
    assert described[:101] == names[:101]
    assert len(described) < 150 and len(described) + facts["models_forgotten"] == 301
