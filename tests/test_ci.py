"""`.ci/run` makes every target, says how long each took, and ends in time."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import LONG, TOGETHER

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / ".ci" / "run"
# stands in for make: notes what it is asked to make
MAKE = """#!/bin/sh
echo "$*" >>made
echo "making $*"
[ "$1" != "$SLOW" ] || exec sleep 60
[ "$1" != "$BROKEN" ] || exit 3
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder in which `.ci/run` finds nothing but a make of its own."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(SCRIPT, tmp_path / ".ci")
    make = tmp_path / "bin" / "make"
    make.parent.mkdir()
    make.write_text(MAKE)
    make.chmod(0o755)
    return tmp_path


def run(checkout: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": f"{checkout / 'bin'}:{os.environ['PATH']}"} | variables
    return subprocess.run(
        [checkout / ".ci" / "run"], env=environment, capture_output=True, text=True, timeout=50
    )


def timed(output: str) -> list[str]:
    """Return what the table of minutes names, in its order."""
    return re.findall(r"^ *\d+:\d\d  (.*)$", output, re.M)


def made(checkout: Path) -> list[str]:
    return (checkout / "made").read_text().splitlines()


def test_every_target_is_made_and_timed(checkout: Path) -> None:
    done = run(checkout)
    assert (done.returncode, done.stderr) == (0, "")
    assert {"test", "test-oldest", "test-fastvideo", "test-frameworks", "test-engines", "e2e"} <= {
        *made(checkout)
    }
    assert sorted(timed(done.stdout)) == sorted(
        [*(f"make {it}" for it in made(checkout)), "in all"]
    )
    assert timed(done.stdout)[-1] == "in all"
    # what ran beside others is printed, too
    assert all(f"making {it}\n" in done.stdout for it in made(checkout))


def test_a_target_that_fails_ends_the_run_with_its_status(checkout: Path) -> None:
    done = run(checkout, BROKEN="test-oldest")
    assert (done.returncode, done.stderr) == (3, ".ci/run: make test-oldest ended with 3\n")
    assert "test-fastvideo" not in made(checkout)
    assert timed(done.stdout)[-2:] == ["make test-oldest", "in all"]


def test_a_target_beside_others_that_fails_ends_the_run_where_it_is_needed(checkout: Path) -> None:
    done = run(checkout, BROKEN="backends")
    assert done.returncode == 3
    assert ".ci/run: make backends ended with 3\n" in done.stdout + done.stderr
    assert "test-engines" in made(checkout) and "e2e" not in made(checkout)


@pytest.mark.parametrize("slow", ["test-fastvideo", "backends"])
def test_a_run_that_takes_too_long_is_stopped_with_a_line(checkout: Path, slow: str) -> None:
    done = run(checkout, SLOW=slow, CI_LIMIT_SECONDS="3")
    assert done.returncode == 124
    assert f".ci/run: stopped in make {slow}: " in done.stdout + done.stderr
    assert f"make {slow}" in timed(done.stdout) and "e2e" not in made(checkout)


def test_what_touches_private_names_of_torch_is_tried_on_the_oldest_torch() -> None:
    """Frameworks ask for packages that pin newer ones."""
    touching = {
        path.relative_to(ROOT / "otel_torch").parts[0]
        for path in (ROOT / "otel_torch").glob("*/**/*.py")
        if "torch_private" in path.read_text()
    }
    listed = re.search(
        r"^OLDEST_TESTS = \$\(addprefix tests/,(.*?)\)$",
        (ROOT / "Makefile").read_text(),
        re.M | re.S,
    )
    tried = [Path(word) for word in listed[1].replace("\\", " ").split()]
    assert all((ROOT / "tests" / path).exists() for path in tried)
    assert touching - {"frameworks"} <= {path.parts[0] for path in tried}


def test_the_files_that_workers_begin_with_exist() -> None:
    files = {name for name in (*LONG, *TOGETHER) if name not in TOGETHER.values()}
    assert [name for name in sorted(files) if not (ROOT / name).exists()] == []
