"""Other layouts and faults, written without sight of the comparison.

The programs are in `tests/programs/layouts/later_layouts`, and the cases in `later.txt`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.corpora.case import Case, Right, Run
from tests.corpora.layouts.cases import Program
from tests.corpora.scores import Corpus
from tests.support import PROGRAMS

# options that the model in one process has, too; the others say how it is split
_OF_MODEL = ("ragged", "tied")


def _ranks(options: str) -> int:
    sizes = [word for word in options.split() if word.startswith("ranks=")]
    return int(sizes[0].partition("=")[2]) if sizes else 2


def _program(name: str, capture: str) -> Program:
    return Program(
        PROGRAMS / f"layouts/later_layouts/{name}.py",
        lambda options: capture,
        lambda options: " ".join(word for word in options.split() if word in _OF_MODEL),
        _ranks,
    )


PROGRAMS_BY_NAME = {
    name: _program(name, capture)
    for capture, names in {
        "parity": ("ulysses_dit", "vae_strips", "video_frames"),
        "training": ("contrastive", "gshard", "state_space", "t5_heads", "flat_shards"),
    }.items()
    for name in names
}


def case_of(program: str, options: str = "", fault: str = "", said: str = "") -> Case:
    """Return a case; `said` is what the first finding says, as in `later.txt`."""
    chosen = PROGRAMS_BY_NAME[program]
    capture = chosen.capture(options)
    split = (*options.split(), *([f"fault={fault}"] if fault else []))
    return Case(
        name=" ".join(filter(None, (program, options, fault))),
        family=program,
        edit=fault,
        kind="written without sight of the comparison",
        reference=Run(chosen.path, tuple(chosen.alone(options).split()), 1, capture),
        port=Run(chosen.path, split, chosen.ranks(options), capture),
        right=_right(said) if said else None,
    )


def _right(said: str) -> Right:
    """Return what is right to say: one of the alternatives, each with its own place and rank."""
    alternatives = [_says(*alternative.split()) for alternative in said.split(" or ")]
    grade = alternatives[0].pop("grade")
    others = tuple({k: v for k, v in says.items() if k != "grade"} for says in alternatives[1:])
    return Right(says=alternatives[0], or_says=others, grade=grade)


def _says(
    module: str, tensor: str, phase: str, rank: str, cause: str, grade: str = "exact"
) -> dict[str, Any]:
    says: dict[str, Any] = {"port_module": module.strip('"'), "port_tensor": tensor, "phase": phase}
    says |= {} if rank == "-" else {"rank": int(rank)}
    says |= {} if cause == "-" else {"cause": cause}
    return says | {"grade": grade}


def _read() -> list[Case]:
    lines = Path(__file__).with_name("later.txt").read_text().splitlines()
    cells = [line.split("|") for line in lines if not line.startswith("#")]
    return [case_of(*(cell.strip() for cell in row)) for row in cells]


class LaterLayouts(Corpus):
    name = "later_layouts"
    without_warnings = True

    def load(self) -> Sequence[Case]:
        return _read()


CORPORA = {"later_layouts": LaterLayouts()}
