"""The real ports as cases: bugs made by hand, faults of real ports, clean pairs, and faults drawn by a
machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.corpora.case import Case, Lines, Place, Right, into, out_of, sides_of
from tests.corpora.judge import OURS, RULE
from tests.corpora.scores import DTYPES, Corpus
from tests.fastvideo.ports.bugs import BUGS, REAL
from tests.fastvideo.ports.corpus import PAIRS, build
from tests.fastvideo.ports.faults import Fault, draw
from tests.fastvideo.ports.lines import LINES, lines_of_fault
from tests.fastvideo.ports.quiet import quietly

# What bf16 does to an output hides what does less than three times as much: relative L2 of the
# output, by the fault alone in fp32, and by bf16 alone in the clean port (for faults of real ports,
# in the reference).
BELOW_ROUNDING: dict[str, tuple[float, float]] = {
    "cosmos25_epsilon": (2.4e-6, 1.2e-2),
    "hunyuan_activation": (6.6e-5, 8.8e-3),
    "wan_text_projection": (9.1e-5, 6.7e-3),
    "kandinsky5": (3.5e-4, 8.6e-3),
    "lingbot_t5_eps": (1.2e-3, 2.0e-2),
    "hunyuan15_condition_type": (4.8e-3, 5.8e-3),
    "clip_activation": (7.4e-3, 7.8e-3),
    "wan_image_length": (7.2e-3, 6.9e-3),
    "hunyuan15_masked": (7.9e-3, 6.5e-3),
    "wan_qk_norm": (9.6e-3, 6.7e-3),
    "cosmos_frame_rate": (2.4e-2, 1.2e-2),
    "hunyuan_refiner_time": (1.9e-2, 8.8e-3),
    "hunyuan_masked": (2.8e-2, 1.0e-2),
}

# a clean port whose reference does in fp32 what it need not do: a real difference, rightly named,
# and nobody's fault
LEGAL: dict[str, tuple[str, tuple[Place, ...], tuple[Place, ...]]] = {
    "kandinsky5": (
        "the reference rounds rotated q and k to bf16 whatever it runs in",
        tuple(
            place("text_transformer_blocks.0.self_attention.local_attention")
            for place in (into, out_of)
        ),
        (into("text_transformer_blocks.0.self_attention.out_layer"),),
    ),
}


def _read() -> dict[str, list[str]]:
    lines = Path(__file__).with_name("drawn.txt").read_text().splitlines()
    rows = (line.split() for line in lines if not line.startswith("#"))
    return {pair: specs for pair, *specs in rows}


DRAWN = _read()
NO_LINES = Lines()


def _case(
    name: str,
    pair: str,
    edit: str = "",
    port: Iterable[Place] = (),
    reference: Iterable[Place] = (),
    lines: Lines = NO_LINES,
) -> Case:
    """Return a case; without a place in the reference's names, it is judged by the port's alone."""
    right = Right(places=tuple(port), in_reference=tuple(reference) or None, lines=lines)
    return Case(
        name=name, family=pair, edit=edit, right=right if right.places else None,
        invisible=("bf16",) if name in BELOW_ROUNDING else (),
        **sides_of("ports", pair, name, environment={"FASTVIDEO_LOGGING_LEVEL": "ERROR"}),
    )  # fmt: skip


class Ports(Corpus):
    name, variants, judges = "ports", DTYPES, (OURS, RULE)
    together = noise = True

    def load(self) -> Sequence[Case]:
        return [
            *(_case(pair, pair) for pair in PAIRS if pair not in LEGAL),
            *(_case(pair, pair, *said, lines=LINES[pair]) for pair, said in (LEGAL | REAL).items()),
            *(
                _case(name, bug.pair, bug.what, bug.port, bug.reference, LINES[name])
                for name, bug in BUGS.items()
            ),
        ]


class MachineFaults(Corpus):
    """Faults at random modules, whose right answers the broken port itself tells: modules may hang in
    it under several names.
    """

    name, variants, judges = "machine", DTYPES[:1], (OURS, RULE)
    together = noise = True

    def load(self) -> Sequence[Case]:
        quietly()
        return [_planted(pair, spec) for pair, specs in DRAWN.items() for spec in specs]

    def drawn(self, count: int, seed: int) -> Sequence[Case]:
        quietly()
        return [_planted(pair, spec) for pair in PAIRS for spec in draw(pair, count, seed)]


def _planted(pair: str, spec: str) -> Case:
    fault = Fault.parse(spec)
    with build(pair, "port", fault=spec) as broken:
        places = fault.truth(broken.model)
    return _case(f"{pair} {spec}", pair, spec, places, lines=lines_of_fault(fault))


CORPORA = {"ports": Ports(), "machine": MachineFaults()}
