"""The corpus on which `otel-torch diff` is tested is itself held to what it claims: clean ports are
right, each bug and each fault changes the output and begins where it says, in both programs' names.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fastvideo.ports.bugs import BUGS, REAL
from tests.fastvideo.ports.corpus import FAULTY, PAIRS
from tests.sampling import VARIABLE, sample, seed_of_this_run

pytestmark = pytest.mark.fastvideo

ROOT = Path(__file__).parents[3]
DRAWN_PAIRS = sample(PAIRS)


@pytest.fixture(scope="module")
def report() -> dict[str, dict[str, Any]]:
    """Measured in a process of its own: FastVideo changes its process for good."""
    if importlib.util.find_spec("fastvideo") is None:
        pytest.skip("fastvideo is not installed; `make test-fastvideo` does")
    command = [sys.executable, "-m", "tests.fastvideo.ports.report"]
    environ = {**os.environ, "OTEL_TORCH_ENABLED": "0", VARIABLE: seed_of_this_run()}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("pair", DRAWN_PAIRS)
def test_a_clean_port_is_right(report: dict[str, dict[str, Any]], pair: str) -> None:
    errors = report["pairs"][pair]
    assert errors["fp32"] <= errors["limit"]
    assert errors["bf16"] <= 3 * errors["reference's bf16"]


@pytest.mark.parametrize("pair", FAULTY)
def test_a_faulty_port_is_not(report: dict[str, dict[str, Any]], pair: str) -> None:
    errors = report["faulty"][pair]
    assert errors["fp32"] > errors["limit"]
    assert pair in REAL


@pytest.mark.parametrize("name", [name for name in BUGS if BUGS[name].pair in DRAWN_PAIRS])
def test_a_bug_begins_where_it_says(report: dict[str, dict[str, Any]], name: str) -> None:
    found = report["bugs"][name]
    assert found["error"] > 1e-5
    assert found["port"], found["first"]
    assert found["reference"]


def test_faults_begin_where_they_say(report: dict[str, dict[str, Any]]) -> None:
    assert len(report["faults"]) == 2 * len(DRAWN_PAIRS)
    assert [spec for spec, found in report["faults"].items() if not found["port"]] == []


# runs each side in a process of its own, forked from one that has imported FastVideo, which takes ten times longer than a side
EACH_ALONE = """
import os, sys
from tests.fastvideo.ports.quiet import quietly
quietly()
import fastvideo
from tests.corpora import side
for words in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        sys.argv = ["side", "ports", *words.split()]
        side.main()
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, words
"""


def test_two_processes_agree_without_talking() -> None:
    """The two sides of a pair, each in a process of its own, and the port with a bug."""
    if importlib.util.find_spec("fastvideo") is None:
        pytest.skip("fastvideo is not installed; `make test-fastvideo` does")
    sides = ("clip_text port", "clip_text reference", "clip_activation port")
    done = subprocess.run(
        [sys.executable, "-c", EACH_ALONE, *sides],
        cwd=ROOT, env={**os.environ, "OTEL_TORCH_ENABLED": "0"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    said = [
        line for line in done.stdout.splitlines() if " norm " in line
    ]  # FastVideo says things, too
    port, reference, broken = (float(line.split()[-1]) for line in said)
    assert reference == pytest.approx(port, rel=1e-6)
    assert broken != pytest.approx(port, rel=1e-5)
