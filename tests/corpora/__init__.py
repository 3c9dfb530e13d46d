"""Corpora of programs with known faults, and how often the comparison names each.

A case is data (`case.py`). One runner records and compares (`scores.py`), one function grades the
answer (`judge.py`), and one command prints all corpora:

    python -m tests.corpora [CORPUS …] [--engine graph] [--only WORD] [--seed N]

| corpus | programs |
|---|---|
| `small` | models of transformers and diffusers, another attention kernel in the port |
| `causes` | three models of its own; what the fault is, and not where |
| `libraries` | faults of `small`; what they are |
| `training` | trainings of a few steps |
| `unseen` | programs and faults that were written after the comparison of operations, and their lines |
| `later` | the same, written later, without sight of the comparison |
| `latest` | a third round of these |
| `newest` | a fourth round |
| `fifth` | a fifth one |
| `layouts` | one process against the ranks of the same model |
| `later_layouts` | other layouts and faults, written without sight of the comparison |
| `engines` | transformers against vLLM |
| `engine_rows` | the same, recorded as graphs of operations with rows |
| `later_engines` | other models and faults, written without sight of the comparison |
| `ports` | FastVideo's models against their originals |
| `machine` | the same, with faults at random modules |
| `frameworks` | as `layouts`, split by Megatron-core and DeepSpeed |
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.corpora.scores import Corpus

# families and faults that were written at different times
ROUNDS = ("unseen", "later", "latest", "newest", "fifth")
# imported only when asked for: most need a framework
CORPORA = {
    "small": "tests.corpora.small.cases",
    "causes": "tests.corpora.causes.cases",
    "libraries": "tests.corpora.causes.cases",
    "training": "tests.corpora.training.cases",
    **dict.fromkeys(ROUNDS, "tests.corpora.unseen.cases"),
    "layouts": "tests.corpora.layouts.cases",
    "later_layouts": "tests.corpora.layouts.later",
    "engines": "tests.corpora.engines.cases",
    "engine_rows": "tests.corpora.engines.cases",
    "later_engines": "tests.corpora.engines.later",
    "frameworks": "tests.corpora.layouts.cases",
    "ports": "tests.fastvideo.ports.cases",
    "machine": "tests.fastvideo.ports.cases",
}
# those also recorded as graphs of operations: of one process, or of as many on both sides, and each
# fault once
AS_GRAPHS = ("small", "causes", "training", "ports", "machine")


def corpus_of(name: str) -> Corpus:
    """Import a corpus."""
    corpora: dict[str, Corpus] = importlib.import_module(CORPORA[name]).CORPORA
    return corpora[name]
