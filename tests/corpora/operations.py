"""The same corpora, recorded as graphs of operations: the other engine of the comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tests.corpora.case import GRAPH, Case
from tests.corpora.scores import DTYPES, Corpus

# a training is recorded in whole, for some faults show after the first step
STEPS = {"training": "0-99"}


class Operations(Corpus):
    """A corpus of which each program is recorded as a graph. The noise serves in bf16 alone, where
    rounding is coarse.
    """

    engine = GRAPH

    def __init__(self, corpus: Corpus) -> None:
        self._corpus, self.name, self.together = corpus, corpus.name, corpus.together
        self.in_whole = corpus.in_whole
        # of variants that say what is kept of a module's tensors, a graph has none
        self.variants = tuple(v for v in corpus.variants if v in DTYPES) or ("",)

    def load(self) -> Sequence[Case]:
        return [as_graph(case) for case in self._corpus.load()]

    def drawn(self, count: int, seed: int) -> Sequence[Case]:
        return [as_graph(case) for case in self._corpus.drawn(count, seed)]  # type: ignore[attr-defined]

    def has_noise(self, variant: str) -> bool:
        return self._corpus.noise and variant == "bf16"


def as_graph(case: Case) -> Case:
    """Return a case of which both programs are recorded as graphs."""
    assert case.reference is not None and case.port is not None
    runs = case.reference, case.port
    counts = [run.ranks for run in runs]
    # one process beside ranks: they have parts of its values
    parts = [max(counts) if count == 1 < max(counts) else 0 for count in counts]
    reference, port = (
        replace(run, capture="graph", steps=STEPS.get(run.capture, run.steps), parts=count)
        for run, count in zip(runs, parts, strict=True)
    )
    return replace(case, reference=reference, port=port)
