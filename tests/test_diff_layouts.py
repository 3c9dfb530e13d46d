"""One process against the ranks of the same model: clean splits are silent, faults are named with
their module, their rank, and what the ranks hold.
"""

from __future__ import annotations

import sys

import pytest

from tests.parity.layouts import scoreboard, trainings
from tests.parity.layouts.corpus import CLEAN, FAULTS, Expected, Recorder

pytestmark = pytest.mark.scoreboard

DOWN, UP = "blocks.0.mlp.down", "blocks.1.mlp.up"


@pytest.fixture(scope="module")
def recorder(tmp_path_factory) -> Recorder:
    return Recorder(tmp_path_factory.mktemp("layouts"))


@pytest.mark.parametrize(("program", "options"), CLEAN)
def test_a_clean_layout_matches_one_process(recorder, program, options):
    report = recorder.compare(program, options)
    assert (report.verdict, report.introduced, report.warnings) == ("match", [], [])
    if program in ("hand", "library"):  # those of a mesh may be cut in another order
        assert not report.weaker
    if program == "hand":
        assert {"norm", "head", "embed"} <= {pair.module for pair in report.compared}
    elif options == "stages":
        assert report.unpaired == {"reference": [], "port": []}
        right = {pair.port_module for pair in report.compared if pair.state == "right"}
        assert {f"blocks.{index}.down" for index in range(4)} <= right
    else:
        fewest = {"library": 100, "experts": 100, "fused": 170, "calls": 190}
        assert report.pairs > fewest.get(program, 300)


@pytest.mark.parametrize(("program", "options", "fault"), FAULTS)
def test_a_fault_of_a_layout_is_named_with_its_rank(recorder, program, options, fault):
    first = recorder.compare(program, options, fault).first
    assert first is not None
    assert Expected.of(first) == FAULTS[program, options, fault]


@pytest.mark.parametrize(("program", "options"), trainings.CLEAN)
def test_a_clean_training_over_ranks_matches_one_process(recorder, program, options):
    report = recorder.compare(program, options)
    assert (report.verdict, report.introduced, report.warnings) == ("match", [], [])
    # the gradients and updates of two steps, and those of the second microbatch
    assert report.pairs > {"torch": 600, "llama": 350}[program]


@pytest.mark.parametrize(("program", "options", "fault"), trainings.FAULTS)
def test_a_fault_of_a_training_over_ranks_is_named(recorder, program, options, fault):
    first = recorder.compare(program, options, fault).first
    assert first is not None
    assert Expected.of(first) == trainings.FAULTS[program, options, fault]


def test_ranks_that_clip_by_their_own_norms_are_said_in_words(recorder):
    first = recorder.compare("torch", "gpipe", "local_norm").first
    assert first is not None and first.explanation.startswith(
        "Each rank has multiplied its gradients by a number of its own (1.863 on rank 0, 1.171 on "
        "rank 1), as clipping by the norm of its own part does."
    )


def test_a_loss_averaged_over_local_tokens_is_named(recorder):
    first = recorder.compare("library", "data_wrong_mean").first
    assert first is not None and (first.phase, first.tensor) == ("loss", "loss")
    assert first.cause is not None and first.cause.kind == "mean_of_means"


def test_a_partial_sum_is_said_in_words(recorder):
    first = recorder.compare("hand", "", "embed:missing").first
    assert first is not None
    assert first.explanation.startswith(
        "Each rank has a partial sum: the reference has the sum of those of the 2 ranks, so a "
        "reduction over the ranks (all-reduce, reduce-scatter) is missing."
    )


def test_gradients_that_an_optimizer_of_flat_parts_reduces_itself_are_not_accused(recorder):
    report = recorder.compare("fused", "data=2 flat")
    assert (report.verdict, report.introduced) == ("match", [])
    (warning,) = report.warnings
    assert warning.startswith("the parameters of Model changed after step 0")


def test_only_one_wrong_rank_is_named(recorder):
    first = recorder.compare("hand", "", f"{UP}:shard").first
    assert first is not None and first.explanation.endswith("Only rank 1 is wrong.")


def test_the_scoreboard_tells_what_is_right_from_what_is_not(recorder):
    fault = "hand", "", f"{DOWN}:missing"
    report, expected = recorder.compare(*fault), FAULTS[fault]
    clean = recorder.compare("hand", "")
    neighbor = Expected(DOWN, "out", "forward", 0, "partial_sum", "near")
    other_rank = Expected(DOWN, "out", "forward", 1, "partial_sum")
    assert scoreboard.outcome(report, expected) == "exact"
    assert scoreboard.outcome(report, neighbor) == "near"
    assert scoreboard.outcome(report, other_rank) == "wrong"
    assert scoreboard.outcome(report, None) == "false"
    assert scoreboard.outcome(clean, expected) == "missed"
    assert scoreboard.outcome(clean, None) == "silent"


def test_the_scoreboard_prints_a_line_each_and_their_sum(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scoreboard", "--only", "embed:"])
    scoreboard.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[:2]] == [
        ["hand", "embed:missing", "exact"],
        ["hand", "embed:rows", "exact"],
    ]
    assert lines[2:] == ["2 exact"]
