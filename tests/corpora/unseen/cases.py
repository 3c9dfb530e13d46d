"""Programs and faults that were written after the comparison of operations and tried once.

Each case is graded by its line: whether it, or a short region that holds it, is named in either
program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module

from tests.corpora import ROUNDS
from tests.corpora.case import GRAPH, Case, Right, sides_of
from tests.corpora.scores import Corpus
from tests.corpora.unseen.programs import Edit, right_lines

# the steps that are recorded: of samplers, trainings and models that are called for parts of a batch
# several, of others the first
STEPS = {
    "ddim": "0-5", "dit": "0-3", "nerf": "0-1", "adamw": "0-7", "decode": "0-5",
    "lora": "0-7", "rectified": "0-9", "contrast": "0-99", "ppo": "0-99",
    "heun": "0-9", "policy": "0-9", "ema": "0-99",
    "paged": "0-9", "wgan": "0-99", "fastspeech": "0-3", "pixart": "0-9", "vlm": "0-99",
    "finetune": "0-99",
}  # fmt: skip


class Unseen(Corpus):
    """One round of families, and the edits of their ports."""

    engine, together = GRAPH, True

    def __init__(self, name: str) -> None:
        super().__init__()
        edits = import_module(f"tests.corpora.{name}.edits")
        self.name = name
        self._faults: Mapping[str, Edit] = edits.FAULTS
        self._legal: Mapping[str, Edit] = edits.LEGAL

    def load(self) -> Sequence[Case]:
        right = {name: Right(lines=right_lines(name, edit)) for name, edit in self._faults.items()}
        families = sorted({name.partition("_")[0] for name in self._faults})
        names = *families, *self._legal, *self._faults
        return [_case(self.name, name, right.get(name)) for name in names]


def _case(corpus: str, name: str, right: Right | None) -> Case:
    family = name.partition("_")[0]
    sides = sides_of(corpus, family, name, capture="graph", steps=STEPS.get(family, ""))
    return Case(name=name, family=family, right=right, **sides)


CORPORA = {name: Unseen(name) for name in ROUNDS}
