"""Where single values of a graph lie on disk: a folder with one file for each of them.

>>> file_name(ValueKey(0, 3, "op[12]"), 0)
'loop0.step3.op[12].rank0.safetensors'
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

# the list of file names of the values that a run is to keep, one a line
WANTED = "wanted"
# before the label of a value, that of what was put in its place
PUT_LABEL = "put "
# in the header of a value that is put: an axis of it, and the same axis of the port's value
AXES = "axes"


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
    folder.mkdir(parents=True, exist_ok=True)
    (folder / WANTED).write_text("".join(f"{name}\n" for name in names), encoding="utf-8")


def read_header(file: BinaryIO) -> dict[str, Any]:
    """Read the header of a value's file, which is one of safetensors: eight bytes of length, a JSON
    object, the elements.
    """
    header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return header


def write_header(file: BinaryIO, header: dict[str, Any]) -> None:
    content = json.dumps(header).encode()
    file.write(len(content).to_bytes(8, "little") + content)


def copy_value(source: Path, target: Path, axes: tuple[int, int] | None) -> None:
    """Copy the file of a value that is to be put in another one's place.

    Args:
        axes: An axis of the value and the same axis of the other one, if that is known.
    """
    if axes is None:
        shutil.copyfile(source, target)
        return
    with source.open("rb") as original, target.open("wb") as copy:
        header = read_header(original)
        write_header(copy, {**header, "__metadata__": {AXES: json.dumps(axes)}})
        shutil.copyfileobj(original, copy)
