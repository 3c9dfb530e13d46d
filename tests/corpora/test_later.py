"""`otel-torch diff` on graphs of programs that were written without sight of it."""

from __future__ import annotations

import pytest

from tests.corpora import ROUNDS, corpus_of
from tests.corpora.checks import check_line, fixture_of

# of each round cases from most families: a quotient close to 1, model outputs that a training uses,
# ports with channels last and other formulas, a sampler that is a model, windows, recurrence, tokens
# in other batches
QUICK = (
    ("later", "convnext_response_norm_over_channels"), ("later", "ppo"),
    ("later", "ppo_entropy_by_logsumexp"), ("later", "detr_library_attention"),
    ("later", "lora_decay_through_the_moments"), ("later", "hyena_positions_end_before_one"),
    ("later", "swin_mask_added"), ("later", "whisper_newest_first"),
    ("later", "flow_gate_by_sigmoid"), ("later", "videovae_norm_by_hand"),
    ("latest", "clipt5_causal_mask_by_the_library"), ("latest", "conformer"),
    ("latest", "vae2d_shift_undone_before_the_scale"), ("latest", "vae2d_upsampled_by_an_index"),
    ("latest", "wan_query_and_key_norm_per_head"), ("latest", "wan_feed_forward_of_a_folded_scale"),
    ("newest", "policy"), ("newest", "policy_one_plan_after_another"),
    ("newest", "deltanet_memory_read_before_it_fades"), ("newest", "sam"),
    ("newest", "sam_distances_of_scaled_queries"), ("newest", "tagger_second_bias_forgotten"),
    ("fifth", "jointvideo_windows_by_split_maps"),
    ("fifth", "jointvideo_past_of_the_map_before_the_windows"),
    ("fifth", "pixart_heads_by_the_library"), ("fifth", "pixart_places_of_rows_before_columns"),
)  # fmt: skip
later_board, latest_board, newest_board, fifth_board = (
    fixture_of(corpus_of(name)) for name in ROUNDS[1:]
)


@pytest.mark.parametrize(("corpus", "name"), QUICK)
def test_the_line_of_a_fault_is_named_and_clean_pairs_are_silent(
    request: pytest.FixtureRequest, corpus: str, name: str
) -> None:
    check_line(request.getfixturevalue(f"{corpus}_board"), name, "")


@pytest.mark.parametrize(
    ("corpus", "clean", "faults"),
    [("later", 30, 60), ("latest", 12, 30), ("newest", 29, 40), ("fifth", 32, 40)],
)
def test_the_corpora_are_large_enough(corpus: str, clean: int, faults: int) -> None:
    cases = corpus_of(corpus).cases
    assert sum(case.clean for case in cases.values()) == clean
    assert sum(not case.clean for case in cases.values()) == faults
