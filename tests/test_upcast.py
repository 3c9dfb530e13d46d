"""OTEL_TORCH_UPCAST: an unmodified program computes in double precision."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from otel_torch import torch_private
from otel_torch.cli.main import main
from otel_torch.settings import Settings
from tests.support import PROGRAMS, lines, recording, run_python

PROGRAM = PROGRAMS / "compute_in_float32.py"


def output(folder: Path, *arguments: str, **variables: str) -> tuple[list[str], str]:
    """Run the program; return what it prints, and its stderr."""
    folder.mkdir(exist_ok=True)
    done = run_python(folder, PROGRAM, *arguments, OTEL_TORCH_CAPTURE="parity", **variables)
    return done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_program_that_casts_to_float32_computes_as_one_written_in_double(
    tmp_path: Path, dtype: str
) -> None:
    plain, _ = output(tmp_path / "plain", dtype, "evaluate")
    upcast, said = output(tmp_path / "upcast", dtype, "evaluate", OTEL_TORCH_UPCAST="float64")
    by_hand, _ = output(tmp_path / "by_hand", dtype, "evaluate", "float64")
    for index in (0, 2):  # in the main thread and in another one
        values, expected, rounded = (
            [float(word) for word in printed[index].split()] for printed in (upcast, by_hand, plain)
        )
        assert values == pytest.approx(expected, rel=1e-9)
        assert values != pytest.approx(rounded, rel=1e-9)
    assert upcast[1] == "torch.float32"  # the program's own code computes as before
    assert upcast[3] == plain[3]  # the next random number
    assert "models run in double precision" in said
    rows = lines(tmp_path / "upcast" / "run.jsonl")
    assert {row["dtype"] for row in rows if row["tensor"] == "out"} == {"torch.float64"}


def test_an_operation_without_a_version_in_double_is_reported(tmp_path: Path) -> None:
    upcast, said = output(tmp_path / "upcast", "float32", "halve", OTEL_TORCH_UPCAST="float64")
    plain, _ = output(tmp_path / "plain", "float32", "halve")
    values, expected = ([float(word) for word in printed[0].split()] for printed in (upcast, plain))
    assert values == pytest.approx(expected, rel=1e-3) and values != expected
    assert "sample.halve.default has no fp64 version and runs in float32" in said


def test_everything_but_random_operations_is_in_double(tmp_path: Path) -> None:
    upcast, _ = output(tmp_path / "upcast", "float32", "train", OTEL_TORCH_UPCAST="float64")
    plain, _ = output(tmp_path / "plain", "float32", "train")
    by_hand, _ = output(tmp_path / "by_hand", "float32", "train", "float64")
    losses, expected, rounded = (
        [float(word) for word in printed[:-1]] for printed in (upcast, by_hand, plain)
    )
    assert losses == pytest.approx(expected, rel=1e-6) and losses != rounded
    assert upcast[-1] == plain[-1]


def test_a_forward_that_raises_ends_the_mode(tmp_path: Path) -> None:
    printed, _ = output(tmp_path, "float32", "raise", OTEL_TORCH_UPCAST="float64")
    assert printed[0] == "torch.float32"


def test_a_forward_that_the_program_calls_ends_the_mode() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with recording(upcast="float64"):
        assert net.forward(torch.ones(1, 2)).dtype == torch.float64
        assert (torch.ones(2) * 2).dtype == torch.float32


def test_an_operation_that_fails_in_any_type_fails_as_in_the_program() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with recording(upcast="float64"), pytest.raises(RuntimeError, match="1x3 and 2x2"):
        net(torch.ones(1, 3))


def test_as_the_golden_recording(tmp_path: Path) -> None:
    for name, dtype, variables in (
        ("float32", "float32", {}),
        ("bfloat16", "bfloat16", {}),
        ("golden", "float32", {"OTEL_TORCH_UPCAST": "float64"}),
    ):
        output(tmp_path / name, dtype, "evaluate", **variables)
    paths = [str(tmp_path / name / "run.jsonl") for name in ("float32", "bfloat16", "golden")]
    answer = tmp_path / "answer.json"
    main(["diff", *paths[:2], "--golden", paths[2], "--json", str(answer)])
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
