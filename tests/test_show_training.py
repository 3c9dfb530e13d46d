"""`otel-torch show` of a training: its table, what points at trouble, and its part of the page."""

from __future__ import annotations

import json
import math

import pytest

from otel_torch.show.training import TrainingSeries
from otel_torch.show.training_trouble import troubles
from tests.support import run_python
from tests.test_show import recording, row, run  # noqa: F401  # a fixture

TRAIN = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(
    [{"params": model[0].parameters(), "lr": 1e-2}, {"params": model[2].parameters(), "lr": 1e-3}]
)
for step in range(12):
    x = torch.randn(32, 8)
    optimizer.zero_grad()
    for part in x.chunk(2):
        (model(part) - part.sum(1, keepdim=True)).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A recording of a real training, with activations."""
    folder = tmp_path_factory.mktemp("trained")
    run_python(folder, TRAIN, OTEL_TORCH_ENABLED="1", OTEL_TORCH_JSONL="run.jsonl")
    return folder / "run.jsonl"


def value(label, step, number, module="", **fields):
    return {
        "module": module, "tensor": label, "step": step, "call": 0, "loop": 0, "model": "M", "phase": "train",
        "mean": number, **fields,
    }  # fmt: skip


def values(label, numbers, module=""):
    return [value(label, step, number, module) for step, number in enumerate(numbers)]


def lines_of(rows):
    training = TrainingSeries()
    for each in rows:
        training.add(each)
    return troubles(training)


def recorded(path, label):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        each["mean"] for each in rows if each["tensor"] == label and each["module"] == ""
    ]  # losses of one step are neighbors


def test_the_health_of_a_training_comes_before_its_activations(trained, capsys):
    assert run(str(trained)) == 0
    out = capsys.readouterr().out
    head, health, activations = out.split("\n\n", 2)
    assert "72 records, 4 modules" not in head and "of a training" in head
    first, header, *lines = health.splitlines()
    assert first.startswith("training of Sequential, 12 steps") and "samples/s" in first
    assert header.split() == ["quantity", "first", "last", "least", "largest", "at"]
    assert [line.split("  ")[0] for line in lines] == [
        "loss", "learning rate [0]", "learning rate [1]", "gradient norm", "gradient norm, clipped", "parameter norm",
        "update ratio",
    ]  # fmt: skip
    assert "loss" not in activations and "grad_norm" not in activations


def test_json_has_the_values_of_the_rows(trained, capsys):
    assert run(str(trained), "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["training"]["troubles"] == []
    model = shown["training"]["models"]["Sequential"]
    losses = recorded(trained, "loss")
    means = [(first + second) / 2 for first, second in zip(losses[::2], losses[1::2], strict=True)]
    loss = model["quantities"]["loss"]
    assert (loss["first"], loss["last"]) == pytest.approx((means[0], means[-1]))
    assert (loss["least"], loss["largest"]) == pytest.approx((min(means), max(means)))
    assert loss["at"] == f"step {means.index(max(means))}"
    assert model["quantities"]["lr[1]"]["first"] == 1e-3
    assert model["summary"]["steps"] == 12
    assert shown["rows"] and "train" not in {each["phase"] for each in shown["rows"]}
    assert shown["records"] == 24 * 4


def test_a_recording_without_activations_shows_the_training_alone(recording, capsys):
    path = recording(*values("loss", [2.0, 1.0]))
    assert run(path) == 0
    out = capsys.readouterr().out
    assert "2 values of a training, steps 0 to 1" in out and "0 records" not in out
    assert "loss" in out and "abs_mean" not in out
    assert run(path, "--step", "7") == 2
    assert "has the values of a training and steps 0 to 1" in capsys.readouterr().err


def test_a_recording_without_training_says_nothing_of_one(recording, capsys):
    path = recording(row(), row(step=1))
    assert run(path) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == f"{path}: 2 records, 1 module, steps 0 to 1"
    assert "training" not in out
    assert run(path, "--json") == 0
    assert "training" not in json.loads(capsys.readouterr().out)


def test_modules_select_no_activations_of_others_but_keep_the_totals(recording, capsys):
    path = recording(row("a"), row("b"), *values("loss", [2.0]), *values("grad_norm", [1.0], "b"))
    assert run(path, "--module", "^a$", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert list(shown["training"]["models"]["M"]["quantities"]) == ["loss"]
    assert run(path, "--module", "zzz") == 2


def test_trouble_stands_below_the_heading(recording, capsys):
    assert run(recording(*values("loss", [1.0] * 41 + [math.nan] * 3))) == 0
    _, outcome, trouble, *_ = capsys.readouterr().out.splitlines()
    assert "no NaN" not in outcome
    assert trouble == "! loss became NaN at step 41, and in 2 more steps"


def test_every_model_is_named_where_there_are_several():
    rows = values("loss", [1.0, math.inf])
    other = [{**each, "model": "N", "mean": 1.0} for each in rows]
    assert lines_of([*rows, *other]) == ["M: loss became infinite at step 1"]


FALLING = [0.97**step for step in range(200)]
SPIKE = [*FALLING[:120], 8.1 * sum(FALLING[109:111]) / 2, *FALLING[121:]]
HALVED = [2.0 ** (40 - step // 4) for step in range(100)]


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        (
            values("loss", SPIKE),
            "loss spike at step 120: 8.1 times the median of the 20 steps before",
        ),
        (
            values("grad_norm", [1.0] * 200)
            + values("grad_norm", [0.1] * 30 + [1e-9] * 170, "layers.0"),
            "gradient of `layers.0` below 1e-7 of the total from step 30 on",
        ),
        (values("loss_scale", HALVED), "loss scale fell 12 times in the last 50 steps"),
        (
            values("grad_norm", [1.0] * 30 + [50.0] + [1.0] * 9),
            "gradient norm spike at step 30: 50 times the median of the 20 steps before",
        ),
        (values("grad_norm", [1.0, math.inf]), "gradient norm became infinite at step 1"),
    ],
)
def test_trouble_is_named(rows, line):
    assert lines_of(rows) == [line]


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(values("loss", FALLING), id="falls"),
        pytest.param(values("loss", [-(2.0**step) for step in range(60)]), id="negative"),
        pytest.param(values("loss", [1.0, 1.0, 1.0, 9.0] * 30), id="cycles"),
        pytest.param(values("loss", [0.0] * 40 + [1e-3]), id="from zero"),
        pytest.param(values("loss_scale", HALVED[:40]), id="search of the scale"),
        pytest.param(
            values("grad_norm", [math.inf, 1.0]) + values("skipped", [1, 0]), id="skipped step"
        ),
        pytest.param(
            values("grad_norm", [1.0] * 20) + values("grad_norm", [0.0] * 19 + [1.0], "late"),
            id="gradient that came",
        ),
        pytest.param([value("loss", 0, "?"), value("loss", None, 1.0)], id="no number or step"),
    ],
)
def test_what_is_usual_is_no_trouble(rows):
    assert lines_of(rows) == []


def test_skipped_steps_are_counted(recording, capsys):
    path = recording(*values("loss", [1.0] * 4), *values("skipped", [1, 1, 0, 0]))
    assert run(path) == 0
    assert "2 steps skipped by the gradient scaler" in capsys.readouterr().out


def test_many_groups_are_left_out_and_counted(recording, capsys):
    rows = [value(f"lr[{group}]", 0, 0.1) for group in range(20)]
    assert run(recording(*rows)) == 0
    out = capsys.readouterr().out
    assert out.count("learning rate [") == 8 and "learning rate, 12 more groups" in out
