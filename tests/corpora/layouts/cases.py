"""Layouts of models over ranks, clean and with faults, each compared with the same model in one process.

`hand` splits a model by hand, `library` by torch's own means, `mesh` over two dimensions of ranks
at once, `decoder` grouped queries over tensor and pipeline parallel ranks, `fused` weights that are
cut part by part, `experts` a mixture whose tokens are exchanged, `calls` divides the calls of one
process, `torch` trains by torch's own means, `llama` has its collectives between its modules.
The cases are in `cases.txt`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.corpora.case import Case, Right, Run
from tests.corpora.scores import Corpus
from tests.support import PROGRAMS


@dataclass(frozen=True)
class Program:
    """A program that runs in one process or split over ranks.

    Attributes:
        capture: (options) -> what is recorded.
        alone: (options) -> those of the same model in one process.
        ranks: (options) -> how many there are.
        variables: What else is in the environment.
    """

    path: Path
    capture: Callable[[str], str]
    alone: Callable[[str], str]
    ranks: Callable[[str], int]
    variables: dict[str, str] = field(default_factory=dict)


# options of programs on a mesh that the model in one process does not have
_MESH = ("tensor", "context", "pipeline", "expert", "data", "balanced", "dealt")
_MESH += ("virtual", "sequence", "ring", "stage", "flat")
# options of `split_by_library.py` that it has, too
_IN_ONE_PROCESS = ("stages", "data_wrong_mean")


def _without(options: str, *dropped: str) -> str:
    """Return the options, except those that begin with one of these words."""
    return " ".join(option for option in options.split() if not option.startswith(dropped))


def _on_a_mesh(program: str, folder: Path = PROGRAMS, **variables: str) -> Program:
    return Program(
        folder / program,
        lambda options: "training",
        lambda options: _without(options, *_MESH),
        lambda options: math.prod(
            int(option.partition("=")[2])
            for option in options.split()
            if "=" in option and not option.startswith("virtual")
        ),
        variables,
    )


FRAMEWORKS = PROGRAMS.parent / "frameworks/programs"
_OF_FRAMEWORKS: dict[str, Any] = {
    "folder": FRAMEWORKS,
    "PYTHONPATH": str(FRAMEWORKS),
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
}
PROGRAMS_BY_NAME = {
    "hand": Program(
        PROGRAMS / "layouts/hand_split.py",
        lambda options: "training" if "train" in options.split() else "parity",
        lambda options: options,
        lambda options: 2,
    ),
    "library": Program(
        PROGRAMS / "layouts/split_by_library.py",
        lambda options: "parity" if options == "stages" else "training",
        lambda options: options if options in _IN_ONE_PROCESS else "alone",
        lambda options: 2,
    ),
    "mesh": _on_a_mesh("layouts/split_on_a_mesh.py"),
    "decoder": _on_a_mesh("layouts/split_a_decoder.py"),
    "experts": _on_a_mesh("layouts/split_experts.py"),
    "llama": _on_a_mesh("layouts/split_a_llama.py"),
    "fused": _on_a_mesh("layouts/split_fused_weights.py"),
    "calls": _on_a_mesh("layouts/split_calls.py"),
    "torch": Program(
        PROGRAMS / "layouts/train_over_torch.py",
        lambda options: "training",
        lambda options: "",
        lambda options: 4 if options in ("fsdp1_hybrid", "fsdp2_hybrid", "fsdp2_tensor") else 2,
    ),
    "megatron": _on_a_mesh("megatron_layouts.py", **_OF_FRAMEWORKS),
    "deepspeed": replace(
        _on_a_mesh("deepspeed_layouts.py", **_OF_FRAMEWORKS), ranks=lambda options: 2
    ),
}
KINDS = {
    "hand": "two ranks, split by hand",
    "library": "two ranks, split by hand",
    "mesh": "a mesh of two or four ranks",
    "decoder": "a decoder on two or four ranks",
    "fused": "fused weights on two ranks",
    "experts": "experts on two ranks",
    "llama": "a llama on two or four ranks",
    "torch": "torch's own means",
    "calls": "calls that ranks divide",
    "megatron": "Megatron-core and DeepSpeed",
    "deepspeed": "Megatron-core and DeepSpeed",
}

# the fewest pairs of a clean layout, so that silence means something: of trainings, the gradients
# and updates of two steps, and those of the second microbatch
FEWEST = {
    "hand": 1, "library": 100, "experts": 100, "fused": 170, "calls": 190, "torch": 600, "llama": 350, "megatron": 1500,
    "deepspeed": 200,
}  # fmt: skip


def case_of(program: str, options: str = "", fault: str = "", said: str = "") -> Case:
    """Return a case; `said` is what the first finding says, as in `cases.txt`."""
    chosen = PROGRAMS_BY_NAME[program]
    capture = chosen.capture(options)
    split = (*options.split(), *filter(None, [fault]))
    return Case(
        name=" ".join(filter(None, (program, options, fault))), family=program, edit=fault, kind=KINDS[program],
        reference=Run(chosen.path, tuple(chosen.alone(options).split()), 1, capture, environment=chosen.variables),
        port=Run(chosen.path, split, chosen.ranks(options), capture, environment=chosen.variables),
        right=_right(*said.split()) if said else None,
    )  # fmt: skip


def _right(
    module: str, tensor: str, phase: str, rank: str, cause: str, grade: str = "exact"
) -> Right:
    says = {
        "port_module": module.strip('"'),
        "port_tensor": tensor,
        "phase": phase,
        "rank": None if rank == "-" else int(rank),
        "cause": None if cause == "-" else cause,
    }
    return Right(says=says, grade=grade)


def _read() -> list[Case]:
    lines = Path(__file__).with_name("cases.txt").read_text().splitlines()
    cells = [line.split("|") for line in lines if not line.startswith("#")]
    return [case_of(*(cell.strip() for cell in row)) for row in cells]


class Layouts(Corpus):
    without_warnings = True

    def __init__(self, name: str) -> None:
        self.name = name

    def load(self) -> Sequence[Case]:
        of_frameworks = self.name == "frameworks"
        return [case for case in _read() if (case.family in _BY_FRAMEWORKS) == of_frameworks]


_BY_FRAMEWORKS = ("megatron", "deepspeed")
CORPORA = {name: Layouts(name) for name in ("layouts", "frameworks")}
