"""What differs before anything is computed: settings of the models, inputs, tables of a sampler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import otel_torch


class Words(nn.Module):
    """A model of token ids, with a configuration that changes nothing."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.config = {
            "hidden_act": "silu",
            "rope": {"theta": 1e4},
            "path": "/data/model",
            **config,
        }

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(input_ids)))


IDS = torch.arange(3, 15)[None]


def test_other_settings_are_said_first_though_the_programs_match() -> None:
    answer = otel_torch.bisect(Words(), Words(hidden_act="gelu"), IDS)
    assert answer.verdict == "match"
    assert repr(answer).splitlines()[:2] == [
        "! Differs before the run (reference → port):",
        "    Words: hidden_act silu → gelu",
    ]
    (fact,) = answer.as_json()["before"]
    assert fact["name"] == "hidden_act" and (fact["reference"], fact["port"]) == ("silu", "gelu")


def test_they_are_said_before_the_faults() -> None:
    port = Words(rope={"theta": 1e6})
    with torch.no_grad():
        port.head.bias += 1
    text = repr(otel_torch.bisect(Words(), port, IDS))
    assert text.index("rope.theta 10000.0 → 1000000.0") < text.index("✗ proven")


def test_other_dtypes_of_the_parameters() -> None:
    answer = otel_torch.bisect(Words(), Words().bfloat16(), IDS)
    assert "dtypes of the parameters float32 → bfloat16" in repr(answer)


def test_equal_settings_are_not_mentioned() -> None:
    answer = otel_torch.bisect(Words(), Words(only_the_port_has=1), IDS)
    assert answer.as_json()["before"] == [] and "before the run" not in repr(answer)


def test_other_token_ids_are_said_with_their_position() -> None:
    ids = IDS.clone()
    ids[0, 5] = 0
    (fault,) = otel_torch.bisect(Words(), Words(), IDS, port_inputs=ids).faults
    assert fault.proof == "proven"
    assert fault.explanation.endswith("They differ at position 5: 8 beside 0.")
    ids[0, 7:] = 1
    (fault,) = otel_torch.bisect(Words(), Words(), IDS, port_inputs=ids).faults
    assert fault.explanation.endswith("position 5: 8 beside 0, and at 5 more.")


def test_inputs_of_other_lengths_are_said_with_their_shapes() -> None:
    answer = otel_torch.bisect(Words(), Words(), IDS, port_inputs=IDS[:, 1:])
    assert (answer.verdict, answer.faults) == ("partial", [])
    assert "1 row of the reference's outputs" in answer.report.reason
    said = "input `input_ids` has shape [1, 12] in the reference and [1, 11] in the port"
    assert said in answer.report.reason


class Velocity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.into, self.out = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.out(torch.tanh(self.into(x) + torch.sin(time.float() / 1000)))


def sampler(kind: str, **settings: Any) -> Callable[[Tensor], Tensor]:
    """Return the denoising loop of a scheduler of diffusers."""
    diffusers = pytest.importorskip("diffusers")
    model = Velocity().requires_grad_(False)

    def sample(x: Tensor) -> Tensor:
        scheduler = getattr(diffusers, kind)(**settings)
        scheduler.set_timesteps(5)
        for time in scheduler.timesteps:
            x = scheduler.step(model(x, time), time, x).prev_sample
        return x

    return sample


@pytest.mark.parametrize(
    ("kind", "settings", "table"),
    [
        ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}, "self.sigmas["),
        ("DDIMScheduler", {"beta_schedule": "scaled_linear"}, "self.betas = torch.linspace("),
    ],
)
def test_another_table_of_a_scheduler_is_proven_where_it_is_made_or_read(
    kind: str, settings: dict[str, Any], table: str
) -> None:
    """The first one is made by numpy."""
    x = torch.linspace(-2, 2, 32).sin().reshape(4, 8)
    answer = otel_torch.bisect(sampler(kind), sampler(kind, **settings), x)
    assert answer.is_healed and answer.faults[0].proof == "proven"
    assert table in answer.faults[0].port_line.text


class Stored(nn.Module):
    """A layer that stores its weight in a dtype of eight bits."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        torch.manual_seed(2)
        weight = torch.randn(8, 8) * scale
        self.register_buffer("weight", weight.to(torch.float8_e4m3fn))
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(x @ self.weight.float()))


def test_a_weight_in_float8_is_exchanged() -> None:
    x = torch.linspace(-2, 2, 32).sin().reshape(4, 8)
    answer = otel_torch.bisect(Stored(1.0), Stored(0.5), x)
    assert answer.is_healed and answer.faults[0].proof == "proven"
