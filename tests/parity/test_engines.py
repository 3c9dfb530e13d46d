"""transformers against vLLM on a CPU: clean engines are silent, and faults are named with their
module and tokens. The scoreboard prints all of them.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import pytest

from tests.parity.engines.corpus import CLEAN, FAULTS, Engine
from tests.parity.engines.environment import ENVIRONMENT
from tests.parity.engines.scoreboard import outcome

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


def _cases() -> dict[Engine, list[str]]:
    """Return the faults of each engine; that without a name is the clean engine."""
    cases = defaultdict(list)
    for engine in CLEAN:
        cases[engine].append("")
    for name in SOME_FAULTS:
        cases[Engine(FAULTS[name].family)].append(name)
    return cases


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    os.environ.update(ENVIRONMENT)
    return tmp_path_factory.mktemp("engines")


@pytest.mark.parametrize(("engine", "faults"), _cases().items(), ids=str)
def test_an_engine_is_silent_and_its_faults_are_named(folder, engine, faults):
    from tests.parity.engines.recorder import compare

    reports = compare(folder, engine, faults)
    outcomes = {
        name: outcome(report, FAULTS.get(name))
        for name, report in zip(faults, reports, strict=True)
    }
    assert outcomes == {name: "exact" if name else "silent" for name in faults}
