"""`diff --golden`: which of two programs is nearer to a recording in higher precision."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import otel_torch
from otel_torch.cli.main import main
from tests.support import recording_to


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = (
            nn.LayerNorm(32),
            nn.Linear(32, 64),
            nn.GELU(),
            nn.Linear(64, 32),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def eager(net: Net) -> nn.Module:
    return net


def compiled(net: Net) -> nn.Module:
    return torch.compile(net)  # type: ignore[return-value]


def double(net: Net) -> nn.Module:
    return net.double()


def bfloat16(net: Net) -> nn.Module:
    return net.bfloat16()


def approximate(net: Net) -> nn.Module:
    net.blocks[1].act.approximate = "tanh"  # type: ignore[union-attr, assignment]
    return net


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[[Net], Any]], Path]:
    """Return a function that records a variant of the net, each once."""
    folder = tmp_path_factory.mktemp("golden")
    torch.manual_seed(0)
    net, inputs = Net().eval(), torch.randn(4, 10, 32)

    def recorded(variant: Callable[[Net], nn.Module]) -> Path:
        path = folder / f"{variant.__name__}.jsonl"
        if not path.exists():
            with recording_to(path, grad=True):
                model = variant(copy.deepcopy(net))
                with torch.no_grad():
                    model(inputs.to(next(model.parameters()).dtype))
        return path

    return recorded


@pytest.mark.parametrize(
    "reference, port, verdict, nearer, count",
    [
        (eager, compiled, "match", "neither", 17),
        (eager, bfloat16, "match", "reference", 17),
        (bfloat16, eager, "match", "port", 17),
        (eager, approximate, "diverged", "reference", 9),
        (approximate, compiled, "diverged", "port", 9),
    ],
)
def test_the_nearer_program_is_named(recorded, reference, port, verdict, nearer, count):
    report = otel_torch.diff(recorded(reference), recorded(port), golden=recorded(double))
    golden = report.golden
    assert (report.verdict, golden.end.module, golden.end.nearer) == (verdict, "", nearer)
    assert golden.count(nearer) == count
    # a module without parameters is compared only as long as its inputs match
    assert len(golden.modules) == (16 if verdict == "diverged" else 17)


def test_the_module_at_which_the_port_leaves_comes_before_those_that_are_near(recorded):
    golden = otel_torch.diff(recorded(eager), recorded(approximate), golden=recorded(double)).golden
    assert golden.modules[0].module == "blocks.1.act"
    assert golden.modules[0].port_error > 100 * golden.modules[0].error
    near = {row.module for row in golden.modules if row.nearer == "neither"}
    assert {"blocks.0", "blocks.0.act", "blocks.1.up"} <= near
    assert not near & {"blocks.1", "blocks.2", "head", ""}


def test_text_json_and_page_say_it(recorded, tmp_path, capsys):
    paths = [str(recorded(variant)) for variant in (eager, bfloat16, double)]
    page, answer = tmp_path / "page.html", tmp_path / "answer.json"
    arguments = [
        "diff",
        *paths[:2],
        "--golden",
        paths[2],
        "--html",
        str(page),
        "--json",
        str(answer),
    ]
    assert main(arguments) == 0
    text = " ".join(capsys.readouterr().out.split())
    sentence = "The reference is nearer to the golden recording: the output of (root) is off by"
    assert sentence in text and "more; --all lists them" in text
    assert sentence in page.read_text()
    golden = json.loads(answer.read_text())["golden"]
    assert golden["recording"] == paths[2]
    assert (golden["end"]["nearer"], len(golden["modules"])) == ("reference", 17)
    assert main([*arguments[:5], "--all"]) == 0
    text = capsys.readouterr().out
    assert "more; --all" not in text and text.count("  reference\n") == 17


def test_a_value_that_is_not_finite_is_furthest(recorded, tmp_path):
    def overflowing(net: Net) -> nn.Module:
        net.blocks[2].down.bias.data[0] = float("inf")  # type: ignore[union-attr]
        return net

    golden = otel_torch.diff(recorded(eager), recorded(overflowing), golden=recorded(double)).golden
    assert golden.modules[0].port_error == float("inf")
    assert golden.end.nearer == "reference"


def test_a_golden_recording_of_another_model_is_refused(recorded, tmp_path, capsys):
    path = tmp_path / "other.jsonl"
    with recording_to(path, grad=True):
        nn.Sequential(nn.Linear(3, 3))(torch.ones(1, 3))
    arguments = [str(recorded(eager)), str(recorded(bfloat16)), "--golden", str(path)]
    capsys.readouterr()
    assert main(["diff", *arguments]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "other.jsonl cannot be compared with" in line


def test_a_golden_recording_says_nothing_about_bits(recorded):
    with pytest.raises(ValueError, match="--golden"):
        otel_torch.diff(recorded(eager), recorded(compiled), golden=recorded(double), bitwise=True)
