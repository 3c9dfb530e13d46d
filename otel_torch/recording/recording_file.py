"""Where a recording lies: one file a process, never two runs in one, never an earlier one
overwritten.

Processes that know nothing of each other may want the same path at the same moment, and a run may
be renamed while it is still written: each step of it is done under a lock of the folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from otel_torch.console import say
from otel_torch.job import Job
from otel_torch.recording.reader import metadata_path


def resolve(template: str, job: Job) -> Path:
    """The path that OTEL_TORCH_JSONL names for this process: placeholders replaced, ranks told
    apart.

    >>> job = Job("r1", rank=3, local_rank=3, world_size=4, host="h", pid=7)
    >>> str(resolve("out/<run>.jsonl", job)), str(resolve("a.<rank>.jsonl", job))
    ('out/r1.rank3.jsonl', 'a.3.jsonl')
    """
    separated = "<rank>" in template or "<pid>" in template or job.world_size == 1
    for name, value in (("<pid>", job.pid), ("<rank>", job.rank), ("<run>", job.run_id)):
        template = template.replace(name, str(value))
    path = Path(template).expanduser()
    return path if separated else _insert(path, f"rank{job.rank}")


def claim(path: Path, job: Job, metadata: dict[str, Any]) -> tuple[Path, int]:
    """Make a new file at `path`, with `metadata` beside it, and return where it came to lie and a
    descriptor to append to.

    Another process of this run and rank keeps the path (ours gets `.pid<pid>`), an earlier run's
    file is renamed. Raises OSError, with nothing left behind, where it cannot be written.
    """
    with contextlib.suppress(FileExistsError):
        path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent):
        owner = _owner(path)
        if owner is not None and owner[:2] == (job.run_id, job.rank) and owner[2] != job.pid:
            path = _insert(path, f"pid{job.pid}")
        if os.path.lexists(path):
            _rename(path)
        try:
            descriptor = _create(path)
        except FileExistsError:  # no locks on this file system, and another process was faster
            path = _insert(path, f"pid{job.pid}")
            descriptor = _create(path)
        try:
            _replace(metadata_path(path), metadata)
        except BaseException:
            os.close(descriptor)
            path.unlink()
            raise
    return path, descriptor


def replace_metadata(path: Path, descriptor: int, metadata: dict[str, Any]) -> Path:
    """Write the metadata of the recording that was claimed at `path`, and return where it lies now:
    a later run may have renamed it. A reader sees the old metadata or the new, never half. Raises
    OSError.
    """
    with _locked(path.parent):
        path = _follow(path, descriptor)
        _replace(metadata_path(path), metadata)
    return path


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666)


def _follow(path: Path, descriptor: int) -> Path:
    ours = os.fstat(descriptor)
    if path.exists() and os.path.samestat(path.stat(), ours):
        return path
    for entry in os.scandir(path.parent):
        if entry.inode() == ours.st_ino:
            return path.with_name(entry.name)
    raise FileNotFoundError(errno.ENOENT, "the recording was deleted")


def _replace(target: Path, metadata: dict[str, Any]) -> None:
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        # a name may hold what is no Unicode; as JSON's escape it can be read back
        text = json.dumps(metadata, indent=1, ensure_ascii=False) + "\n"
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _rename(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not path.is_file() and not path.is_symlink():
        raise OSError(errno.EINVAL, "not a regular file")
    number = 1
    while os.path.lexists(old := _insert(path, str(number))) or metadata_path(old).exists():
        number += 1
    path.rename(old)
    with contextlib.suppress(FileNotFoundError):
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
    """One process of this machine at a time; a file system without locks goes without."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        with contextlib.suppress(OSError):
            # said, and not left to `close`: a process forked meanwhile has the descriptor too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
