"""`otel-torch diff` on graphs of programs that were written without sight of it."""

from __future__ import annotations

import pytest

from tests.corpora import corpus_of
from tests.corpora.checks import check_line, fixture_of
from tests.corpora.scores import Board

# cases from most families, among them a quotient close to 1 and model outputs that a training uses
QUICK = (
    "convnext_response_norm_over_channels", "ppo", "ppo_entropy_by_logsumexp", "detr_library_attention",
    "lora_decay_through_the_moments", "hyena_positions_end_before_one", "swin_mask_added",
    "whisper_newest_first", "flow_gate_by_sigmoid", "videovae_norm_by_hand",
)  # fmt: skip
# the third round: among them ports with channels last and other formulas
QUICK_OF_LATEST = (
    "clipt5_causal_mask_by_the_library", "conformer", "vae2d_shift_undone_before_the_scale",
    "vae2d_upsampled_by_an_index", "wan_query_and_key_norm_per_head", "wan_feed_forward_of_a_folded_scale",
)  # fmt: skip
# the fourth: a sampler that is a model, windows, recurrence
QUICK_OF_NEWEST = (
    "policy", "policy_one_plan_after_another", "deltanet_memory_read_before_it_fades", "sam",
    "sam_distances_of_scaled_queries", "tagger_second_bias_forgotten",
)  # fmt: skip

board = fixture_of(corpus_of("later"))
latest_board = fixture_of(corpus_of("latest"))
newest_board = fixture_of(corpus_of("newest"))


@pytest.mark.parametrize("name", QUICK)
def test_the_line_of_a_fault_is_named_and_clean_pairs_are_silent(board: Board, name: str) -> None:
    check_line(board, name, "")


@pytest.mark.parametrize("name", QUICK_OF_LATEST)
def test_so_they_are_in_the_third_round(latest_board: Board, name: str) -> None:
    check_line(latest_board, name, "")


@pytest.mark.parametrize("name", QUICK_OF_NEWEST)
def test_so_they_are_in_the_fourth_round(newest_board: Board, name: str) -> None:
    check_line(newest_board, name, "")


@pytest.mark.parametrize(
    ("corpus", "clean", "faults"), [("later", 30, 60), ("latest", 12, 30), ("newest", 29, 40)]
)
def test_the_corpora_are_large_enough(corpus: str, clean: int, faults: int) -> None:
    cases = corpus_of(corpus).cases
    assert sum(case.clean for case in cases.values()) == clean
    assert sum(not case.clean for case in cases.values()) == faults
