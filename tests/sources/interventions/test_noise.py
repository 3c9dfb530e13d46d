"""Noise on a reference: by at most one unit in the last place, the same for one seed, and only
where it was asked for.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers.modeling_outputs import CausalLMOutput

from otel_torch.settings import Settings
from tests.support import PROGRAMS, lines, metadata, recording, run_python, run_ranks

PROGRAM = PROGRAMS / "two_models_with_dropout.py"


def ran(folder: Path, fresh: bool = False, **variables: str) -> tuple[bytes, list[str], str]:
    """Run the program; return its recording, its results and the random numbers that follow."""
    folder.mkdir()
    variables = {"OTEL_TORCH_CAPTURE": "inputs,outputs"} | variables
    done = run_python(folder, PROGRAM, fresh=fresh, **variables)
    *computed, drawn = done.stdout.splitlines()
    return b"".join(path.read_bytes() for path in folder.glob("*.jsonl")), computed, drawn


def test_a_seed_gives_the_same_bytes_another_one_others_and_random_numbers_stay(
    tmp_path: Path,
) -> None:
    plain, first = ran(tmp_path / "plain"), ran(tmp_path / "first", OTEL_TORCH_NOISE="1")
    # an interpreter that hashes strings differently
    again = ran(tmp_path / "again", fresh=True, OTEL_TORCH_NOISE="1")
    other = ran(tmp_path / "other", OTEL_TORCH_NOISE="2")
    assert first == again
    assert len({plain[0], first[0], other[0]}) == 3 and plain[1] != first[1] != other[1]
    assert plain[2] == first[2] == other[2]
    assert metadata(tmp_path / "first" / "run.jsonl")["settings"]["OTEL_TORCH_NOISE"] == "1"
    assert "OTEL_TORCH_NOISE" not in metadata(tmp_path / "plain" / "run.jsonl")["settings"]


SELECTIONS = {
    "modules": {"OTEL_TORCH_MODULES": r"blocks\.3"},
    "models": {"OTEL_TORCH_MODELS": "Net"},
}


@pytest.mark.parametrize("chosen", SELECTIONS)
def test_leaves_that_are_not_recorded_have_noise_too(tmp_path: Path, chosen: str) -> None:
    """What enters a recorded module, or a recorded model, was computed with noise as well."""
    _, whole, _ = ran(tmp_path / "whole", OTEL_TORCH_NOISE="1")
    _, selected, _ = ran(tmp_path / "selected", OTEL_TORCH_NOISE="1", **SELECTIONS[chosen])
    assert whole == selected
    assert len(lines(tmp_path / "selected" / "run.jsonl")) < len(
        lines(tmp_path / "whole" / "run.jsonl")
    )


def test_a_rank_that_records_nothing_has_the_noise_of_all(tmp_path: Path) -> None:
    """Replicated values would part, and with them the ranks' ways."""
    job = {"WORLD_SIZE": "2", "OTEL_TORCH_JSONL_RANKS": "0", "OTEL_TORCH_NOISE": "1"}
    first, second = (ran(tmp_path / rank, RANK=rank, **job) for rank in ("0", "1"))
    assert first[0] and not second[0]
    assert first[1:] == second[1:]
    assert first[1] != ran(tmp_path / "plain")[1]


class Returning(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self) -> Any:
        return self.value


def jittered(value: Any, seed: str = "1") -> Any:
    with recording(noise=seed) as sink:
        jittered_values = Returning(value)()
    assert sink.records or not isinstance(value, torch.Tensor)
    return jittered_values


def units_away(reference: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    """How many representable numbers lie between, 0 or 1; more are 2. Equal ones, and NaNs, are 0."""
    above = torch.nextafter(reference, torch.full_like(reference, torch.inf))
    below = torch.nextafter(reference, torch.full_like(reference, -torch.inf))
    near = (moved == above) | (moved == below)
    same = (moved == reference) | (reference.isnan() & moved.isnan())
    return torch.where(same, 0, torch.where(near, 1, 2))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
def test_every_element_moves_by_one_unit_in_the_last_place_at_most(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    numbers = torch.randn(40, 250, generator=torch.Generator().manual_seed(0)).to(dtype)
    ends = [
        0.0,
        1.0,
        -1.0,
        limits.max,
        limits.min,
        limits.tiny,
        limits.smallest_normal,
        torch.inf,
        -torch.inf,
        torch.nan,
    ]
    numbers[0, : len(ends)] = torch.tensor(ends, dtype=dtype)
    jittered_values = jittered(numbers)
    away = units_away(numbers, jittered_values)
    assert away.max() == 1
    assert (away == 1).double().mean() > 0.98
    moved = (jittered_values.double().abs() > numbers.double().abs()).double().mean()
    assert 0.45 < moved < 0.55  # to both sides alike
    assert torch.equal(jittered_values.isfinite(), numbers.isfinite())
    assert (
        jittered_values.dtype == dtype
        and jittered_values.shape == numbers.shape
        and jittered_values[0, 0] == 0
    )


def test_all_leaves_have_noise_of_their_own() -> None:
    numbers = torch.ones(1000)
    net = nn.ModuleList(nn.Identity() for _ in range(20))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = net

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [part(x) for part in self.parts]

    with recording(noise="7"):
        jittered_values = Net()(numbers)
        later = Net()(numbers)
    patterns = {tuple((one < 1).tolist()) for one in (*jittered_values, *later)}
    assert len(patterns) == 40  # at every call too


class Pair(NamedTuple):
    mean: torch.Tensor
    scale: torch.Tensor


def test_structured_outputs_are_changed_and_what_holds_no_rounded_number_is_not() -> None:
    one = torch.linspace(1, 2, 50)
    jittered_values = jittered((one, [one, {"a": one}], Pair(one, one), None, "text"))
    assert isinstance(jittered_values[2], Pair)
    for tensor in (
        jittered_values[0],
        jittered_values[1][0],
        jittered_values[1][1]["a"],
        jittered_values[2].mean,
        jittered_values[2].scale,
    ):
        assert units_away(one, tensor).sum() > 40
    assert jittered_values[3:] == (None, "text")
    for kept in (
        torch.arange(5), torch.ones(5, dtype=torch.bool), torch.ones(3, dtype=torch.complex64), torch.ones(3, device="meta"),
        torch.ones(4).to(torch.float8_e4m3fn),
    ):  # fmt: skip
        assert jittered(kept) is kept


@pytest.mark.parametrize(
    "value",
    [CausalLMOutput(logits=torch.ones(3)), torch.eye(3).to_sparse()],
    ids=["output", "sparse"],
)
def test_what_gets_no_noise_is_said(value: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert jittered(value) is value
    assert "Returning/ gets no noise" in capfd.readouterr().err


def test_the_recording_holds_what_the_program_got() -> None:
    net, x = nn.Sequential(nn.Linear(5, 5), nn.Identity()), torch.randn(3, 5)
    with torch.no_grad():
        exact = net[0](x)
        got = []
        with recording(noise="1", capture="inputs,outputs", stats="sum,abs_mean") as sink:
            handle = net[1].register_forward_pre_hook(
                lambda module, args: got.append(args[0].clone())
            )
            net(x)
            handle.remove()
    assert not torch.equal(got[0], exact) and units_away(exact, got[0]).max() == 1
    (recorded,) = sink.rows("stats", module="0", tensor="out")
    (entering,) = sink.rows("stats", module="1", tensor="in[0]")
    assert recorded == entering and recorded["sum"] == pytest.approx(
        got[0].double().sum().item(), rel=1e-12
    )


def test_noise_leaves_a_models_inputs_and_its_random_numbers_alone() -> None:
    def state() -> list[Any]:
        return [
            torch.get_rng_state().tolist(),
            random.getstate(),
            np.random.get_state(legacy=True)[1].tolist(),
        ]

    x = torch.randn(4)
    kept, before = x.clone(), state()
    with recording(noise="1"):
        nn.Identity()(x)
    assert torch.equal(x, kept) and state() == before


def test_training_goes_through_the_noise() -> None:
    def gradients(**settings: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(6, 12),
            nn.ReLU(inplace=True),
            nn.Dropout(0.0),
            nn.LayerNorm(12),
            nn.Linear(12, 1),
        )
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            net(torch.randn(7, 6)).square().sum().backward()
            optimizer.step()
        return [parameter.grad.clone() for parameter in net.parameters()]

    plain = gradients()
    with recording(noise="1", capture="outputs,gradients"):
        noisy = gradients()
    for expected_gradient, noisy_gradient in zip(plain, noisy, strict=True):
        assert torch.allclose(expected_gradient, noisy_gradient, rtol=1e-3, atol=1e-5)
    assert not all(
        torch.equal(expected_gradient, noisy_gradient)
        for expected_gradient, noisy_gradient in zip(plain, noisy, strict=True)
    )


def test_nothing_of_it_stays_after_stop_or_in_a_copy() -> None:
    net, x = nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.randn(2, 4)
    exact = net(x)
    with recording(noise="1"):
        noisy = net(x)
        copied = copy.deepcopy(net)
    assert not torch.equal(noisy, exact)
    assert torch.equal(net(x), exact) and torch.equal(copied(x), exact)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(4, 4), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.linear(x))


def test_compiled_code_gets_none_and_says_so_without_another_graph(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def compiled() -> nn.Module:
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        net = nn.Sequential(Block(), Block(), Block(), nn.Linear(4, 4))
        for block in net[:3]:
            block.compile(fullgraph=True, backend="eager")
        return net

    x = torch.ones(2, 4)
    net = compiled()
    exact = net[:3](x)
    graphs = counters["stats"]["unique_graphs"]
    net = compiled()
    inside: list[torch.Tensor] = []
    net[3].register_forward_pre_hook(lambda module, args: inside.append(args[0]))
    with recording(noise="1") as sink:
        last = net(x)
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]
    assert torch.equal(inside[0], exact) and not torch.equal(
        last, net[3](exact)
    )  # the last layer is not compiled
    assert ("0.act", "out") in sink.rows("module", "tensor")
    messages = [line for line in capfd.readouterr().err.splitlines() if "get no noise" in line]
    assert len(messages) == 1 and "TORCHDYNAMO_DISABLE=1" in messages[0]


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_noise_never_raises_into_the_program(
    transform: str, capfd: pytest.CaptureFixture[str]
) -> None:
    net = nn.Linear(3, 3)
    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "vmap": torch.vmap(net),
        "grad": torch.func.grad(lambda one: net(one).sum()),
    }
    x = torch.randn(3) if transform == "grad" else torch.randn(5, 3)
    exact = calls[transform](x)
    with recording(noise="1"):
        jittered_values = calls[transform](x)
    assert torch.allclose(exact, jittered_values, rtol=1e-4)


def test_a_distributed_tensor_is_changed_shard_by_shard(tmp_path: Path) -> None:
    code = PROGRAMS / "layouts/noise_on_distributed_tensors.py"
    done = run_ranks(tmp_path, code, OTEL_TORCH_NOISE="1")
    assert done.stdout.count("fine") == 2
    assert "gets no noise: unsupported tensor type DTensor" in done.stderr


@pytest.mark.parametrize(
    ("text", "seed"), [("", None), ("off", None), ("0", None), ("7", 7), (str(2**70), 2**70)]
)
def test_a_seed_is_a_whole_number(text: str, seed: int | None) -> None:
    assert Settings.from_env({"OTEL_TORCH_NOISE": text}).noise == seed


@pytest.mark.parametrize("text", ["yes please", "-1", "1.5", "²"])
def test_anything_else_is_said_and_gives_none(text: str) -> None:
    messages: list[str] = []
    assert Settings.from_env({"OTEL_TORCH_NOISE": text}, messages.append).noise is None
    assert messages == [
        f"OTEL_TORCH_NOISE={text!r}: use a whole number of at least 1, or off; using 'off'"
    ]


def test_any_seed_will_do() -> None:
    assert units_away(torch.ones(9), jittered(torch.ones(9), str(2**70))).max() == 1
