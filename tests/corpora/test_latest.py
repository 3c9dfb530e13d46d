"""`otel-torch diff` on graphs of a third round of programs, which were written without sight of it."""

from __future__ import annotations

import pytest

from tests.corpora import corpus_of
from tests.corpora.checks import check_line, fixture_of
from tests.corpora.scores import Board

# cases from most families, among them ports with channels last and other formulas
QUICK = (
    "clipt5_causal_mask_by_the_library", "conformer", "vae2d_shift_undone_before_the_scale",
    "vae2d_upsampled_by_an_index", "wan_query_and_key_norm_per_head", "wan_feed_forward_of_a_folded_scale",
)  # fmt: skip

board = fixture_of(corpus_of("latest"))


@pytest.mark.parametrize("name", QUICK)
def test_the_line_of_a_fault_is_named_and_clean_pairs_are_silent(board: Board, name: str) -> None:
    check_line(board, name, "")


def test_the_corpus_is_large_enough() -> None:
    cases = corpus_of("latest").cases
    assert sum(case.clean for case in cases.values()) == 12
    assert sum(not case.clean for case in cases.values()) == 30
