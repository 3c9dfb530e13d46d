"""`otel-torch show --html`: a recording as one page. tests/pages opens it in a browser."""

from __future__ import annotations

import base64
import json
import math
import random
import sys
import zlib
from itertools import pairwise

import numpy as np
import pytest

from otel_torch.cli.main import main
from otel_torch.show import explorer_data as explorer
from otel_torch.show import grid as grids
from otel_torch.show.explorer_data import explorer_data
from otel_torch.show.grid import Grid, combine
from otel_torch.show.packed import pack
from otel_torch.show.traces import Process, Span, assign_lanes
from tests.pages.spans import line, span, step, write
from tests.parity.report.test_report import HOSTILE, Page
from tests.show.test_overview import recording, row  # noqa: F401  # a fixture
from tests.support import run_python


@pytest.fixture
def page(tmp_path, capsys):
    """Run the command; return the page as a browser parses it."""

    def make(*words):
        path = tmp_path / "page.html"
        assert main(["show", *map(str, words), "--html", str(path)]) == 0, capsys.readouterr().err
        parsed = Page(path.read_text(encoding="utf-8"))
        assert parsed.open == []
        parsed.said = capsys.readouterr().out
        return parsed

    return make


def text(page):
    return " ".join(" ".join(page.texts).split())


def data(page):
    return json.loads(page.scripts[0])


def explored(page):
    return data(page)["explorer"]


def names(page, field):
    """Return a field of each tensor."""
    categories = explored(page)["tensors"][field]
    return [categories["names"][index] for index in categories["of"]]


def unpack(text):
    """Return the numbers of a packed table, as the page's script reads them."""
    planes = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=np.uint8)
    high, middle, low = planes.reshape(3, -1).astype(np.uint64)
    return ((high << 16 | middle << 8 | low) << 40).view(np.float64)


def table(page, statistic, recording=0):
    """Return a statistic, of shape (tensors, columns); inf for NaN or Inf."""
    cells = next(
        each["cells"] for each in explored(page)["statistics"] if each["name"] == statistic
    )
    return unpack(cells[recording]).reshape(-1, len(explored(page)["columns"]))


def cells(page, statistic, kind="outputs"):
    """Return the values of one kind of tensor by module and column."""
    return {
        (module, step): value
        for module, of, row in zip(
            names(page, "module"), names(page, "kind"), table(page, statistic), strict=True
        )
        for step, value in zip(explored(page)["columns"], row.tolist(), strict=True)
        if of == kind and not math.isnan(value)
    }


META = {
    "run_id": "r7", "rank": 3, "world_size": 8, "pid": 71, "host": "node", "ended_cleanly": True,
    "start": "2026-11-21T10:00:00+00:00", "end": "2026-11-21T10:00:02.5+00:00", "kernels": "native (avx512)",
    "versions": {"torch": "2.13.0"}, "settings": {"OTEL_TORCH_ENABLED": "1"},
    "models": {"M": {"modules": 74, "forwards": 10}},
    "regions": {"fastvideo.region::denoising": {"count": 2, "host_total_s": 1.5, "host_longest_s": 1.0, "device_total_s": None}},
}  # fmt: skip


def test_the_header_has_the_facts_of_the_run(recording, page):
    found = text(page(recording(row(), row(step=1), meta=META)))
    for message in (
        "ended cleanly", "1 tensor over 2 steps, all values finite", "2 of 1 modules", "run r7", "rank 3 of 8", "71 on node", "2.5 s",
        "torch 2.13.0", "native (avx512)", "OTEL_TORCH_ENABLED=1", "model M 74 modules, 10 forwards",
        "fastvideo.region::denoising 1.5 s 1 s 2",
    ):  # fmt: skip
        assert message in found


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        (META | {"ended_cleanly": False}, "killed or still running"),
        (META | {"writing_ended": "disk"}, "writing ended before the run did (disk)"),
        (
            META | {"lost": [{"what": "record", "reason": "disk", "count": 4}]},
            "lost 4 records (disk)",
        ),
        (None, "no metadata"),
        (
            {
                "versions": 3,
                "models": [1],
                "regions": "?",
                "settings": None,
                "lost": {},
                "start": 5,
            },
            "no metadata",
        ),
    ],
)
def test_it_says_how_the_run_ended_and_what_was_lost(recording, page, meta, message):
    assert message in text(page(recording(row(), meta=meta)))


def test_modules_with_nan_or_inf_come_first_in_order_of_appearance(recording, page):
    rows = [
        row("fine"),
        row("late", 4, max="Infinity"),
        row("bad"),
        row("bad", 5, abs_mean="NaN", nonfinite=7),
        row("bad", 6, nonfinite=1),
    ]
    found = page(recording(*rows))
    message = text(found)
    assert message.index("NaN and Inf") < message.index("Module × step") < message.index("Timeline")
    table = message[message.index("elements records") : message.index("Module × step")]
    assert table == "elements records M late out 4 0 1 M bad out 5 7 2 "
    assert cells(found, "abs_mean")["bad", "5"] == cells(found, "max")["late", "4"] == math.inf
    assert cells(found, "abs_mean")["fine", "0"] == 1.0


def test_each_statistic_is_a_grid_of_modules_by_steps(recording, page):
    rows = [
        row(name, index, abs_mean=index + 0.5, further=2 * index)
        for index in range(3)
        for name in ("a", "b")
    ]
    rows += [
        row("a", 1, call=1, abs_mean=-7.0, min=-9.0, max=0.0, nonfinite=0, zeros=2),
        row("a", 1, call=2, zeros=3),
    ]
    found = page(recording(*rows))
    assert [each["name"] for each in explored(found)["statistics"]] == [
        "abs_mean",
        "min",
        "max",
        "nonfinite",
        "zeros",
        "further",
    ]
    assert cells(found, "abs_mean") == {
        ("a", "0"): 0.5, ("a", "1"): -7.0, ("a", "2"): 2.5, ("b", "0"): 0.5, ("b", "1"): 1.5, ("b", "2"): 2.5,
    }  # fmt: skip
    assert cells(found, "min")["a", "1"] == -9.0 and cells(found, "max")["a", "1"] == 1.0
    assert cells(found, "zeros") == {("a", "1"): 5.0}
    assert cells(found, "further")["b", "2"] == 4.0


def test_findings_are_buttons_that_choose_their_tensor(recording, page):
    rows = [row("fine"), row("late", 4, max="Infinity"), row("bad", 2, nonfinite=3)]
    found = page(recording(*rows))
    buttons = [attributes for tag, attributes in found.elements if tag == "button"]
    modules = names(found, "module")
    assert [modules[int(button["data-tensor"])] for button in buttons] == ["late", "bad"]
    assert [modules[index] for index in explored(found)["bad"]] == ["late", "bad"]


@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (50, 7)])
def test_a_packed_table_keeps_four_digits_and_what_is_not_finite(shape):
    numbers = np.random.default_rng(0)
    values = numbers.normal(size=shape) * 10.0 ** numbers.integers(-300, 300, size=shape)
    read = unpack(pack(values)).reshape(shape)
    assert np.allclose(read, values, rtol=2e-4, atol=0)
    special = np.array([math.nan, math.inf, 0.0, -7.0, 0.5, 1.7e308, -1.797e308, 5e-324])
    read = unpack(pack(special))
    assert math.isnan(read[0]) and read[1:5].tolist() == [math.inf, 0.0, -7.0, 0.5]
    assert np.isfinite(read[2:]).all() and np.allclose(read[5:], special[5:], rtol=2e-4)


def test_kinds_of_tensors_models_and_phases_are_told_apart(recording, page):
    rows = [
        row(tensor=name) for name in ("out[0]", "out[1]", "in.x", "grad", "param.weight", "odd")
    ]
    rows += [row(model="N"), row(model="N", phase="eval")]
    found = page(recording(*rows))
    assert explored(found)["tensors"]["kind"]["names"] == [
        "outputs",
        "inputs",
        "gradients of outputs",
        "parameters",
        "other tensors",
    ]
    fields = ("model", "tensor", "phase", "kind")
    tensors = list(zip(*(names(found, field) for field in fields), strict=True))
    assert tensors[1:3] == [
        ("M", "out[1]", "forward", "outputs"),
        ("M", "in.x", "forward", "inputs"),
    ]
    assert tensors[-2:] == [
        ("N", "out", "forward", "outputs"),
        ("N", "out", "eval", "outputs"),
    ]


def test_histograms_are_drawn_as_shares_where_they_were_recorded(recording, page):
    def counts(**by_bin):
        return [by_bin.get(f"b{index}", 0) for index in range(64)]

    rows = [
        row("a", 0, histogram=counts(b41=1, b43=1)),
        row("a", 1, histogram=counts(b43=2)),
        row("b", histogram=counts(b42=5)),
    ]
    found = page(recording(*rows))
    assert "Magnitudes" in text(found)
    histograms = explored(found)["histograms"]
    assert histograms["bins"] == ["2^-1", "2^0", "2^1"]
    shares = np.nan_to_num(unpack(histograms["rows"][0])).reshape(-1, 3)
    assert shares.tolist() == [[0.25, 0.0, 0.75], [0.0, 1.0, 0.0]]
    by_step = np.nan_to_num(unpack(histograms["steps"][0]["outputs"])).reshape(3, -1)
    assert by_step == pytest.approx(np.array([[1 / 7, 0], [5 / 7, 0], [1 / 7, 1]]), rel=1e-3)
    assert "Magnitudes" not in text(page(recording(row())))


def test_steps_beyond_the_columns_are_put_together_and_it_is_said(recording, page):
    rows = [
        row(f"blocks.{index // 3}.{index % 3}", number, abs_mean=float(number))
        for number in range(1000)
        for index in range(300)
    ]
    rows[150_000]["abs_mean"] = 5000.0
    found = page(recording(*rows))
    columns = explored(found)["columns"]
    assert len(columns) == 250 and columns[0] == "0–3" and columns[-1] == "996–999"
    assert "1,000 steps are grouped by 4" in text(found)
    values = table(found, "abs_mean")
    assert values.shape == (300, 250)
    assert values.max() == 5000.0 and (values[:, -1] == 999).all(), "no extreme is lost"


def test_tensors_beyond_the_page_are_left_out_but_for_those_that_are_not_finite(
    recording, page, monkeypatch
):
    monkeypatch.setattr(explorer, "MAX_TENSORS", 100)
    monkeypatch.setattr("otel_torch.show.explorer.MAX_TENSORS", 100)
    rows = [row(f"m{index}", abs_mean="NaN" if index == 400 else 1.0) for index in range(500)]
    found = page(recording(*rows))
    assert names(found, "module") == [f"m{index}" for index in (*range(99), 400)]
    assert explored(found)["bad"] == [99]
    assert "Left out: 400 further tensors" in text(found)


def test_the_page_is_bounded_whatever_the_recording(recording, page, tmp_path):
    numbers = random.Random(0)
    rows = [
        {
            "module": f"{index}",
            "tensor": kind,
            "step": number,
            **{f"s{item}": numbers.gauss(0, 1e9) for item in range(30)},
        }
        for number in range(90)
        for index in range(130)
        for kind in ("out", "in[0]")
    ]
    found = page(recording(*rows))
    assert (tmp_path / "page.html").stat().st_size < 6_000_000
    assert "Left out: 6 further statistics, such as s24, s25, s26, s27, s28" in text(found)


def test_modules_and_steps_are_selected(recording, page):
    rows = [row(name, index) for index in range(5) for name in ("a.1", "b.1")]
    found = page(recording(*rows), "--module", "^b", "--step", "2-3")
    assert set(cells(found, "abs_mean")) == {("b.1", "2"), ("b.1", "3")}
    assert "10 of 2 modules, 2 of them shown" in text(found)


def test_several_recordings_are_laid_on_each_other(recording, page, tmp_path):
    first = recording(row("a", 0), row("a", 2), row("only here", 0), meta=META)
    rows = [row("b", 0), *[row("a", step, abs_mean=7.0 + step) for step in (0, 1, 2)]]
    second = write(
        tmp_path / "second.jsonl",
        "\n".join(map(json.dumps, [*rows, row("a", 2, call=1, nonfinite=1)])) + "\n",
    )
    found = page(first, second)
    assert explored(found)["recordings"] == ["run.jsonl", "second.jsonl"]
    assert explored(found)["columns"] == ["0", "1", "2"], "the steps of both, in order"
    assert names(found, "module") == ["a", "only here", "b"]
    tables = [np.nan_to_num(table(found, "abs_mean", index), nan=-1).tolist() for index in (0, 1)]
    assert tables == [
        [[1, -1, 1], [1, -1, -1], [-1, -1, -1]],
        [[7, 8, 9], [-1, -1, -1], [1, -1, -1]],
    ]
    (button,) = [attributes for tag, attributes in found.elements if tag == "button"]
    assert (button["data-tensor"], button["data-recording"]) == ("0", "1")
    message = text(found)
    assert "NaN and Inf in second.jsonl" in message and "run r7" in message
    assert "2 tensors, all values finite" in message
    assert "8 records, 4 tensors" in found.said


def test_several_recordings_need_a_page(recording, capsys):
    path = recording(row())
    assert main(["show", path, path]) == 2
    assert "several recordings are shown on one page: give --html FILE" in capsys.readouterr().err


# -- the timeline


def test_the_outcome_is_what_matters(recording, page):
    found = page(recording(row(step=0), row(step=4, nonfinite=1), meta=META))
    assert "NaN or Inf since step 4" in text(found) and "ended cleanly" not in text(found)


def timeline(page):
    return data(page)["timelines"].get("timeline-0")


def test_without_traces_one_line_says_how_to_get_a_timeline(recording, page):
    found = page(recording(row(), meta=META))
    assert timeline(found) is None
    assert (
        "To see when each region and step began and ended, also set OTEL_TORCH_OTLP_FILE=FOLDER"
        in text(found)
    )


def test_spans_beside_the_recording_are_its_timeline(recording, page, tmp_path):
    path = recording(row(), meta=META)
    happened = ("exception", 2.5, {"exception.type": "ValueError"})
    mine = line(
        span("torch.run", 0, 9),
        span("region", 1, 4, torch_region="r", events=[happened]),
        step(3, 1.5, 2),
        rank=3,
    )
    write(tmp_path / "traces.rank3.jsonl", mine)
    write(tmp_path / "traces.rank4.jsonl", line(span("of another rank", 0, 99), rank=4))
    drawn = timeline(page(path))
    spans = [
        (item["name"], item["from"], item["to"], item["line"], item["kind"])
        for item in drawn["spans"]
    ]
    assert spans == [
        ("torch.run", 0.0, 9.0, 0, "other"), ("region", 1.0, 4.0, 1, "region"), ("torch.step 3", 1.5, 2.0, 2, "step"),
    ]  # fmt: skip
    (mark,) = drawn["events"]
    assert (mark["at"], mark["line"], mark["text"]) == (
        2.5,
        1,
        "exception\nexception.type ValueError",
    )


def test_given_traces_of_another_run_are_not_drawn_and_it_is_said(recording, page, tmp_path):
    write(tmp_path / "else" / "traces.jsonl", line(span("torch.run", 0, 9), run="another"))
    found = page(recording(row(), meta=META), "--traces", tmp_path / "else")
    assert timeline(found) is None
    assert (
        "the traces are of another run or another rank" in text(found)
        and "the traces are of another run or another rank" in found.said
    )


def test_of_many_spans_the_longest_are_drawn_and_it_is_said(recording, page, tmp_path):
    many = [span(f"s{index}", index, index + (0.9 if index % 2 else 0.1)) for index in range(5000)]
    found = page(recording(row()), "--traces", write(tmp_path / "traces.jsonl", line(*many)))
    values = timeline(found)["spans"]
    assert len(values) == 2000 and all(item["to"] - item["from"] > 0.8 for item in values)
    assert "The 2,000 longest of 5,000 spans are drawn." in text(found)


def test_a_timeline_never_draws_two_spans_in_one_place():
    numbers = random.Random(3)
    here = Process(None, 0, 1, None)
    spans = []
    for index in range(400):
        start = numbers.randrange(1000)
        spans.append(Span(f"{index}", start, start + numbers.randrange(1, 60), here))
    placed = assign_lanes(spans)
    by_place: dict[tuple[int, int], list[Span]] = {}
    for item, place in zip(spans, placed, strict=True):
        by_place.setdefault(place, []).append(item)
    for (lane, depth), inside in by_place.items():
        inside.sort(key=lambda item: item.start_ns)
        assert all(item.end_ns <= other.start_ns for item, other in pairwise(inside))
        above = by_place.get((lane, depth - 1), [])
        assert depth == 0 or all(
            any(up.start_ns <= item.start_ns and item.end_ns <= up.end_ns for up in above)
            for item in inside
        )


# -- safety


def test_no_name_runs_in_a_page(recording, page, tmp_path):
    meta = META | {
        "trace_id": HOSTILE, "versions": {HOSTILE: HOSTILE}, "settings": {HOSTILE: HOSTILE}, "kernels": HOSTILE,
        "models": {HOSTILE: {"modules": HOSTILE}}, "regions": {HOSTILE: {"count": 1}}, "writing_ended": HOSTILE,
    }  # fmt: skip
    bad = row(
        HOSTILE,
        tensor=HOSTILE,
        model=HOSTILE,
        phase=HOSTILE,
        branch=HOSTILE,
        nonfinite=1,
        **{HOSTILE: 1.5},
    )
    hostile = HOSTILE.replace("\ud800", "")  # which no writer of protobuf's JSON writes
    traces = line(
        span(hostile, 0, 1, events=[(hostile, 0.5, {hostile: hostile})], **{hostile: hostile}),
        rank=3,
    )
    given = "--traces", write(tmp_path / "traces.jsonl", traces)
    honest = page(
        recording(row(nonfinite=1), meta=META),
        "--traces",
        write(tmp_path / "t.jsonl", line(span("a", 0, 1), rank=3)),
    )
    found = page(recording(bad, meta=meta), *given)
    assert len(found.scripts) == 3 and found.scripts[1:] == honest.scripts[1:]
    assert {tag for tag, _ in found.elements} == {tag for tag, _ in honest.elements} | {"p"}
    found.assert_is_closed()
    assert "alert(1)" in text(found) and "alert(1)" in str(timeline(found))
    assert names(found, "kind") == ["other tensors"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--html", "no/such/folder.html"),
            "no/such/folder.html: cannot be written: No such file or directory",
        ),
        (("--html", "."), "cannot be written: Is a directory"),
        (
            ("--html", "p.html", "--module", "nothing"),
            "none of its 1 records is selected; it has 1 modules (block)",
        ),
        (("--html", "p.html", "--traces", "run.jsonl"), "run.jsonl: is a recording"),
    ],
)
def test_bad_input_is_one_line_status_2_and_no_page(
    recording, tmp_path, monkeypatch, capsys, words, message
):
    recording(row())
    monkeypatch.chdir(tmp_path)
    assert main(["show", "run.jsonl", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err and len(captured.err.splitlines()) == 1
    assert not (tmp_path / "p.html").exists()


def test_a_page_needs_no_further_package(recording, page, monkeypatch):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    assert "1 tensor over 1 step" in text(page(recording(row())))


# -- the grid


@pytest.mark.parametrize("cells_in_memory", [1 << 20, 100, 1])
@pytest.mark.parametrize("statistic", ["x", "min", "zeros"])
def test_whatever_is_put_together_is_what_putting_all_together_gives(
    monkeypatch, statistic, cells_in_memory
):
    """Merging gives the same in one chunk or many, with columns for all steps or one."""
    monkeypatch.setattr(grids, "MAX_CELLS", cells_in_memory)
    numbers = random.Random(7)
    rows = [
        {"module": f"m{numbers.randrange(9)}", "tensor": "out", "step": index // 5, "loop": 0,
         statistic: numbers.choice([math.nan, math.inf, 0.0]) if numbers.random() < 0.01 else float(numbers.randrange(-99, 99))}
        for index in range(3000)
    ]  # fmt: skip
    if statistic == "zeros":
        rows = [
            item | {"zeros": abs(item["zeros"]) if math.isfinite(item["zeros"]) else 1.0}
            for item in rows
        ]
    grid = Grid()
    for start in range(0, len(rows), 700):
        grid.add(rows[start : start + 700])
    array = grid.statistics[statistic]
    assert array.shape == (9, len(grid.columns)) and len(grid.columns) <= grids.MAX_COLUMNS
    column_of = {step: index for index, steps in enumerate(grid.columns) for step in steps}
    expected: dict[tuple[str, int], list[float]] = {}
    for item in rows:
        value = item[statistic] if math.isfinite(item[statistic]) else math.inf
        expected.setdefault((item["module"], column_of[(0, item["step"])]), []).append(value)
    for index, series in enumerate(grid.series):
        for column in range(len(grid.columns)):
            values = expected.get((series.module, column))
            wanted = math.nan if values is None else combine(statistic, np.array([values]))[0]
            found = array[index, column]
            # of two values of one magnitude and different signs either may stay
            assert (
                (found != found and wanted != wanted)
                or found == wanted
                or (statistic == "x" and found == -wanted)
            )
    if cells_in_memory == 1:
        assert len(grid.columns) == 1


def test_fields_that_are_no_numbers_are_no_statistics():
    odd = {
        "x": "<error>",
        "y": [1, 2],
        "z": True,
        "order": [1, 2],
        "value": 3,
        "class": "Linear",
        "huge": 10**400,
        "rms": 2,
    }
    grid = Grid.of(iter([{"module": "a", "tensor": "out", "step": None, **odd}]))
    assert list(grid.statistics) == ["rms", "huge"]
    assert np.isinf(grid.statistics["huge"]).all()
    assert explorer_data(grid, ["a"])["columns"] == ["none"]


def test_reading_for_a_page_needs_neither_torch_nor_the_sdk(tmp_path):
    write(tmp_path / "run.jsonl", json.dumps(row()) + "\n")
    code = (
        "import sys, otel_torch.show.page as page, otel_torch.rendering.page, otel_torch.show.chrome_trace\nfrom pathlib import Path\n"
        "from otel_torch.show.selection import Selection\n"
        "page.write_page([Selection('run.jsonl')], Path('p.html'), [], lambda text: None)\n"
        "sys.exit(len({'torch', 'opentelemetry.sdk'} & {*sys.modules}))"
    )
    run_python(tmp_path, code, OTEL_TORCH_ENABLED="0")
