"""Finds the recordings of all ranks in a folder, and pairs those of two folders."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from otel_torch.parity.merge_shards import merge_shards
from otel_torch.parity.recording_source import RecordingSource, Warn
from otel_torch.recording.input_file import open_once, require_regular_file
from otel_torch.recording.metadata import read_metadata
from otel_torch.recording.reader import RecordingError
from otel_torch.recording.recordings_folder import holds_none, recordings_in


@dataclass(frozen=True, slots=True)
class RankRecording:
    """A recording to compare. rank: None if it covers all ranks, or if there is only one."""

    rank: int | None
    source: RecordingSource


def find_recordings(path: Path, warn: Warn, leave_out: Warn) -> list[RankRecording]:
    """Return the recordings of a path.

    A file is one recording. A folder has one for each rank; if the ranks recorded shards of
    tensors, they are merged into a single recording.

    Raises:
        RecordingError: If the folder holds no recordings, or one without a rank.
    """
    if not path.is_dir():
        return [RankRecording(None, RecordingSource(path))]
    ranks = recordings_by_rank(path)
    if len(ranks) > 1 and any(map(_has_shards, ranks.values())):
        return [RankRecording(None, merge_shards(path, ranks, warn, leave_out))]
    return [
        RankRecording(rank if len(ranks) > 1 else None, RecordingSource(recording))
        for rank, recording in ranks.items()
    ]


def pair_ranks(
    reference: list[RankRecording], port: list[RankRecording], leave_out: Warn
) -> list[tuple[RankRecording, RankRecording]]:
    """Pair equal ranks; if the two sides have different ones, pair only the first of each."""
    reference_by_rank = {recording.rank: recording for recording in reference}
    port_by_rank = {recording.rank: recording for recording in port}
    if reference_by_rank.keys() == port_by_rank.keys():
        return [(recording, port_by_rank[rank]) for rank, recording in reference_by_rank.items()]
    if len(reference) > 1 or len(port) > 1:
        leave_out(
            f"the reference has {_ranks(reference)} and the port {_ranks(port)}, and their rows "
            "do not say which shard they hold: only the first rank of each is compared"
        )
    return [(reference[0], port[0])]


def _ranks(recordings: list[RankRecording]) -> str:
    return "1 rank" if len(recordings) == 1 else f"{len(recordings)} ranks"


def recordings_by_rank(folder: Path) -> dict[int, Path]:
    """Return the recordings in a folder, by rank.

    Raises:
        RecordingError: If the folder holds no recordings, one without a rank, or two of a rank.
    """
    recordings: dict[int, Path] = {}
    for path in recordings_in(folder):
        require_regular_file(path)
        rank = _rank_of(path)
        if rank in recordings:
            raise RecordingError(
                f"{folder}: {recordings[rank].name} and {path.name} are both of rank {rank}; "
                "leave one run in the folder"
            )
        recordings[rank] = path
    if not recordings:
        raise RecordingError(holds_none(folder))
    return dict(sorted(recordings.items()))


def _rank_of(path: Path) -> int:
    """Return the rank in the metadata of a recording, else the one in its name."""
    rank = read_metadata(path).get("rank")
    if isinstance(rank, int):
        return rank
    match = re.search(r"rank(\d+)", path.name)
    if match is None:
        raise RecordingError(
            f"{path}: neither its name (.rank0.jsonl) nor its metadata gives its rank"
        )
    return int(match[1])


def _has_shards(path: Path) -> bool:
    with open_once(path) as file:
        return any(b'"shard"' in line for line in file)
