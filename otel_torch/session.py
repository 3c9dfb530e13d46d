"""The current session, if any: what a source asks for when it has something to record."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from otel_torch.process.job import Job
    from otel_torch.recorder import Recorder
    from otel_torch.records import Losses
    from otel_torch.regions.closer import RegionLabel
    from otel_torch.settings import Settings
    from otel_torch.sources.steps.step_clocks import StepTracker


@dataclass(slots=True)
class Session:
    """The recording of one process: its place in the job, its settings, and its recorder.

    `step_tracker` is None where only regions are recorded, as in a test. `region_labels` caches
    what each region name means under these settings, by the name as the program entered it.
    """

    job: Job
    settings: Settings
    recorder: Recorder
    losses: Losses
    step_tracker: StepTracker | None = None
    region_labels: dict[str, RegionLabel] = field(default_factory=dict)


_current: Session | None = None


def current() -> Session | None:
    """Return the session of this process, or None while nothing is recorded."""
    return _current


def become(session: Session | None) -> None:
    """Make `session` the current one of this process; None ends it."""
    global _current
    _current = session
