"""`otel-torch diff` on plain transformers and diffusers models: planted faults are named, clean
pairs are left alone.

Most are recorded one after the other in this process, which differs from two programs in nothing
that a recording shows; six are two unmodified processes, switched on by environment alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from tests.parity import scoreboard
from tests.parity.case import Case
from tests.parity.cases import CASES, families, program

# a family each, and each way in which a fault shows: in front of a module, in its output, in its
# weights, as a missing call
PROCESSES = (
    "llama_rope_interleaved", "qwen3_q_norm_missing", "gpt2_bias_missing", "wan_unpatchify_order", "unet_skip_order", "vae",
)  # fmt: skip
# one of each kind that is quick, so that `make test` sees a difference that stays unnamed or is
# made up
QUICK = (
    "llama",
    "gpt2",
    "wan",
    "llama_swiglu_swapped",
    "gpt2_query_and_key_exchanged",
    "wan_token_order",
    "flux_norm_out_swapped",
)
BY_NAME = {case.name: case for case in CASES}
OURS = "otel_torch"


class Board:
    """Scores each case when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._recorder = scoreboard.RecorderInProcess(folder, program)
        self._known: dict[tuple[str, str], list[scoreboard.Score]] = {}

    def ours(self, case: Case, dtype: str) -> scoreboard.Score:
        if (case.name, dtype) not in self._known:
            self._known[case.name, dtype] = scoreboard.score_all([(case, dtype)], self._recorder)
        return next(score for score in self._known[case.name, dtype] if score.judge == OURS)

    def lines(self) -> list[str]:
        return scoreboard.totals([score for scores in self._known.values() for score in scores])


@pytest.fixture(scope="module")
def board(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Board]:
    board = Board(tmp_path_factory.mktemp("small"))
    yield board
    request.config.pluginmanager.register(scoreboard.Summary("small cases, scored", board.lines()))


def _marked(cases: Sequence[Case]) -> list[object]:
    return [
        pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.scoreboard)
        for case in cases
    ]


@pytest.mark.parametrize("dtype", list(families.DTYPES))
@pytest.mark.parametrize("case", _marked([case for case in CASES if case.clean]))
def test_nothing_is_said_of_a_clean_pair(board: Board, case: Case, dtype: str) -> None:
    found = board.ours(case, dtype)
    assert found.outcome == "silent", found.named


@pytest.mark.parametrize("case", _marked([case for case in CASES if not case.clean]))
def test_a_planted_fault_is_named_in_fp32(board: Board, case: Case) -> None:
    found = board.ours(case, "fp32")
    assert found.outcome == "exact", found.named


@pytest.mark.parametrize(
    "case", _marked([case for case in CASES if not case.clean and case.above_rounding])
)
def test_a_planted_fault_above_rounding_is_named_in_bf16(board: Board, case: Case) -> None:
    found = board.ours(case, "bf16")
    assert found.outcome == "exact", found.named


@pytest.mark.scoreboard
@pytest.mark.parametrize("name", PROCESSES)
def test_two_unmodified_processes_switched_on_by_environment_alone(
    tmp_path: Path, name: str
) -> None:
    case = BY_NAME[name]
    recorder = scoreboard.Recorder(tmp_path, fresh=name == PROCESSES[0])
    recordings = recorder.record(case, "fp32", noise=False)
    found = scoreboard.score(case, "fp32", recordings, OURS)
    assert found.outcome == ("silent" if case.clean else "exact"), found.named


@pytest.mark.scoreboard
def test_fastvideos_own_rule_names_fewer_on_the_same_recordings(board: Board) -> None:
    cases = [case for case in CASES if not case.clean]
    ours = sum(board.ours(case, "fp32").outcome == "exact" for case in cases)
    theirs = sum(
        score.outcome == "exact"
        and not score.case.clean
        and score.dtype == "fp32"
        and score.judge != OURS
        for scores in board._known.values()
        for score in scores
    )
    assert theirs < ours / 2
