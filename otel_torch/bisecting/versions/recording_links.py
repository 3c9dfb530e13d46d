"""Links the packages that recording needs into an environment without otel_torch."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from otel_torch.bisecting.versions.environments import PythonEnvironment, UnusableEnvironment

_PACKAGE = Path(__file__).resolve().parents[2]


def link_what_a_recording_needs(environment: PythonEnvironment, folder: Path) -> Path:
    """Return a folder for PYTHONPATH with this otel_torch, and libraries that are missing.

    Both sides run the same otel_torch, whatever is installed there.

    Raises:
        UnusableEnvironment: A library is missing and this Python's cannot be used.
    """
    if "torch" in environment.lacks:
        raise UnusableEnvironment(f"{environment.python} has no torch")
    if environment.lacks and environment.version != sys.version_info[:2]:
        raise UnusableEnvironment(
            f"{environment.python} has no msgspec, which a recording needs: install it there"
        )
    links = folder.resolve() / "links" / "-".join(["otel_torch", *environment.lacks])
    links.mkdir(parents=True, exist_ok=True)
    for target in (_PACKAGE, *map(_folder_of, environment.lacks)):
        if not (links / target.name).exists():
            (links / target.name).symlink_to(target, target_is_directory=True)
    return links


def _folder_of(library: str) -> Path:
    spec = importlib.util.find_spec(library)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent
