"""The notebooks of the documentation run, and print what they show."""

import json
import pathlib
import re
import runpy

import pytest

from tests.sampling import sample

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
# decimals, which a processor rounds
DECIMAL = re.compile(r"-?\d+\.\d+(e[-+]\d+)?|-?\d+e[-+]\d+")


def name_of(path):
    return path.stem


def outputs(cell):
    """Return what a cell printed by kind, without decimals, blanks and pictures. Of stderr only our
    lines count: matplotlib may say there that it looks for fonts.
    """
    printed = {}
    for output in cell["outputs"]:
        texts = output.get("data") or {output["name"]: output["text"]}
        for kind, text in texts.items():
            lines = "".join(text).splitlines()
            if kind == "stderr":
                lines = [line for line in lines if line.startswith("otel_torch")]
            printed[kind] = printed.get(kind, "") + "\n".join(lines) + "\n"
    return {
        kind: "" if kind.startswith("image/") else DECIMAL.sub("#", text).split()
        for kind, text in printed.items()
    }


@pytest.mark.scoreboard  # a kernel each
@pytest.mark.parametrize("path", sample(NOTEBOOKS, 3), ids=name_of)
def test_a_notebook_prints_what_it_shows(path):
    execute = runpy.run_path(str(ROOT / "docs" / "make_notebooks.py"))["execute"]
    stored = json.loads(path.read_text(encoding="utf-8"))["cells"]
    printed = [outputs(cell) for cell in execute(path)["cells"] if cell["cell_type"] == "code"]
    shown = [outputs(cell) for cell in stored if cell["cell_type"] == "code"]
    assert printed == shown, "run `make notebooks`"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_a_notebook_is_executed_and_its_links_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    cells = json.loads(text)["cells"]
    counts = [cell["execution_count"] for cell in cells if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))
    prose = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", prose)
    assert links and [link for link in links if not (path.parent / link).exists()] == []
    assert "/tmp/" not in text and "/home/" not in text and "Traceback" not in text


def test_the_site_has_a_page_of_every_notebook():
    made = runpy.run_path(str(ROOT / "docs" / "site_hooks.py"))["MADE"]
    pages = {path: made[f"notebooks/{path.stem}.md"]() for path in NOTEBOOKS}
    assert len(pages) == 3 and all(page.startswith("# ") for page in pages.values())
    port_bug = pages[ROOT / "docs" / "notebooks" / "port-bug.ipynb"]
    assert "```python\n" in port_bug and "<b>diverged: " in port_bug and "<b>match: " in port_bug
