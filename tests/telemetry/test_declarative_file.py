"""One file, OTEL_CONFIG_FILE, holds the exporters and the settings of a run, as the SDK reads it and
`opentelemetry-instrument` starts it; and settings in such a file or in code are spelled right.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.interpreters import run_script
from tests.otlp_receiver import Receiver
from tests.support import checked, environment, lines, run_python

pytest.importorskip("opentelemetry.configuration", reason="the extra `test` is not installed")

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
FILE = PAGE.split("```yaml\n")[1].split("```")[0]
PROGRAM = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2)])
        self.head = nn.Linear(2, 2)

    def forward(self, x):
        return self.head(self.blocks[0](x))

model = Model()
for _ in range(4):
    model(torch.ones(1, 2))
"""
# as `opentelemetry-distro` is, whose configurator adds nothing to that of the SDK
DISTRIBUTION = """
from opentelemetry.sdk._configuration import _OTelSDKConfigurator
class Configurator(_OTelSDKConfigurator): pass
"""
WRAPPER = "import sys; from opentelemetry.instrumentation.auto_instrumentation import run; sys.exit(run())"


def run_with_file(
    tmp_path: Path, receiver: Receiver, option: str
) -> subprocess.CompletedProcess[str]:
    """Run the program with `opentelemetry-instrument`, and the page's file with one more option."""
    file = FILE.replace("http://localhost:4318", receiver.http_endpoint) + f"      {option}\n"
    (tmp_path / "otel.yaml").write_text(file)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "some_distro.py").write_text(DISTRIBUTION)
    metadata = tmp_path / "some_distro-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: some-distro\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "[opentelemetry_configurator]\nconfigurator = some_distro:Configurator\n"
    )
    variables = environment(tmp_path, OTEL_CONFIG_FILE="otel.yaml", PYTHONPATH=str(tmp_path))
    for name in ("OTEL_TORCH_ENABLED", "OTEL_TORCH_JSONL"):  # wrapper and file replace them
        del variables[name]
    command = ["-c", WRAPPER, sys.executable, "program.py"]
    return checked(run_script(command, variables, tmp_path, 240, fresh=True))


def messages(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return what we have printed."""
    assert "Traceback" not in done.stderr
    return [line for line in done.stderr.splitlines() if line.startswith("otel_torch")]


def test_one_file_holds_exporters_and_settings(tmp_path: Path) -> None:
    with Receiver() as receiver:
        done = run_with_file(tmp_path, receiver, "signls: [spans]")
    assert (
        messages(done)[0]
        == "otel_torch: signls is no setting and is skipped; did you mean signals?"
    )
    rows = lines(tmp_path / "run.jsonl")
    assert [(row["module"], row["step"]) for row in rows] == [("blocks.0", 0), ("blocks.0", 2)]
    assert "shape" in rows[0] and "mean" not in rows[0]
    # the file's exporters
    logs, spans = receiver.log_records(), receiver.spans("torch.step")
    assert [record["attributes"]["torch.step"] for record in logs] == [0, 2]
    assert receiver.metric_points("torch.module.activation.abs_mean")
    assert {item["resource"]["service.name"] for item in [*logs, *spans]} == {"my-model"}
    assert {record["span_id"] for record in logs} <= {span["span_id"] for span in spans}


def test_a_file_that_disables_the_instrumentor_is_respected(tmp_path: Path) -> None:
    with Receiver() as receiver:
        done = run_with_file(tmp_path, receiver, "enabled: false")
    assert messages(done) == [] and not receiver.spans()
    assert not list(tmp_path.rglob("*.jsonl"))


# what the SDK does with a section of the file
FROM_FILE = """
from opentelemetry.configuration.instrumentation import configure_instrumentation
from opentelemetry.configuration.models import ExperimentalInstrumentation
configure_instrumentation(ExperimentalInstrumentation(python={{"torch": {options}}}))
"""
INSTRUMENT = "import otel_torch\notel_torch.OtelTorchInstrumentor().instrument(**{options})\n"
START = "import otel_torch\nassert otel_torch.start(**{options})\n"


@pytest.mark.parametrize("way", [FROM_FILE, INSTRUMENT, START], ids=["file", "instrument", "start"])
def test_a_misspelled_setting_is_one_line_and_the_others_hold(tmp_path: Path, way: str) -> None:
    options = {"moduels": "^head$", "steps": "0", "jsonl": "run.jsonl", "otel_torch_stats": "mean"}
    done = run_python(tmp_path, way.format(options=options) + PROGRAM, OTEL_TORCH_ENABLED="")
    assert messages(done) == [
        "otel_torch: moduels is no setting and is skipped; did you mean modules?",
        "otel_torch: otel_torch_stats is no setting and is skipped; did you mean stats?",
        "otel_torch: 3 records in run.jsonl",
    ]
    assert {row["step"] for row in lines(tmp_path / "run.jsonl")} == {0}


@pytest.mark.parametrize(
    ("options", "report"),
    [
        ({"sterps": 1}, "sterps is no setting and is skipped; did you mean steps?"),
        ({"METRIC-STEP": 1}, "METRIC-STEP is no setting and is skipped; did you mean metric_step?"),
        ({"tracer_provider": 1}, "tracer_provider is no setting and is skipped"),
        (
            {"modules": {"a": 1}},
            "modules is skipped; use a text, a number or a list, not a mapping",
        ),
    ],
)
def test_an_option_that_cannot_be_used_is_reported(options: dict[str, Any], report: str) -> None:
    from otel_torch.settings import options_to_variables

    reports: list[str] = []
    assert options_to_variables(options, reports.append) == {}
    assert reports == [report]


def test_values_have_the_types_that_a_file_gives_them() -> None:
    from otel_torch.settings import Settings, options_to_variables

    options = {
        "capture": ["inputs", "outputs"], "steps": 0, "budget": 0.5, "training": True,
        "upcast": False, "noise": False, "jsonl": False, "metric_series": 5, "models": None,
    }  # fmt: skip
    reports: list[str] = []
    settings = Settings.from_env(options_to_variables(options, reports.append), reports.append)
    assert reports == []
    assert (settings.capture, settings.budget, settings.metric_series) == (
        ("inputs", "outputs"), 0.5, 5,
    )  # fmt: skip
    assert (settings.upcast, settings.noise, settings.jsonl, settings.models) == (
        "off",
        *[None] * 3,
    )
    assert 0 in settings.steps and 1 not in settings.steps and settings.training
