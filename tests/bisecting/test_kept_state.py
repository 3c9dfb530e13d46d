"""Functions run several times: what they change is undone, whatever holds it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import otel_torch
from otel_torch.bisecting.kept_state import kept_as_it_is


class Trainer:
    """A step of a training that changes all that may have a state."""

    def __init__(self, decay: float = 0.5) -> None:
        torch.manual_seed(0)
        self.parts = {"models": [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))]}
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, decay)
        self.generator = torch.Generator().manual_seed(0)

    @property
    def model(self) -> nn.Module:
        return self.parts["models"][0]

    def step(self) -> None:
        x = torch.randn(4, 8, generator=self.generator)
        self.model(x).square().mean().backward()  # and no zero_grad
        self.optimizer.step()
        self.schedule.step()

    def state(self) -> list[Any]:
        """Return all that a step changes."""
        model = self.model
        return [
            [tensor.tolist() for tensor in (*model.parameters(), *model.buffers())],
            [None if own.grad is None else own.grad.tolist() for own in model.parameters()],
            repr(self.optimizer.state_dict()),
            self.schedule.state_dict(),
            self.generator.get_state().tolist(),
        ]


TRAINER = Trainer()


def by_name() -> None:
    [TRAINER.step() for _ in range(1)]


def given(trainer: Trainer = TRAINER) -> None:
    trainer.step()


@pytest.mark.parametrize(
    "function",
    [
        TRAINER.step,
        lambda: TRAINER.step(),
        functools.partial(Trainer.step, TRAINER),
        by_name,
        given,
    ],
    ids=["method", "closure", "argument", "name", "default"],
)
@pytest.mark.parametrize("before", [0, 1])
def test_a_step_is_undone(function: Callable[[], None], before: int) -> None:
    for _ in range(before):  # gradients are None before the first
        function()
    state = TRAINER.state()
    with kept_as_it_is(function):
        function()
        changed = [now != then for now, then in zip(TRAINER.state(), state, strict=True)]
        assert all(changed), changed
    assert TRAINER.state() == state


def test_two_trainings_that_go_on_are_compared() -> None:
    trainers = Trainer(), Trainer(), Trainer(0.9)
    reference, port, wrong = (lambda own=own: (own.step(), own.step()) for own in trainers)
    assert otel_torch.bisect(reference, port).verdict == "match"
    answer = otel_torch.bisect(reference, wrong)
    (fault,) = answer.faults
    assert fault.proof == "proven" and "optimizer.step()" in fault.port_line.text
    assert trainers[0].state() == trainers[1].state()
