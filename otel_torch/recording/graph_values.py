"""Where single values of a graph lie on disk: a folder with one file for each of them.

>>> file_name(ValueKey(0, 3, "op[12]"), 0)
'loop0.step3.op[12].rank0.safetensors'
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

# the list of file names of the values that a run is to keep, one a line
WANTED = "wanted"
# before the label of a value, that of what was put in its place
PUT_LABEL = "put "
# in the header of a value that is put: an axis of it, and the same axis of the port's value; or the
# rows of the port's value in whose place its own are put
AXES, PLACES = "axes", "places"


class ValueKey(NamedTuple):
    """A value of a graph: `label` is the tensor of its row, such as `op[12]` or `leaf[3]`."""

    loop: int
    step: int
    label: str

    def as_put(self) -> ValueKey:
        """Return the key of what a trial put in the place of the value."""
        return self._replace(label=f"{PUT_LABEL}{self.label}")


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


def copy_value(
    source: Path,
    target: Path,
    axes: tuple[int, int] | None,
    part: Sequence[range] | None = None,
) -> None:
    """Copy the file of a value that is to be put in another one's place.

    Args:
        axes: An axis of the value and the same axis of the other one, if that is known.
        part: Which elements of each axis are put there; all by default.
    """
    with source.open("rb") as original, target.open("wb") as copy:
        header = read_header(original)
        ((name, entry),) = header.items()
        if axes is not None:
            header["__metadata__"] = {AXES: json.dumps(axes)}
        if part is None:
            write_header(copy, header)
            shutil.copyfileobj(original, copy)
            return
        elements = np.frombuffer(original.read(), np.uint8).reshape(*entry["shape"], -1)
        own = elements[tuple(slice(own.start, own.stop) for own in part)]
        header[name] = entry | {"shape": list(own.shape[:-1]), "data_offsets": [0, own.size]}
        write_header(copy, header)
        copy.write(own.tobytes())


def copy_rows(sources: Sequence[tuple[Path, Sequence[int], Sequence[int]]], target: Path) -> None:
    """Write rows of some values' files into the file of rows that are to be put into another value.

    Args:
        sources: Each a file, which of its rows along the last axis, and their places in the value.
    """
    content: list[bytes] = []
    places: list[int] = []
    for path, rows, own_places in sources:
        with path.open("rb") as file:
            ((name, entry),) = read_header(file).items()
            table = file.read()
        size = len(table) // math.prod(entry["shape"][:-1])
        content += (table[row * size : (row + 1) * size] for row in rows)
        places += own_places
    header = {
        "dtype": entry["dtype"],
        "shape": [len(places), entry["shape"][-1]],
        "data_offsets": [0, sum(map(len, content))],
    }
    with target.open("wb") as file:
        write_header(file, {name: header, "__metadata__": {PLACES: json.dumps(places)}})
        file.writelines(content)
