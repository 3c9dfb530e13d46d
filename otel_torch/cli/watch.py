"""`otel-torch watch`: follows the recordings of a run while it is under way."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from contextlib import nullcontext
from pathlib import Path

from otel_torch.cli.main import BadInput
from otel_torch.process.console import say
from otel_torch.recording.metadata import METADATA_SUFFIX
from otel_torch.recording.recordings_folder import holds_none, recordings_in
from otel_torch.recording.remote.remote_files import is_url
from otel_torch.rendering.live_screen import LiveScreen
from otel_torch.rendering.table import supports_color, terminal_size, write_line
from otel_torch.show import live_ranks, live_view
from otel_torch.show.watched import WatchedFolder, WatchedRecording


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recording",
        metavar="RECORDING",
        help="a recording (.jsonl), or a folder of those of all ranks; may be yet to come",
    )
    parser.add_argument(
        "--interval",
        metavar="SECONDS",
        type=float,
        default=1.0,
        help="how often to look (default: 1)",
    )
    parser.add_argument(
        "--once", action="store_true", help="show what is there now, and do not wait for more"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object each time instead of the view"
    )


def run(arguments: argparse.Namespace) -> int:
    """Follow the recording until its run ends or Ctrl-C is pressed."""
    if is_url(arguments.recording):
        raise BadInput(
            f"{arguments.recording}: watch follows a local file; `otel-torch show` reads a URL"
        )
    path = Path(arguments.recording).expanduser()
    if not 0.01 <= arguments.interval <= 3600:
        raise BadInput(f"--interval {arguments.interval:g}: give 0.01 to 3600 seconds")
    if path.name.endswith(METADATA_SUFFIX):
        recording = str(path).removesuffix(METADATA_SUFFIX) + ".jsonl"
        raise BadInput(f"{path}: is the metadata of a recording; give {recording}")
    if arguments.once and not path.exists():
        raise BadInput(f"{path}: does not exist")
    if arguments.once and path.is_dir() and not recordings_in(path):
        raise BadInput(holds_none(path))
    is_terminal = not arguments.json and terminal_size(sys.stdout) is not None
    has_screen = is_terminal and not arguments.once and os.environ.get("TERM") != "dumb"
    screen = LiveScreen(sys.stdout) if has_screen else None
    watch = _View(path, as_json=arguments.json, is_terminal=is_terminal, screen=screen)
    try:
        if arguments.once:
            watch.look(float("inf"))
        else:
            with screen or nullcontext():
                watch.follow(arguments.interval)
    except KeyboardInterrupt:
        pass
    watch.print_last()
    return 0


class _View:
    """Looks at a recording or a folder of them again and again, and prints what it sees."""

    def __init__(
        self, path: Path, *, as_json: bool, is_terminal: bool, screen: LiveScreen | None
    ) -> None:
        self._path = path
        self._as_json, self._is_terminal, self._screen = as_json, is_terminal, screen
        self._open()
        if not path.exists():
            self._notify(f"{path}: does not exist yet; waiting for it")

    def follow(self, interval: float) -> None:
        """Look and print until the run is over."""
        while not self.look(interval):
            self._print()
            if self._watched.is_behind:
                continue
            if self._screen is not None:
                self._screen.wait(interval)
            else:
                time.sleep(interval)

    def look(self, seconds: float) -> bool:
        """Read what was appended, for so many seconds at most; return whether the run is over.

        Raises:
            RecordingError: A file does not begin with a record.
        """
        if self._views is live_view and self._path.is_dir():
            self._open()  # it did not exist before
        self._watched.look(seconds)
        return self._watched.is_over

    def print_last(self) -> None:
        """Print the last state, for good."""
        self._print(is_last=True)

    def _open(self) -> None:
        is_folder = self._path.is_dir()
        self._views = live_ranks if is_folder else live_view
        kind = WatchedFolder if is_folder else WatchedRecording
        self._watched: WatchedRecording | WatchedFolder = kind(self._path, self._notify)

    def _notify(self, message: str) -> None:
        if self._screen is None:
            say(message)

    def _print(self, *, is_last: bool = False) -> None:
        columns, rows = shutil.get_terminal_size()
        if self._as_json:
            lines = [json.dumps(self._views.view_json(self._watched), allow_nan=False)]
        elif self._is_terminal:
            color = supports_color(sys.stdout)
            lines = self._views.view_lines(self._watched, width=columns, color=color)
        else:
            lines = self._views.brief_lines(self._watched)
        if is_last or self._screen is None:
            write_line(sys.stdout, "\n".join(lines))
        else:
            self._screen.draw(lines[: rows - 1])
        sys.stdout.flush()
