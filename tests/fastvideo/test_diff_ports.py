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

import pytest

import otel_torch
from tests.corpora import corpus_of
from tests.corpora.case import Place
from tests.corpora.judge import OURS, RULE
from tests.corpora.scores import Recorder, Score, Summary, read, totals
from tests.fastvideo.ports.bugs import BUGS
from tests.fastvideo.ports.cases import BELOW_ROUNDING, DRAWN, LEGAL
from tests.fastvideo.ports.corpus import PAIRS
from tests.sampling import EVERY_CASE, VARIABLE, sample, seed_of_this_run

pytestmark = pytest.mark.fastvideo

ROOT = Path(__file__).parents[2]
PORTS = corpus_of("ports")
# one with other names on each side, one of one's own finding in a real port, one in an autoencoder
# called chunk by chunk
END_TO_END = ("wan_rope", "cosmos_frame_rate", "wan_vae_cache")


# what the day draws; a case needs its reference, whatever else is drawn of the pair
CASES = sample(list(PORTS.cases))
PLANTED = sample([f"{pair} {spec}" for pair, specs in DRAWN.items() for spec in specs])


@dataclass(frozen=True)
class Board:
    """The scores by case, variant and judge, and the folder of the recordings."""

    scores: dict[tuple[str, str, str], Score]
    recordings: Path

    def ours(self, case: str, dtype: str = "fp32") -> Score:
        return self.scores[case, dtype, OURS]


@pytest.fixture(scope="module")
def board(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Board:
    """The drawn cases in both dtypes, and the drawn faults in fp32, side by side in two child
    processes.
    """
    if importlib.util.find_spec("fastvideo") is None:
        pytest.skip("fastvideo is not installed; `make test-fastvideo` does")
    folder = tmp_path_factory.mktemp("ports")
    environment = {
        **os.environ,
        "OTEL_TORCH_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        VARIABLE: seed_of_this_run(),
        "FASTVIDEO_LOGGING_LEVEL": "ERROR",
    }
    children = {}
    for name in ("ports", "machine"):
        command = [sys.executable, "-m", "tests.corpora", name, "--keep", str(folder / name)]
        command += ["--sample", "--file", str(folder / f"{name}.json")]
        with (folder / f"{name}.err").open("w") as errors:
            children[name] = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=errors
            )
    try:
        for name, child in children.items():
            assert child.wait(timeout=1800) == 0, (folder / f"{name}.err").read_text()[-3000:]
    finally:
        for child in children.values():
            child.kill()
    scores = [score for name in children for score in read(folder / f"{name}.json")]
    request.config.pluginmanager.register(Summary("real ports, scored", totals(scores)))
    return Board({(s.case, s.variant, s.judge): s for s in scores}, folder / "ports")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", [name for name in CASES if name not in LEGAL])
def test_a_fault_of_a_port_is_named_and_a_clean_port_left_alone(
    board: Board, name: str, dtype: str
) -> None:
    case, answer = PORTS.cases[name], board.ours(name, dtype)
    if case.clean or dtype not in case.invisible:
        assert answer.grade == ("silent" if case.clean else "exact"), answer.said


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair in CASES and pair not in LEGAL])
def test_nothing_is_said_of_a_clean_port_in_fp32_without_noise_either(
    board: Board, pair: str
) -> None:
    recordings = Recorder(PORTS, board.recordings).recordings(
        PORTS.cases[pair], "fp32", noise=False
    )
    report = otel_torch.diff(recordings.reference, recordings.port)
    assert (report.verdict, report.first) == ("match", None)
    assert report.pairs > 20


@pytest.mark.parametrize("pair", [pair for pair in LEGAL if pair in CASES])
def test_a_reference_that_rounds_more_than_it_need_is_named_where_that_shows(
    board: Board, pair: str
) -> None:
    assert board.ours(pair).grade == "exact", board.ours(pair).said
    assert board.ours(pair, "bf16").grade == "missed", board.ours(pair, "bf16").said


@pytest.mark.parametrize("name", BELOW_ROUNDING)
def test_what_is_left_out_in_bf16_does_less_than_three_times_what_bf16_does(name: str) -> None:
    effect, rounding = BELOW_ROUNDING[name]
    assert name in PORTS.cases and effect < 3 * rounding


def test_faults_planted_by_a_machine_are_named(board: Board) -> None:
    """At least 95 % of them, at random modules of all pairs; none is missed."""
    answers = [board.ours(name) for name in PLANTED]
    others = [f"{a.grade}: {a.case}: {a.said}" for a in answers if a.grade != "exact"]
    assert sum(map(len, DRAWN.values())) >= 100 and set(DRAWN) == set(PAIRS)
    assert len(others) <= max(0.05 * len(PLANTED), 1), "\n".join(others)
    assert not {"missed", "error"} & {a.grade for a in answers}, "\n".join(others)


@pytest.mark.skipif(seed_of_this_run() != EVERY_CASE, reason="compares counts of all cases")
def test_fastvideos_own_rule_is_scored_on_the_same_recordings(board: Board) -> None:
    """That is what the figures are compared with."""
    for dtype in ("fp32", "bf16"):
        exact = [
            {name for name in BUGS if board.scores[name, dtype, judge].grade == "exact"}
            for judge in (OURS, RULE)
        ]
        assert len(exact[1]) < len(exact[0]) / 2


@pytest.mark.parametrize("name", sample(END_TO_END, len(END_TO_END)))
def test_two_unmodified_processes_and_the_command_line(tmp_path: Path, name: str) -> None:
    if importlib.util.find_spec("fastvideo") is None:
        pytest.skip("fastvideo is not installed; `make test-fastvideo` does")
    case = PORTS.cases[name]
    recorder = Recorder(PORTS, tmp_path, together=False, fresh=True)
    recordings = recorder.recordings(case, "fp32", noise=name == END_TO_END[0])
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
    assert Place(first["port_side"], first["port_module"]) in case.right.places
    assert Place(first["side"], first["module"]) in case.right.in_reference
