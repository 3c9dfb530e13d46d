"""transformers against vLLM on a CPU: clean engines are silent, and faults are named with their
module and tokens. The scoreboard prints all of them.
"""

from __future__ import annotations

import os

import pytest

from tests.corpora import corpus_of
from tests.corpora.engines.cases import CLEAN
from tests.corpora.engines.environment import ENVIRONMENT
from tests.corpora.scores import Recorder, score
from tests.sampling import sample

pytestmark = pytest.mark.engines

SOME_FAULTS = (
    "embedding_scaled",
    "keys_and_values_exchanged",
    "linear_scaling",
    "gate_and_up_exchanged",
    "update_of_one_request",
    "layers_exchanged",
    "mlp_of_first_layer",
    "layer_twice",
    "first_norm_twice",
    "bias_added_twice",
    "shared_experts_scaled",
    "logits_not_capped",
    "residual_not_scaled",
    "fc1_without_bias",
    "last_of_chunk_lost",
    "blocks_of_another_request",
    "window_off_by_one",
    "query_norm_missing",
    "one_expert_scaled",
    "logits_of_another_word",
    "query_bias_dropped",
)


ENGINES = corpus_of("engines")
CLEAN_NAMES = set(map(str, CLEAN))
SOME = [
    case for case in ENGINES.cases.values() if (case.clean and case.name in CLEAN_NAMES) or case.name in SOME_FAULTS
]  # fmt: skip


@pytest.mark.parametrize("engine", sample(dict.fromkeys(case.family for case in SOME), 3))
def test_an_engine_is_silent_and_its_faults_are_named(tmp_path, engine):
    os.environ.update(ENVIRONMENT)
    chosen = [case for case in SOME if case.family == engine]
    grades = {
        answer.case: answer.grade
        for (answer,) in score(ENGINES, Recorder(ENGINES, tmp_path), chosen)
    }
    right = {case.name: "silent" if case.clean else "exact" for case in chosen}
    assert {case.name: grades[case.name] for case in chosen} == right


OF_ROWS = ("llama float32", "theta", "softmax_scale", "down_proj_scaled", "last_of_chunk_lost")


def test_by_rows_an_engine_is_silent_and_its_faults_are_named(tmp_path):
    os.environ.update(ENVIRONMENT)
    by_rows = corpus_of("engine_rows")
    chosen = [case for case in by_rows.cases.values() if case.name in OF_ROWS]
    answers = [answer for (answer,) in score(by_rows, Recorder(by_rows, tmp_path), chosen)]
    right = {answer.case for answer in answers if answer.grade in ("silent", "exact", "place")}
    assert right == set(OF_ROWS)
