"""Environments that differ in a few packages: tiny virtual environments over a shared one."""

from __future__ import annotations

import site
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path


def make_environment(folder: Path, packages: Sequence[Path]) -> Path:
    """Return the interpreter of an environment with folders of packages before the shared ones.

    The shared folders are those of this interpreter, without what their start-up files do.
    """
    if not folder.exists():
        venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    shared = [path for path in map(Path, [*site.getsitepackages(), *sys.path]) if path.is_dir()]
    installed = [path for path in dict.fromkeys(shared) if path.name == "site-packages"]
    lines = [str(path.resolve()) for path in (*packages, *installed)]
    (own,) = folder.glob("lib/python*/site-packages")
    (own / "packages.pth").write_text("\n".join(lines) + "\n")
    return folder / "bin" / "python"


def install(requirement: str, folder: Path) -> Path:
    """Install one package, without what it needs, into a folder of its own; return that."""
    target = folder / requirement.replace("==", "-")
    if not target.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        pip += ["--no-deps", "--no-compile", "--target", str(target), requirement]
        subprocess.run(pip, check=True)
    return target
