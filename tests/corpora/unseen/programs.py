"""The two programs of a case, and the lines of each that are right to name.

A family is a file that holds both programs. A port that is faulty, or written in another legal way,
is a copy of that file in which a text was replaced.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from tests.corpora import ROUNDS
from tests.corpora.case import Line, Lines

FOLDERS = tuple(Path(__file__).parents[1] / name for name in ROUNDS)


@dataclass(frozen=True)
class Edit:
    """What changes the port.

    Attributes:
        old, new: texts of its file; `old` stands there once.
        at: further lines of the port that are right to name: they use first what is wrong.
        reference: the lines of the reference that do what the changed ones should.
    """

    old: str
    new: str
    reference: tuple[str, ...] = ()
    at: tuple[str, ...] = ()


def path_of(family: str) -> Path:
    """Return the file of a family."""
    return next(path for folder in FOLDERS if (path := folder / f"{family}.py").is_file())


def source(family: str, edits: Sequence[Edit] = ()) -> str:
    text = path_of(family).read_text()
    for edit in edits:
        if text.count(edit.old) != 1:
            raise ValueError(f"{family}.py holds {text.count(edit.old)} times {edit.old!r}")
        text = text.replace(edit.old, edit.new)
    return text


def lines_of(text: str, parts: tuple[str, ...]) -> set[int]:
    """Return the lines of the statements that hold the parts, of a loop or a branch its first ones."""
    for part in parts:
        if text.count(part) != 1:
            raise ValueError(f"{text.count(part)} times {part!r}")
    return set().union(*(_lines_from(text, text.index(part), part) for part in parts))


def _lines_from(text: str, place: int, part: str) -> set[int]:
    """Return the lines of the statements that hold a part, which stands at a place of the text."""
    lines: set[int] = set()
    first = text[:place].count("\n") + 1
    for line in range(first, first + part.strip("\n").count("\n") + 1):
        around = [s for s in _statements(text) if s.lineno <= line <= (s.end_lineno or 0)]
        inner = max(around, key=lambda s: s.lineno)
        body = getattr(inner, "body", None)
        last = body[0].lineno - 1 if body else inner.end_lineno
        lines |= set(range(inner.lineno, (last or 0) + 1))
    return lines


@cache
def _statements(text: str) -> list[ast.stmt]:
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]


def right_lines(name: str, edit: Edit, others: Sequence[Edit] = ()) -> Lines:
    """Return the right lines of both programs for an edit; the port may have others beside it."""
    family = name.partition("_")[0]
    place = source(family, others).index(edit.old)
    text = source(family, (*others, edit))
    port = _lines_from(text, place, edit.new) | lines_of(text, edit.at)
    reference = lines_of(source(family), edit.reference)
    return Lines(
        tuple(Line(place=f"{name}.py:{line}") for line in sorted(port)),
        tuple(Line(place=f"{family}.py:{line}") for line in sorted(reference)),
    )


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="unseen-"))


def load(name: str, edits: Sequence[Edit] = ()) -> ModuleType:
    """Import a family's file, or a copy of it that has been edited."""
    path = _folder() / f"{name}.py" if edits else path_of(name)
    if edits:
        path.write_text(source(name.partition("_")[0], edits))
    spec = importlib.util.spec_from_file_location(f"unseen_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def side(name: str, side: str, variant: str, seed: int) -> Iterator[Callable[[], object]]:
    """Build one side of a case; only the port is edited, with all edits that a `+` joins."""
    known: dict[str, Edit] = {}
    for folder in ROUNDS:
        edits = importlib.import_module(f"tests.corpora.{folder}.edits")
        known |= edits.FAULTS | edits.LEGAL
    torch.manual_seed(seed)
    reference, port = load(name, [known[own] for own in name.split("+") if own in known]).build()
    torch.manual_seed(seed + 7)
    yield reference if side == "reference" else port
