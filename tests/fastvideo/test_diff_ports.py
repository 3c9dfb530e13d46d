"""`otel-torch diff` names what is wrong in real ports, and says nothing of those that are right.

FastVideo's models against their originals, recorded in two child processes that run one program
after the other, because importing FastVideo takes ten times longer than any of its tiny models.
Three cases run as a user would run them: two unmodified processes, switched on by environment, and
the command line.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import otel_torch
from tests.fastvideo.ports.bugs import BUGS, REAL
from tests.fastvideo.ports.cases import BELOW_ROUNDING, CASES, DRAWN, LEGAL
from tests.fastvideo.ports.corpus import PAIRS
from tests.parity import scoreboard
from tests.parity.case import Place

pytestmark = pytest.mark.fastvideo

CORPUS = "tests.fastvideo.ports.cases"
ROOT = Path(__file__).parents[2]
BY_NAME = {case.name: case for case in CASES}
OURS = "otel_torch"
# one with other names on each side, one of one's own finding in a real port, one in an autoencoder
# called chunk by chunk
END_TO_END = ("wan_rope", "cosmos_frame_rate", "wan_vae_cache")


@dataclass(frozen=True)
class Board:
    """What the scoreboard said, by case, dtype and judge, and the folder of its recordings."""

    scores: dict[tuple[str, str, str], dict[str, Any]]
    recordings: Path

    def ours(self, case: str, dtype: str = "fp32") -> dict[str, Any]:
        return self.scores[case, dtype, OURS]


@pytest.fixture(scope="module")
def board(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Board:
    """All cases in both dtypes, and the faults that are written down in fp32, side by side in two
    child processes.
    """
    if importlib.util.find_spec("fastvideo") is None:
        pytest.skip("fastvideo is not installed; `make test-fastvideo` does")
    folder = tmp_path_factory.mktemp("ports")
    runs = {
        "cases": ["--corpus", CORPUS],
        "faults": ["--corpus", f"{CORPUS}:written_down", "--dtype", "fp32"],
    }
    environment = {
        **os.environ,
        "OTEL_TORCH_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "FASTVIDEO_LOGGING_LEVEL": "ERROR",
    }
    children = []
    for name, arguments in runs.items():
        command = [sys.executable, "-m", "tests.parity.scoreboard", "--together", *arguments]
        command += ["--keep", str(folder / name), "--json", str(folder / f"{name}.json")]
        with (
            (folder / f"{name}.txt").open("w") as said,
            (folder / f"{name}.err").open("w") as errors,
        ):
            children.append(
                (
                    name,
                    subprocess.Popen(
                        command, cwd=ROOT, env=environment, stdout=said, stderr=errors
                    ),
                )
            )
    try:
        for name, child in children:
            assert child.wait(timeout=1800) == 0, (folder / f"{name}.err").read_text()[-3000:]
    finally:
        for _, child in children:
            child.kill()
    scores, lines = {}, []
    for name in runs:
        said = (folder / f"{name}.txt").read_text()
        lines += (
            said[said.rindex("\n\notel_torch, fp32") :].strip().splitlines()
            if "\n\notel_torch, fp32" in said
            else []
        )
        for one in json.loads((folder / f"{name}.json").read_text()):
            scores[one["case"], one["dtype"], one["judge"]] = one
    request.config.pluginmanager.register(scoreboard.Summary("real ports, scored", lines))
    return Board(scores, folder / "cases")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair not in LEGAL])
def test_nothing_is_said_of_a_clean_port(board: Board, pair: str, dtype: str) -> None:
    assert board.ours(pair, dtype)["outcome"] == "silent", board.ours(pair, dtype)["named"]


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair not in LEGAL])
def test_nothing_is_said_of_a_clean_port_in_fp32_without_noise_either(
    board: Board, pair: str
) -> None:
    reference, port = (
        board.recordings / f"ports-{pair}-{side}-fp32" / "run.jsonl"
        for side in ("reference", "port")
    )
    report = otel_torch.diff(reference, port)
    assert (report.verdict, report.first) == ("match", None)
    assert report.pairs > 20


@pytest.mark.parametrize("pair", LEGAL)
def test_a_reference_that_rounds_more_than_it_need_is_named_where_that_shows(
    board: Board, pair: str
) -> None:
    assert board.ours(pair)["outcome"] == "exact", board.ours(pair)["named"]
    assert board.ours(pair, "bf16")["outcome"] == "missed", board.ours(pair, "bf16")["named"]


@pytest.mark.parametrize("name", [*BUGS, *REAL])
def test_a_fault_of_a_port_is_named_in_fp32(board: Board, name: str) -> None:
    assert board.ours(name)["outcome"] == "exact", board.ours(name)["named"]


@pytest.mark.parametrize("name", [name for name in (*BUGS, *REAL) if name not in BELOW_ROUNDING])
def test_a_fault_that_does_more_than_rounding_is_named_in_bf16(board: Board, name: str) -> None:
    assert board.ours(name, "bf16")["outcome"] == "exact", board.ours(name, "bf16")["named"]


@pytest.mark.parametrize("name", BELOW_ROUNDING)
def test_what_is_left_out_in_bf16_does_less_than_three_times_what_bf16_does(name: str) -> None:
    effect, rounding = BELOW_ROUNDING[name]
    assert name in BY_NAME and effect < 3 * rounding


def test_faults_planted_by_a_machine_are_named(board: Board) -> None:
    """At least 95 % of them, at random modules of all pairs; none is missed."""
    names = [f"{pair} {spec}" for pair, specs in DRAWN.items() for spec in specs]
    outcomes = {name: board.ours(name)["outcome"] for name in names}
    others = [
        f"{outcome}: {name}: {board.ours(name)['named']}"
        for name, outcome in outcomes.items()
        if outcome != "exact"
    ]
    assert len(names) >= 100 and set(DRAWN) == set(PAIRS)
    assert len(others) <= 0.05 * len(names), "\n".join(others)
    assert not {"missed", "error"} & set(outcomes.values()), "\n".join(others)


def test_fastvideos_own_rule_is_scored_on_the_same_recordings(board: Board) -> None:
    """That is what the figures are compared with."""
    for dtype in ("fp32", "bf16"):
        exact = [
            {name for name in BUGS if board.scores[name, dtype, judge]["outcome"] == "exact"}
            for judge in (OURS, "FastVideo 0.5 %")
        ]
        assert len(exact[1]) < len(exact[0]) / 2


@pytest.mark.parametrize("name", END_TO_END)
def test_two_unmodified_processes_and_the_command_line(tmp_path: Path, name: str) -> None:
    if importlib.util.find_spec("fastvideo") is None:
        pytest.skip("fastvideo is not installed; `make test-fastvideo` does")
    case = BY_NAME[name]
    recordings = scoreboard.Recorder(tmp_path).record(case, "fp32", noise=name == END_TO_END[0])
    noise = () if recordings.noise is None else ("--noise", recordings.noise)
    done = subprocess.run(
        [sys.executable, "-m", "otel_torch", "diff", recordings.reference, recordings.port, *noise, "--json", "-"],
        env={**os.environ, "OTEL_TORCH_ENABLED": "0"}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert (found["schema"], found["verdict"]) == ("otel_torch.diff/1", "diverged")
    first = found["first"]
    assert first in found["introduced"]
    assert Place(first["port_side"], first["port_module"]) in case.expected
    assert Place(first["side"], first["module"]) in case.places_in_reference
