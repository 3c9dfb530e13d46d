"""What may change the numbers of a program: recorded in the metadata, and compared by `diff`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from otel_torch.cli.main import main
from otel_torch.parity.diff import diff
from tests.support import metadata, run_python

PROGRAM = """
import os, torch
if "THREADS" in os.environ:
    torch.set_num_threads(int(os.environ["THREADS"]))
    torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
torch.nn.Linear(4, 4)(torch.ones(2, 4))
"""


def record(folder: Path, name: str, **variables: str) -> Path:
    path = folder / f"{name}.jsonl"
    variables = {"OTEL_TORCH_CAPTURE": "parity", "OTEL_TORCH_JSONL": str(path)} | variables
    done = run_python(folder, PROGRAM, **variables)
    assert "Warning" not in done.stderr
    return path


def test_the_metadata_has_the_settings_at_the_end_of_the_run(tmp_path: Path) -> None:
    environment = metadata(record(tmp_path, "run", THREADS="3"))["environment"]
    assert environment["threads"] == 3
    assert environment["deterministic_algorithms"] is True
    assert environment["default_dtype"] == "torch.float32"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["cpu.capability"]


def test_only_listed_variables_are_recorded(tmp_path: Path) -> None:
    variables = {"NCCL_ALGO": "Tree", "NCCL_SECRET": "hunter2", "AWS_SECRET_ACCESS_KEY": "hunter2"}
    path = record(tmp_path, "run", **variables)
    assert metadata(path)["environment"]["NCCL_ALGO"] == "Tree"
    assert "hunter2" not in path.with_suffix(".meta.json").read_text()


def test_diff_begins_with_what_differs_between_the_environments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = record(tmp_path, "reference")
    port = record(tmp_path, "port", THREADS="3", NCCL_ALGO="Tree")
    page, object_ = tmp_path / "page.html", tmp_path / "diff.json"
    main(["diff", str(reference), str(port), "--html", str(page), "--json", str(object_)])
    sentence = "deterministic_algorithms off → on, NCCL_ALGO not set → Tree."
    text = capsys.readouterr().out
    assert sentence in " ".join(text.split("\n\n")[0].split())
    assert sentence in page.read_text()
    assert json.loads(object_.read_text())["environment"] == [
        {"name": "threads", "reference": "1", "port": "3"},
        {"name": "deterministic_algorithms", "reference": "off", "port": "on"},
        {"name": "NCCL_ALGO", "reference": None, "port": "Tree"},
    ]


def test_equal_environments_are_not_mentioned(tmp_path: Path) -> None:
    report = diff(record(tmp_path, "reference"), record(tmp_path, "port"))
    assert report.verdict == "match" and report.environment == []


def test_a_recording_without_an_environment_differs_in_nothing(tmp_path: Path) -> None:
    reference, port = record(tmp_path, "reference"), record(tmp_path, "port", THREADS="3")
    beside = reference.with_suffix(".meta.json")
    old = {key: value for key, value in metadata(reference).items() if key != "environment"}
    beside.write_text(json.dumps(old))
    assert diff(reference, port).environment == []
