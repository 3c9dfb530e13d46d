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

board = fixture_of(corpus_of("later"))


@pytest.mark.parametrize("name", QUICK)
def test_the_line_of_a_fault_is_named_and_clean_pairs_are_silent(board: Board, name: str) -> None:
    check_line(board, name, "")


def test_the_corpus_is_large_enough() -> None:
    cases = corpus_of("later").cases
    assert sum(case.clean for case in cases.values()) == 30
    assert sum(not case.clean for case in cases.values()) == 60
