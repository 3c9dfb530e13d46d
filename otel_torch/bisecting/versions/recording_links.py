"""Links the packages that recording needs into an environment without otel_torch."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from otel_torch.bisecting.versions.environments import PythonEnvironment, UnusableEnvironment

_PACKAGE = Path(__file__).resolve().parents[2]
# what the recording of a graph imports beside torch
_LIBRARIES = ("msgspec",)


def link_what_a_recording_needs(environment: PythonEnvironment, folder: Path) -> Path:
    """Return a folder for PYTHONPATH with this otel_torch, and libraries that are missing.

    Both sides run the same otel_torch, whatever is installed there.

    Raises:
        UnusableEnvironment: A library is missing and this Python's cannot be used.
    """
    if "torch" in environment.lacks:
        raise UnusableEnvironment(f"{environment.python} has no torch")
    missing = [name for name in _LIBRARIES if name in environment.lacks]
    links = folder.resolve() / "links" / "-".join(["otel_torch", *missing])
    links.mkdir(parents=True, exist_ok=True)
    targets = {"otel_torch": _PACKAGE}
    for name in missing:
        if environment.version != sys.version_info[:2]:
            raise UnusableEnvironment(
                f"{environment.python} has no {name}, which a recording needs: install it there"
            )
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        targets[name] = Path(spec.origin).parent
    for name, target in targets.items():
        if not (links / name).exists():
            (links / name).symlink_to(target, target_is_directory=True)
    return links
