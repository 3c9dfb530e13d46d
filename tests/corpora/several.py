"""Ports with two or three faults: whether bisect names each one at its line, and heals the port.

    python -m tests.corpora.several [--count 40] [--seed 1] [--only WORD]

The faults are those of other corpora. Of one port they are in the same program, each of them acts
beside the others, and no line is right to name for two of them.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from otel_torch.bisecting.bisection import Bisection
from otel_torch.parity.finding import Report
from otel_torch.rendering.words import plural
from tests.corpora import corpus_of
from tests.corpora.bisected import Bisected
from tests.corpora.case import Case, Line, Right, in_both, sides_of
from tests.corpora.judge_lines import describe, grade_line
from tests.corpora.scores import Corpus, Recorder
from tests.corpora.side import side
from tests.corpora.truth import tensors_in

DRAWN_FROM = ("unseen", "causes", "small")
MOST_FAULTS = 3
# one edit that changes many lines: what is right to say of it is its first, and the others are no
# findings elsewhere
FURTHER = {"unet_norm_epsilon": in_both(Line("norm"))}


@dataclass(frozen=True)
class FaultyPort:
    """A port with several faults.

    Attributes:
        corpus: That its faults are from.
        case: Whose port has them all.
        rights: What is right to say of each.
        further: What may be said besides.
    """

    corpus: str
    case: Case
    rights: tuple[Right, ...]
    further: tuple[Right, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """How right an answer is.

    Attributes:
        planted: How many faults the port has.
        named: How many of them a finding names at their line.
        shown: Likewise, or at a line of the region that it shows.
        elsewhere: How many findings name and show none of them.
        proven: How many findings are proven.
    """

    planted: int
    named: int
    shown: int
    elsewhere: int
    proven: int
    is_healed: bool
    runs: int
    said: tuple[str, ...]

    @property
    def is_complete(self) -> bool:
        """Whether all is right: each fault shown, nothing else, all proven, and the port healed."""
        is_shown = self.shown == self.planted and not self.elsewhere
        return is_shown and self.proven == len(self.said) and self.is_healed


def draw(count: int, seed: int) -> Iterator[FaultyPort]:
    """Yield ports with two and three faults in turn."""
    generator = random.Random(seed)
    corpora = {name: corpus_of(name) for name in DRAWN_FROM}
    drawn: set[str] = set()
    while len(drawn) < count:
        name = generator.choice(DRAWN_FROM)
        faults = [case for case in corpora[name].cases.values() if not case.clean]
        family = generator.choice(sorted({case.family for case in faults}))
        of_family = [case for case in faults if case.family == family]
        size = 2 + len(drawn) % (MOST_FAULTS - 1)
        if len(of_family) < size:
            continue
        port = together(corpora[name], generator.sample(of_family, size))
        if port is not None and port.case.name not in drawn:
            drawn.add(port.case.name)
            yield port


def together(corpus: Corpus, faults: Sequence[Case]) -> FaultyPort | None:
    """Return a port with several faults of one family; None where they overlap."""
    faults = sorted(faults, key=lambda case: case.name)
    name, family = "+".join(case.name for case in faults), faults[0].family
    try:
        rights = tuple(_rights(corpus, name, faults))
        outputs = _outputs(corpus.name, name)
        reversed_outputs = _outputs(corpus.name, "+".join(name.split("+")[::-1]))
        without = [
            _outputs(corpus.name, "+".join(own.name for own in faults if own is not case))
            for case in faults
        ]
    except (ValueError, AttributeError, RuntimeError):
        return None  # what one fault changes, another has replaced
    lines = [line for right in rights for line in right.lines.port]
    is_apart = len(set(lines)) == len(lines)
    acts = all(not _same(outputs, own) for own in without)
    if not (is_apart and acts and _same(outputs, reversed_outputs)):
        return None
    first = faults[0].reference
    assert first is not None
    sides = sides_of(corpus.name, family, name, capture=first.capture, steps=first.steps)
    case = Case(name=name, family=family, right=rights[0], **sides)
    further = (Right(lines=FURTHER[own.name]) for own in faults if own.name in FURTHER)
    return FaultyPort(corpus.name, case, rights, tuple(further))


def _rights(corpus: Corpus, name: str, faults: Sequence[Case]) -> Iterator[Right]:
    """Yield what is right to say of each fault; in a file that has all edits, lines have moved."""
    from tests.corpora.unseen.edits import FAULTS
    from tests.corpora.unseen.programs import right_lines

    for case in faults:
        assert case.right is not None
        if corpus.name != "unseen":
            yield case.right
            continue
        others = [FAULTS[own.name] for own in faults if own is not case]
        yield Right(lines=right_lines(name, FAULTS[case.name], others))


def _outputs(corpus: str, name: str) -> list[torch.Tensor]:
    with side(corpus, name, "port", "fp32", 0) as program:
        return [tensor.detach().clone() for tensor in tensors_in(program())]


def _same(outputs: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(outputs) == len(others) and all(
        own.shape == other.shape and torch.equal(own.nan_to_num(), other.nan_to_num())
        for own, other in zip(outputs, others, strict=True)
    )


def judge(port: FaultyPort, answer: Bisection) -> Outcome:
    """Grade an answer."""
    reports = [
        Report("diverged", first=finding, operations=operations)
        for finding, operations in zip(answer.faults, answer.operations, strict=True)
    ]
    grades = [[grade_line(right, report) for right in port.rights] for report in reports]
    shows = [[grade in ("line", "region") for grade in of_finding] for of_finding in grades]
    is_further = [
        any(grade_line(right, report) == "line" for right in port.further) for report in reports
    ]
    return Outcome(
        planted=len(port.rights),
        named=sum("line" in of_fault for of_fault in zip(*grades, strict=True)),
        shown=sum(map(any, zip(*shows, strict=True))),
        elsewhere=sum(
            not (any(of_finding) or further)
            for of_finding, further in zip(shows, is_further, strict=True)
        ),
        proven=sum(finding.proof == "proven" for finding in answer.faults),
        is_healed=answer.is_healed,
        runs=len(answer.runs),
        said=tuple(
            f"{finding.proof or 'not tried'}: {describe(Report('diverged', first=finding))}"
            for finding in answer.faults
        ),
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description="Bisect ports with several faults.")
    arguments.add_argument("--count", type=int, default=40, help="of ports")
    arguments.add_argument("--seed", type=int, default=1, help="of the draw")
    arguments.add_argument("--only", default="", help="only ports with this in their name")
    options = arguments.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for one order of summation
    bisected = {name: Bisected(corpus_of(name)) for name in DRAWN_FROM}
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        for port in draw(options.count, options.seed):
            if options.only not in port.case.name:
                continue
            answer = bisected[port.corpus].bisect(
                port.case, "fp32", Recorder(corpus_of(port.corpus), Path(folder))
            )
            outcome = judge(port, answer)
            outcomes.append(outcome)
            verdict = "complete" if outcome.is_complete else "not complete"
            print(
                f"{port.corpus} {port.case.name}: {verdict}: {outcome.named} of {outcome.planted} "
                f"named, {outcome.shown} shown, {outcome.elsewhere} elsewhere, {outcome.proven} proven, "
                f"{'healed' if outcome.is_healed else 'not healed'}, {outcome.runs} runs",
                *(f"    {text}" for text in outcome.said), sep="\n", flush=True,
            )  # fmt: skip
    print("", *totals(outcomes), sep="\n")


def totals(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield a line for each count of faults."""
    for size in sorted({outcome.planted for outcome in outcomes}):
        own = [outcome for outcome in outcomes if outcome.planted == size]
        yield (
            f"{plural(len(own), 'port')} with {size} faults: {sum(o.is_complete for o in own)} "
            f"complete; {sum(o.named for o in own)} of {size * len(own)} faults named, "
            f"{sum(o.shown for o in own)} shown, {sum(o.proven for o in own)} findings proven, {sum(o.elsewhere for o in own)} "
            f"elsewhere; {sum(o.is_healed for o in own)} healed; "
            f"{sum(o.runs for o in own) / len(own):.1f} runs"
        )


if __name__ == "__main__":
    main()
