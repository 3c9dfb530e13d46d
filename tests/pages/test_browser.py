"""The pages of `show --html` and `diff --html` as a browser shows them: opened from disk, without a
network, used by hand.
"""

from __future__ import annotations

import json

import pytest

from tests.pages.recorded import command
from tests.show.test_overview import row
from tests.show.test_training import TRAIN, value
from tests.support import run_python

pytestmark = pytest.mark.browser


def marks(page, id, kind="mark-rect"):
    """How many marks of a kind a plot has."""
    return page.count(
        ", ".join(f"#{id} svg g.{kind}.role-mark > {shape}" for shape in ("path", "line", "text"))
    )


def colors(page, selector):
    """How many colors a canvas shows."""
    return page.evaluate(f"""(canvas => {{
        const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext('2d', {{willReadFrequently: true}});
        copy.drawImage(canvas, 0, 0);
        const {{data}} = copy.getImageData(0, 0, canvas.width, canvas.height);
        return new Set(new Uint32Array(data.buffer)).size;
    }})(document.querySelector({json.dumps(selector)} + ' canvas'))""")


def pixel(page, x, y):
    """The color of the map at a place, by shares of what it draws."""
    return page.evaluate(f"""(({{canvas, box}}) => {{
        const [x, y] = [box.labels + {x} * box.plotWidth, {y} * box.height];
        const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext('2d', {{willReadFrequently: true}});
        copy.drawImage(canvas, 0, 0);
        return [...copy.getImageData(x, y, 1, 1).data].slice(0, 3);
    }})(explorer.map)""")


def path_of(page):
    """The names of the chosen module."""
    return page.evaluate("document.getElementById('module-path').textContent").split(" › ")[1:]


def points(page, plot):
    """How many points each line of a plot has."""
    return page.evaluate(
        f"{plot}.drawn.data.slice(1).map(line => line.filter(value => value !== null).length)"
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
        "first Inf: step 16",
        "Timeline",
        "Module × step",
        "Magnitudes",
    ):
        assert phrase in text
    modules, steps = 26, 30
    # torch.run, and a step and a forward for each
    assert page.evaluate("timelines[0].spans.length") == 1 + 2 * steps
    assert page.evaluate("[explorer.order.length, explorer.tensors.columns.length]") == [
        modules,
        steps,
    ]
    assert page.count("#tree [role=treeitem]") == 34  # modules, containers, and one of two tensors
    for id in ("map", "magnitudes-modules", "magnitudes-steps", "timeline-0"):
        assert colors(page, f"#{id}") > 5
    assert points(page, "explorer.curve") == [16] * 5  # two bands, and the median: finite steps
    assert page.count("#module-magnitudes canvas") == 1
    ink = page.evaluate("getComputedStyle(document.querySelector('h2')).color")
    assert ink == ("rgb(228, 233, 242)" if dark else "rgb(28, 35, 48)")
    assert page.evaluate("explorer.curve.drawn.axes[0].stroke()") == page.evaluate("color('--ink')")


@pytest.mark.parametrize("activations", ["0", "1"])
def test_a_training_is_drawn(page, tmp_path, activations):
    run_python(tmp_path, TRAIN, OTEL_TORCH_ACTIVATIONS=activations, OTEL_TORCH_JSONL="run.jsonl")
    command(tmp_path, "show", "run.jsonl", "--html", "show.html")
    page.open(tmp_path / "show.html")
    silent(page, tmp_path / "show.html")
    plots = {
        id: points(page, f"trainingCurves.get('{id}')")
        for id in ("training-loss", "training-rate", "training-norms")
    }
    assert plots["training-loss"] == [12] * 3 and plots["training-rate"] == [12] * 6
    # norms of the gradients, then those of parameters and updates, which follow a step late
    assert plots["training-norms"] == [12] * 6 + [11] * 6
    for id in ("training-gradients", "training-updates"):
        assert colors(page, f"#{id}") > 5
    assert page.count("#map canvas") == (activations == "1")
    page.resize(390, 900)
    assert page.evaluate(
        "[...document.querySelectorAll('.wide:not(.facts)')].every(one => one.scrollWidth <= one.clientWidth)"
    )


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
    assert points(page, "trainingCurves.get('training-loss')") == [21] * 6
    assert page.evaluate("data.training.curves['training-loss'].bad") == list(range(21, 30))
    assert points(page, "trainingCurves.get('training-scale')") == [30] * 6
    assert colors(page, "#training-gradients") > 2 and colors(page, "#training-updates") > 2


def test_rows_of_a_map_are_named_where_there_are_too_many_to_name_all(page, tmp_path):
    recording = tmp_path / "run.jsonl"
    recording.write_text("".join(json.dumps(row(f"layer.{i}")) + "\n" for i in range(200)))
    command(tmp_path, "show", "run.jsonl", "--html", "show.html")
    page.open(tmp_path / "show.html")
    silent(page, tmp_path / "show.html")
    named, height, left = page.evaluate(
        "(({named, height, labels}) => [named, height, labels])(explorer.map.box)"
    )
    assert len(named) > 20 and left > 30
    assert (named[1] - named[0]) * height / 200 >= page.evaluate("LABEL_HEIGHT")


def test_commands_to_copy_are_seen_whole(page, recorded):
    page.open(recorded.diff)
    width, shown = page.evaluate(
        "(({scrollWidth, clientWidth}) => [scrollWidth, clientWidth])(document.querySelector('pre'))"
    )
    assert width == shown


def test_recordings_are_laid_on_each_other(page, recorded):
    folder = recorded.show.parent
    command(folder, "show", "reference.jsonl", "port.jsonl", "--html", "both.html")
    page.open(folder / "both.html")
    silent(page, folder / "both.html")
    assert page.evaluate("[...explorer.control.recording.options].map(one => one.value)") == [
        "reference.jsonl",
        "port.jsonl",
    ]
    page.click("#map canvas", 0.6, 0.3)
    assert len(points(page, "explorer.curve")) == 2
    first = page.evaluate("explorer.map.canvas.toDataURL()")
    page.choose("recording", "port.jsonl")
    page.choose("heat", "times the first recording")
    assert page.evaluate("explorer.map.canvas.toDataURL()") != first and colors(page, "#map") > 5
    assert page.errors == []


def test_of_ten_thousand_modules_only_what_is_in_sight_exists(page, tmp_path):
    rows = [
        {
            "module": f"layers.{index // 10}.{index % 10}",
            "tensor": "out",
            "step": step,
            "abs_mean": index + step,
        }
        for step in range(8)
        for index in range(10_000)
    ]
    rows[-1]["abs_mean"] = "NaN"
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command(tmp_path, "show", "run.jsonl", "--html", "show.html")
    page.open(tmp_path / "show.html")
    silent(page, tmp_path / "show.html")
    assert page.count("#tree [role=treeitem]") == 2  # folded, as 1,000 lines follow
    page.click("[data-tensor]")
    page.settle()
    assert page.evaluate("explorer.tree.visible.length") == 1 + 1 + 1000 + 10
    assert page.count("#tree [role=treeitem]") < 100
    assert path_of(page) == ["layers", "999", "9"] and page.count("#tree .chosen") == 1
    page.evaluate("explorer.map.zoomTo({top: 5000, bottom: 5020, left: 0, right: 8})")
    page.click("#map canvas", 0.6, 0.01)
    assert path_of(page) == ["layers", "500", "0"]
    page.choose("sort", "largest first")
    assert page.evaluate("explorer.tensors.name(explorer.order[0])") == "layers.999.8"
    assert page.errors == []


def told(page):
    """Return the fragment of the address after the page has had time to write it."""
    return page.evaluate(
        "new Promise(done => setTimeout(() => done(location.hash), 2 * ADDRESS_DELAY))"
    )


SEEN = """[explorer.control.pattern.value, explorer.control.sort.value, byId('count').textContent,
    byId('module-path').textContent, byId('module-facts').textContent, explorer.map.canvas.toDataURL()]"""


def test_an_address_shows_others_the_same_module_and_step(page, tmp_path):
    rows = [
        row(f"blocks.{block}.{part}", step, abs_mean="NaN" if step > 30 else 1 + block + part / 10)
        for step in range(50)
        for block in range(200)
        for part in range(10)
    ]
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command(tmp_path, "show", "run.jsonl", "--html", "show.html")
    path = tmp_path / "show.html"
    page.open(path)
    silent(page, path)
    assert told(page) == "" and page.count("*") < 1000
    page.evaluate(
        "explorer.control.pattern.value = '7$'; explorer.control.pattern.dispatchEvent(new Event('input'))"
    )
    page.choose("sort", "largest first")
    box = page.evaluate("explorer.map.box")
    page.click("#map canvas", (box["labels"] + 20.5 / 50 * box["plotWidth"]) / box["width"], 0.01)
    address = told(page)
    assert address == "#pattern=7%24&sort=largest+first&module=blocks.197.7&step=20"
    seen = page.evaluate(SEEN)
    assert seen[2] == "200 of 2,000 tensors" and "198.7 at step 20" in seen[4]
    assert page.evaluate("document.querySelector('#module-curve .u-value').textContent") == "20"
    page.open("about:blank")
    page.open(path.resolve().as_uri() + address)
    assert page.evaluate(SEEN) == seen and told(page) == address
    page.evaluate("location.hash = 'module=blocks.3&step=31&sort=no+such+order&pattern=('")
    page.settle()
    assert path_of(page) == ["blocks", "3"] and page.evaluate("explorer.map.markedColumn") == 31
    assert told(page) == "#module=blocks.3&step=31"
    page.click("[data-tensor]")
    page.settle()
    assert told(page) == "#kind=outputs&module=blocks.0.0&step=31"
    assert "NaN or Inf at step 31" in page.text() and page.errors == []


def test_the_pointer_reads_magnitudes_and_spans(page, recorded):
    page.open(recorded.show)
    tip = "document.getElementById('tip').textContent"
    page.point_at("#magnitudes-modules canvas", 0.6, 0.01)
    assert page.evaluate(tip).startswith("blocks.0\nmagnitude 2^")
    page.point_at("#magnitudes-steps canvas", 0.6, 0.5)
    assert page.evaluate(tip).startswith("step ")
    page.point_at("#timeline-0 canvas", 0.5, 0.1)
    assert page.evaluate(tip).startswith("torch.run\nfrom 0 s")
    page.evaluate("timelines[0].canvas.focus()")
    page.press("+", "+", "ArrowRight")
    start, end = page.evaluate("timelines[0].view.map(time => time / timelines[0].end)")
    assert 0.2 < start < end < 0.8
    assert page.errors == []


def test_what_is_recorded_now_and_then_is_a_line_to_its_end(page, tmp_path):
    rows = [value("grad_norm", step, 1.0) for step in range(200)]
    rows += [value("param_norm", step, 9.0) for step in range(0, 200, 10)]
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command(tmp_path, "show", "run.jsonl", "--html", "show.html")
    page.open(tmp_path / "show.html")
    drawn = page.evaluate("""(canvas => {
        const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext('2d');
        copy.drawImage(canvas, 0, 0);
        const wanted = hexColor(color('--inherited')).join();
        let columns = 0;
        for (let x = 0; x < canvas.width; x++) {
            const {data} = copy.getImageData(x, 0, 1, canvas.height);
            for (let at = 0; at < data.length; at += 4) {
                if (data.slice(at, at + 3).join() !== wanted) continue;
                columns += 1;
                break;
            }
        }
        return columns / canvas.width;
    })(document.querySelector('#training-norms canvas'))""")
    assert drawn > 0.8


RED = [214, 41, 62]


def test_what_is_not_finite_is_drawn_in_its_own_colour(page, recorded):
    page.open(recorded.show)
    columns = page.evaluate("explorer.tensors.columns.length")
    seen = [pixel(page, (column + 0.1) / columns, 0.01) == RED for column in range(columns)]
    row = page.evaluate(
        "Array.from(explorer.tensors.row(explorer.values, explorer.order[0]), Number.isFinite)"
    )
    assert seen == [not finite for finite in row] and seen.count(True) == 14


def test_every_choice_in_the_page_is_drawn(page, recorded):
    page.open(recorded.show)
    options = {
        id: page.evaluate(f"[...document.getElementById('{id}').options].map(one => one.value)")
        for id in ("statistic", "kind", "heat", "scale", "sort")
    }
    assert options["statistic"] == ["abs_mean", "min", "max", "std", "nonfinite"]
    assert options["kind"] == ["", "outputs", "inputs"]
    seen = set()
    for kind in options["kind"]:
        page.choose("kind", kind)
        for heat in options["heat"]:
            page.choose("heat", heat)
            for statistic in options["statistic"]:
                page.choose("statistic", statistic)
                if (statistic, heat) == ("nonfinite", options["heat"][1]):
                    # more than half of the steps were right: the median is 0
                    assert "Nothing to draw" in page.evaluate("explorer.map.legend.textContent")
                    continue
                assert colors(page, "#map") > 2, (kind, heat, statistic)
                seen.add(page.evaluate("explorer.map.canvas.toDataURL()"))
    assert len(seen) == 3 * (2 * 5 - 1), "each choice is a picture of its own"
    for id in ("scale", "sort"):
        for option in options[id]:
            page.choose(id, option)
    assert page.errors == []


def test_modules_are_searched_by_a_regular_expression(page, recorded):
    page.open(recorded.show)
    search = "document.getElementById('pattern')"

    def said(pattern):
        page.evaluate(
            f"{search}.value = {json.dumps(pattern)}; {search}.dispatchEvent(new Event('input'))"
        )
        page.settle()
        return page.evaluate(
            "['count', 'pattern-error'].map(id => document.getElementById(id).textContent)"
        )

    assert said(r"\.up$") == ["6 of 52 tensors", ""]
    assert page.evaluate("explorer.order.map(index => explorer.tensors.name(index))") == [
        f"blocks.{block}.up" for block in range(6)
    ]
    assert said("(") == ["6 of 52 tensors", "not a regular expression"]
    assert said("no such module") == ["0 of 52 tensors", ""]
    assert said("") == ["26 of 52 tensors", ""]
    page.evaluate("document.activeElement.blur()")
    page.press("/")
    assert page.evaluate("document.activeElement.id") == "pattern"
    assert page.errors == []


def test_a_finding_leads_to_its_module_in_every_view(page, recorded):
    page.open(recorded.show)
    page.click("[data-tensor]:nth-of-type(1)")
    page.settle()
    assert path_of(page) == ["(root)"] and page.evaluate("explorer.control.kind.value") == "inputs"
    assert "Has NaN or Inf" in page.evaluate("document.getElementById('module-facts').textContent")
    assert page.evaluate("explorer.map.marked") == [0, 1]


def test_the_tree_is_used_by_keyboard(page, recorded):
    page.open(recorded.show)
    page.evaluate("document.getElementById('tree').focus()")
    lines = page.count("#tree [role=treeitem]")
    page.press("ArrowDown", "ArrowDown")
    assert path_of(page) == ["blocks", "0"]
    page.press("ArrowLeft")
    assert page.count("#tree [role=treeitem]") == lines - 4
    assert page.count("#tree [aria-expanded=false]") == 1
    page.press("ArrowRight", "ArrowRight", "ArrowDown")
    assert path_of(page) == ["blocks", "0", "norm"]
    assert page.evaluate("document.querySelector('#tree .chosen').id") == page.evaluate(
        "document.getElementById('tree').getAttribute('aria-activedescendant')"
    )
    page.press("ArrowLeft", "ArrowLeft", "ArrowLeft")
    assert path_of(page) == ["blocks"]
    page.press("End")
    assert path_of(page) == ["(root)"]
    assert page.errors == []


def test_a_click_in_the_map_chooses_the_module_and_a_drag_zooms(page, recorded):
    page.open(recorded.show)
    canvas = "#map canvas"
    page.click(canvas, 0.6, 0.3)
    chosen = path_of(page)
    row = page.evaluate("explorer.map.marked[0]")
    assert ".".join(chosen).startswith(
        page.evaluate(f"explorer.tensors.field('module', explorer.order[{row}])")
    )
    name = page.evaluate("document.querySelector('#tree .chosen .name').textContent")
    assert name == f"✕ {chosen[-1]}"
    page.drag(canvas, (0.5, 0.2), (0.7, 0.5))
    view = page.evaluate("explorer.map.view")
    assert 0 < view["top"] < view["bottom"] < 26 and 0 < view["left"] < view["right"] < 30
    page.evaluate("explorer.map.canvas.focus()")
    page.press("Escape")
    assert page.evaluate("explorer.map.view") == {"top": 0, "bottom": 26, "left": 0, "right": 30}
    page.press("ArrowRight", "ArrowRight", "ArrowDown", "+")
    assert page.evaluate("explorer.map.said.textContent").startswith(
        "blocks.0.norm\nstep 1\nabs_mean "
    )
    assert page.evaluate("explorer.map.view.right - explorer.map.view.left") == 15
    page.click(canvas, 0.6, 0.3, count=2)
    assert page.evaluate("explorer.map.view") == {"top": 0, "bottom": 26, "left": 0, "right": 30}
    assert page.errors == []


def test_the_pointer_shows_what_it_is_at(page, recorded):
    page.open(recorded.show)
    left = page.evaluate("(explorer.map.box.labels + 3) / explorer.map.box.width")
    page.point_at("#map canvas", left, 0.01)
    tooltip = page.evaluate("document.getElementById('tip').textContent")
    value = page.evaluate("numberText(explorer.tensors.row(explorer.values, explorer.order[0])[0])")
    assert tooltip == f"blocks.0\nstep 0\nabs_mean {value}"


@pytest.mark.parametrize("width", [390, 700])
def test_a_narrow_window_has_nothing_wider_than_itself(page, recorded, width):
    page.resize(width, 900)
    page.open(recorded.show)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    widths = page.evaluate(
        "[...document.querySelectorAll('canvas')].map(one => one.getBoundingClientRect().width)"
    )
    assert len(widths) == 6 and max(widths) <= width


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
        "[...document.getElementById('heat').options].map(one => one.value)"
    ):
        page.choose("heat", colour)
        for statistic in page.evaluate(
            "[...document.getElementById('statistic').options].map(one => one.value)"
        ):
            page.choose("statistic", statistic)
    silent(page, tmp_path / "show.html")
