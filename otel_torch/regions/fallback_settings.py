"""Settings of regions, profiler and NVTX for a program that uses them without a session."""

from __future__ import annotations

import dataclasses
import os

from otel_torch import session
from otel_torch.process.console import say_once
from otel_torch.settings import Settings


def read_environment(prefix: str) -> Settings:
    """Return settings whose fields that start with `prefix` are read from the environment.

    The others have their defaults: a bad value elsewhere must not switch the profiler off.
    """
    names: dict[str, str] = {}
    for row in dataclasses.fields(Settings):
        if row.name.startswith(prefix):
            for name in (row.metadata["name"], row.metadata["alias"]):
                if name and name in os.environ:
                    names[name] = os.environ[name]
    return Settings.from_env(names, say_once)


def find_settings(prefix: str) -> Settings:
    """Return the session's settings; without a session those of the environment, by `prefix`."""
    current = session.current()
    return current.settings if current is not None else read_environment(prefix)
