"""Arguments that may be URLs in place of paths: a command gets the path of a local copy."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from otel_torch.recording.remote.remote_files import LocalCopies, is_url
from otel_torch.rendering.progress import Progress


class _Url(str):
    """A URL of a recording, or of a folder of them."""


class _FolderUrl(_Url):
    """A URL of a file, or of a folder of which everything is needed."""


def path_or_url(text: str) -> str:
    return _Url(text) if is_url(text) else text


def folder_or_url(text: str) -> str:
    """Return an argument that may name a folder of other files than recordings, for argparse."""
    return _FolderUrl(text) if is_url(text) else text


@contextmanager
def local_copies(arguments: argparse.Namespace) -> Iterator[None]:
    """Put local copies in place of URLs among the arguments, for as long as the context lasts.

    Raises:
        RemoteError: A URL cannot be read.
    """

    def local(value: Any) -> Any:
        if isinstance(value, list):
            return [local(text) for text in value]
        if isinstance(value, _Url):
            return copies.fetch(value, with_folders=isinstance(value, _FolderUrl))
        return value

    with Progress() as progress, LocalCopies(progress) as copies:
        for name, value in list(vars(arguments).items()):
            setattr(arguments, name, local(value))
        progress.clear()
        yield
