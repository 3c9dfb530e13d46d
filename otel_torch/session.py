"""The running session, if there is one: what sources ask for when they have something to record."""

from __future__ import annotations

from dataclasses import dataclass

from otel_torch.job import Job
from otel_torch.recorder import Recorder
from otel_torch.records import Losses
from otel_torch.settings import Settings


@dataclass(slots=True)
class Session:
    """One process's recording: who it is, what was asked for, and the recorder that everything goes
    through.
    """

    job: Job
    settings: Settings
    recorder: Recorder
    losses: Losses


_current: Session | None = None


def current() -> Session | None:
    """The session of this process, None while nothing is recorded."""
    return _current


def become(session: Session | None) -> None:
    """Make `session` the one of this process; None ends it."""
    global _current
    _current = session
