"""Private names of torch: each tested version has all of them, and one that moves is noticed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from otel_torch import torch_private
from otel_torch.cli import doctor


def test_a_tested_torch_has_every_name() -> None:
    assert [way for way in torch_private.ways() if not way.is_open] == []


@pytest.mark.parametrize(
    ("owner", "name", "purpose"),
    [
        (torch.nn.Module, "_call_impl", "calls of modules"),
        (torch._C._dynamo.eval_frame, "_FrameExecStrategy", "hooks in compiled code"),
        (torch_private, "number_of_operation", "operations of autograd"),
        (torch_private, "graph_task_id", "backward passes"),
    ],
)
def test_a_name_that_moved_closes_its_way_alone(
    owner: Any, name: str, purpose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, lambda *arguments: None)
    assert [way.purpose for way in torch_private.ways() if not way.is_open] == [purpose]


def test_doctor_says_what_happens_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(result.ok for result in doctor.find_ways({}))
    monkeypatch.setattr(torch_private, "is_symbolically_traced", lambda: False)
    monkeypatch.setattr(torch_private, "module_call", lambda: None)
    monkeypatch.setattr(torch_private, "_WAYS", (
        ("calls of modules", torch_private.module_call, "left to torch"),
        ("traces by torch.fx", torch_private._recognizes_fx, "counted as forwards"),
    ))  # fmt: skip
    assert [(result.ok, result.text) for result in doctor.find_ways({})][-3:] == [
        (True, "torch is as known: "),
        (None, "torch is not as known: calls of modules: left to torch"),
        (None, "torch is not as known: traces by torch.fx: counted as forwards"),
    ]


def test_a_trace_is_recognized_inside_of_it_only() -> None:
    class Seen(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch_private.is_symbolically_traced())
            return x

    seen: list[bool] = []
    torch.fx.symbolic_trace(Seen())
    Seen()(torch.zeros(1))
    assert seen == [True, False]
