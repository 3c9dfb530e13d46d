"""The same cases recorded as graphs: the right line is named, and clean pairs are left alone."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from tests.corpora import corpus_of
from tests.corpora.checks import cases_of, check_line, fixture_of
from tests.corpora.operations import Operations
from tests.corpora.scores import Board

# an edited line, a weight, an order, and clean pairs of two libraries
QUICK = ("gpt2", "wan", "llama_swiglu_swapped", "gpt2_bias_missing", "wan_token_order")
QUICK_CAUSES = ("llama", "llama_scale_missing", "unet_norms_exchanged", "wan_gate_missing")
# what is named at a later line, or not at all; `python -m tests.corpora CORPUS --engine graph` says where
LATER = {"mistral_positions_in_bf16", "flux_norm_out_swapped"}
LATER_CAUSES = {
    "llama_norms_exchanged", "llama_embedding_through_bf16", "llama_tokens_shifted", "wan_query_and_key_weights_exchanged",
    "wan_last_token_lost", "llama_fused_parts_in_another_order", "llama_query_part_scaled", "llama_query_in_rotary_pairs",
    "wan_tokens_through_fp16", "wan_heads_before_tokens",
}  # fmt: skip

SMALL, CAUSES = Operations(corpus_of("small")), Operations(corpus_of("causes"))
board, board_of_causes = fixture_of(SMALL), fixture_of(CAUSES)


@pytest.mark.parametrize(("name", "variant"), cases_of(SMALL, QUICK, variants=("fp32",)))
def test_the_line_of_a_small_case_is_named(board: Board, name: str, variant: str) -> None:
    check_line(board, name, variant, LATER)


@pytest.mark.parametrize(("name", "variant"), cases_of(CAUSES, QUICK_CAUSES))
def test_the_line_of_a_cause_is_named(board_of_causes: Board, name: str, variant: str) -> None:
    check_line(board_of_causes, name, variant, LATER_CAUSES)
