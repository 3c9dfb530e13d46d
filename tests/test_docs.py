"""The documents say what is: tables are made from the code, links lead somewhere, commands run, names are known."""

import dataclasses
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys

import pytest

from otel_torch.settings import Settings

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
names = {row.metadata[key] for row in dataclasses.fields(Settings) for key in ("name", "alias") if row.metadata[key]}


def page_id(page):
    return str(page.relative_to(ROOT))


def test_configuration_is_made_from_the_settings():
    made = runpy.run_path(str(ROOT / "docs" / "make_configuration.py"))["make_page"]()
    assert (ROOT / "docs" / "configuration.md").read_text() == made, "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_variables_are_settings(page):
    assert set(re.findall(r"\bOTEL_TORCH_[A-Z_]+\b", page.read_text())) - names == set()


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_make_targets_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert (
        set(re.findall(r"`make ([a-z-]+)", page.read_text())) | set(re.findall(r"^make ([a-z-]+)", page.read_text(), re.M))
        <= targets
    )


# blocks marked `sh` run here, those of one page in one folder; `bash` ones need a network, a server or a checkout
@pytest.mark.parametrize("page", [page for page in PAGES if "```sh\n" in page.read_text()], ids=page_id)
def test_commands_run(page, tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "FASTVIDEO_"))}
    environ["PATH"] = os.pathsep.join([str(pathlib.Path(sys.executable).parent), environ["PATH"]])
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.S):
        result = subprocess.run(["bash", "-euc", block], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, f"{block}\n{result.stdout}\n{result.stderr}"
        assert not re.search("Traceback|unrecorded|nothing is recorded", result.stderr), result.stderr
