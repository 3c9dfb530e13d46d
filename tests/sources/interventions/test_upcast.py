"""OTEL_TORCH_UPCAST: an unmodified program computes in double precision."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from otel_torch import torch_private
from otel_torch.cli.main import main
from otel_torch.settings import Settings
from tests.support import PROGRAMS, lines, recording, run_python

PROGRAM = PROGRAMS / "compute_in_float32.py"


@dataclass(frozen=True)
class Run:
    """What the program printed, and its recording."""

    printed: list[str]
    said: str
    recording: Path


Runs = Callable[..., Run]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return a function that runs the program, once with each arguments."""

    @functools.cache
    def run(*arguments: str, upcast: str = "off") -> Run:
        folder = tmp_path_factory.mktemp("run")
        variables = {"OTEL_TORCH_CAPTURE": "parity", "OTEL_TORCH_UPCAST": upcast}
        done = run_python(folder, PROGRAM, *arguments, **variables)
        return Run(done.stdout.splitlines(), done.stderr, folder / "run.jsonl")

    return run


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_program_that_casts_to_float32_computes_as_one_written_in_double(
    runs: Runs, dtype: str
) -> None:
    plain, by_hand = runs(dtype, "evaluate").printed, runs(dtype, "evaluate", "float64").printed
    run = runs(dtype, "evaluate", upcast="float64")
    upcast, said = run.printed, run.said
    for index in (0, 2):  # in the main thread and in another one
        values, expected, rounded = (
            [float(word) for word in printed[index].split()] for printed in (upcast, by_hand, plain)
        )
        assert values == pytest.approx(expected, rel=1e-9)
        assert values != pytest.approx(rounded, rel=1e-9)
    assert upcast[1] == "torch.float32"  # the program's own code computes as before
    assert upcast[3] == plain[3]  # the next random number
    assert "models run in double precision" in said
    assert {row["dtype"] for row in lines(run.recording) if row["tensor"] == "out"} == {
        "torch.float64"
    }


def test_an_operation_without_a_version_in_double_is_reported(runs: Runs) -> None:
    upcast, plain = runs("float32", "halve", upcast="float64"), runs("float32", "halve")
    values, expected = ([float(word) for word in run.printed[0].split()] for run in (upcast, plain))
    assert values == pytest.approx(expected, rel=1e-3) and values != expected
    assert "sample.halve.default has no fp64 version and runs in float32" in upcast.said


def test_everything_but_random_operations_is_in_double(runs: Runs) -> None:
    upcast = runs("float32", "train", upcast="float64").printed
    plain = runs("float32", "train").printed
    by_hand = runs("float32", "train", "float64").printed
    losses, expected, rounded = (
        [float(word) for word in printed[:-1]] for printed in (upcast, by_hand, plain)
    )
    assert losses == pytest.approx(expected, rel=1e-6) and losses != rounded
    assert upcast[-1] == plain[-1]


def test_a_forward_that_raises_ends_the_mode(runs: Runs) -> None:
    assert runs("float32", "raise", upcast="float64").printed[0] == "torch.float32"


def test_a_forward_that_the_program_calls_ends_the_mode() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with recording(upcast="float64"):
        assert net.forward(torch.ones(1, 2)).dtype == torch.float64
        assert (torch.ones(2) * 2).dtype == torch.float32


def test_an_operation_that_fails_in_any_type_fails_as_in_the_program() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with recording(upcast="float64"), pytest.raises(RuntimeError, match="1x3 and 2x2"):
        net(torch.ones(1, 3))


def test_as_the_golden_recording(runs: Runs, tmp_path: Path) -> None:
    reference, port = (str(runs(dtype, "evaluate").recording) for dtype in ("float32", "bfloat16"))
    golden_path = str(runs("float32", "evaluate", upcast="float64").recording)
    answer = tmp_path / "answer.json"
    main(["diff", reference, port, "--golden", golden_path, "--json", str(answer)])
    golden = json.loads(answer.read_text())["golden"]
    assert golden["end"]["nearer"] == "reference"
    assert 0 < golden["end"]["error"] < 1e-5 < 1e-4 < golden["end"]["port_error"]


def test_only_float64_is_a_precision_to_run_in() -> None:
    messages: list[str] = []
    assert Settings.from_env({"OTEL_TORCH_UPCAST": "float64"}).upcast == "float64"
    assert Settings.from_env({"OTEL_TORCH_UPCAST": "bf16"}, messages.append).upcast == "off"
    assert messages == ["OTEL_TORCH_UPCAST='bf16': use off or float64; using 'off'"]


def test_what_the_mode_asks_of_an_operation() -> None:
    add, select = torch.ops.aten.add_.Tensor, torch.ops.aten.select.int
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert torch_private.written_arguments(add) == {0, "self"}
    assert torch_private.returns_view(select) and not torch_private.returns_view(add)
    assert torch_private.argument(attention, "dropout_p", (), {}) == 0.0
    assert torch_private.argument(attention, "dropout_p", (0, 0, 0, 0.5), {}) == 0.5
    assert torch_private.argument(attention, "dropout_p", (), {"dropout_p": 0.5}) == 0.5
    # of what says nothing of itself nothing is known
    assert not torch_private.written_arguments(object) and not torch_private.returns_view(object)
    assert torch_private.argument(object, "dropout_p", (), {}) is None
