"""Where single values of a graph lie on disk: a folder with one file for each of them.

>>> file_name(ValueKey(0, 3, "op[12]"), 0)
'loop0.step3.op[12].rank0.safetensors'
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

# the list of file names of the values that a run is to keep, one a line
WANTED = "wanted"
# before the label of a value, that of what was put in its place
PUT_LABEL = "put "


class ValueKey(NamedTuple):
    """A value of a graph: `label` is the tensor of its row, such as `op[12]` or `leaf[3]`."""

    loop: int
    step: int
    label: str


def file_name(key: ValueKey, rank: int) -> str:
    """Return the name of the file of a value."""
    return f"loop{key.loop}.step{key.step}.{key.label}.rank{rank}.safetensors"


def read_wanted(path: Path) -> frozenset[str]:
    """Return the names in a list of values. Raises OSError if there is none."""
    return frozenset(path.read_text(encoding="utf-8").splitlines())


def write_wanted(folder: Path, names: Iterable[str]) -> None:
    """Write the list of values that a run is to keep in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / WANTED).write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
