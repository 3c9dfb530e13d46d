"""`otel-torch diff` on graphs of programs that were written after it: the right line is named."""

from __future__ import annotations

import pytest

from tests.corpora import corpus_of
from tests.corpora.checks import cases_of, check_line, fixture_of
from tests.corpora.scores import Board

# one of each way in which two programs differ, and faults of each kind
QUICK = (
    "mamba", "ddim", "dit_image_after_image", "decode_prompt_in_parts", "gnn_nodes_renumbered", "t5_logits_scaled",
    "wavenet_gate_halves", "unet_skip_first", "nerf_passed_includes_the_sample", "adamw_decay_of_norms",
    "decode_embedding_unscaled",
)  # fmt: skip

board = fixture_of(corpus_of("unseen"))


@pytest.mark.parametrize(("name", "variant"), cases_of("unseen", QUICK))
def test_the_line_of_a_fault_is_named(board: Board, name: str, variant: str) -> None:
    check_line(board, name, variant)


def test_the_corpus_is_large_enough() -> None:
    cases = corpus_of("unseen").cases
    assert sum(case.clean for case in cases.values()) >= 25
    assert sum(not case.clean for case in cases.values()) >= 44
