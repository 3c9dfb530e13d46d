"""A case is data: two programs, what was changed in the port, and what is right to say of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

# one side of any corpus as an unmodified program
SIDE = Path(__file__).with_name("side.py")
REST, KEPT_BACK = "", "kept back"
# what is recorded and compared: the calls of modules, or the graph of operations
MODULES, GRAPH, BISECT = ENGINES = ("modules", "graph", "bisect")


@dataclass(frozen=True)
class Place:
    """The place where a wrong tensor is first seen, in one program's names.

    side: "output" of `module`, which computed it; "input" of `module`, so the code that calls the
    module is at fault; "parameter" of `module`, which differs before any forward; "missing": the
    module is never called; "" if any side is right. The model itself is the module "".
    """

    side: str
    module: str

    def __str__(self) -> str:
        return f"{self.side} {self.module or '(root)'}".lstrip()


into, out_of, parameter_of, missing, at = (
    partial(Place, side) for side in ("input", "output", "parameter", "missing", "")
)


@dataclass(frozen=True)
class Line:
    """A line of one program, by what is known of it. Of what is left empty, anything is right.

    Attributes:
        text: a piece of the line, as it stands in the source.
        function: a piece of `file:function`.
        module: in which the line runs.
        place: `file.py:7`.
        leaf: a wrong parameter or buffer, such as `norm.weight`; all of a module, with a dot at the
            end. A finding names it, or the line that reads it in the module that owns it.
    """

    text: str = ""
    function: str = ""
    module: str = ""
    leaf: str = ""
    place: str = ""


@dataclass(frozen=True)
class Lines:
    """The lines of each program that are right to name: any of them, in either program.

    Right is the line that is wrong, and the one that computes the first wrong tensor: if two names are
    exchanged where a tensor is split, no tensor is wrong before they are used.
    """

    port: tuple[Line, ...] = ()
    reference: tuple[Line, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.port or self.reference)


def in_both(*lines: Line) -> Lines:
    """Return lines that have the same name in both programs."""
    return Lines(lines, lines)


@dataclass(frozen=True, kw_only=True)
class Right:
    """What is right to say of a fault. Of what is left empty, anything is right.

    Attributes:
        places: by the port's names, best first; any of them is exact.
        in_reference: likewise by the reference's names; a place that is right in either program's
            names counts. None: not known.
        near: modules next to the right one. None: the order of events tells which those are.
        lines: of a comparison of operations.
        phases: `forward`, `loss`, `backward`, `update` …, best first.
        step: of the reference, where the fault first shows.
        causes: kinds of cause; `()` if nothing can name it, so that any name is wrong.
        coarser: kinds of cause that say less than what is known.
        words: of the explanation, all of them; `|` separates alternatives.
        says: fields of the finding and their only right values, where no other place is nearly right.
        or_says: other values that are as right.
        grade: what an answer counts that is as expected; less than `exact` if it is known to be less
            than the truth.
    """

    places: tuple[Place, ...] = ()
    in_reference: tuple[Place, ...] | None = None
    near: tuple[str, ...] | None = None
    lines: Lines = Lines()
    phases: tuple[str, ...] = ()
    step: int | None = None
    causes: tuple[str, ...] | None = None
    coarser: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    says: Mapping[str, Any] = field(default_factory=dict)
    or_says: tuple[Mapping[str, Any], ...] = ()
    grade: str = "exact"

    def __str__(self) -> str:
        said = [*self.phases[:1], *map(str, self.places[:1]), *(self.causes or ()), *self.words]
        said += [str(value) for value in self.says.values() if value not in (None, "")]
        return " ".join(said)


@dataclass(frozen=True)
class Run:
    """A program as one side of a case; recorded once, however many cases share it."""

    program: Path
    arguments: tuple[str, ...]
    ranks: int = 1
    capture: str = "parity"
    _: KW_ONLY
    steps: str = ""
    parts: int = 0
    environment: Mapping[str, str] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Two programs, and where they differ.

    Attributes:
        edit: what is wrong with the port, in words or as the text of a planted fault.
        plant: what changes the port, if a function does.
        right: None for a clean pair.
        round: in which the case was first seen: with the rules, or kept back from them.
        kind: the row of the page that counts it.
        invisible: variants in which nothing can name it: its effect is below rounding, or only whole
            tensors show it.
    """

    name: str
    family: str
    reference: Run | None = None
    port: Run | None = None
    edit: str = ""
    plant: Callable[..., object] | None = field(default=None, compare=False)
    right: Right | None = None
    round: str = REST
    kind: str = ""
    invisible: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        return self.right is None


def sides_of(corpus: str, reference: str, port: str, **settings: Any) -> dict[str, Run]:
    """Return the runs of a case whose sides `side.py` builds."""
    return {
        "reference": Run(SIDE, (corpus, reference, "reference"), **settings),
        "port": Run(SIDE, (corpus, port, "port"), **settings),
    }
