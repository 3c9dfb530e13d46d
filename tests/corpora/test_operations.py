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
QUICK_TRAININGS = ("hook_scales_a_modules_gradient", "loss_summed", "accumulation_not_divided")
QUICK_CAUSES = (
    "llama", "llama_scale_missing", "unet_norms_exchanged", "wan_gate_missing", "wan_noise",
)  # fmt: skip

SMALL, CAUSES, TRAINING = (Operations(corpus_of(name)) for name in ("small", "causes", "training"))
board, board_of_causes, board_of_trainings = map(fixture_of, (SMALL, CAUSES, TRAINING))


@pytest.mark.parametrize(("name", "variant"), cases_of(SMALL, QUICK, variants=("fp32",)))
def test_the_line_of_a_small_case_is_named(board: Board, name: str, variant: str) -> None:
    check_line(board, name, variant)


@pytest.mark.parametrize(("name", "variant"), cases_of(CAUSES, QUICK_CAUSES))
def test_the_line_of_a_cause_is_named(board_of_causes: Board, name: str, variant: str) -> None:
    check_line(board_of_causes, name, variant)


@pytest.mark.parametrize(("name", "variant"), cases_of(TRAINING, QUICK_TRAININGS))
def test_the_line_of_a_fault_of_a_training_is_named(
    board_of_trainings: Board, name: str, variant: str
) -> None:
    check_line(board_of_trainings, name, variant)
