"""Trainings with a fault, which has to be named, or a legal change, of which nothing is to be said.

Each side is an unmodified program in a child process.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.corpora.case import Case
from tests.corpora.scores import Corpus
from tests.corpora.training.clean import CLEAN
from tests.corpora.training.faults import FAULTS
from tests.corpora.training.kept_back import BESIDE  # which adds to both tables

assert BESIDE


class Trainings(Corpus):
    name = "training"
    in_whole = False  # a port may evaluate in between

    def load(self) -> Sequence[Case]:
        return [*FAULTS.values(), *CLEAN.values()]


CORPORA = {"training": Trainings()}
