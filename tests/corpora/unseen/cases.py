"""Programs and faults that were written after the comparison of operations and tried once.

Each case is graded by its line: whether it, or a short region that holds it, is named in either
program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.corpora.case import GRAPH, Case, Right, sides_of
from tests.corpora.later import edits as later
from tests.corpora.latest import edits as latest
from tests.corpora.newest import edits as newest
from tests.corpora.scores import Corpus
from tests.corpora.unseen import edits
from tests.corpora.unseen.programs import Edit, right_lines

# the steps that are recorded: of samplers, trainings and models that are called for parts of a batch
# several, of others the first
STEPS = {
    "ddim": "0-5", "dit": "0-3", "nerf": "0-1", "adamw": "0-7", "decode": "0-5",
    "lora": "0-7", "rectified": "0-9", "contrast": "0-99", "ppo": "0-99",
    "heun": "0-9", "policy": "0-9", "ema": "0-99",
}  # fmt: skip
FAMILIES = (
    "adamw", "ddim", "decode", "dit", "gnn", "mamba", "melspec", "moe", "nerf", "rwkv",
    "seq2seq", "t5", "unet", "vq", "wavenet",
)  # fmt: skip

LATER_FAMILIES = (
    "contrast", "convnext", "detr", "flow", "hyena", "lora", "mla", "ppo", "rectified", "swin",
    "videovae", "whisper",
)  # fmt: skip

LATEST_FAMILIES = ("clipt5", "conformer", "gemma", "heun", "vae2d", "wan")

NEWEST_FAMILIES = (
    "deltanet", "ema", "hifigan", "modernbert", "pointnet", "policy", "sam", "tagger",
)  # fmt: skip


class Unseen(Corpus):
    """Families, and the edits of their ports."""

    engine, together = GRAPH, True

    def __init__(
        self,
        name: str,
        families: Sequence[str],
        faults: Mapping[str, Edit],
        legal: Mapping[str, Edit],
    ) -> None:
        super().__init__()
        self.name, self._families, self._faults, self._legal = name, families, faults, legal

    def load(self) -> Sequence[Case]:
        right = {name: Right(lines=right_lines(name, edit)) for name, edit in self._faults.items()}
        names = *self._families, *self._legal, *self._faults
        return [_case(self.name, name, right.get(name)) for name in names]


def _case(corpus: str, name: str, right: Right | None) -> Case:
    family = name.partition("_")[0]
    sides = sides_of(corpus, family, name, capture="graph", steps=STEPS.get(family, ""))
    return Case(name=name, family=family, right=right, **sides)


CORPORA = {
    "unseen": Unseen("unseen", FAMILIES, edits.FAULTS, edits.LEGAL),
    "later": Unseen("later", LATER_FAMILIES, later.FAULTS, later.LEGAL),
    "latest": Unseen("latest", LATEST_FAMILIES, latest.FAULTS, latest.LEGAL),
    "newest": Unseen("newest", NEWEST_FAMILIES, newest.FAULTS, newest.LEGAL),
}
