"""Compares two runs of several ranks, and merges the reports of the ranks into one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from otel_torch.parity.finding import Finding, Report
from otel_torch.parity.layouts.explain import explain_ranks
from otel_torch.parity.layouts.one_recording import make_one_recording
from otel_torch.parity.layouts.stored_parts import with_wrong_positions
from otel_torch.parity.operations.compare_operations import compare_operations, hold_operations
from otel_torch.parity.rank_executor import CompareRank, Progress, RankPair, compare_pairs
from otel_torch.parity.rank_recordings import (
    RankRecording,
    find_recordings,
    pair_ranks,
    recordings_by_rank,
)
from otel_torch.parity.rank_sums import name_partial_sum
from otel_torch.parity.recording_source import RecordingSource, Warn
from otel_torch.parity.sides import Sides


def compare_ranks(
    reference: Path,
    port: Path,
    noise: Path | None,
    compare_rank: CompareRank,
    progress: Progress,
    on: str | None = None,
    workers: int | None = None,
    tensors: Sides[Path] | None = None,
) -> Report:
    """Compare two sides of which at least one is a folder of ranks.

    Args:
        reference: A recording, or a folder of them.
        port: Likewise.
        noise: The noise recording of the reference, or a folder of them, if any.
        compare_rank: Compares the recordings of one process each.
        progress: Called with a short text from time to time.
        on: `ray`, or the address of a Ray cluster, whose machines compare the ranks.
        workers: How many processes compare ranks; 1 if `compare_rank` cannot be pickled.
        tensors: Where whole tensors are, None for where the runs put them.
    """
    if port.is_dir() and not reference.is_dir() and len(ranks := recordings_by_rank(port)) > 1:
        return _compare_with_one_process(
            reference, port, ranks, noise, compare_rank, progress, tensors
        )
    warnings: list[str] = []
    uncompared: list[str] = []
    reports: list[tuple[int | None, Report]] = []
    leading: Report | None = None
    warn = warnings.append
    references = find_recordings(reference, warn, uncompared.append)
    ports = find_recordings(port, warn, uncompared.append)
    noises = [] if noise is None else find_recordings(noise, warn, warn)
    parts = pair_ranks(references, ports, uncompared.append)
    pairs = []
    for part, port_part in parts:
        name = "the ranks" if part.rank is None else f"rank {part.rank}"
        own_noise = _noise_of(part.rank, noise, noises, warn)
        pairs.append(RankPair(name, part.source, port_part.source, own_noise))
    with closing(compare_pairs(pairs, compare_rank, progress, on, workers)) as compared:
        for (part, _), report in zip(parts, compared, strict=True):
            reports.append((part.rank, report))
            leading = _keep_pairs_of_one(leading, report)
    merged = _merge_reports(reports)
    if len(parts) > 1 and _have_one_first([report for _, report in reports]):
        sources = [Sides(pair.reference, pair.port) for pair in pairs]
        _replace_first(merged, lambda finding: name_partial_sum(finding, sources))
    return _of_whole(merged, reference, port, warnings, uncompared)


def _compare_with_one_process(
    reference: Path,
    port: Path,
    ranks: dict[int, Path],
    noise: Path | None,
    compare_rank: CompareRank,
    progress: Progress,
    tensors: Sides[Path] | None,
) -> Report:
    """Compare one process with the ranks of a model that is split over them."""
    warnings: list[str] = []
    uncompared: list[str] = []
    warn = warnings.append
    noises = [] if noise is None else find_recordings(noise, warn, warn)
    own_noise = _noise_of(None, noise, noises, warn)
    one_process, (first, *others) = RecordingSource(reference), map(RecordingSource, ranks.values())
    if hold_operations(Sides(one_process, first)):
        report = compare_operations(Sides(one_process, first), own_noise, progress, others)
    else:
        one = make_one_recording(reference, port, ranks, warn, uncompared.append)
        report = compare_rank(one_process, one.recording, noise=own_noise, progress=progress)
        explain_ranks(report, one)
        _replace_first(
            report, lambda finding: with_wrong_positions(finding, reference, ranks, tensors)
        )
    return _of_whole(report, reference, port, warnings, uncompared)


def _of_whole(
    report: Report, reference: Path, port: Path, warnings: list[str], uncompared: list[str]
) -> Report:
    """Return the report of all ranks, with what was said before they were compared."""
    report.reference, report.port = str(reference), str(port)
    report.warnings[:0] = [*warnings, *uncompared]
    report.uncompared[:0] = uncompared
    report.judge_whole()
    return report


def _noise_of(
    rank: int | None, noise: Path | None, noises: list[RankRecording], warn: Warn
) -> RecordingSource | None:
    """Return the noise recording of a rank; a single one applies to all ranks."""
    for recording in noises:
        if recording.rank == rank or len(noises) == 1:
            return recording.source
    if noise is not None:
        warn(f"{noise}: has no recording of rank {rank}, which is compared without noise")
    return None


def _keep_pairs_of_one(leading: Report | None, report: Report) -> Report:
    """Return the report of the rank that diverges earlier; drop the compared pairs of the other.

    The pairs of a thousand ranks would fill the memory, and only those of one are shown.
    """
    if leading is None:
        return report
    earlier, later = sorted((leading, report), key=_start_of_divergence)
    later.compared, later.chain = [], []
    return earlier


def _merge_reports(reports: list[tuple[int | None, Report]]) -> Report:
    """Return the report of the rank that diverges first, with the findings of all ranks."""
    if len(reports) == 1:
        return reports[0][1]
    _, leading = min(reports, key=lambda item: _start_of_divergence(item[1]))
    merged = replace(
        leading,
        warnings=[],
        uncompared=[
            f"rank {rank}: {line}" for rank, report in reports for line in report.uncompared
        ],
        introduced=_merge_findings([(rank, report.introduced) for rank, report in reports]),
        harmless=_merge_findings([(rank, report.harmless) for rank, report in reports]),
    )
    merged.first = None
    if leading.first is not None:
        place = _place(leading.first)
        merged.first = next(
            (finding for finding in merged.introduced if _place(finding) == place), None
        )
    if merged.first is not None:
        merged.introduced.sort(key=lambda finding: finding is not merged.first)
        merged.verdict = "diverged"
    else:
        merged.verdict, merged.reason = "match", None
        for _, report in reports:
            if report.verdict == "incomparable":
                merged.verdict, merged.reason = report.verdict, report.reason
                break
    merged.pairs = sum(report.pairs for _, report in reports)
    merged.compared_left_out = merged.pairs - len(merged.compared)
    merged.warnings = [
        f"rank {rank}: {warning}" for rank, report in reports for warning in report.warnings
    ]
    return merged


def _have_one_first(reports: list[Report]) -> bool:
    """Return whether all ranks diverge first at the same place."""
    places = {None if report.first is None else _place(report.first) for report in reports}
    return len(places) == 1 and None not in places


def _replace_first(report: Report, change: Callable[[Finding], Finding]) -> None:
    first = report.first
    if first is not None:
        report.first = change(first)
        report.introduced = [
            report.first if finding is first else finding for finding in report.introduced
        ]


def _start_of_divergence(report: Report) -> tuple[int, int, int]:
    """Return a key that sorts reports: wrong weights, then loop and step, then no divergence."""
    first = report.first
    if first is None:
        return 2, 0, 0
    if first.phase == "attach":
        return 0, -1, -1
    return 0, first.loop or 0, first.step or 0


def _merge_findings(findings_by_rank: list[tuple[int | None, list[Finding]]]) -> list[Finding]:
    """Return each finding once, with the first rank that has it and the number of the others."""
    first: dict[tuple[Any, ...], Finding] = {}
    counts: dict[tuple[Any, ...], int] = {}
    for rank, findings in findings_by_rank:
        for finding in findings:
            place = _place(finding)
            first.setdefault(place, replace(finding, rank=rank))
            counts[place] = counts.get(place, 0) + 1
    merged = []
    for place, finding in first.items():
        if counts[place] > 1:
            explanation = f"{finding.explanation} Likewise on {counts[place] - 1} other ranks."
            finding = replace(finding, explanation=explanation)
        merged.append(finding)
    return merged


def _place(finding: Finding) -> tuple[Any, ...]:
    return (
        finding.kind,
        finding.model,
        finding.module,
        finding.side,
        finding.port_model,
        finding.port_module,
        finding.port_side,
    )
