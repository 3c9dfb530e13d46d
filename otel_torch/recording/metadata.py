"""The metadata beside a recording or an OTLP file: where it is stored, how it is read, and the
fields that both kinds of file share.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from otel_torch.process.job import Job
from otel_torch.recording.input_file import require_regular_file

# name and version of a recording's format, in its metadata
RECORDING_SCHEMA = "otel_torch.recording/1"
# what the name of a metadata file ends with
METADATA_SUFFIX = ".meta.json"
# what a user reads for each value of `writing_ended`
_END_REASONS = {
    "disk": "the disk is full or failed",
    "max_bytes": "OTEL_TORCH_MAX_BYTES was reached",
}


def metadata_path(path: str | Path) -> Path:
    """Return the path of a file's metadata.

    >>> metadata_path("runs/ref.jsonl").as_posix(), metadata_path("ref.jsonl.gz").as_posix()
    ('runs/ref.meta.json', 'ref.meta.json')
    """
    path = Path(path)
    name = path.name.removesuffix(".gz").removesuffix(".jsonl")
    return path.with_name(name + METADATA_SUFFIX)


def describe_process(job: Job, trace_id: str) -> dict[str, Any]:
    """Return the metadata fields that identify the process that wrote a file."""
    return {
        "run_id": job.run_id,
        "rank": job.rank,
        "world_size": job.world_size,
        "host": job.host,
        "pid": job.pid,
        "trace_id": trace_id,
    }


def read_metadata(
    path: str | Path, warn: Callable[[str], None] = lambda message: None
) -> dict[str, Any]:
    """Return the metadata of the recording at `path`, {} if it has none or is unreadable.

    Each field that is there has the type of `metadata_schema`, or is unknown there.

    Args:
        warn: called with one line if the metadata, or a field of it, exists but cannot be read.
    """
    from otel_torch.recording.metadata_schema import drop_wrong_fields

    if Path(path).is_dir():
        return {}  # reading its rows reports the problem
    target = metadata_path(path)
    try:
        require_regular_file(target)
        metadata = json.loads(target.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        warn(f"{target}: metadata ignored, it cannot be read ({' '.join(str(error).split())})")
        return {}
    if not isinstance(metadata, dict):
        warn(f"{target}: metadata ignored, it is not a JSON object")
        return {}
    for fault in drop_wrong_fields(metadata):
        warn(f"{target}: {fault}")
    return metadata


def encode_metadata(metadata: dict[str, Any]) -> str:
    return json.dumps(metadata, indent=1, ensure_ascii=False) + "\n"


def describe_early_end(path: str | Path, metadata: dict[str, Any]) -> list[str]:
    """Return one line for each reason why a recording ends before its run did."""
    reasons = []
    if metadata.get("ended_cleanly") is False:
        reasons.append(f"{path}: ends early: its run was killed or is still running")
    if writing_ended := metadata.get("writing_ended"):
        reason = _END_REASONS.get(writing_ended, str(writing_ended))
        reasons.append(f"{path}: writing ended before the run did: {reason}")
    return reasons
