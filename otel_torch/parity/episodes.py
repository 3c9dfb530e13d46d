"""Cuts a recording into episodes, one outermost forward each, so that two long runs can be compared in little memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from otel_torch.parity.lines import Block, Line, iterate_lines
from otel_torch.parity.program import Parameter, build_parameters
from otel_torch.parity.recording import Row, iterate_attached

# not forwards, or forwards that were there before
_PASSED_OVER = frozenset({"attach", "backward", "recompute"})
# rows after which an episode that has no other end is cut where its step changes, or where a tensor comes again
_LONGEST = 50_000


@dataclass(slots=True, eq=False)
class Episode:
    """The rows of one outermost forward (without recorded calls: of one model in one step), in the recording's order.

    cut: it was longer, and no end of a forward was known at which it could be cut. repeated: rows of one place came again in
    its step, and said no call.
    """

    model: str
    loop: int | None
    step: int | None
    phase: str
    lines: list[Line] = field(default_factory=list)
    cut: bool = False
    repeated: bool = False
    _parts: list[tuple[Block, int, int]] = field(default_factory=list)

    @property
    def rows(self) -> list[Row]:
        """The same as dicts: read again from the bytes of the recording at each time."""
        return [row for block, start, stop in self._parts for row in block.rows(start, stop)]

    @property
    def when(self) -> tuple[Any, ...]:
        """What names it within its run."""
        return self.model, self.loop, self.step, self.phase, self.lines[0].call

    def take(self, block: Block, at: int) -> None:
        """Add a line of a block."""
        self.lines.append(block.lines[at])
        if self._parts and self._parts[-1][0] is block and self._parts[-1][2] == at:
            self._parts[-1] = block, self._parts[-1][1], at + 1
        else:
            self._parts.append((block, at, at + 1))

    def take_run(self, block: Block, start: int, stop: int) -> None:
        """Add neighbouring lines of a block."""
        self.lines += block.lines[start:stop]
        self._parts.append((block, start, stop))


def iterate_episodes(
    path: str | Path, problem: Callable[[str], None] = lambda message: None, read: Callable[[int], None] = lambda count: None
) -> Iterator[Episode]:
    """The episodes of a recording one after the other. Raises RecordingError; see `iterate_lines`."""
    episode: Episode | None = None
    until = -1  # when the outermost call that is going on is left; -1 while that is not known
    seen: set[Any] = set()  # the tensors of an episode without calls
    for block in iterate_lines(path, problem, read):
        at, lines = 0, block.lines
        while at < len(lines):
            line = lines[at]
            if line.phase in _PASSED_OVER:
                at += 1
                continue
            order = line.order
            entered = None if order is None else order[0]
            if entered is not None and entered <= until and episode is not None:  # in the outermost call: so are most
                stop = _run(lines, at, until) if len(episode.lines) < _LONGEST else at + 1
                if stop == at + 1 and len(episode.lines) >= _LONGEST and _moment(line) != _moment(episode.lines[-1]):
                    yield episode
                    episode = _new(line, cut=True)
                episode.take_run(block, at, stop)
                at = stop
                continue
            new = cut = False
            if episode is None:
                new = True
            elif entered is None:
                key = line.module, line.tensor, line.call
                again = key in seen and _moment(line) == _moment_of(episode)
                cut = again and line.step is not None and len(episode.lines) >= _LONGEST
                new = _moment(line) != _moment_of(episode) or cut or (again and line.step is None)
                episode.repeated = episode.repeated or (again and not new)
            elif line.parent is None:
                new = until >= 0 or entered > (_first_entered(episode) or 0)
            else:
                new = until >= 0 or _moment(line) != _moment_of(episode)
            if new:
                if episode is not None:
                    yield episode
                episode, until = _new(line, cut), -1
                seen.clear()
            assert episode is not None
            if entered is None:
                seen.add((line.module, line.tensor, line.call))
            elif line.parent is None and order is not None:
                until = entered if order[1] is None else order[1]
            episode.take(block, at)
            at += 1
    if episode is not None:
        yield episode


def _run(lines: list[Line], start: int, until: int) -> int:
    """Where the lines end that lie in an outermost call."""
    for at in range(start, len(lines)):
        line = lines[at]
        order = line.order
        if order is None or order[0] is None or order[0] > until or line.phase in _PASSED_OVER:
            return at
    return len(lines)


def _new(line: Line, cut: bool) -> Episode:
    return Episode(line.model, line.loop, line.step, line.phase, cut=cut)


def _moment(line: Line) -> tuple[Any, ...]:
    return line.model, line.loop, line.step, line.phase


def _moment_of(episode: Episode) -> tuple[Any, ...]:
    return episode.model, episode.loop, episode.step, episode.phase


def _first_entered(episode: Episode) -> int | None:
    return min((line.order[0] for line in episode.lines if line.order and line.order[0] is not None), default=None)


def read_parameters(path: str | Path, meta: dict[str, Any] | None = None) -> list[Parameter]:
    """The parameters at attach, without reading the rest of a long recording in full.

    meta: the recording's metadata: of a run that ended cleanly it names all models.
    """
    models = meta.get("models") if meta and meta.get("ended_cleanly") else None
    return build_parameters(iterate_attached(path, models if isinstance(models, dict) else ()))
