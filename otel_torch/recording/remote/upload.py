"""Uploads a recording that was written locally to where a URL says, as whole files.

It runs in a process of its own, for which the program waits: while an interpreter ends, no library
can look up a host. If the program is killed meanwhile, the upload goes on.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

from otel_torch.recording.metadata import METADATA_SUFFIX, metadata_path
from otel_torch.recording.remote.remote_files import (
    Moved,
    RemoteError,
    open_place,
    reason_of,
    while_it_moves,
)
from otel_torch.recording.run_file import insert_part

# uploaded at a time: no store takes smaller parts
_PART_BYTES = 5 * 2**20
# what a server that takes a file in one piece must manage
_BYTES_PER_S = 10e6
_DONE = "done"
# the store of this scheme is the memory of the process
_OF_THIS_PROCESS = "memory:"


def upload_folder(folder: str, start: str) -> str | None:
    """Upload all files in a folder, then remove it; return why that failed, if it did.

    Args:
        start: What comes before a file's path in the folder to make its URL.
    """
    return _in_own_process("upload", folder, start)


def check_place(url: str) -> str | None:
    """Write a small file beside a URL and remove it; return why that failed, if it did."""
    return _in_own_process("check", url)


def _in_own_process(action: str, *arguments: str) -> str | None:
    if arguments[-1].startswith(_OF_THIS_PROCESS):
        return _try(lambda seconds: None, action, *arguments)
    command = [sys.executable or "python3", "-P", "-m", __name__, action, *arguments]
    package = str(Path(__file__).parents[3])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = os.environ | {"OTEL_TORCH_ENABLED": "0", "PYTHONPATH": os.pathsep.join(paths)}
    try:
        process = subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            close_fds=False,  # which would need a fork: an interpreter that ends allows none
        )
    except OSError as error:
        return f"{command[0]} cannot be started ({error.strerror})"
    said = process.stdout.strip()
    return None if said == _DONE else said or f"its process ended with {process.returncode}"


def main(action: str, *arguments: str) -> NoReturn:
    """Do what `_in_own_process` asks for, and print why it failed, or that it is done."""
    try:
        reason = while_it_moves(lambda moved: _try(moved, action, *arguments))
    except RemoteError as error:
        reason = str(error)
    with contextlib.suppress(BrokenPipeError):  # the program has ended
        print(reason or _DONE, flush=True)
    os._exit(reason is not None)  # whatever a library still waits for


def _try(moved: Moved, action: str, *arguments: str) -> str | None:
    try:
        do = _check if action == "check" else _upload
        do(moved, *arguments)
    except Exception as error:
        return reason_of(error)
    return None


def _check(moved: Moved, url: str) -> None:
    files, path = open_place(f"{url}.check")
    moved(0.0)
    files.pipe_file(path, b"otel_torch")
    moved(0.0)
    files.rm_file(path)


def _upload(moved: Moved, folder: str, start: str) -> None:
    found = [path for path in Path(folder).rglob("*") if path.is_file()]
    urls = {path: start + path.relative_to(folder).as_posix() for path in found}
    for path, url in urls.items():
        if not path.name.endswith(METADATA_SUFFIX):
            _rename_earlier_run(url, moved)
    for path in sorted(found, key=lambda path: path.stat().st_size):
        _upload_file(path, urls[path], moved)
    shutil.rmtree(folder, ignore_errors=True)


def _rename_earlier_run(url: str, moved: Moved) -> None:
    """Rename a recording that is there already, as earlier runs are renamed on a disk."""
    files, path = open_place(url)
    moved(0.0)
    if not _exists(files, path):
        return
    numbered = (insert_part(Path(path), str(number)) for number in itertools.count(1))
    new = next(new for new in numbered if not _exists(files, str(new)))
    for old, renamed in ((path, new), (str(metadata_path(path)), metadata_path(new))):
        if _exists(files, old):
            moved(files.info(old)["size"] / _BYTES_PER_S)
            files.mv(old, str(renamed))


def _exists(files: Any, path: str) -> bool:
    try:
        return bool(files.exists(path))
    except PermissionError:  # it may be written, but not looked at
        return False


def _upload_file(file: Path, url: str, moved: Moved) -> None:
    files, path = open_place(url)
    size = file.stat().st_size
    target = files.open(path, "wb", block_size=_PART_BYTES)
    try:
        with open(file, "rb") as source:
            while part := source.read(_PART_BYTES):
                target.write(part)
                moved(0.0)
        moved(size / _BYTES_PER_S)
        target.close()
    except BaseException:
        with contextlib.suppress(Exception):
            target.discard()  # closing would make a file of a part
        raise
    moved(0.0)
    if files.info(path)["size"] != size:
        raise RemoteError("the connection was cut before the end")


if __name__ == "__main__":
    main(*sys.argv[1:])
