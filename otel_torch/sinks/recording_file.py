"""Where a recording lies: one file a process, never two runs in one, never an earlier one overwritten."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

from otel_torch.console import say
from otel_torch.job import Job


def resolve(template: str, job: Job) -> Path:
    """The path that OTEL_TORCH_JSONL names for this process: placeholders replaced, ranks told apart.

    >>> job = Job("r1", rank=3, local_rank=3, world_size=4, host="h", pid=7)
    >>> str(resolve("out/<run>.jsonl", job)), str(resolve("a.<rank>.jsonl", job))
    ('out/r1.rank3.jsonl', 'a.3.jsonl')
    """
    separated = "<rank>" in template or "<pid>" in template or job.world_size == 1
    for name, value in (("<pid>", job.pid), ("<rank>", job.rank), ("<run>", job.run_id)):
        template = template.replace(name, str(value))
    path = Path(template).expanduser()
    return path if separated else _insert(path, f"rank{job.rank}")


def metadata_path(path: Path) -> Path:
    """The metadata beside a recording.

    >>> str(metadata_path(Path("ref.jsonl")))
    'ref.meta.json'
    """
    return path.with_name(path.name.removesuffix(".jsonl") + ".meta.json")


def claim(path: Path, job: Job) -> Path:
    """Make room at `path` and return the path to write, now empty: another process of this run and rank keeps the file
    (ours gets `.pid<pid>`), an earlier run's is renamed. Raises OSError where it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent):
        if path.exists():
            owner = _owner(path)
            if owner is not None and owner[:2] == (job.run_id, job.rank) and owner[2] != job.pid:
                path = _insert(path, f"pid{job.pid}")
        if path.exists():
            _rename(path)
        path.touch()
        metadata_path(path).write_text(json.dumps({"run_id": job.run_id, "rank": job.rank, "pid": job.pid}))
    return path


def _rename(path: Path) -> None:
    number = 1
    while (old := _insert(path, str(number))).exists() or metadata_path(old).exists():
        number += 1
    path.rename(old)
    if metadata_path(path).exists():
        metadata_path(path).rename(metadata_path(old))
    say(f"{path} held an earlier run, which is now {old.name}")


def _insert(path: Path, part: str) -> Path:
    if path.suffix == ".jsonl":
        return path.with_name(f"{path.stem}.{part}.jsonl")
    return path.with_name(f"{path.name}.{part}")


def _owner(path: Path) -> tuple[str, int, int] | None:
    try:
        found = json.loads(metadata_path(path).read_text())
        return found["run_id"], found["rank"], found["pid"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Ranks of one machine claim one after the other; a file system without locks goes without."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
