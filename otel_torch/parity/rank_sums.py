"""Recognize a reduction that the ranks of a port leave out: their values add up to the reference's.

Ranks are compared one by one, with those of a reference that is split alike. Where all of them
differ at one place, the sum over the ranks says more than any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from otel_torch.parity.call_graph import Sketch
from otel_torch.parity.finding import Cause, Finding
from otel_torch.parity.recording_source import RecordingSource
from otel_torch.parity.sides import Sides
from otel_torch.recording.row_batches import RowKinds

_Place = tuple[str | None, str | None, str | None, str | None, int, int | None, int]


def name_partial_sum(finding: Finding, ranks: Sequence[Sides[RecordingSource]]) -> Finding:
    """Return a finding that all ranks have, with its cause if each rank has a term of a sum."""
    if finding.kind != "value" or not finding.side == finding.port_side == "output":
        return finding
    place, port_place = _places(finding)
    wholes = [_sketch_at(sources.reference, place) for sources in ranks]
    terms = [_sketch_at(sources.port, port_place) for sources in ranks]
    known, parts = [w for w in wholes if w is not None], [t for t in terms if t is not None]
    if not len(known) == len(parts) == len(ranks) or len({s.shape for s in known + parts}) > 1:
        return finding
    total, limit = np.sum(parts, axis=0), len(ranks) * (finding.floor or 0.0)
    if any(np.linalg.norm(total - whole) > limit * np.linalg.norm(whole) for whole in known):
        return finding
    text = (
        f"each rank has a partial sum: the reference has the sum of those of the {len(ranks)} "
        "ranks, so a reduction over the ranks (all-reduce, reduce-scatter) is missing"
    )
    cause = Cause("partial_sum", True, text)
    given = "" if finding.cause is None else finding.cause.sentence
    explanation = finding.explanation.removeprefix(given).lstrip()
    return replace(finding, cause=cause, explanation=f"{cause.sentence} {explanation}")


def _places(finding: Finding) -> Sides[_Place]:
    where = (finding.model, finding.module, finding.tensor, finding.phase)
    port = (finding.port_model, finding.port_module, finding.port_tensor, finding.phase)
    return Sides(
        (*where, finding.loop or 0, finding.step, finding.call or 0),
        (*port, finding.port_loop or 0, finding.port_step, finding.port_call or 0),
    )


def _sketch_at(source: RecordingSource, place: _Place) -> Sketch | None:
    """Return the sketch of a row; that of a value stands with the first row that has it."""
    model, module, tensor, phase, loop, step, call = place
    kinds, sketches = RowKinds(), dict[float, bytes]()
    for batch in source.batches(kinds):
        positions = np.maximum(batch.places, 0)  # loop and call may be absent
        in_step = (positions[:, 0] == loop) & (positions[:, 1] == step)
        for number, index in enumerate(batch.sketched.tolist()):
            if in_step[index]:
                sketches.setdefault(float(batch.numbers[0, index]), batch.sketches[number])
        named = [
            (kind.model, kind.module, kind.tensor, kind.phase) == (model, module, tensor, phase)
            for kind in kinds.kinds
        ]
        found = np.array(named)[batch.kinds] & in_step & (positions[:, 2] == call)
        for index in np.flatnonzero(found).tolist():
            content = sketches.get(float(batch.numbers[0, index]))
            return None if content is None else np.frombuffer(content, "<f4").astype(np.float64)
    return None
