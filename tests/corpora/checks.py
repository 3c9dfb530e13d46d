"""The test of a corpus: no case is judged worse than is known."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any

import pytest

from tests.corpora import corpus_of
from tests.corpora.case import GRAPH
from tests.corpora.judge import GRADES
from tests.corpora.judge_lines import LINE_GRADES
from tests.corpora.scores import DTYPES, Board, Corpus, Score, Summary, read
from tests.sampling import sample


def fixture_of(corpus: Corpus) -> Any:
    """Return a fixture: a board that scores each case once and prints the totals at the end."""

    @pytest.fixture(scope="module")
    def board(
        request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Board]:
        board = Board(corpus, tmp_path_factory.mktemp(corpus.name))
        yield board
        summary = Summary(f"{corpus.name}, scored", board.lines())
        request.config.pluginmanager.register(summary)

    return board


def cases_of(
    corpus: str | Corpus,
    quick: Collection[str] = (),
    mark: Any = pytest.mark.scoreboard,
    variants: Collection[str] | None = None,
) -> list[Any]:
    """Return (case, variant) for `parametrize`: the quick ones, and marked those that the day draws.
    What is below rounding is left out: anything may be said of it.
    """
    corpus = corpus_of(corpus) if isinstance(corpus, str) else corpus
    seen = [
        (case, variant)
        for case in corpus.cases
        for variant in variants or corpus.variants
        if variant not in DTYPES or variant not in corpus.cases[case].invisible
    ]
    drawn = sample([pair for pair in seen if pair[0] not in quick])
    return [
        pytest.param(*pair, id=" ".join(filter(None, pair)), marks=() if pair[0] in quick else mark)
        for pair in seen
        if pair[0] in quick or pair in drawn
    ]


def check(board: Board, name: str, variant: str, known: Mapping[str, str] | None = None) -> None:
    """Fail if a case is judged worse than it should be; `known` says which are not exact, and how far
    they are.
    """
    case, answer = board.corpus.cases[name], board.ours(name, variant)
    if case.right is None:
        assert answer.grade == "silent", answer.said
    elif variant not in case.invisible:
        expected = (known or {}).get(name, case.right.grade)
        assert GRADES.index(answer.grade) <= GRADES.index(expected), answer.said
    else:
        assert answer.grade not in ("wrong", "error"), answer.said


@cache
def _graded_before() -> dict[tuple[str, str, str], Score]:
    """Return what the page of scores says of comparisons of operations."""
    return {(s.corpus, s.case, s.variant): s for s in read() if s.engine == GRAPH}


def check_line(board: Board, name: str, variant: str) -> None:
    """Fail if a comparison of operations names no right line, or is not silent about a clean pair,
    unless the page of scores says that it does no better.
    """
    case, answer = board.corpus.cases[name], board.ours(name, variant)
    assert answer.engine == GRAPH
    before = _graded_before().get((board.corpus.name, name, variant))
    if case.right is None:
        assert answer.grade in ("silent", before and before.grade), answer.said
    else:
        worst = max("region", before.line if before else "", key=_rank)
        assert _rank(answer.line) <= _rank(worst), answer.said


def _rank(line: str) -> int:
    return ("", *LINE_GRADES).index(line)
