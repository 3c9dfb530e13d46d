"""A child that follows a plan: other sources, attributes of torch, and which functions ran."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

from otel_torch.code_exchange.plan import ExchangePlan
from otel_torch.process.recorded_child import STARTUP_SITE

ROOT = Path(__file__).parents[2]


def run(
    folder: Path, code: str, plan: ExchangePlan, **variables: str
) -> subprocess.CompletedProcess[str]:
    plan.write(folder / "plan.json")
    environment = {
        "PYTHONPATH": f"{STARTUP_SITE}:{ROOT}:{folder}",
        "OTEL_TORCH_ENABLED": "1",
        "OTEL_TORCH_EXCHANGE": str(folder / "plan.json"),
        "OTEL_TORCH_JSONL": "",
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    return subprocess.run(
        [sys.executable, "-c", dedent(code)], env=environment, capture_output=True, text=True
    )


def make_package(folder: Path) -> Path:
    package = folder / "things"
    package.mkdir()
    (package / "__init__.py").write_text("from things.parts import part\n")
    (package / "parts.py").write_text(
        "def part(x):\n    return [helper(y) for y in x]\n\ndef helper(x):\n    return x\n"
    )
    return package


def test_a_module_is_compiled_from_another_file_and_keeps_its_own(tmp_path: Path) -> None:
    package = make_package(tmp_path)
    before = {path: path.read_bytes() for path in package.rglob("*.py")}
    other = tmp_path / "other.py"
    other.write_text("def part(x):\n    return 'exchanged'\n")
    plan = ExchangePlan({str(package / "parts.py"): str(other)})
    done = run(tmp_path, "import things; print(things.part([1]), things.parts.__file__)", plan)
    assert done.stdout.split() == ["exchanged", str(package / "parts.py")], done.stderr
    assert {path: path.read_bytes() for path in before} == before
    # nor is what was compiled kept for runs without the plan
    assert run(tmp_path, "import things; print(things.part([1]))", ExchangePlan()).stdout == "[1]\n"


def test_functions_are_noted_with_the_watched_one_that_called_them(tmp_path: Path) -> None:
    package = make_package(tmp_path)
    plan = ExchangePlan(watched=[str(package)], executed=str(tmp_path / "notes"))
    code = """
        import threading, things
        outside = lambda: things.part([1, 2])
        outside()
        thread = threading.Thread(target=outside)
        thread.start(); thread.join()
    """
    done = run(tmp_path, code, plan)
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "notes").iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    names = [(line[1], line[3]) for line in lines]
    assert ("part", "") in names
    assert [line[1] for line in lines].count("helper") == 1
    assert any(name == "helper" and caller.startswith("part") for name, caller in names)
    assert {line[0] for line in lines} == {str(package / "__init__.py"), str(package / "parts.py")}


def test_a_forked_process_notes_what_only_it_runs(tmp_path: Path) -> None:
    package = make_package(tmp_path)
    plan = ExchangePlan(watched=[str(package)], executed=str(tmp_path / "notes"))
    code = """
        import os, things
        if os.fork() == 0:
            things.part([1])
            os._exit(0)
        os.wait()
    """
    assert run(tmp_path, code, plan).returncode == 0
    texts = [path.read_text() for path in (tmp_path / "notes").iterdir()]
    assert len(texts) == 2 and sum('"helper"' in text for text in texts) == 1


def test_attributes_of_torch_are_set_when_it_is_imported(tmp_path: Path) -> None:
    attributes = {
        "torch.backends.mkldnn.enabled": "False",
        "torch.set_default_dtype": "torch.float64",
        "torch.set_float32_matmul_precision": "medium",
    }
    code = """
        import torch
        print(torch.backends.mkldnn.enabled, torch.zeros(1).dtype)
        print(torch.get_float32_matmul_precision())
    """
    done = run(tmp_path, code, ExchangePlan(attributes=attributes))
    assert done.stdout.split() == ["False", "torch.float64", "medium"], done.stderr


def test_a_plan_that_cannot_be_followed_records_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, "print('ran')", ExchangePlan(), OTEL_TORCH_EXCHANGE="missing.json")
    assert done.stdout == "ran\n"
    assert "cannot start: FileNotFoundError" in done.stderr
