"""Compares two runs of one program bit by bit, and names the first tensor that differs.

Nothing is aligned: a record corresponds to the one with the same key. Two runs write their rows in
the same order unless threads race, so both files are read side by side, and only rows whose
counterpart has not been read yet are kept.
"""

from __future__ import annotations

import math
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from otel_torch.parity.environment import environment_differences
from otel_torch.parity.finding import Finding, Kind, Report, Side, UncomparedTensor
from otel_torch.parity.forwards import WARM_UP
from otel_torch.parity.ranks import compare_ranks
from otel_torch.parity.recording_source import RecordingSource, Warn
from otel_torch.parity.rules import sketch_errors
from otel_torch.recording.metadata import describe_early_end
from otel_torch.recording.rows import Row
from otel_torch.rendering.words import plural

_KEY = ("model", "module", "tensor", "loop", "step", "call", "phase")
# fields that say where a tensor is, and not what it holds; memory may be reused in another order
_PLACE = frozenset(
    (*_KEY, "branch", "class", "argument", "value", "storage", "order", "parent", "shard")
)
_SIDES: dict[str, Side] = {"in": "input", "param": "parameter", "buffer": "parameter"}
_Key = tuple[Any, ...]


@dataclass(slots=True)
class _Difference:
    """Two rows of one key whose statistics differ. position: of the reference's row in its file."""

    position: int
    reference: Row
    port: Row


@dataclass(slots=True)
class _RowPairs:
    """What was compared so far, and the rows that still wait for their counterpart."""

    pairs: int = 0
    hashed: int = 0
    different: int = 0
    first: _Difference | None = None
    waiting: tuple[dict[_Key, tuple[int, Row]], dict[_Key, tuple[int, Row]]] = field(
        default_factory=lambda: ({}, {})
    )
    # of every call whose input differs
    wrong_inputs: Counter[_Key] = field(default_factory=Counter)

    def add(self, position: int, side: int, row: Row) -> None:
        """Add a row of the reference (side 0) or of the port (side 1)."""
        key = tuple(row.get(name) for name in _KEY)
        counterpart = self.waiting[1 - side].pop(key, None)
        if counterpart is None:
            self.waiting[side][key] = position, row
        elif side == 0:
            self._compare(position, row, counterpart[1])
        else:
            self._compare(*counterpart, row)

    def _compare(self, position: int, reference: Row, port: Row) -> None:
        self.pairs += 1
        self.hashed += all(_tells_every_bit(row) for row in (reference, port))
        if _is_identical(reference, port):
            return
        self.different += 1
        if _side_of(reference) == "input":
            self.wrong_inputs[_call_of(reference)] += 1
        if self.first is None or position < self.first.position:
            self.first = _Difference(position, reference, port)


def _tells_every_bit(row: Row) -> bool:
    """Return whether equal rows mean equal tensors: those of phase `train` have one element."""
    return "hash" in row or row.get("phase") == "train"


def compare_bitwise(
    reference: str | Path,
    port: str | Path,
    progress: Callable[[str], None] = lambda text: None,
    *,
    warm_ups: bool = False,
    on: str | None = None,
) -> Report:
    """Compare two recordings of one program, or two folders with the recordings of all ranks.

    Args:
        on: `ray`, or the address of a Ray cluster, whose machines compare the ranks of folders.

    Raises:
        RecordingError: A file cannot be read.
        ValueError: There is no such cluster.
    """
    paths = Path(reference), Path(port)
    if any(path.is_dir() for path in paths):
        return compare_ranks(*paths, None, partial(_compare, warm_ups=warm_ups), progress, on)
    sources = map(RecordingSource, paths)
    return _compare(*sources, noise=None, progress=progress, warm_ups=warm_ups)


def _compare(
    reference: RecordingSource,
    port: RecordingSource,
    *,
    noise: RecordingSource | None,
    progress: Callable[[str], None],
    warm_ups: bool,
) -> Report:
    """Compare two recordings; there is no noise where every bit counts."""
    report = Report("match", reference=str(reference), port=str(port))
    sources = reference, port
    metadata = [source.metadata(report.warnings.append) for source in sources]
    for source, facts in zip(sources, metadata, strict=True):
        for line in describe_early_end(source.path, facts):
            report.leave_out(line)
    report.environment = environment_differences(*metadata)
    comparison = _RowPairs()
    streams = (_rows(source, report.leave_out, warm_ups) for source in sources)
    for position, rows in enumerate(zip_longest(*streams)):
        for side, row in enumerate(rows):
            if row is not None:
                comparison.add(position, side, row)
        if position % 100_000 == 0:
            progress(f"{position:,} records read")
    report.pairs = comparison.pairs
    for name, waiting in zip(("reference", "port"), comparison.waiting, strict=True):
        report.unpaired[name] = list(dict.fromkeys(_tensors(waiting)))
    if not comparison.pairs:
        report.verdict = "incomparable"
        report.reason = "no record of one run has a counterpart in the other: --bitwise compares "
        report.reason += "two runs of the same program"
        return report
    if comparison.hashed < comparison.pairs:
        report.warnings.append(
            f"{comparison.pairs - comparison.hashed:,} of {comparison.pairs:,} pairs have no hash "
            "and were compared by their statistics; record both runs with "
            "OTEL_TORCH_STATS=hash,shape,dtype"
        )
    if comparison.first is not None:
        report.verdict = "diverged"
        report.first = _finding(comparison, comparison.first)
        report.introduced = [report.first]
    for name, waiting in zip(("reference", "port"), comparison.waiting, strict=True):
        if waiting:
            report.leave_out(
                f"{plural(len(waiting), 'record')} of the {name} without a counterpart, "
                f"of {plural(len(report.unpaired[name]), 'tensor')}"
            )
    report.judge_whole()
    return report


def _rows(source: RecordingSource, warn: Warn, warm_ups: bool) -> Iterator[Row]:
    for row in source.rows(warn):
        if warm_ups or row.get("phase") != WARM_UP:
            yield row


def _tensors(waiting: dict[_Key, tuple[int, Row]]) -> Iterator[UncomparedTensor]:
    for _, row in waiting.values():
        yield UncomparedTensor(row.get("model", ""), row["module"], row["tensor"])


def _is_identical(reference: Row, port: Row) -> bool:
    """Return whether everything that both rows say of their tensors is equal, NaN included."""
    names = reference.keys() & port.keys() - _PLACE
    return all(
        reference[name] == port[name] or (_is_nan(reference[name]) and _is_nan(port[name]))
        for name in names
    )


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _side_of(row: Row) -> Side:
    label = str(row["tensor"]).partition(".")[0].partition("[")[0]
    return _SIDES.get(label, "output")


def _call_of(row: Row) -> _Key:
    return tuple(row.get(name) for name in _KEY if name != "tensor")


def _finding(comparison: _RowPairs, first: _Difference) -> Finding:
    reference, port = first.reference, first.port
    side = _side_of(reference)
    explanation = (
        "It is the first tensor in the order of execution that is not bit-identical; "
        f"{comparison.different:,} of {comparison.pairs:,} are not."
    )
    if side == "output" and reference.get("phase") != "backward":
        explanation += " The module computed other bits from " + (
            "other inputs."
            if comparison.wrong_inputs[_call_of(reference)]
            else "the same recorded inputs."
        )
    place: dict[str, Any] = {name: reference.get(name) for name in ("model", "module", "tensor")}
    time: dict[str, Any] = {name: reference.get(name) for name in ("loop", "step", "call")}
    return Finding(
        **place,
        **time,
        phase=reference.get("phase"),
        **{f"port_{name}": value for name, value in (place | time).items()},
        rank=None,
        side=side,
        port_side=side,
        kind=_kind(reference, port),
        error=_error(reference, port),
        floor=0.0,
        explanation=explanation,
    )


def _kind(reference: Row, port: Row) -> Kind:
    for name, kind in (("shape", "shape"), ("dtype", "dtype"), ("nonfinite", "nonfinite")):
        if reference.get(name) != port.get(name):
            return kind  # type: ignore[return-value]
    return "value"


def _error(reference: Row, port: Row) -> float | None:
    """Return the relative L2 error by the sketches, None without them."""
    sketches = [row["sketch"] for row in (reference, port) if "sketch" in row]
    if len(sketches) < 2:
        return None
    vectors = [np.frombuffer(b64decode(sketch), "<f4").astype(float)[None] for sketch in sketches]
    unknown_norm = np.array([math.nan])
    error = float(sketch_errors(vectors[0], vectors[1], unknown_norm)[0])
    return math.inf if math.isnan(error) else error
