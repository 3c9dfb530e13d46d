"""The pages of `show --html` and `diff --html` as a browser shows them: opened from disk, without a
network, used by hand.
"""

from __future__ import annotations

import json

import pytest

from tests.pages.recorded import command
from tests.support import run_python
from tests.test_show_training import TRAIN, value

pytestmark = pytest.mark.browser


def marks(page, id, kind="mark-rect"):
    """How many marks of a kind a plot has."""
    return page.count(
        ", ".join(f"#{id} svg g.{kind}.role-mark > {shape}" for shape in ("path", "line", "text"))
    )


def silent(page, path):
    """Nothing was complained of, and nothing but the page itself was loaded."""
    assert page.errors == []
    assert page.requests == [path.resolve().as_uri()]
    assert page.evaluate("performance.getEntriesByType('resource').length") == 0


@pytest.mark.parametrize("dark", [False, True])
def test_a_recording_is_drawn(page, recorded, dark):
    page.resize(1280, 900, dark=dark)
    page.open(recorded.show)
    silent(page, recorded.show)
    text = page.text()
    for phrase in (
        "NaN or Inf since step",
        "First NaN or Inf: Denoiser (root) in[0], loop 0, step 16, call 0",
        "Timeline",
        "Module × step",
        "Magnitudes",
    ):
        assert phrase in text
    modules, steps = 26, 30
    assert marks(page, "timeline") == 1 + 2 * steps  # torch.run, and a step and a forward for each
    assert marks(page, "heat") == modules * steps
    assert page.evaluate("data.groups.outputs.rows.length") == modules
    assert (
        marks(page, "over-steps", "mark-area") == 2
        and marks(page, "over-steps", "mark-symbol") > 15
    )
    assert marks(page, "over-modules", "mark-rule") == 2 * modules
    assert (
        marks(page, "histogram-modules") > 5 * modules
        and marks(page, "histogram-steps") > 5 * steps
    )
    ink = page.evaluate("getComputedStyle(document.querySelector('#heat svg text')).fill")
    assert ink == ("rgb(228, 233, 242)" if dark else "rgb(28, 35, 48)"), (
        "the plots have the page's own colours"
    )


@pytest.mark.parametrize("activations", ["0", "1"])
def test_a_training_is_drawn(page, tmp_path, activations):
    run_python(tmp_path, TRAIN, OTEL_TORCH_ACTIVATIONS=activations, OTEL_TORCH_JSONL="run.jsonl")
    command(tmp_path, "show", "run.jsonl", "--html", "show.html")
    page.open(tmp_path / "show.html")
    silent(page, tmp_path / "show.html")
    assert marks(page, "training-loss", "mark-symbol") == 12
    assert marks(page, "training-rate", "mark-symbol") == 2 * 12
    assert marks(page, "training-norms", "mark-symbol") > 3 * 12
    for id in ("training-gradients", "training-updates"):
        assert marks(page, id) == 2 * page.evaluate(f"data.training['{id}'].columns.length") > 0
    assert marks(page, "heat") == (4 * 12 if activations == "1" else 0)


def test_a_training_in_trouble_is_drawn(page, tmp_path):
    rows = [
        {**value(label, step, number, module), "model": model}
        for model in ("G", "D")
        for step in range(30)
        for label, number, module in (
            ("loss", "NaN" if step > 20 else -step, ""),
            ("grad_norm", 0.0 if step % 2 else 1e9, ""),
            ("grad_norm", "NaN" if step > 20 else 0.0, "constructor"),
            ("update_ratio", "Infinity", "layer"),
            ("loss_scale", 2.0**step, ""),
        )
    ]
    recording = tmp_path / "run.jsonl"
    recording.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command(tmp_path, "show", "run.jsonl", "--html", "show.html")
    page.open(tmp_path / "show.html")
    silent(page, tmp_path / "show.html")
    assert "G: loss became NaN at step 21" in page.text()
    assert marks(page, "training-loss", "mark-symbol") == 2 * 21
    assert marks(page, "training-loss", "mark-rule") == 2 * 9
    assert marks(page, "training-scale", "mark-symbol") == 2 * 30
    assert marks(page, "training-gradients") == marks(page, "training-updates") == 2 * 30


def test_what_is_not_finite_is_drawn_in_its_own_colour(page, recorded):
    page.open(recorded.show)
    red = page.evaluate("""[...document.querySelectorAll('#heat svg path')].filter(
        one => getComputedStyle(one).fill === 'rgb(214, 41, 62)').length""")
    expected = page.evaluate(
        "data.groups.outputs.statistics.abs_mean.cells.flat().filter(one => one === '!').length"
    )
    assert red == expected > 100


def test_every_choice_in_the_page_is_drawn(page, recorded):
    page.open(recorded.show)
    options = {
        id: page.evaluate(f"[...document.getElementById('{id}').options].map(one => one.value)")
        for id in ("statistic", "tensors", "colour")
    }
    assert options["statistic"] == ["abs_mean", "min", "max", "std", "nonfinite"] and options[
        "tensors"
    ] == ["outputs", "inputs"]
    seen = set()
    for tensors in options["tensors"]:
        page.choose("tensors", tensors)
        for colour in options["colour"]:
            page.choose("colour", colour)
            for statistic in options["statistic"]:
                page.choose("statistic", statistic)
                if (statistic, colour) != ("nonfinite", options["colour"][1]):
                    assert marks(page, "heat") > 100, (tensors, colour, statistic)
                elif tensors == "outputs":  # more than half of the steps were right
                    assert "Nothing to draw" in page.evaluate(
                        "document.getElementById('heat').textContent"
                    )
                assert statistic in page.evaluate(
                    "document.getElementById('over-steps').textContent"
                )
                seen.add(page.evaluate("document.getElementById('heat').innerHTML"))
    assert len(seen) == 2 * 2 * 5 - 1, (
        "each choice is a picture of its own, but where there is nothing to draw"
    )
    assert page.errors == []


def test_the_pointer_shows_what_it_is_at(page, recorded):
    page.open(recorded.show)
    page.point_at("#heat svg g.mark-rect.role-mark > path")
    tooltip = page.evaluate("document.getElementById('tip').textContent")
    first = page.evaluate(
        "data.groups.outputs.rows[0] + '|' + data.groups.outputs.statistics.abs_mean.cells[0][0]"
    ).split("|")
    assert tooltip == f"{first[0]}\nstep 0\nabs_mean {first[1]}"


def test_a_narrow_window_has_no_plot_wider_than_itself(page, recorded):
    page.resize(700, 900)
    page.open(recorded.show)
    widths = page.evaluate(
        "[...document.querySelectorAll('.plot svg')].map(one => one.getBoundingClientRect().width)"
    )
    assert len(widths) == 6 and max(widths) <= 700


def test_a_comparison_is_drawn(page, recorded):
    page.open(recorded.diff)
    silent(page, recorded.diff)
    assert "First divergence: the input in[0] of blocks.0.down" in page.text()
    assert marks(page, "curve", "mark-symbol") > 20 and marks(page, "curve", "mark-area") == 1
    assert marks(page, "heat") > 50


def test_a_script_in_a_name_does_not_run(page, tmp_path):
    """The policy of the page, tried in earnest: an element that was smuggled in stays dead."""
    name = (
        "<img src=x onerror=\"document.title='ran'\"></script><script>document.title='ran'</script>"
    )
    record = {
        "module": name,
        "tensor": "out",
        "step": 0,
        "model": name,
        "abs_mean": "NaN",
        name: 1.0,
    }
    (tmp_path / "run.jsonl").write_text(json.dumps(record) + "\n")
    command(tmp_path, "show", "run.jsonl", "--html", "show.html")
    page.open(tmp_path / "show.html")
    silent(page, tmp_path / "show.html")
    assert page.evaluate("document.title") == "run.jsonl: 1 records" and page.count("img") == 0
    page.evaluate(
        "document.body.insertAdjacentHTML('beforeend', '<img src=\"data:,\" onerror=\"document.title=1\">')"
    )
    page.evaluate("new Promise(done => setTimeout(done, 0))")
    assert page.evaluate("document.title") == "run.jsonl: 1 records"
    assert any("Content Security Policy" in error for error in page.errors)


ROW = {"module": "a", "tensor": "out", "step": 0}
ODD = {
    "nothing to draw": [{**ROW, "shape": [1]}],
    "nothing but zeros": [{**ROW, "step": step, "abs_mean": 0.0} for step in range(3)],
    "nothing finite": [{**ROW, "abs_mean": "NaN", "histogram": [0] * 64}],
    "as far as numbers go": [
        {**ROW, "step": 2**63 - 1, "min": -1.7e308, "max": 1.7e308},
        {**ROW, "min": -5e-324, "max": 5e-324},
    ],
    "names that every object has": [
        {**ROW, "module": "__proto__", "constructor": 1.0, "toString": 2.0, "__proto__": 3.0}
    ],
}


@pytest.mark.parametrize("rows", ODD.values(), ids=ODD)
def test_any_recording_is_a_page_without_an_error(page, tmp_path, rows):
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command(tmp_path, "show", "run.jsonl", "--html", "show.html")
    page.open(tmp_path / "show.html")
    for colour in page.evaluate(
        "[...document.getElementById('colour').options].map(one => one.value)"
    ):
        page.choose("colour", colour)
        for statistic in page.evaluate(
            "[...document.getElementById('statistic').options].map(one => one.value)"
        ):
            page.choose("statistic", statistic)
    silent(page, tmp_path / "show.html")
