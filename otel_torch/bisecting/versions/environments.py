"""What two interpreters have installed, and which packages differ."""

from __future__ import annotations

import filecmp
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from otel_torch.parity.sides import Sides

# runs in the interpreter that is listed, and imports no package
_LIST = """
import importlib.metadata, importlib.util, json, os, re, sys
modules = {}
for module, names in importlib.metadata.packages_distributions().items():
    for name in names:
        modules.setdefault(name, []).append(module)
def place(module):
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return None
    return spec and [*(spec.submodule_search_locations or ()), spec.origin][0]
packages = {}
for own in importlib.metadata.distributions():
    name = own.metadata["Name"]
    if name is None or name in packages:
        continue
    known = modules.get(name) or [re.sub("[-.]", "_", name)]
    places = {module: place(module) for module in known if module.isidentifier()}
    packages[name] = [own.version, {key: path for key, path in places.items() if path}]
lacks = [name for name in ("torch", "msgspec") if importlib.util.find_spec(name) is None]
print(json.dumps([list(sys.version_info[:2]), packages, lacks]))
"""
# what installs packages is no part of a program
_INSTALLERS = frozenset({"pip", "setuptools", "wheel", "otel-torch"})


class UnusableEnvironment(ValueError):
    """An interpreter cannot run the program; the message is one line."""


class InstalledPackage(NamedTuple):
    """A distribution, and where its modules are by the names that are imported."""

    version: str
    places: Mapping[str, Path]


@dataclass(frozen=True, slots=True)
class PythonEnvironment:
    """An interpreter and what it has installed.

    Attributes:
        lacks: Which libraries that a recording needs are missing.
    """

    python: str
    version: tuple[int, int]
    packages: Mapping[str, InstalledPackage]
    lacks: tuple[str, ...]


def list_environment(python: str) -> PythonEnvironment:
    """Ask an interpreter what it has installed.

    Raises:
        UnusableEnvironment: It does not run, or is too old.
    """
    try:
        done = subprocess.run([python, "-P", "-c", _LIST], capture_output=True, text=True)
    except OSError as error:
        raise UnusableEnvironment(f"{python}: {error.strerror}") from None
    if done.returncode or not done.stdout:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise UnusableEnvironment(f"{python} cannot be listed, it needs Python 3.11: {last}")
    version, packages, lacks = json.loads(done.stdout.splitlines()[-1])
    installed = {
        name: InstalledPackage(own, {module: Path(x).resolve() for module, x in places.items()})
        for name, (own, places) in packages.items()
    }
    return PythonEnvironment(python, tuple(version), installed, tuple(lacks))


@dataclass(frozen=True)
class Suspect:
    """A package whose code differs, or the user's own repository.

    Attributes:
        roots: Where each imported name is, or the folder of the repository as the name "".
    """

    name: str
    versions: Sides[str]
    roots: Sides[Mapping[str, Path]]

    @cached_property
    def files(self) -> dict[str, Sides[Path | None]]:
        """All Python files that differ, by their path below the root's parent."""
        return _differing_files(self.roots, (".py",))

    @property
    def has_other_compiled_code(self) -> bool:
        """Whether a compiled library differs, which cannot be exchanged."""
        return bool(_differing_files(self.roots, (".so", ".pyd", ".dylib")))

    def __str__(self) -> str:
        old, new = self.versions
        change = f"{old} → {new}" if old != new else f"{old}, with other sources"
        return f"{self.name} {change}"


def find_suspects(environments: Sides[PythonEnvironment]) -> list[Suspect]:
    """Return the packages that both have, in other versions or with other sources."""
    old, new = environments.map(lambda environment: environment.packages)
    suspects = []
    for name in sorted(old.keys() & new.keys() - _INSTALLERS):
        versions = Sides(old[name].version, new[name].version)
        roots = Sides(old[name].places, new[name].places)
        suspect = Suspect(name, versions, roots)
        if versions.reference != versions.port or (roots.reference != roots.port and suspect.files):
            suspects.append(suspect)
    return suspects


def _differing_files(
    roots: Sides[Mapping[str, Path]], suffixes: Sequence[str]
) -> dict[str, Sides[Path | None]]:
    old, new = roots.map(lambda own: dict(_files(own, suffixes)))
    pairs = {name: Sides(old.get(name), new.get(name)) for name in sorted({*old, *new})}
    return {name: pair for name, pair in pairs.items() if not _is_same(*pair)}


def _files(roots: Mapping[str, Path], suffixes: Sequence[str]) -> Iterator[tuple[str, Path]]:
    for name, root in roots.items():
        if root.is_file() and root.suffix in suffixes:
            yield root.name, root
        for path in root.rglob("*"):
            if path.suffix in suffixes:
                yield str(Path(name, path.relative_to(root))), path


def _is_same(old: Path | None, new: Path | None) -> bool:
    if old is None or new is None:
        return False
    return old == new or filecmp.cmp(old, new, shallow=False)
