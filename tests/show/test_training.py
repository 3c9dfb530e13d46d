"""`otel-torch show` of a training: its table, what points at trouble, and its part of the page."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from otel_torch.laws.series import TrainingSeries
from otel_torch.show.run_sections import Run
from otel_torch.show.selection import Selection
from otel_torch.show.training.page import MAX_POINTS, training_section
from otel_torch.show.training.trouble import troubles
from tests.parity.report.test_report import HOSTILE
from tests.show.test_overview import recording, row, run  # noqa: F401  # a fixture
from tests.show.test_page import data, names, page, text, unpack  # noqa: F401  # a fixture
from tests.support import run_python

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
    return troubles(training, [])


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
    _, outcome, verdict, trouble, *_ = capsys.readouterr().out.splitlines()
    assert "no NaN" not in outcome
    assert verdict == "M cannot tell: the change of the parameters is known of no step"
    assert trouble == "! loss became NaN at step 41, and in 2 more steps"


def test_a_loss_that_ends_as_nan_is_not_trained(recording, capsys):
    rows = values("loss", [1.0] * 9 + [math.nan]) + values("update_ratio", [0.1] * 10)
    frozen = {"models": ["M"], "frozen": ["M:a.weight", "M:a.bias"]}
    assert run(recording(*rows, meta={"ended_cleanly": True, "optimizers": [frozen]})) == 0
    out = capsys.readouterr().out
    assert "M does not train: its loss ends as NaN or Inf" in out and "2 parameters frozen" in out


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
        (
            [
                *values("loss", [1.0] * 9),
                value("param_norm", 2, 1.0),
                value("param_norm", 8, math.nan),
            ],
            "parameter norm became NaN at step 8 (not recorded since step 2)",
        ),
        (
            values("dead", [0.2] * 5 + [0.95, 0.979, 0.979], "layers.0"),
            "97 % of the units of `layers.0` are dead, 90 % or more from step 5 on",
        ),
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
        pytest.param(values("dead", [0.95] * 9 + [0.85], "units"), id="units that came back"),
        pytest.param(values("dead", [0.1, 0.1, 0.95, 0.95], "units"), id="few values"),
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


# -- the page


def test_the_page_begins_with_curves_and_maps_of_the_training(trained, page):
    drawn = page(trained)
    words = text(drawn)
    shown = data(drawn)["training"]
    assert words.index("training of Sequential, 12 steps") < words.index("Module × step")
    losses = shown["curves"]["training-loss"]["lines"][0]["middle"]
    read = recorded(trained, "loss")
    means = [(first + second) / 2 for first, second in zip(read[::2], read[1::2], strict=True)]
    assert losses == pytest.approx(means, rel=1e-3)
    rates = shown["curves"]["training-rate"]["lines"]
    assert [line["name"] for line in rates] == ["lr[0]", "lr[1]"]
    assert shown["curves"]["training-norms"]["scale"] == "log"
    assert {id: each["rows"] for id, each in shown["maps"].items()} == {
        "training-gradients": ["0", "2"],
        "training-updates": ["0", "2"],
        "training-dead": ["1"],
    }
    for each in shown["maps"].values():
        assert each["columns"][:3] == ["0", "1", "2"]
        cells = unpack(each["cells"]).reshape(len(each["rows"]), len(each["columns"]))
        assert (np.isnan(cells) | (cells >= 0)).all() and (cells >= 0).any()
    assert "train" not in names(drawn, "phase")


def test_a_page_of_a_training_alone_has_no_charts_of_activations(recording, page):
    drawn = page(recording(*values("loss", [2.0, math.nan, 1.0])))
    loss = data(drawn)["training"]["curves"]["training-loss"]
    assert loss["bad"] == [1] and loss["lines"][0]["middle"] == [2.0, None, 1.0]
    assert "loss became NaN at step 1" in text(drawn) and "no activations" in text(drawn)
    assert "Module × step" not in text(drawn) and "training 3 values" in text(drawn)
    assert "3 values of a training, 0 records" in drawn.said


@pytest.mark.parametrize(
    ("rows", "kind", "outcome"),
    [
        (values("loss", [2.0, math.nan]), "trouble", "NaN or Inf since step 1"),
        (
            [*values("loss", [2.0, math.inf]), row(step=3, mean=math.nan, nonfinite=1)],
            "trouble",
            "NaN or Inf since step 1",
        ),
        (
            values("grad_norm", [math.inf, 1.0]) + values("skipped", [1, 0]),
            "fine",
            "ended cleanly",
        ),
    ],
)
def test_a_training_that_became_nan_did_not_go_fine(
    recording, page, tmp_path, capsys, rows, kind, outcome
):
    path = recording(*rows, meta={"ended_cleanly": True})
    page(path)
    drawn = (tmp_path / "page.html").read_text()
    assert f'<span class="badge {kind}">{outcome}</span>' in drawn
    assert run(path) == 0
    assert (kind == "trouble") == ("NaN or Inf" in capsys.readouterr().out.splitlines()[1])


def test_a_page_without_training_has_no_such_section(recording, page):
    drawn = page(recording(row()))
    assert "Training" not in text(drawn) and data(drawn)["training"] == {"curves": {}, "maps": {}}


def test_the_curves_of_several_trainings_share_a_plot(recording, page, tmp_path):
    first = recording(*values("loss", [3.0, 2.0]), value("grad_norm", 0, 1.0, "layer"))
    second = tmp_path / "second.jsonl"
    rows = [*values("loss", [5.0, math.nan, 4.0]), value("grad_norm", 0, 2.0, "layer")]
    second.write_text("".join(json.dumps(each) + "\n" for each in rows))
    drawn = page(first, second)
    shown = data(drawn)["training"]
    loss = shown["curves"]["training-loss"]
    assert {line["name"]: line["middle"] for line in loss["lines"]} == {
        "run.jsonl: loss": [3.0, 2.0, None],
        "second.jsonl: loss": [5.0, None, 4.0],
    }
    assert loss["bad"] == [1]
    assert list(shown["maps"]) == ["training-gradients", "training-gradients-1"]
    assert "second.jsonl: loss became NaN at step 1" in text(drawn)


def test_loops_follow_each_other(recording, page):
    drawn = page(recording(value("loss", 0, 1.0), value("loss", 0, 2.0, loop=1)))
    loss = data(drawn)["training"]["curves"]["training-loss"]
    assert loss["x"] == [0, 1] and loss["steps"] == ["0", "0 (loop 1)"]


def test_the_section_is_bounded_and_keeps_the_extremes():
    training = TrainingSeries()
    for step in range(10_000):
        training.add(value("loss", step, 50.0 if step == 7_001 else 1.0))
        for group in range(12):
            training.add(value(f"lr[{group}]", step, 1e-3))
        for module in range(500) if step % 100 == 0 else ():
            training.add(value("grad_norm", step, 1.0, f"layers.{module // 10}.{module % 10}"))
    section = training_section([Run("run.jsonl", 0, Selection("run.jsonl", training=training))])
    (loss,) = section.curves["training-loss"]["lines"]
    assert len(loss["most"]) <= MAX_POINTS and max(loss["most"]) == 50.0
    (drawn,) = section.maps.values()
    assert len(drawn["rows"]) == 500 and len(drawn["columns"]) <= 256
    assert "4 further curves left out." in "".join(section.lines)
    assert len(json.dumps([section.lines, section.curves, section.maps])) < 1e6


def test_no_name_of_a_training_runs_in_a_page(recording, page):
    rows = [
        value(label, 0, 1.0, module, model=HOSTILE)
        for label in ("loss", "grad_norm", f"lr[{HOSTILE}]")
        for module in ("", HOSTILE)
    ]
    drawn = page(recording(*rows))
    assert len(drawn.scripts) == 3
    assert "alert(1)" in text(drawn) and "alert(1)" in drawn.scripts[0]
    assert all(each.isprintable() or each == "\n" for each in "".join(drawn.texts))
    assert "<" not in drawn.scripts[0]
