"""Files that a URL names (`s3://bucket/run.jsonl`): what commands copy here before they read it.

The only module that imports fsspec, and only once a URL was given. Copies lie in a temporary folder
under the path that they have in their URL, so that one replacement of text (`show_as`) names the
URL in all that is printed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import queue
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, ParamSpec, TypeVar

from otel_torch.process.console import as_given, show_as
from otel_torch.recording.metadata import METADATA_SUFFIX, metadata_path

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")
# where a file is, where its copy goes, its size if that is known
_Found = tuple[str, Path, int | None]
# called whenever data has moved, with the seconds that the next move may take besides PATIENCE_S
Moved = Callable[[float], None]

# how long nothing may move before a server is given up
PATIENCE_S = 10.0
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+://+)(.*)", re.DOTALL)
# what is copied of a folder of recordings
_OF_RECORDINGS = (".jsonl", ".jsonl.gz", METADATA_SUFFIX)


class RemoteError(ValueError):
    """Something that a URL names cannot be read or written; one line."""


def is_url(text: str) -> bool:
    """Return whether a text is a URL rather than a path.

    >>> is_url("s3://bucket/run.jsonl"), is_url("runs/s3.jsonl")
    (True, False)
    """
    return _URL.match(text) is not None


def split_url(url: str) -> tuple[str, str]:
    """Return what a URL begins with, and the path after it.

    >>> split_url("s3://bucket/run.jsonl")
    ('s3://', 'bucket/run.jsonl')
    """
    match = _URL.fullmatch(url)
    if match is None:
        raise RemoteError(f"{url}: is no URL")
    return match[1], match[2].strip("/")


def open_place(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path there.

    Raises:
        Exception: It cannot be reached; `reason_of` says why.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise RemoteError("URLs need fsspec: pip install 'otel-torch[remote]'") from None
    files, path = url_to_fs(url)
    files.invalidate_cache()  # another program may have written since
    return files, path.rstrip("/")


def reason_of(error: BaseException) -> str:
    """Return in one line why a server did not do what was asked.

    >>> reason_of(FileNotFoundError("bucket/run.jsonl"))
    'no such file or folder'
    """
    text = " ".join(str(error).split())[:300]
    if isinstance(error, FileNotFoundError):
        return "no such file or folder"
    if isinstance(error, PermissionError):
        return f"not allowed, are the credentials right? ({text})"
    if isinstance(error, RemoteError | ImportError):
        return text
    if "Protocol not known" in text:
        return "fsspec knows no such kind of URL"
    return f"{type(error).__name__}: {text}"


def while_it_moves(action: Callable[[Moved], Result]) -> Result:
    """Return what `action` does; it runs in a thread of its own and says when data has moved.

    Raises:
        RemoteError: Nothing moved for PATIENCE_S.
        Exception: What `action` raises.
    """
    outcome: queue.SimpleQueue[tuple[Result] | BaseException] = queue.SimpleQueue()
    deadline = time.monotonic() + PATIENCE_S

    def moved(seconds: float = 0.0) -> None:
        nonlocal deadline
        deadline = time.monotonic() + PATIENCE_S + seconds

    def run() -> None:
        try:
            outcome.put((action(moved),))
        except BaseException as error:
            outcome.put(error)

    threading.Thread(target=run, name="otel_torch-remote", daemon=True).start()
    while True:
        with contextlib.suppress(queue.Empty):
            done = outcome.get(timeout=0.1)
            if isinstance(done, BaseException):
                raise done
            return done[0]
        if time.monotonic() > deadline:
            raise RemoteError(f"no answer for {PATIENCE_S:.0f} s")


class LocalCopies:
    """Copies of what URLs name, for as long as the context lasts.

    Args:
        progress: Called now and then with a short text.
    """

    def __init__(self, progress: Callable[[str], None] = lambda text: None) -> None:
        self._progress = progress
        self._folders: dict[str, Path] = {}  # what URLs begin with -> where their copies lie

    def __enter__(self) -> LocalCopies:
        return self

    def __exit__(self, *error: object) -> None:
        for folder in self._folders.values():
            # a thread that was given up may still write there
            shutil.rmtree(folder, ignore_errors=True)

    def fetch(self, url: str, *, with_folders: bool = False) -> str:
        """Copy a file and the metadata beside it, or the recordings in a folder; return its path.

        Args:
            with_folders: Copy all that is in a folder, whatever it is and however deep.

        Raises:
            RemoteError: It cannot be read.
        """

        def copy(moved: Moved) -> None:
            files, path = open_place(url)
            moved(0.0)
            found = _find(files, path, target, with_folders=with_folders)
            moved(0.0)
            self._copy(url, files, found, moved)

        try:
            target = self._local_path(url)
            while_it_moves(copy)
        except Exception as error:
            raise RemoteError(f"{url}: {reason_of(error)}") from None
        return str(target)

    def local(self, value: Any, *, with_folders: bool = False) -> Any:
        """Return an argument with the path of a copy in place of each URL in it.

        Raises:
            RemoteError: A URL cannot be read.
        """
        if isinstance(value, tuple):
            return tuple(self.local(item, with_folders=with_folders) for item in value)
        if isinstance(value, str) and is_url(value):
            return self.fetch(value, with_folders=with_folders)
        return value

    def _local_path(self, url: str) -> Path:
        start, rest = split_url(url)
        if start not in self._folders:
            folder = self._folders[start] = Path(tempfile.mkdtemp(prefix="otel_torch."))
            show_as(f"{folder}/", start)
        return self._folders[start] / _inside(rest)

    def _copy(self, url: str, files: Any, found: Sequence[_Found], moved: Moved) -> None:
        from fsspec.callbacks import Callback

        total, copied = sum(size or 0 for _, _, size in found), 0
        for path, target, size in found:

            def report(size: int, value: int, so_far: int = copied, **others: Any) -> None:
                moved(0.0)
                done = f"{(so_far + value) / 1e6:,.0f} of {total / 1e6:,.0f} MB"
                self._progress(f"{url}: {done} copied")

            target.parent.mkdir(parents=True, exist_ok=True)
            files.get_file(path, str(target), callback=Callback(hooks={"report": report}))
            if size is not None and target.stat().st_size != size:
                raise RemoteError("the connection was cut before the end; try again")
            copied += size or 0


def takes_urls(
    *recordings: str, folders: Sequence[str] = ()
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Return a decorator of a function of paths that takes URLs as well, and reads copies of them.

    Args:
        recordings: The arguments that name a recording, or a folder of them.
        folders: The arguments that name folders of which all is needed, one or a tuple of them.
    """

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def read_copies(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            bound = signature.bind(*args, **kwargs)
            with LocalCopies() as copies:
                for name in (*recordings, *folders):
                    given = bound.arguments.get(name)
                    if given is not None:
                        bound.arguments[name] = copies.local(given, with_folders=name in folders)
                try:
                    return function(*bound.args, **bound.kwargs)
                except ValueError as error:
                    message = as_given(str(error))
                    raise error if message == str(error) else ValueError(message) from None

        return read_copies

    return decorate


def _inside(name: str) -> PurePosixPath:
    """Return a relative path that stays below the folder that it is added to.

    Raises:
        RemoteError: It would not.
    """
    path = PurePosixPath(name.strip("/"))
    if ".." in path.parts:
        raise RemoteError(f"{name}: leads out of its folder")
    return path


def _find(files: Any, path: str, target: Path, *, with_folders: bool) -> list[_Found]:
    """Return what is to be copied: where it is, where it goes, and its size if that is known."""
    info = files.info(path)
    if info["type"] != "directory":
        metadata = path[: path.rfind("/") + 1] + metadata_path(path).name
        found = [(path, target, info.get("size"))]
        with contextlib.suppress(FileNotFoundError, PermissionError):
            found.append((metadata, metadata_path(target), files.info(metadata).get("size")))
        return found
    target.mkdir(parents=True, exist_ok=True)
    depth = None if with_folders else 1
    return [
        (name, target / _inside(name[len(path) :]), entry.get("size"))
        for name, entry in sorted(files.find(path, maxdepth=depth, detail=True).items())
        if with_folders or name.endswith(_OF_RECORDINGS)
    ]
