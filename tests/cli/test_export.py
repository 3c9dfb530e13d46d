"""`otel-torch export`: targets together, what it prints, and bad input in one line."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from otel_torch.cli.main import main
from otel_torch.exporting.targets import TARGETS

ROW = '{"module": "fc", "tensor": "out", "step": 0, "mean": 1.5}\n'


@pytest.fixture
def recording(tmp_path) -> Path:
    path = tmp_path / "run.jsonl"
    path.write_text(ROW * 3)
    region = {"count": 1, "host_total_s": 2}
    (tmp_path / "run.meta.json").write_text(json.dumps({"regions": {"load": region}}))
    return path


def refusal(capsys, *words: object) -> str:
    """Return the line of a command that fails."""
    assert main(["export", *map(str, words)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line.removeprefix("otel_torch: ")


def test_several_targets_at_once(recording, tmp_path, capsys):
    words = ["export", str(recording), "--parquet", "p", "--tensorboard", "t"]
    os.chdir(tmp_path)
    assert main([*words, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {
        "schema": "otel_torch.export/1",
        "recording": str(recording),
        "written": [
            {"target": "parquet", "destination": "p", "recordings": 1, "rows": 3, "values": 0},
            {"target": "tensorboard", "destination": "t", "runs": ["run"], "scalars": 3},
        ],
        "warnings": [],
    }
    assert list(tmp_path.glob("p/rows/rank=0/step=0/*.parquet"))
    assert list(tmp_path.glob("t/run/events.*"))


def test_it_says_what_was_written(recording, tmp_path, capsys):
    assert main(["export", str(recording), "--parquet", str(tmp_path / "p")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/p: parquet, recordings 1, rows 3, values 0\n"


def test_without_a_target_it_lists_them(recording, capsys):
    line = refusal(capsys, recording)
    assert line.startswith("nothing to write: give a target (--parquet FOLDER, ")
    assert all(f"--{name} {target.metavar}" in line for name, target in TARGETS.items())


FILE_TARGETS = [name for name in TARGETS if name != "trackio"]


@pytest.mark.parametrize("target", FILE_TARGETS)
def test_what_is_no_recording(tmp_path, capsys, target):
    made = tmp_path / "made"
    other = tmp_path / "other.jsonl"
    other.write_text("no\n")
    (tmp_path / "empty").mkdir()
    for path, reason in (
        (tmp_path / "missing.jsonl", "No such file or directory"),
        (other, "line 1 is not JSON"),
        (tmp_path / "empty", "holds no recording (*.jsonl)"),
    ):
        line = refusal(capsys, path, f"--{target}", made)
        assert line.startswith(f"{path}: ") and reason in line
        assert not made.exists()


@pytest.mark.parametrize("target", FILE_TARGETS)
def test_where_nothing_can_be_written(recording, capsys, target):
    assert "/proc/" in refusal(capsys, recording, f"--{target}", "/proc/made")
    nowhere = recording.parent / "nowhere" / "made"
    assert refusal(capsys, recording, f"--{target}", nowhere).startswith(f"{nowhere}: cannot be ")


@pytest.mark.parametrize("target", ["parquet", "tensorboard"])
def test_a_folder_that_holds_something_is_left_alone(recording, tmp_path, capsys, target):
    made = tmp_path / "made"
    assert main(["export", str(recording), f"--{target}", str(made)]) == 0
    capsys.readouterr()
    before = sorted(made.rglob("*"))
    line = refusal(capsys, recording, f"--{target}", made)
    assert line == f"{made}: holds something, maybe another export; give a new folder"
    assert sorted(made.rglob("*")) == before
    assert refusal(capsys, recording, f"--{target}", recording) == f"{recording}: Not a directory"


def test_a_destination_is_checked_before_anything_is_written(recording, tmp_path, capsys):
    refusal(capsys, recording, "--parquet", tmp_path / "p", "--pprof", tmp_path)
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("target", ["parquet", "tensorboard", "trackio"])
def test_a_missing_package_is_named_with_its_extra(
    recording, tmp_path, capsys, monkeypatch, target
):
    package = TARGETS[target].package
    monkeypatch.setitem(sys.modules, package, None)
    assert importlib.util.find_spec(package) is None
    line = refusal(capsys, recording, f"--{target}", tmp_path / "made")
    assert line == f"--{target} needs {package}: pip install 'otel-torch[{target}]'"


def test_every_extra_exists():
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for target in TARGETS.values():
        if target.extra:
            assert any(named.startswith(target.package) for named in extras[target.extra])


def test_parquet_and_pprof_load_no_torch(recording, tmp_path):
    """Nor does TensorBoard's own writer."""
    targets = [
        "--parquet",
        tmp_path / "p",
        "--pprof",
        tmp_path / "f",
        "--tensorboard",
        tmp_path / "t",
    ]
    words = ["export", str(recording), *map(str, targets)]
    program = f"import sys; from otel_torch.cli.main import main; assert main({words!r}) == 0; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
