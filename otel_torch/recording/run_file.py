"""Gives each process a file of its own: no two runs share one, and no earlier run is overwritten.

Processes that do not know each other may want the same path at the same time, and a file may be
renamed by a later run while it is still being written. Every change of names is made under a lock
on the folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from otel_torch.process.console import say
from otel_torch.process.job import Job
from otel_torch.recording.metadata import metadata_path
from otel_torch.recording.replace_file import NEW_FILE, replace_file

# how long a process may hold the lock of a folder: it only renames files meanwhile
_LOCK_S = 1.0


def resolve_path(template: str, job: Job) -> Path:
    """Return the path for this process: placeholders replaced, and a part for the rank added if
    several ranks would share the file.

    >>> job = Job("r1", rank=3, local_rank=3, world_size=4, host="h", pid=7)
    >>> str(resolve_path("out/<run>.jsonl", job)), str(resolve_path("a.<rank>.jsonl", job))
    ('out/r1.rank3.jsonl', 'a.3.jsonl')
    """
    is_unique = "<rank>" in template or "<pid>" in template or job.world_size == 1
    path = Path(fill_placeholders(template, job)).expanduser()
    return path if is_unique else insert_part(path, f"rank{job.rank}")


def fill_placeholders(template: str, job: Job) -> str:
    """Return a path with `<run>`, `<rank>` and `<pid>` replaced."""
    for placeholder, value in (("<pid>", job.pid), ("<rank>", job.rank), ("<run>", job.run_id)):
        template = template.replace(placeholder, str(value))
    return template


def claim_path(path: Path, job: Job, metadata: str) -> tuple[Path, int]:
    """Create a file with metadata beside it, and return its path and a descriptor that appends.

    If another process of this run and rank has the path, this one gets `.pid<pid>` in its name.
    A file of an earlier run is renamed.

    Raises:
        OSError: the file or its metadata cannot be written; nothing new is left on disk.
    """
    make_folder(path.parent)
    with _locked(path.parent):
        owner = _read_owner(path)
        if owner is not None and owner[:2] == (job.run_id, job.rank) and owner[2] != job.pid:
            path = insert_part(path, f"pid{job.pid}")
        if os.path.lexists(path):
            _rename_earlier_run(path)
        try:
            descriptor = _create(path)
        except FileExistsError:
            # this file system has no locks, and another process was faster
            path = insert_part(path, f"pid{job.pid}")
            descriptor = _create(path)
        try:
            replace_file(metadata_path(path), metadata)
        except BaseException:
            os.close(descriptor)
            path.unlink()
            raise
    return path, descriptor


def make_folder(folder: Path) -> None:
    """Make a folder unless it exists.

    Raises:
        OSError: it cannot be made, or is a link that another user has made.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(parents=True, exist_ok=True)
    link = os.lstat(folder)
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (0, os.geteuid()):
        raise OSError(errno.ELOOP, "its folder is a link of another user")


def replace_metadata(path: Path, descriptor: int, metadata: str) -> Path:
    """Replace the metadata of a claimed file, and return the file's current path, which a later run
    may have changed.

    Raises:
        OSError: the metadata cannot be written, or the file was deleted.
    """
    with _locked(path.parent):
        path = _find_current_path(path, descriptor)
        replace_file(metadata_path(path), metadata)
    return path


def _create(path: Path) -> int:
    return os.open(path, NEW_FILE | os.O_APPEND, 0o666)


def _find_current_path(path: Path, descriptor: int) -> Path:
    opened = os.fstat(descriptor)
    if path.exists() and os.path.samestat(path.stat(), opened):
        return path
    for entry in os.scandir(path.parent):
        if entry.inode() == opened.st_ino:
            return path.with_name(entry.name)
    raise FileNotFoundError(errno.ENOENT, "the file was deleted")


def _rename_earlier_run(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not path.is_file() and not path.is_symlink():
        raise OSError(errno.EINVAL, "not a regular file")
    number = 1
    while any(map(os.path.lexists, (new := insert_part(path, str(number)), metadata_path(new)))):
        number += 1
    path.rename(new)
    with contextlib.suppress(FileNotFoundError):
        metadata_path(path).rename(metadata_path(new))
    say(f"{path} is from an earlier run; renamed to {new.name}")


def insert_part(path: Path, part: str) -> Path:
    """Return a path with a further part in its name.

    >>> insert_part(Path("out/run.jsonl"), "1").as_posix()
    'out/run.1.jsonl'
    """
    if path.suffix == ".jsonl":
        return path.with_name(f"{path.stem}.{part}.jsonl")
    return path.with_name(f"{path.name}.{part}")


def _read_owner(path: Path) -> tuple[str, int, int] | None:
    """Return (run id, rank, pid) of the process that wrote a file, or None."""
    try:
        if not metadata_path(path).is_file():  # reading a pipe would wait for its writer
            return None
        metadata = json.loads(metadata_path(path).read_text())
        return metadata["run_id"], metadata["rank"], metadata["pid"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder against other processes of this machine, if its file system has locks and
    nobody else holds this one for ever.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _acquire(descriptor)
        yield
    finally:
        with contextlib.suppress(OSError):
            # closing would not unlock if a process forked meanwhile, as it has the descriptor too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _acquire(descriptor: int) -> None:
    deadline = time.monotonic() + _LOCK_S
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return
            time.sleep(0.005)
        except OSError:
            return
