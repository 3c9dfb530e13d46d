"""The environment in which a child process records, whatever its interpreter has installed."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

from otel_torch.process.job import name_run

# contains a sitecustomize.py that starts recording
STARTUP_SITE = str(Path(__file__).parents[1] / "startup" / "site")


def enable_recording(environ: MutableMapping[str, str]) -> None:
    """Make every Python interpreter with this environment record, with or without an installed
    start-up file.

    >>> environ = {"PYTHONPATH": "/home/me/lib"}; enable_recording(environ)
    >>> environ["OTEL_TORCH_ENABLED"], environ["PYTHONPATH"].endswith("site:/home/me/lib")
    ('1', True)
    """
    environ["OTEL_TORCH_ENABLED"] = "1"
    environ["OTEL_TORCH_RUN_ID"] = name_run(environ)
    folders = environ.get("PYTHONPATH", "").split(os.pathsep)
    existing = [folder for folder in folders if folder and folder != STARTUP_SITE]
    environ["PYTHONPATH"] = os.pathsep.join([STARTUP_SITE, *existing])
