"""The documentation is true: generated tables are up to date, links exist, commands run, names are
documented.
"""

import ast
import dataclasses
import json
import os
import pathlib
import re
import runpy
import shutil
import subprocess

import pytest
import yaml

import otel_torch
from otel_torch.cli.main import COMMANDS
from otel_torch.settings import Settings
from tests.interpreters import command_of_tests, folder_of_commands
from tests.otlp_receiver import Receiver
from tests.sampling import sample
from tests.support import run_python

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
names = {
    row.metadata[key]
    for row in dataclasses.fields(Settings)
    for key in ("name", "alias")
    if row.metadata[key]
}


def page_id(page):
    return str(page.relative_to(ROOT))


def test_configuration_is_made_from_the_settings():
    made = runpy.run_path(str(ROOT / "docs" / "make_configuration.py"))["make_page"]()
    assert (ROOT / "docs" / "configuration.md").read_text() == made, "run `make docs`"


def test_the_site_has_every_page_and_makes_those_of_commands_and_public_names():
    made = runpy.run_path(str(ROOT / "docs" / "site_hooks.py"))["MADE"]
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    named = re.findall(r"- (\S+\.md)$", navigation, re.M)
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert sorted(name for name in named if not name.startswith("source/")) == sorted(
        pages | made.keys()
    )
    for command in COMMANDS:
        usage = f"\n## otel-torch {command}\n\n```text\nusage: otel-torch {command} "
        assert usage in made["commands.md"]()
    public = [name for name in otel_torch.__all__ if name != "__version__"]
    assert re.findall(r"^::: otel_torch\.(\w+)$", made["api.md"](), re.M) == public


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_variables_are_settings(page):
    assert set(re.findall(r"\bOTEL_TORCH_[A-Z_]+\b", page.read_text())) - names == set()


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_make_targets_exist(page):
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert (
        set(re.findall(r"`make ([a-z0-9-]+)", page.read_text()))
        | set(re.findall(r"^make ([a-z0-9-]+)", page.read_text(), re.M))
        <= targets
    )


def test_the_lines_that_troubleshooting_explains_are_still_said():
    trees = [ast.parse(path.read_text()) for path in (ROOT / "otel_torch").rglob("*.py")]
    constants = (
        node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)
    )
    reported = {value for value in constants if isinstance(value, str)}
    page = (ROOT / "docs" / "getting-started.md").read_text().partition("\n## Troubleshooting\n")[2]
    cells = [cell for cell in re.findall(r"^\| ([^|]*) \|", page, re.M) if cell.startswith("`")]
    pieces = [
        piece.strip()
        for cell in cells
        for line in re.findall(r"`([^`]+)`", cell)
        for piece in line.split("…")
    ]
    words = [
        piece
        for piece in pieces
        if " " in piece and not piece.startswith("700 ") and "otel-torch" not in piece
    ]
    assert len(words) > 25
    assert [piece for piece in words if not any(piece in text for text in reported)] == []


def test_every_field_of_the_metadata_is_explained(tmp_path):
    """The page shows the fields that a real run writes."""
    page = (ROOT / "docs" / "record-format.md").read_text()
    record, metadata = (json.loads(block) for block in re.findall(r"```json\n(.*?)```", page, re.S))
    run_python(
        tmp_path,
        ROOT / "examples" / "quickstart.py",
        OTEL_TORCH_JSONL="quickstart.jsonl",
        OTEL_TORCH_STATS="abs_mean,shape,dtype",
    )
    rows = [json.loads(line) for line in (tmp_path / "quickstart.jsonl").read_text().splitlines()]
    assert [
        list(row) for row in rows if (row["module"], row["step"], row["call"]) == ("blocks.0", 0, 1)
    ] == [list(record)]
    written = json.loads((tmp_path / "quickstart.meta.json").read_text())
    assert list(written) == list(metadata)
    assert (
        written["models"] == metadata["models"]
        and written["records_written"] == metadata["records_written"]
    )
    assert [{*region} for region in written["regions"].values()] == [
        {*region} for region in metadata["regions"].values()
    ]


def test_every_name_that_arrives_is_in_its_page(tmp_path):
    with Receiver() as receiver:
        signals = "spans,span_events,log_events,metrics"
        run_python(
            tmp_path,
            ROOT / "examples" / "transformers_train.py",
            OTEL_TORCH_SIGNALS=signals,
            **receiver.environment(),
        )
    spans, points, logs = receiver.spans(), receiver.metric_points(), receiver.log_records()
    assert spans and points and logs
    events = [event for span in spans for event in span["events"]]
    names = {item["name"] for item in [*spans, *points, *events]} | {
        log["event_name"] for log in logs
    }
    names |= {name for item in [*spans, *points, *events, *logs] for name in item["attributes"]}
    names |= {name for span in spans for name in span["resource"]}
    kinds = {"fastvideo.region::": "<name>", "torch.stat.": "<statistic>", "telemetry.sdk.": "*"}
    kinds |= {f"torch.module.activation.{name}": "" for name in ("magnitude", "nonfinite")} | {
        "torch.module.activation.": "<statistic>"
    }
    written = {
        next((start + rest for start, rest in kinds.items() if name.startswith(start)), name)
        for name in names
    }
    page = (ROOT / "docs" / "opentelemetry-names.md").read_text()
    assert {name for name in written if f"`{name}`" not in page} == set()


def marks_of(page):
    """Return the marks of a page's test: first pages are tried at once, others take long."""
    if page.name == "README.md":
        return []
    commands = "".join(block for kind, block in BLOCK.findall(page.read_text()) if kind == "sh")
    return [pytest.mark.fastvideo if "_fastvideo.py" in commands else pytest.mark.scoreboard]


BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)
WITH_COMMANDS = [page for page in PAGES if "```sh\n" in page.read_text()]
TRIED = [
    pytest.param(page, id=page_id(page), marks=marks_of(page))
    for page in WITH_COMMANDS
    if not marks_of(page) or page in sample(WITH_COMMANDS, 7)
]


def words(text):
    """Return the lines, without decimals, which a processor rounds, and the names of runs."""
    varying = r"-?\d+\.\d+(e[-+]\d+)?|-?\de[-+]\d+|run-\w+"
    lines = [" ".join(re.sub(varying, "#", line).split()) for line in text.splitlines()]
    return [line for line in lines if line]


def assert_prints(output, sample):
    """Check that the output has the lines of a sample; a line `…` stands for any number of them."""
    printed = words(output)
    for part in re.split(r"^\s*…\n", sample, flags=re.M):
        wanted = words(part)
        starts = (i for i in range(len(printed) + 1) if printed[i : i + len(wanted)] == wanted)
        start = next(starts, None)
        assert start is not None, f"not printed:\n{part}\nbut:\n{output}"
        printed = printed[start + len(wanted) :]


# blocks marked `sh` run here, those of one page in one folder, and blocks marked `output` are what
# the one before them prints; `bash` ones need a network, a server or a checkout, or ranks of gloo,
# which may abort when they end (`EXIT_RANK` in support.py)
@pytest.mark.parametrize("page", TRIED)
def test_commands_run(page, tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OTEL_", "FASTVIDEO_"))
    }
    environ["PATH"] = os.pathsep.join([str(folder_of_commands()), environ["PATH"]])
    printed = None  # by the last block of commands, where that ran here
    for kind, block in BLOCK.findall(page.read_text()):
        if kind == "output" and printed is not None:
            assert_prints(printed, block)
        if kind == "bash":
            printed = None
        if kind != "sh":
            continue
        result = subprocess.run(
            ["bash", "-euc", block],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert result.returncode == 0, f"{block}\n{result.stdout}\n{result.stderr}"
        assert not re.search("Traceback|unrecorded|nothing is recorded", result.stderr), (
            result.stderr
        )
        printed = result.stdout


def test_the_gate_of_a_port_stops_a_wrong_one_and_lets_a_right_one_pass(tmp_path):
    page = (ROOT / "docs" / "diff.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", page, re.S)
    job = yaml.safe_load(block)["jobs"]["port"]
    assert len(block.splitlines()) <= 10
    commands = [step["run"] for step in job["steps"] if "run" in step]
    (upload,) = (step["with"]["sarif_file"] for step in job["steps"] if "with" in step)
    for file in ("original.py", "port.py"):
        shutil.copy(ROOT / "examples" / "port" / file, tmp_path)
    settings = {name: str(value) for name, value in job["env"].items()}
    own = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    environ = {**own, **settings}
    environ["PATH"] = os.pathsep.join([str(folder_of_commands()), environ["PATH"]])

    def run(command):
        command = command.removeprefix("pip install -r requirements.txt && ")
        return subprocess.run(["bash", "-euc", command], cwd=tmp_path, env=environ).returncode

    assert run("OTEL_TORCH_JSONL=reference.jsonl python original.py") == 0
    assert [run(command) for command in commands] == [0, 1]
    (result,) = json.loads((tmp_path / upload).read_text())["runs"][0]["results"]
    location = result["locations"][0]["physicalLocation"]
    assert (location["artifactLocation"]["uri"], location["region"]["startLine"]) == ("port.py", 40)
    assert "<failure" in (tmp_path / "junit.xml").read_text()
    assert [run(command.replace("port.py", "port.py --fixed")) for command in commands] == [0, 0]
    assert json.loads((tmp_path / upload).read_text())["runs"][0]["results"] == []


def test_the_samples_of_the_readme_are_up_to_date(tmp_path):
    finding, quickstart = re.findall(r"```output\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    # the page that finds this bug is tried by `test_commands_run`
    assert_prints((ROOT / "docs" / "port-a-model.md").read_text(), finding)
    printed = run_python(
        tmp_path,
        ROOT / "examples" / "quickstart.py",
        OTEL_TORCH_JSONL="otel-torch/quickstart.jsonl",
    )
    shown = subprocess.run(
        [command_of_tests("otel-torch"), "show", "otel-torch/quickstart.jsonl"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    ours = re.findall(r"^otel_torch: .*\n", printed.stderr, re.M)  # torch has warnings, too
    assert_prints("".join([printed.stdout, *ours, shown.stdout]), quickstart)


def test_the_code_of_the_readme_runs(tmp_path):
    """On other pages such blocks are fragments."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert blocks
    for block in blocks:
        result = run_python(tmp_path, block, OTEL_TORCH_ENABLED="0")
        assert result.stdout.splitlines()[-2:-1] == ["torch.Size([1, 8])"]
