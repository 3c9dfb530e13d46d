"""Settings for those who use regions, the profiler or NVTX in a program that is not being
recorded.
"""

from __future__ import annotations

import dataclasses
import os

from otel_torch import session
from otel_torch.console import say_once
from otel_torch.settings import Settings


def read_environment(prefix: str) -> Settings:
    """The environment's settings whose field begins with `prefix`; all others have their defaults.

    Only these are read, so that a bad value elsewhere cannot switch a profiler off.
    """
    rows = [row.metadata for row in dataclasses.fields(Settings) if row.name.startswith(prefix)]
    names = {name for row in rows for name in (row["name"], row["alias"]) if name}
    return Settings.from_env(
        {name: os.environ[name] for name in names if name in os.environ}, say_once
    )


def find_settings(prefix: str) -> Settings:
    """The session's settings, and where there is no session those of the environment that begin
    with `prefix`.
    """
    running = session.current()
    return running.settings if running is not None else read_environment(prefix)
