"""What `otel_torch.bisect` answers: the lines of two functions, each tried."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import otel_torch


class Block(nn.Module):
    """A gated block with a norm; `change` may alter each of its steps."""

    def __init__(self, change: dict[str, Any], last: bool) -> None:
        super().__init__()
        self.norm, self.up, self.gate, self.down = (
            nn.LayerNorm(16),
            nn.Linear(16, 32),
            nn.Linear(16, 32),
            nn.Linear(32, 16),
        )
        self.change = change if last or change.get("everywhere") else {}

    def forward(self, x: Tensor) -> Tensor:
        change = self.change
        h = F.layer_norm(x, (16,), self.norm.weight, self.norm.bias, change.get("eps", 1e-5))
        h = change.get("activation", F.silu)(self.gate(h)) * self.up(h)
        h = self.down(h)
        return h * change.get("scale", 1.0) + x * change.get("residual", 1.0)


class Model(nn.Module):
    def __init__(self, layers: int = 3, **change: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block(change, last=index == 1) for index in range(layers))
        self.last = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


X = torch.linspace(-2, 2, 48).sin().reshape(6, 8)


def texts(answer: Any) -> list[str]:
    """Return the port's line of each fault."""
    return [fault.port_line.text.strip() for fault in answer.faults]


def test_equal_programs_match_after_two_runs() -> None:
    answer = otel_torch.bisect(Model(), Model(), X)
    assert (answer.verdict, answer.faults, len(answer.runs)) == ("match", [], 2)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"eps": 1e-2}, "h = F.layer_norm("),
        ({"activation": F.relu}, 'h = change.get("activation", F.silu)'),
        ({"scale": 0.5}, 'return h * change.get("scale", 1.0)'),
        ({"residual": 0.0}, 'return h * change.get("scale", 1.0)'),
    ],
    ids=["eps", "activation", "scale", "residual"],
)
def test_a_fault_is_proven_at_its_line_in_four_runs(change: dict[str, Any], text: str) -> None:
    answer = otel_torch.bisect(Model(), Model(**change), X)
    assert answer.verdict == "diverged" and answer.is_healed
    assert [fault.proof for fault in answer.faults] == ["proven"]
    for line in (answer.faults[0].line, answer.faults[0].port_line):
        assert line.text.strip().startswith(text)
    assert answer.faults[0].module.startswith("blocks.1")
    # what a port leaves as it was is a right value: both that read it are put right, one by one
    assert len(answer.runs) == (5 if "residual" in change else 4)


def test_two_faults_are_found_in_one_call_with_one_run_more() -> None:
    answer = otel_torch.bisect(Model(), Model(eps=1e-2, scale=0.5), X)
    assert answer.is_healed and len(answer.runs) == 5
    assert [fault.proof for fault in answer.faults] == ["proven", "proven"]
    assert texts(answer)[0].startswith("h = F.layer_norm(")
    assert texts(answer)[1].startswith('return h * change.get("scale"')


def test_a_fault_in_each_layer_is_one_fault() -> None:
    answer = otel_torch.bisect(Model(), Model(activation=F.relu, everywhere=True), X)
    assert answer.is_healed and len(answer.faults) == 1
    assert answer.faults[0].port_module == "blocks.0"


def test_wrong_weights_are_proven_and_left_as_they_were() -> None:
    port = Model()
    with torch.no_grad():
        port.blocks[1].up.weight.mul_(1.5)
        port.last.bias.add_(0.5)
    before = port.blocks[1].up.weight.clone()
    answer = otel_torch.bisect(Model(), port, X)
    named = {(fault.port_module, fault.port_tensor, fault.proof) for fault in answer.faults}
    assert named == {
        ("blocks.1.up", "param.weight", "proven"),
        ("last", "param.bias", "proven"),
    }
    assert answer.is_healed and torch.equal(port.blocks[1].up.weight, before)


class Modulated(nn.Module):
    """A norm with scale and shift from one projection."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self.linear(x).chunk(2, dim=-1)
        return F.layer_norm(x, (8,)) * (1 + scale) + shift


def test_exchanged_halves_of_a_weight_are_named_and_not_the_line_that_uses_them() -> None:
    port = Modulated()
    with torch.no_grad():
        for parameter in port.parameters():
            parameter.copy_(parameter.roll(8, 0))
    answer = otel_torch.bisect(Modulated(), port, X)
    assert answer.is_healed
    assert {(fault.port_module, fault.port_tensor, fault.proof) for fault in answer.faults} == {
        ("linear", "param.weight", "proven"),
        ("linear", "param.bias", "proven"),
    }


class Steep(nn.Module):
    """An exponential of large numbers, which are off by rounding; the sum may be in two parts."""

    def __init__(self, *, in_parts: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.in_parts = nn.Linear(64, 64), in_parts

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if self.in_parts:
            parts = zip(x.split(32, 1), self.linear.weight.split(32, 1), strict=True)
            h = sum(part @ weight.T for part, weight in parts) + self.linear.bias
        return torch.exp(20 * h)


def test_what_is_hardly_above_the_limit_is_measured_before_it_is_accused() -> None:
    x = torch.linspace(0, 900, 1024).sin().reshape(16, 64)
    programs = Steep(in_parts=False), Steep(in_parts=True)
    assert otel_torch.bisect(*programs, x, noise="off").verdict == "diverged"
    answer = otel_torch.bisect(*programs, x)
    assert (answer.verdict, len(answer.runs)) == ("match", 3)


class Bounded(nn.Module):
    """Bounds the sum of what two layers make of halves, or bounds each and halves the sum."""

    def __init__(self, *, is_halved_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Linear(8, 8, bias=False) for _ in range(2))
        self.is_halved_first = is_halved_first

    def forward(self, x: Tensor) -> Tensor:
        made = [-self.second(self.first(own)) for own in self.split(x)]
        if self.is_halved_first:
            return torch.tanh((made[0] + made[1]).clamp(-0.1, 0.1))
        return torch.tanh((made[0].clamp(-0.1, 0.1) + made[1].clamp(-0.1, 0.1)) / 2)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x / 2, x.flip(1) / 2) if self.is_halved_first else (x, x.flip(1))


def test_what_is_off_by_a_factor_alone_proves_nothing() -> None:
    x = torch.linspace(0, 90, 64).sin().reshape(8, 8)
    answer = otel_torch.bisect(Bounded(is_halved_first=True), Bounded(is_halved_first=False), x)
    assert [("clamp" in fault.port_line.text, fault.proof) for fault in answer.faults] == [
        (False, "not proven"),
        (True, "proven"),
    ]
    assert answer.is_healed


def test_a_factor_is_told() -> None:
    model = nn.Linear(8, 8)
    x = torch.linspace(0, 90, 64).sin().reshape(8, 8)
    answer = otel_torch.bisect(
        lambda x: model(x).mul(0.5).tanh(), lambda x: model(x).div(8).tanh(), x
    )
    (fault,) = answer.faults
    assert fault.explanation.endswith(" What comes of it is 0.25 times the reference's.")


def test_other_inputs_are_the_fault() -> None:
    answer = otel_torch.bisect(Model(), Model(), X, port_inputs=X * 1.1)
    assert [(fault.side, fault.proof) for fault in answer.faults] == [("input", "proven")]


def test_a_module_that_the_port_leaves_out() -> None:
    class Normed(nn.Module):
        def __init__(self, *, has_norm: bool) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.model, self.head = Model(), nn.Linear(8, 8)
            self.norm = nn.LayerNorm(8) if has_norm else nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.model(x)))

    answer = otel_torch.bisect(Normed(has_norm=True), Normed(has_norm=False), X)
    assert answer.is_healed and answer.faults[0].proof == "proven"
    assert answer.faults[0].line.text.strip() == "return self.head(self.norm(self.model(x)))"


def sampler(model: Model, wrong_at: int | None) -> Callable[[Tensor], Tensor]:
    """Return a sampler of four steps, of which the one at `wrong_at` is too large."""

    def sample(x: Tensor) -> Tensor:
        for step in range(4):
            velocity = model(x)
            size = 0.3 if step == wrong_at else 0.25
            x = x - size * velocity
        model(x)
        return x

    return sample


def test_a_step_of_a_sampler_is_found_between_two_forwards() -> None:
    model = Model().requires_grad_(False)
    answer = otel_torch.bisect(sampler(model, None), sampler(model, 2), X)
    assert answer.is_healed and texts(answer) == ["x = x - size * velocity"]
    assert "0.25" in answer.faults[0].explanation and "0.3" in answer.faults[0].explanation


class Decoder(nn.Module):
    def __init__(self, power: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.out, self.power = nn.Linear(8, 4), power

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(x) * self.power)


def generator(model: Model, decoder: Decoder, last: float = 1.0) -> Callable[[Tensor], Tensor]:
    """Return three steps of a model and what decodes their result, multiplied before."""

    def generate(x: Tensor) -> Tensor:
        for _ in range(3):
            x = x - 0.25 * model(x)
        return decoder(x * last)

    return generate


def test_faults_of_two_models_with_steps_between_them_that_were_not_recorded() -> None:
    right = generator(Model(), Decoder())
    answer = otel_torch.bisect(right, generator(Model(scale=0.5), Decoder(0.7)), X)
    assert answer.is_healed and [fault.proof for fault in answer.faults] == ["proven", "proven"]
    assert texts(answer)[0].startswith('return h * change.get("scale"')
    assert texts(answer)[1] == "return self.out(torch.tanh(x) * self.power)"


def test_a_fault_between_two_models() -> None:
    right = generator(Model(), Decoder())
    answer = otel_torch.bisect(right, generator(Model(), Decoder(), last=1.1), X)
    assert answer.is_healed and texts(answer) == ["return decoder(x * last)"]


def test_a_reference_that_computes_other_values_each_time_is_said_to() -> None:
    draws = np.random.default_rng()

    def noisy(x: Tensor) -> Tensor:
        return model(x + torch.from_numpy(draws.normal(size=x.shape)).float())

    model = Model()
    answer = otel_torch.bisect(noisy, model, X)
    assert answer.verdict == "incomparable"
    assert "other values in each run" in answer.report.reason
    assert "test_callables.py" in answer.report.reason


def test_random_numbers_are_the_same_in_all_runs_and_untouched() -> None:
    model = Model()

    def draw(x: Tensor) -> Tensor:
        return model(x + torch.randn(x.shape) + random.random() + np.random.rand())

    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    assert otel_torch.bisect(draw, draw, X).verdict == "match"
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1] and (np.random.get_state()[1] == states[2]).all()


def test_a_program_that_raises_is_one_line() -> None:
    def fails(x: Tensor) -> Tensor:
        return Model()(x[:, :3])

    answer = otel_torch.bisect(Model(), fails, X)
    assert answer.verdict == "incomparable" and answer.report.reason.startswith("the port raised")


def test_a_function_that_computes_nothing_records_nothing() -> None:
    answer = otel_torch.bisect(Model(), lambda x: 0.5, X)
    assert answer.report.reason == "the port ran no operation of torch, so nothing was recorded"


def test_only_faults_of_the_modules_that_are_asked_for() -> None:
    answer = otel_torch.bisect(Model(), Model(eps=1e-2, scale=0.5), X, module=r"^last$")
    assert answer.verdict == "diverged" and not answer.faults


def test_inputs_by_name_and_by_a_function() -> None:
    expected = {"a": 1.0}
    for inputs in ({"x": X}, (X,), lambda model: model(X)):
        answer = otel_torch.bisect(Model(), Model(scale=0.5), inputs)
        assert answer.faults[0].proof == "proven", expected


def test_the_answer_as_data() -> None:
    content = otel_torch.bisect(Model(), Model(scale=0.5), X).as_json()
    assert content["schema"] == "otel_torch.bisect/1" and content["verdict"] == "diverged"
    fault = content["faults"][0]
    assert fault["proof"] == "proven" and __file__.endswith(fault["port_line"]["file"])
    assert [run["side"] for run in content["runs"]] == ["reference", "port", "reference", "port"]


def test_the_answer_as_text() -> None:
    text = repr(otel_torch.bisect(Model(), Model(scale=0.5), X))
    assert text.startswith("✗ proven: `mul` has 1.0 in the reference and 0.5 in the port.")
    assert text.endswith("diverged: 1 fault, 1 proven; with the reference's values there, the "
                         "whole port matches")  # fmt: skip
    assert "▸" in text and "with the reference's value behind test_callables.py:" in text
    assert re.search(r"\n4 runs, \d+ s; \d+ s with the comparisons\n", text)


def test_a_backward_pass_and_an_optimizer_are_part_of_the_program() -> None:
    def train(rate: float, clip: float) -> Callable[[], None]:
        def run() -> None:
            model = Model()
            optimizer = torch.optim.SGD(model.parameters(), lr=rate)
            for _ in range(2):
                optimizer.zero_grad()
                model(X).square().mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()

        return run

    assert otel_torch.bisect(train(0.1, 1.0), train(0.1, 1.0)).verdict == "match"
    answer = otel_torch.bisect(train(0.1, 1.0), train(0.2, 1.0))
    assert texts(answer) == ["optimizer.step()"] and answer.faults[0].proof == "proven"
    assert ", in the update of the weights, error " in " ".join(repr(answer).split())


def test_a_line_is_said_to_differ_in_its_backward_pass_alone() -> None:
    def train(is_detached: bool) -> Callable[[], None]:
        def run() -> None:
            gap = Model()(X) - 1.0
            weight = (gap.detach() if is_detached else gap).abs().mean()
            (weight * gap.square().mean()).backward()

        return run

    answer = otel_torch.bisect(train(True), train(False))
    assert answer.faults[0].phase == "backward"
    assert ", in its backward pass" in " ".join(repr(answer).split())


class Waves(nn.Module):
    """A model of time, whose waves make much of a small difference."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.time, self.inner, self.out = nn.Linear(16, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        angles = time[:, None] * 10000.0 ** (-torch.arange(8) / 8)
        waves = torch.cat([angles.cos(), angles.sin()], -1)
        return self.out(F.silu(self.inner(x) + self.time(waves)))


def rounding(cast: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    model = Waves().requires_grad_(False)

    def sample(x: Tensor) -> Tensor:
        for sigma in torch.tensor([1.0, 0.9375, 0.8333, 0.625]):
            x = x - 0.1 * model(x, cast(sigma).expand(len(x)))
        return x

    return sample


def test_what_heals_only_together_is_named_at_the_cast_that_did_it() -> None:
    right, wrong = rounding(lambda s: s * 1000), rounding(lambda s: s.bfloat16().float() * 1000)
    answer = otel_torch.bisect(right, wrong, X)
    assert answer.is_healed and [fault.proof for fault in answer.faults] == ["proven"]
    (text,) = texts(answer)
    assert "s.bfloat16().float() * 1000" in text
    (warning,) = answer.report.warnings
    assert "only the port computes in bfloat16, first at " in warning
    number = int(warning.partition("test_callables.py:")[2].partition(":")[0])
    assert "s.bfloat16().float() * 1000" in Path(__file__).read_text().splitlines()[number - 1]


class Chain(nn.Module):
    """Layers without a residual: a value put between two of them hides all that is before."""

    def __init__(self, activation: Callable[[Tensor], Tensor], shift: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.activation, self.shift = activation, shift

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == 4:
                x = x + self.shift
            x = self.activation(x)
        return self.layers[0](x)


def test_a_line_that_is_healed_in_several_layers_at_once_is_one_fault() -> None:
    answer = otel_torch.bisect(Model(6), Model(6, activation=F.relu, everywhere=True), X)
    assert answer.is_healed and len(answer.faults) == 1 and len(answer.runs) <= 8


def test_it_hides_no_fault_between_these_layers() -> None:
    answer = otel_torch.bisect(Chain(torch.tanh), Chain(torch.sin, 0.5), X)
    assert answer.is_healed and texts(answer) == ["x = self.activation(x)", "x = x + self.shift"]
    assert [fault.proof for fault in answer.faults] == ["proven", "proven"]
    wrong = Chain(torch.sin)
    with torch.no_grad():
        wrong.layers[4].weight.mul_(1.5)
    answer = otel_torch.bisect(Chain(torch.tanh), wrong, X)
    first, second = answer.faults
    assert (second.port_module, second.port_tensor) == ("layers.4", "param.weight")
    assert (first.proof, second.proof) == ("proven", "proven")


def test_a_fault_in_two_layers_does_not_hide_one_behind_them() -> None:
    port = Model(4)
    with torch.no_grad():
        for block in port.blocks[:2]:
            block.change = {"activation": F.relu}
        port.blocks[3].change = {"residual": 0.5}
    answer = otel_torch.bisect(Model(4), port, X)
    assert answer.is_healed and not answer.report.warnings
    assert [fault.port_module for fault in answer.faults] == ["blocks.0", "blocks.3"]


@pytest.mark.parametrize("fault", [False, True])
def test_functions_need_no_modules(fault: bool) -> None:
    weight = torch.linspace(-1, 1, 64).sin().reshape(8, 8)

    def reference(x: Tensor) -> Tensor:
        x = F.silu(x @ weight)
        return x.softmax(-1) * x

    def port(x: Tensor) -> Tensor:
        x = F.gelu(x @ weight) if fault else F.silu(F.linear(x, weight.T))
        return F.softmax(x, -1) * x

    answer = otel_torch.bisect(reference, port, X)
    assert answer.verdict == ("diverged" if fault else "match")
    assert (
        texts(answer)
        == ["x = F.gelu(x @ weight) if fault else F.silu(F.linear(x, weight.T))"][
            : len(answer.faults)
        ]
    )
    assert [finding.proof for finding in answer.faults] == ["proven"] * fault


@pytest.mark.parametrize("fill", [-1e9, torch.finfo(torch.float32).min])
def test_scores_are_seen_behind_a_mask_of_finite_numbers(fill: float) -> None:
    """Beside -1e9 wrong scores are right within 1e-9: the mask would acquit them."""

    def attend(x: Tensor, slope: float) -> Tensor:
        mask = torch.full((6, 6), fill).triu(1)
        scores = torch.tanh(x @ x.T * slope)
        return F.linear((scores + mask).softmax(-1) @ x, torch.eye(8) + 0.1)

    answer = otel_torch.bisect(lambda x: attend(x, 0.3), lambda x: attend(x, 0.5).clone(), X)
    assert texts(answer) == ["scores = torch.tanh(x @ x.T * slope)"]
    assert [fault.proof for fault in answer.faults] == ["proven"] and answer.is_healed
