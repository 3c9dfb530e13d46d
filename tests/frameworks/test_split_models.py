"""One process against the ranks of a model that Megatron-core or DeepSpeed splits."""

from __future__ import annotations

import pytest

from tests.corpora import corpus_of
from tests.corpora.checks import cases_of, check, fixture_of
from tests.corpora.layouts.cases import FEWEST

CORPUS = corpus_of("frameworks")
pytestmark = pytest.mark.frameworks

board = fixture_of(CORPUS)


@pytest.mark.parametrize(("name", "variant"), cases_of("frameworks", mark=()))
def test_a_model_that_a_framework_splits_is_judged_as_known(board, name, variant):
    check(board, name, variant)
    case = CORPUS.cases[name]
    if case.clean:
        report, _ = CORPUS.compare(case, variant, board.recorder)
        assert report.pairs > FEWEST[case.family]
