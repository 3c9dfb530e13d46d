"""Reports of a comparison: one screen of text, and a page that opens offline."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import math
import re
import sys

import pytest

import otel_torch.rendering.page
from otel_torch.parity.finding import ComparedPair, Finding, Report, UncomparedTensor
from otel_torch.parity.report.html import write_html
from otel_torch.parity.report.html_charts import MAX_COLUMNS, MAX_POINTS, MAX_ROWS
from otel_torch.parity.report.text import SCREEN_LINES, render_text

MODEL, PORT = "LlamaForCausalLM", "LlamaPort"
BLOCK = (  # module, its name in the port, tensor, side
    ("input_layernorm", "norm_1", "in", "input"),
    ("input_layernorm", "norm_1", "out", "output"),
    ("self_attn.q_proj", "attn.to_q", "out", "output"),
    ("self_attn.k_proj", "attn.to_k", "out", "output"),
    ("self_attn.v_proj", "attn.to_v", "out", "output"),
    ("self_attn.o_proj", "attn.to_out", "in", "input"),
    ("self_attn.o_proj", "attn.to_out", "out", "output"),
    ("mlp.gate_proj", "ffn.gate", "out", "output"),
    ("mlp.down_proj", "ffn.down", "out", "output"),
)


def pair(
    depth, module, port_module, tensor, side, step, error, state, floor=1e-6, shape=(2, 16, 64)
):
    scale = 1 + (error or 0) / 10 if math.isfinite(error or 0) else math.nan
    numbers = {"abs_mean": 0.8, "mean": 0.01, "std": 1.0}
    return ComparedPair(
        MODEL, module, tensor, side, 0, step, 0, PORT, port_module, tensor, side, 0, step, 0, depth, error, floor, state,
        {**numbers, "shape": list(shape), "dtype": "torch.float32"},
        {**{key: value * scale for key, value in numbers.items()}, "shape": list(shape), "dtype": "torch.float32"},
    )  # fmt: skip


def pairs(layers, steps, wrong_layer=None, wrong="self_attn.o_proj"):
    """Return all pairs of a port with an error that enters at one layer's input and stays."""
    rows = []
    for step in range(steps):
        error, depth = 0.0, 0
        for layer in range(layers):
            for module, port_module, tensor, side in BLOCK:
                state = "inherited" if error else "right"
                if layer == wrong_layer and module == wrong and side == "input":
                    error = error or 0.64
                    state = "introduced" if step == 0 else "inherited"
                size = (
                    error / (1 + (layer - (wrong_layer or 0))) if error else 2e-7 * (1 + depth % 5)
                )
                if step and wrong_layer is not None:
                    state, size = (
                        ("inherited", 0.3) if state == "right" else (state, max(size, 0.3))
                    )
                names = f"model.layers.{layer}.{module}", f"blocks.{layer}.{port_module}"
                rows.append(pair(depth, *names, tensor, side, step, size, state))
                depth += 1
    return rows


def finding(**fields):
    defaults = {
        "model": MODEL, "module": "model.layers.1.self_attn.o_proj", "tensor": "in", "loop": 0, "step": 0, "call": 0,
        "phase": "forward", "port_model": PORT, "port_module": "blocks.1.attn.to_out", "port_tensor": "in", "port_loop": 0,
        "port_step": 0, "port_call": 0, "rank": None, "side": "input", "port_side": "input", "kind": "value", "error": 0.64,
        "floor": 1e-6, "explanation": "queries, keys and values are right; what the code between them and o_proj makes is not.",
    }  # fmt: skip
    return Finding(**{**defaults, **fields})


def diverged(layers=4, steps=1, **fields):
    compared = pairs(layers, steps, wrong_layer=1)
    first = finding()
    index = next(position for position, pair in enumerate(compared) if pair.state == "introduced")
    chain = [pair for pair in compared[:index] if pair.tensor == "out" or pair.depth == 0]
    defaults = {
        "verdict": "diverged", "pairs": len(compared), "first": first, "introduced": [first], "compared": compared,
        "chain": chain, "reference": "ref.jsonl", "port": "port.jsonl",
    }  # fmt: skip
    return Report(**{**defaults, **fields})


def busy():
    """Return a report with many entries of every kind."""
    further = [
        finding(
            module=f"model.layers.{layer}.mlp.down_proj",
            tensor="out",
            side="output",
            error=0.01 * layer,
        )
        for layer in range(2, 30)
    ]
    first = finding()
    modules = [
        UncomparedTensor(MODEL, f"model.layers.{layer}.rotary_embedding", "out")
        for layer in range(40)
    ]
    return diverged(
        layers=22,
        steps=3,
        introduced=[first, *further],
        harmless=[
            finding(kind="dtype"),
            finding(kind="value", module="model.rotary"),
            finding(kind="layout", side="output"),
        ]
        * 5,
        unpaired={"reference": modules, "port": modules[:2]},
        ambiguous=modules[:7],
        warnings=[
            "the reference ended early: its last step is left out",
            *(f"warning {number}" for number in range(30)),
        ],
        compared_left_out=1_000_000,
        weaker=True,
    )


def match(**fields):
    compared = pairs(layers=4, steps=2)
    return Report(
        "match",
        pairs=len(compared),
        compared=compared,
        reference="ref.jsonl",
        port="port.jsonl",
        **fields,
    )


def test_a_divergence_is_told_on_one_screen():
    text = render_text(diverged(), color=False)
    assert (
        text
        == """\
reference ref.jsonl, port port.jsonl
✗ First divergence: the input `in` of model.layers.1.self_attn.o_proj has different values (step 0,
  call 0). Everything recorded before it matches.
             model             module                           tensor  side   step  call
  reference  LlamaForCausalLM  model.layers.1.self_attn.o_proj  in      input     0     0
  port       LlamaPort         blocks.1.attn.to_out             in      input     0     0
  The relative L2 error is 0.64, 640,000 times its floor of 1e-06. Why: queries, keys and values are
  right; what the code between them and o_proj makes is not.

Next: find the line and prove it, in one command:
  otel-torch bisect -- REFERENCE_COMMAND -- PORT_COMMAND
Or record every operation of both programs, and compare, which names the line of each:
  OTEL_TORCH_ENABLED=1 OTEL_TORCH_CAPTURE=graph OTEL_TORCH_JSONL=ref-graph.jsonl REFERENCE_COMMAND
  OTEL_TORCH_ENABLED=1 OTEL_TORCH_CAPTURE=graph OTEL_TORCH_JSONL=port-graph.jsonl PORT_COMMAND
  otel-torch diff ref-graph.jsonl port-graph.jsonl

              from the inputs to it            tensor  in the port           error  floor
✓ right       model.layers.0.input_layernorm   in      blocks.0.norm_1       2e-07  1e-06
              … 2 more: 2 right
✓ right       model.layers.0.self_attn.k_proj  out     blocks.0.attn.to_k    8e-07  1e-06
✓ right       model.layers.0.self_attn.v_proj  out     blocks.0.attn.to_v    1e-06  1e-06
✓ right       model.layers.0.self_attn.o_proj  out     blocks.0.attn.to_out  4e-07  1e-06
✓ right       model.layers.0.mlp.gate_proj     out     blocks.0.ffn.gate     6e-07  1e-06
✓ right       model.layers.0.mlp.down_proj     out     blocks.0.ffn.down     8e-07  1e-06
✓ right       model.layers.1.input_layernorm   out     blocks.1.norm_1       2e-07  1e-06
✓ right       model.layers.1.self_attn.q_proj  out     blocks.1.attn.to_q    4e-07  1e-06
✓ right       model.layers.1.self_attn.k_proj  out     blocks.1.attn.to_k    6e-07  1e-06
✓ right       model.layers.1.self_attn.v_proj  out     blocks.1.attn.to_v    8e-07  1e-06
✗ introduced  model.layers.1.self_attn.o_proj  in      blocks.1.attn.to_out   0.64  1e-06

error by depth: 36 pairs of step 0 in execution order, log scale, · within its floor
   0.64                              ████████▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇
                                     ████████████████████████████████████████████
  1e-06  ····························████████████████████████████████████████████
                                     ▲ input of model.layers.1.self_attn.o_proj

diverged: 36 pairs compared, 1 finding"""
    )


def of_one_run(report):
    report.reference = report.port = "both.jsonl"
    report.models = ("LlamaForCausalLM", "LlamaPort")
    return report


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_the_busiest_report_fits_one_screen_and_still_says_what_matters(width):
    report = of_one_run(busy())  # whose next steps are the most
    lines = render_text(report, color=False, width=width).splitlines()
    assert len(lines) <= SCREEN_LINES
    text = " ".join(" ".join(lines).split())
    for expected in (
        "First divergence: the input `in` of model.layers.1.self_attn.o_proj", "blocks.1.attn.to_out", "This verdict is weaker",
        "OTEL_TORCH_TENSORS=both-tensors", "--tensors both-tensors", "28 further findings", "5 dtype, 5 healed, 5 layout", "only in the reference: 40",
        "only in the port: 2", "ambiguous: 7", "more warnings (--all)", "1,000,000 compared pairs",
        "OTEL_TORCH_ISOLATE=both-whole-tensors",
    ):  # fmt: skip
        assert expected in text
    assert (
        lines[-1]
        == "diverged: 594 pairs compared, 29 findings, 15 harmless differences, 49 not compared"
    )
    uncut = [line for line in lines if "_COMMAND" not in line and "LlamaForCausalLM" not in line]
    assert all(len(line) <= max(width, 90) for line in uncut)


def test_several_findings_are_told_apart_in_isolation_and_one_needs_none():
    isolated, ranks = of_one_run(busy()), busy()
    isolated.isolated = True
    ranks.reference, ranks.port = "ref", "port"  # bisect tells their faults apart
    for report in (of_one_run(diverged()), isolated, ranks):
        assert "OTEL_TORCH_ISOLATE" not in render_text(report, color=False, width=100)


def test_everything_is_everything():
    text = render_text(busy(), color=False, show_all=True)
    for layer in range(2, 30):
        assert (
            f"output of model.layers.{layer}.mlp.down_proj `out`, step 0, call 0: value, error {0.01 * layer:.2g}"
            in text
        )
    assert (
        "model.layers.39.rotary_embedding" in text
        and "warning 29" in text
        and "more (--all)" not in text
    )
    assert text.count("✓ right") == len(busy().chain)


def test_several_steps_are_a_curve_of_their_own():
    grown = diverged(steps=3)
    for pair in grown.compared:
        if pair.step == 2 and pair.depth == 30:
            pair.error = 2.5
    assert "error by step: ███  0.64 at step 0, 2.5 at step 2" in render_text(grown, color=False)


def test_a_match_says_how_near_it_was_and_what_it_did_not_see():
    report = match(
        unpaired={"reference": [UncomparedTensor(MODEL, "rope", "out")], "port": []},
        harmless=[finding(kind="dtype")],
    )
    for pair in report.compared:
        pair.error = min(pair.error or 0.0, 5e-7)
    report.compared[20].error = 9e-7
    report.compared[21].error = 9e-6  # right by another value, of the same rows
    assert (
        render_text(report, color=False)
        == """\
reference ref.jsonl, port port.jsonl
✓ The port matches the reference: 72 tensor pairs within floor.
  Closest to its floor: model.layers.2.self_attn.q_proj `out` at step 0, error 9e-07, floor 1e-06.

harmless: 1 dtype (input of model.layers.1.self_attn.o_proj)
only in the reference: 1 (rope)

match: 72 pairs compared, 1 harmless difference, 1 not compared"""
    )


def test_a_match_without_sketches_says_that_it_is_weaker():
    assert "This verdict is weaker: without sketches only statistics" in render_text(
        match(weaker=True), color=False
    )
    assert "weaker" not in render_text(match(), color=False)


def test_what_cannot_be_compared_says_why():
    report = Report(
        "incomparable",
        reason="no module of the port has a counterpart",
        warnings=["the port ended early"],
    )
    assert render_text(report, color=False) == (
        "These recordings cannot be compared: no module of the port has a counterpart\n\n! the port ended early\n\n"
        "incomparable: 0 pairs compared"
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"side": "output", "kind": "layout"},
            "the output `in` of {module} has its values in a different order",
        ),
        (
            {"side": "output", "kind": "nonfinite", "error": math.inf},
            "has NaN or Inf values on one side only (step 0, call 0). Everything that enters the module matches.",
        ),
        (
            {"side": "parameter", "kind": "weights", "tensor": "param.weight"},
            "the weight `param.weight` of {module} differs. No forward pass is involved.",
        ),
        (
            {"kind": "missing", "port_module": None, "error": None},
            "only the reference has {module}, the port does not",
        ),
        (
            {"kind": "missing", "module": None, "error": None},
            "only the port has blocks.1.attn.to_out",
        ),
        ({"loop": 1, "step": None, "call": 3}, "(loop 1, call 3)"),
        ({"rank": 3}, "This is rank 3."),
    ],
)
def test_each_kind_of_finding_has_its_words(fields, expected):
    report = Report("diverged", first=finding(**fields), introduced=[finding(**fields)])
    text = " ".join(render_text(report, color=False, width=200).split())
    assert expected.format(module="model.layers.1.self_attn.o_proj") in text
    assert text.endswith("diverged: 0 pairs compared, 1 finding")


HOSTILE = "a\x1b[2J\u202e`{module}`</script><script>alert(1)</script><!--\ud800\n"


def hostile():
    report = diverged()
    for pair in report.compared:
        pair.model = pair.module = pair.tensor = pair.port_module = pair.port_tensor = HOSTILE
        pair.statistics = {HOSTILE: HOSTILE}
    everywhere = dict.fromkeys(
        ("model", "module", "tensor", "port_model", "port_module", "port_tensor", "explanation"),
        HOSTILE,
    )
    report.first = finding(**everywhere)
    report.introduced = [report.first, finding(**everywhere, step=1)]
    report.harmless = [finding(**everywhere, kind="dtype")]
    report.unpaired = {
        side: [UncomparedTensor(HOSTILE, HOSTILE, HOSTILE)] for side in ("reference", "port")
    }
    report.ambiguous = [UncomparedTensor(HOSTILE, HOSTILE, HOSTILE)]
    report.warnings, report.reference, report.port = [HOSTILE], HOSTILE, HOSTILE
    return report


@pytest.mark.parametrize("everything", [False, True])
def test_no_name_reaches_the_terminal_raw(everything):
    text = render_text(hostile(), color=False, show_all=everything)
    assert all(character.isprintable() or character == "\n" for character in text)
    coloured = re.sub(r"\x1b\[\d+m", "", render_text(hostile(), color=True, show_all=everything))
    assert coloured == text


class Page(html.parser.HTMLParser):
    """The elements, scripts and texts that a browser finds in a page."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts, self.open, self.texts, self.unclosed = [], [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in ("meta", "br", "input"):
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            self.scripts[-1] += data
        elif self.open[-1:] != ["style"]:
            self.texts.append(data)

    def assert_is_closed(self):
        """Check that the page loads nothing, runs its own scripts only, and prints no command."""
        attributes = {name for _, given in self.elements for name in given}
        assert not [name for name in attributes if name.startswith("on")]
        assert not attributes & {"src", "href", "srcset", "action", "data", "poster", "background"}
        policy = next(given["content"] for _, given in self.elements if "http-equiv" in given)
        directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
        assert directives["default-src"] == "'none'"
        assert set(directives["script-src"].split()) == {
            f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
            for script in self.scripts[1:]
        }
        assert "<" not in self.scripts[0]
        texts = "".join(self.texts)
        assert not re.search(r"@import|url\(", texts)
        assert all(character.isprintable() or character == "\n" for character in texts)


@pytest.fixture
def page(tmp_path):
    pytest.importorskip("vl_convert")

    def make(report):
        path = tmp_path / "new" / "report.html"
        write_html(report, path)
        parsed = Page(path.read_text(encoding="utf-8"))
        assert parsed.open == []
        return parsed

    return make


def plots(page):
    return json.loads(page.scripts[0])


def drawn(plot):
    """Return the picture that Vega draws of a plot."""
    import vl_convert

    return vl_convert.vegalite_to_svg(
        {**plot, "width": 900} if plot["width"] == "container" else plot
    )


def points(plot):
    return plot["data"]["values"]


def test_a_page_tells_of_the_divergence(page):
    report = busy()
    parsed = page(report)
    text = " ".join(" ".join(parsed.texts).split())
    for expected in (
        "First divergence: the input in of model.layers.1.self_attn.o_proj", "blocks.1.attn.to_out",
        "640,000 times its floor", "This verdict is weaker", "Error by depth", "Module × step", "Modules",
        "Statistics of the finding", "Findings",
        "Harmless differences: 15", "Only in the reference: 40", "Ambiguous: 7", "Warnings: 31", "warning 29",
    ):  # fmt: skip
        assert expected in text


def test_the_tree_is_unfolded_where_the_error_came_in(page):
    parsed = page(diverged())
    text = " ".join(" ".join(parsed.texts).split())
    tree = text[text.index("leads to a finding.") : text.index("Statistics of the finding")]
    assert (
        "✗ model ✗ layers ✓ 0" in tree
        and "✗ o_proj = blocks.1.attn.to_out input introduced 0.64" in tree
    )
    assert "↓ gate_proj = blocks.1.ffn.gate output inherited 0.64" in tree
    folds = [attributes for tag, attributes in parsed.elements if tag == "details"]
    assert 0 < sum("open" in attributes for attributes in folds) < len(folds)


def test_the_curve_and_the_map_are_drawn_from_the_pairs(page):
    report = diverged(layers=4, steps=3)
    made = plots(page(report))
    curve = points(made["curve"])
    assert [(point["depth"], point["error"]) for point in curve] == [
        (pair.depth, pair.error) for pair in report.compared if pair.step == 0
    ]
    assert [point["text"] for point in curve if point["state"] == "introduced"] == [
        "✗ introduced\nreference  model.layers.1.self_attn.o_proj  in\nport       blocks.1.attn.to_out  in\n"
        "error 0.64, floor 1e-06, step 0"
    ]
    cells = {(point["module"], point["step"]): point["heat"] for point in points(made["heat"])}
    assert len(cells) == 4 * 7 * 3
    assert cells["model.layers.0.mlp.down_proj", "0"] == "within its floor"
    assert cells["model.layers.1.self_attn.o_proj", "0"] == "more"
    assert "var(--introduced)" in drawn(made["curve"])
    assert "model.layers.3.mlp.gate_proj" in drawn(made["heat"])


def test_errors_of_zero_and_errors_without_end_have_a_place_on_a_log_scale(page):
    report = diverged()
    report.compared[0].error, report.compared[-1].error, report.compared[-2].error = (
        0.0,
        math.inf,
        None,
    )
    made = plots(page(report))
    values = points(made["curve"])
    assert all(math.isfinite(point["error"]) and point["error"] > 0 for point in values)
    assert "error NaN/Inf" in values[-1]["text"]
    assert "NaN or Inf" in {point["heat"] for point in points(made["heat"])}


def test_the_statistics_stand_side_by_side(page):
    text = " ".join(" ".join(page(diverged()).texts).split())
    assert "statistic reference port relative difference abs_mean 0.8 0.8512 0.06" in text
    assert "dtype float32 float32 equal" in text and "shape 2×16×64 2×16×64 equal" in text


def test_a_match_and_an_incomparable_pair_have_pages_too(page):
    assert "The port matches the reference." in " ".join(page(match()).texts)
    parsed = page(Report("incomparable", reason="another model"))
    assert "another model" in " ".join(parsed.texts)
    assert plots(parsed) == {} and len(parsed.scripts) == 1


def test_no_name_runs_in_a_page(page):
    honest, parsed = page(diverged()), page(hostile())
    assert len(parsed.scripts) == len(honest.scripts) == 3
    assert parsed.scripts[1:] == honest.scripts[1:]
    allowed = {
        "html", "head", "meta", "title", "style", "body", "header", "p", "span", "h1", "h2", "h3", "table", "tr", "th", "td",
        "code", "pre", "details", "summary", "div", "ul", "li", "script",
    }  # fmt: skip
    assert {tag for tag, _ in parsed.elements} <= allowed
    parsed.assert_is_closed()
    assert "alert(1)" in "".join(parsed.texts)
    assert "alert(1)" in points(plots(parsed)["curve"])[0]["text"]
    assert "alert(1)" in drawn(plots(parsed)["heat"])


def test_the_largest_tree_shows_the_way_to_the_finding(page):
    parsed = page(diverged(layers=900))
    text = " ".join(" ".join(parsed.texts).split())
    assert "branches without a finding are folded" in text
    assert "✗ o_proj = blocks.1.attn.to_out input introduced 0.64" in text
    assert "↓ 899 and 9 modules in it" in text


def test_a_name_of_ten_thousand_parts_is_still_a_page(page):
    report = diverged()
    report.compared[20].module = "a." * 10_000
    page(report)


def test_a_hundred_thousand_pairs_make_a_page_that_opens(page, tmp_path):
    report = diverged(layers=220, steps=51)
    assert len(report.compared) > 100_000
    made = plots(page(report))
    assert len(points(made["curve"])) <= MAX_POINTS
    assert [
        point["depth"] for point in points(made["curve"]) if point["state"] == "introduced"
    ] == [14]
    assert len({point["module"] for point in points(made["heat"])}) <= MAX_ROWS
    assert len({point["step"] for point in points(made["heat"])}) <= MAX_COLUMNS
    assert (tmp_path / "new" / "report.html").stat().st_size < 4_000_000
    assert len(render_text(report, color=False).splitlines()) <= SCREEN_LINES


def test_without_the_plotting_library_one_line_says_what_to_install(tmp_path, monkeypatch):
    otel_torch.rendering.page.plot_library.cache_clear()
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(
        ModuleNotFoundError,
        match=r"^--html needs vl-convert-python: pip install 'otel-torch\[html\]'$",
    ):
        write_html(match(), tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()
