"""Programs and faults that were written after the comparison of operations and tried once.

Each case is graded by its line: whether it, or a short region that holds it, is named in either
program.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.corpora.case import GRAPH, Case, Right, sides_of
from tests.corpora.scores import Corpus
from tests.corpora.unseen.edits import FAULTS, LEGAL
from tests.corpora.unseen.programs import right_lines

# the steps that are recorded: of samplers, trainings and models that are called for parts of a batch
# several, of others the first
STEPS = {"ddim": "0-5", "dit": "0-3", "nerf": "0-1", "adamw": "0-7", "decode": "0-5"}
FAMILIES = (
    "adamw", "ddim", "decode", "dit", "gnn", "mamba", "melspec", "moe", "nerf", "rwkv",
    "seq2seq", "t5", "unet", "vq", "wavenet",
)  # fmt: skip


class Unseen(Corpus):
    name, engine, together = "unseen", GRAPH, True

    def load(self) -> Sequence[Case]:
        right = {name: Right(lines=right_lines(name, edit)) for name, edit in FAULTS.items()}
        return [_case(name, right.get(name)) for name in (*FAMILIES, *LEGAL, *FAULTS)]


def _case(name: str, right: Right | None) -> Case:
    family = name.partition("_")[0]
    sides = sides_of("unseen", family, name, capture="graph", steps=STEPS.get(family, ""))
    return Case(name=name, family=family, right=right, **sides)


CORPORA = {"unseen": Unseen()}
