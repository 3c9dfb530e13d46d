"""Where something is wrong: the words in which bugs and faults say what a diff must answer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

Side = Literal["input", "output", "parameter", "missing"]


@dataclass(frozen=True)
class Place:
    """An answer, in one program's names.

    output: what enters `module` and what its children compute is right, what it returns is wrong.
    input: what enters `module` is wrong, though everything before was right: the fault is in the
    glue in front of it. parameter: its own weights are wrong. missing: it is never called.

    The model itself is the module "".
    """

    side: Side
    module: str

    def __str__(self) -> str:
        return f"{self.side}: {self.module or 'the model'}"


into = partial(Place, "input")
out_of = partial(Place, "output")
parameter_of = partial(Place, "parameter")
missing = partial(Place, "missing")
